//! Outside text in log lines and messages: never long, never more than one line.

/// Enough to recognise a value, too few to flood a log.
const MAX_QUOTED_CHARS: usize = 80;

/// Text in quotes, control characters escaped, clipped.
pub fn quoted(text: &str) -> String {
    format!("{:?}", clipped(text, MAX_QUOTED_CHARS))
}

/// The same for bytes; what is not UTF-8 becomes U+FFFD.
pub fn quoted_bytes(bytes: &[u8]) -> String {
    // No character has more than four bytes, and only the start is shown.
    let start = bytes.get(..MAX_QUOTED_CHARS.saturating_mul(4).saturating_add(4)).unwrap_or(bytes);
    quoted(&String::from_utf8_lossy(start))
}

/// At most so many characters, and a mark if there were more.
pub fn clipped(text: &str, max_chars: usize) -> String {
    let mut rest = text.chars();
    let mut clipped: String = rest.by_ref().take(max_chars).collect();
    if rest.next().is_some() {
        clipped.push('…');
    }
    clipped
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn outside_text_is_short_and_on_one_line() {
        assert_eq!(quoted("a\n\"b\""), r#""a\n\"b\"""#);
        assert_eq!(quoted(&"x".repeat(1 << 20)).chars().count(), 80 + 3);
        assert_eq!(quoted_bytes(&vec![0xff; 1 << 20]).chars().count(), 80 + 3);
        assert_eq!(quoted_bytes("é".repeat(200).as_bytes()), quoted(&"é".repeat(200)));
    }
}
