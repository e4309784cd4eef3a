//! Durations as Kubernetes writes them: the grammar of Go's `time.ParseDuration`, without negative values.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use thiserror::Error;

/// Go's own bound: a `time.Duration` is a signed 64-bit count of nanoseconds (292 years).
const MAX_NANOSECONDS: u128 = i64::MAX as u128;

/// Digits of a fraction that can matter: an hour has 3.6e12 nanoseconds. What follows is read and rounded down, and
/// eighteen digits times an hour still fit a `u128`.
const MAX_FRACTION_DIGITS: usize = 18;

/// The text of a duration, as it stands in the configuration: of the right type, not yet read.
#[derive(Debug, Clone)]
#[cfg_attr(test, derive(serde::Serialize))]
pub(super) struct DurationText(pub(super) String);

/// Why a text is no duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum DurationError {
    #[error("is not a duration such as 500ms, 5s or 1h30m")]
    Malformed,
    #[error("has no unit: write 500ms, 5s or 1h30m")]
    MissingUnit,
    #[error("has an unknown unit: expected ns, us, ms, s, m or h")]
    UnknownUnit,
    #[error("is negative")]
    Negative,
    #[error("is too long")]
    TooLong,
}

/// Reads a duration: `500ms`, `1.5s`, `1h30m`, and `0`, which needs no unit.
pub(super) fn parse(text: &str) -> Result<Duration, DurationError> {
    if text.starts_with('-') {
        return Err(DurationError::Negative);
    }
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(DurationError::Malformed);
    }
    let mut total: u128 = 0;
    while !rest.is_empty() {
        let (number, after) = split_while(rest, is_number_char);
        let (unit, after) = split_while(after, |c| !is_number_char(c));
        total = total
            .checked_add(nanoseconds(number, unit)?)
            .filter(|total| *total <= MAX_NANOSECONDS)
            .ok_or(DurationError::TooLong)?;
        rest = after;
    }
    u64::try_from(total).map(Duration::from_nanos).map_err(|_| DurationError::TooLong)
}

fn nanoseconds(number: &str, unit: &str) -> Result<u128, DurationError> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return Err(DurationError::Malformed);
    }
    let unit = unit_nanoseconds(unit)?;
    let whole = if whole.is_empty() { Some(0) } else { whole.parse::<u128>().ok() };
    whole
        .and_then(|whole| whole.checked_mul(unit))
        .and_then(|whole| whole.checked_add(fraction_of(fraction, unit)))
        .ok_or(DurationError::TooLong)
}

fn unit_nanoseconds(unit: &str) -> Result<u128, DurationError> {
    match unit {
        "ns" => Ok(1),
        // Go takes both: the micro sign and the Greek letter.
        "us" | "\u{b5}s" | "\u{3bc}s" => Ok(1_000),
        "ms" => Ok(1_000_000),
        "s" => Ok(1_000_000_000),
        "m" => Ok(60_000_000_000),
        "h" => Ok(3_600_000_000_000),
        "" => Err(DurationError::MissingUnit),
        _ => Err(DurationError::UnknownUnit),
    }
}

/// `0.fraction` of a unit in whole nanoseconds, rounded down.
fn fraction_of(fraction: &str, unit: u128) -> u128 {
    let (digits, scale) = fraction
        .chars()
        .take(MAX_FRACTION_DIGITS)
        .filter_map(|c| c.to_digit(10))
        .fold((0_u128, 1_u128), |(digits, scale), digit| {
            (digits.saturating_mul(10).saturating_add(digit.into()), scale.saturating_mul(10))
        });
    digits.saturating_mul(unit).checked_div(scale).unwrap_or(0)
}

fn is_number_char(c: char) -> bool {
    c.is_ascii_digit() || c == '.'
}

fn split_while(text: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    let end = text.find(|c| !belongs(c)).unwrap_or(text.len());
    text.split_at_checked(end).unwrap_or((text, ""))
}

impl From<&str> for DurationText {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl<'de> Deserialize<'de> for DurationText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;

        impl Visitor<'_> for TextVisitor {
            type Value = DurationText;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a duration such as \"500ms\", \"5s\" or \"1h30m\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<DurationText, E> {
                Ok(text.into())
            }
        }

        deserializer.deserialize_str(TextVisitor)
    }
}

#[cfg(test)]
mod tests {
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use super::*;

    #[test]
    fn reads_what_go_reads() {
        let rows = [
            ("zero needs no unit", "0", 0),
            ("a sign before zero", "+0", 0),
            ("nanoseconds", "7ns", 7),
            ("microseconds in ASCII", "7us", 7_000),
            ("microseconds with the micro sign", "7µs", 7_000),
            ("microseconds with the Greek letter", "7μs", 7_000),
            ("milliseconds", "500ms", 500_000_000),
            ("seconds", "5s", 5_000_000_000),
            ("a plus sign", "+5s", 5_000_000_000),
            ("minutes", "5m", 300_000_000_000),
            ("combined units", "1h30m", 5_400_000_000_000),
            ("combined units in any order, even twice", "1s1h1s", 3_602_000_000_000),
            ("a fraction", "1.5s", 1_500_000_000),
            ("no digit before the point", ".5s", 500_000_000),
            ("no digit after the point", "5.s", 5_000_000_000),
            ("a fraction below a nanosecond is rounded down", "0.9ns", 0),
            ("a fraction of any length", "0.333333333333333333333333333333333333333333333h", 1_199_999_999_999),
            ("leading zeros", "0000000000000000000000000000000000000000000000005s", 5_000_000_000),
            ("the longest that Go reads", "9223372036854775807ns", i64::MAX as u64),
        ];
        for (sentence, text, nanoseconds) in rows {
            assert_eq!(parse(text), Ok(Duration::from_nanos(nanoseconds)), "{sentence}: {text}");
        }
    }

    #[test]
    fn refuses_what_is_no_duration() {
        let huge = format!("{}h", "9".repeat(1000));
        let rows = [
            ("nothing", "", DurationError::Malformed),
            ("a lone sign", "+", DurationError::Malformed),
            ("a lone point", ".", DurationError::Malformed),
            ("a point with a unit", ".s", DurationError::Malformed),
            ("two points", "1.2.3s", DurationError::Malformed),
            ("a unit alone", "s", DurationError::Malformed),
            ("two signs", "++5s", DurationError::Malformed),
            ("a space in front", " 5s", DurationError::Malformed),
            ("a number without a unit", "5", DurationError::MissingUnit),
            ("a second number without a unit", "1h30", DurationError::MissingUnit),
            ("zero with a point needs a unit", "0.0", DurationError::MissingUnit),
            ("days, which Go does not know", "1d", DurationError::UnknownUnit),
            ("a capital unit", "5S", DurationError::UnknownUnit),
            ("a space before the unit", "5 s", DurationError::UnknownUnit),
            ("a space behind", "5s ", DurationError::UnknownUnit),
            ("an exponent", "1e3s", DurationError::UnknownUnit),
            ("a negative duration", "-5s", DurationError::Negative),
            ("one nanosecond more than Go reads", "9223372036854775808ns", DurationError::TooLong),
            ("a sum that is too long", "2562047h48m", DurationError::TooLong),
            ("a number beyond every integer", &huge, DurationError::TooLong),
        ];
        for (sentence, text, error) in rows {
            assert_eq!(parse(text), Err(error), "{sentence}: {text}");
        }
    }
}
