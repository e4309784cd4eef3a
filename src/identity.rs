//! The subject of a verified client certificate as a Kubernetes identity, as kube-apiserver's own certificate
//! authentication reads it (`x509.CommonNameUserConversion`).
//!
//! Read from the text that Envoy gives of it (`connection.subject_peer_certificate`, RFC 2253 by BoringSSL) and not from
//! the certificate: every Envoy has that text, it escapes whatever could be taken for structure, and no parser of
//! certificates has to be right in the VM. The text does not tell of which string type a value was, so two things that
//! Go refuses pass: UniversalStrings, and an `@` in a PrintableString. Only a CA that the cluster trusts can issue them.

use std::borrow::Cow;

use crate::config::IdentityHeaders;
use crate::hex;

/// Who a certificate is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// User name: the last common name.
    pub user: String,
    /// Groups: the organizations in the order of the certificate, repeated ones too.
    pub groups: Vec<String>,
    /// UID, if the certificate has one.
    pub uid: Option<String>,
}

impl IdentityHeaders {
    /// Whether a client's header of this name could be taken for an identity: any of the names, in any case, and with
    /// underscores for dashes, which some servers read as the same.
    pub fn may_hold(&self, name: &str) -> bool {
        let plain = |byte: u8| if byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
        let begins_with = |name: &str, start: &str| {
            name.len() >= start.len() && name.bytes().zip(start.bytes()).all(|(a, b)| plain(a) == plain(b))
        };
        let is = |known: &String| name.len() == known.len() && begins_with(name, known);
        [&self.user, &self.group, &self.uid].into_iter().flatten().any(is)
            || self.extra_prefix.iter().any(|prefix| begins_with(name, prefix))
    }
}

/// Why nobody may be made of a subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Not the text of a name.
    #[error("the certificate's subject cannot be read")]
    Malformed,
    /// A name, an organization or a UID that is no text.
    #[error("the certificate's subject has a value that is no text")]
    NoText,
    /// Kubernetes refuses such a certificate.
    #[error("the certificate's subject has two UIDs or an empty one")]
    Uid,
    /// It would reach the apiserver as something else, or not at all.
    #[error("the certificate's subject has a value that no header can carry unchanged")]
    NoHeader,
}

/// Object identifier of the attribute that holds a Kubernetes UID.
const UID: &str = "1.3.6.1.4.1.57683.2";

/// One attribute of a name.
struct Attribute<'s> {
    kind: &'s str,
    value: Value<'s>,
}

enum Value<'s> {
    Text(Cow<'s, [u8]>),
    /// The DER of the value, in hexadecimal: an attribute that BoringSSL does not know, or one that is no string.
    Hex(&'s str),
}

impl Identity {
    /// Reads a subject. `None`: it names no user, as if there were no certificate.
    ///
    /// # Errors
    /// See [`IdentityError`]: the request must be refused, for an identity was shown that nobody can be sure of.
    pub fn of_subject(subject: &str) -> Result<Option<Self>, IdentityError> {
        let mut attributes = attributes(subject)?;
        // RFC 2253 begins at the end.
        attributes.reverse();
        let (mut user, mut groups, mut uid) = (None, Vec::new(), None);
        for Attribute { kind, value } in attributes {
            match kind {
                "CN" => user = Some(value.text()?),
                "O" => groups.push(value.text()?),
                UID => {
                    let given = value.string()?;
                    if uid.is_some() || given.is_empty() {
                        return Err(IdentityError::Uid);
                    }
                    uid = Some(given);
                }
                _ => {}
            }
        }
        let Some(user) = user.filter(|user| !user.is_empty()) else { return Ok(None) };
        let can_travel = groups.iter().chain(&uid).chain([&user]).all(|value| can_travel(value));
        if can_travel { Ok(Some(Self { user, groups, uid })) } else { Err(IdentityError::NoHeader) }
    }
}

/// Whether a header brings the value to the apiserver as it is: empty ones are dropped there, blanks around it are cut
/// off, and control bytes end the request.
fn can_travel(value: &str) -> bool {
    let is_blank = |c: Option<char>| matches!(c, None | Some(' ' | '\t'));
    !is_blank(value.chars().next())
        && !is_blank(value.chars().next_back())
        && value.bytes().all(|byte| byte == b'\t' || !byte.is_ascii_control())
}

/// The attributes in the order of the text. What is escaped never separates.
fn attributes(subject: &str) -> Result<Vec<Attribute<'_>>, IdentityError> {
    let mut attributes = Vec::new();
    let mut rest = subject;
    while !rest.is_empty() {
        let (kind, behind) = rest.split_once('=').ok_or(IdentityError::Malformed)?;
        let is_kind = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
        if kind.is_empty() || !kind.chars().all(is_kind) {
            return Err(IdentityError::Malformed);
        }
        let end = end_of_value(behind);
        let (written, separator) = behind.split_at_checked(end).ok_or(IdentityError::Malformed)?;
        let value = match written.strip_prefix('#') {
            Some(hex) => Value::Hex(hex),
            None => Value::Text(unescaped(written)?),
        };
        attributes.push(Attribute { kind, value });
        // One byte: a comma or a plus sign.
        rest = separator.get(1..).unwrap_or_default();
        if rest.is_empty() && !separator.is_empty() {
            return Err(IdentityError::Malformed);
        }
    }
    Ok(attributes)
}

fn end_of_value(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.bytes().position(|byte| {
        let ends = !is_escaped && matches!(byte, b',' | b'+');
        is_escaped = !is_escaped && byte == b'\\';
        ends
    });
    end.unwrap_or(text.len())
}

/// A value without its escapes: a backslash stands before a special character, or before two hexadecimal digits.
fn unescaped(written: &str) -> Result<Cow<'_, [u8]>, IdentityError> {
    if !written.contains('\\') {
        return Ok(Cow::Borrowed(written.as_bytes()));
    }
    let mut value = Vec::with_capacity(written.len());
    let mut bytes = written.bytes();
    while let Some(byte) = bytes.next() {
        value.push(if byte == b'\\' {
            let escaped = bytes.next().ok_or(IdentityError::Malformed)?;
            match hex::digit(escaped) {
                Some(high) => {
                    let low = bytes.next().and_then(hex::digit).ok_or(IdentityError::Malformed)?;
                    (high << 4) | low
                }
                None => escaped,
            }
        } else {
            byte
        });
    }
    Ok(Cow::Owned(value))
}

impl Value<'_> {
    /// The value of an attribute that BoringSSL knows. A dump of it means that it is no string.
    fn text(self) -> Result<String, IdentityError> {
        match self {
            Self::Text(bytes) => String::from_utf8(bytes.into_owned()).map_err(|_| IdentityError::NoText),
            Self::Hex(_) => Err(IdentityError::NoText),
        }
    }

    /// The value of an attribute that BoringSSL does not know, which it dumps.
    fn string(self) -> Result<String, IdentityError> {
        match self {
            Self::Text(_) => self.text(),
            Self::Hex(hex) => decoded(hex).ok_or(IdentityError::NoText),
        }
    }
}

/// The text in a DER string of a type that Go's `crypto/x509` takes.
fn decoded(hex: &str) -> Option<String> {
    let mut digits = hex.bytes();
    let mut der = Vec::with_capacity(hex.len() / 2);
    while let Some(high) = digits.next() {
        der.push((hex::digit(high)? << 4) | hex::digit(digits.next()?)?);
    }
    let (tag, rest) = der.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, value) = match first {
        0x00..=0x7f => (usize::from(*first), rest),
        0x81 => rest.split_first().map(|(length, value)| (usize::from(*length), value))?,
        // A UID of more than 255 bytes is none.
        _ => return None,
    };
    if value.len() != length {
        return None;
    }
    match tag {
        // UTF8String, NumericString, PrintableString, IA5String
        0x0c | 0x12 | 0x13 | 0x16 => String::from_utf8(value.to_vec()).ok(),
        // T61String, which holds Latin-1 wherever it is met.
        0x14 => Some(value.iter().copied().map(char::from).collect()),
        // BMPString
        0x1e if length.is_multiple_of(2) => {
            let units = value.chunks_exact(2).filter_map(|pair| Some(u16::from_be_bytes(pair.try_into().ok()?)));
            char::decode_utf16(units).collect::<Result<_, _>>().ok()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use serde_json::Value as Json;

    /// Who Kubernetes' own code takes certificates for (see `tests/vectors/README.md`).
    const VECTORS: &str = include_str!("../tests/vectors/identity.jsonl");

    #[test]
    fn every_vector_is_read_as_kubernetes_reads_it_or_refused() {
        for line in VECTORS.lines() {
            let vector: Json = serde_json::from_str(line).unwrap();
            let Some(subject) = vector["rfc2253_reversed"].as_str() else { continue };
            let note = vector["note"].as_str().unwrap();
            let texts = |value: &Json| -> Vec<String> {
                value.as_array().into_iter().flatten().map(|text| text.as_str().unwrap().to_owned()).collect()
            };
            let user = vector["user"].as_str();
            let (groups, uid) = (texts(&vector["groups"]), vector["uid"].as_str().unwrap_or_default());
            let expected = match user {
                // The text does not tell: see the head of this file.
                None if note == "UniversalString" => {
                    Ok(Some(Identity { user: "j".to_owned(), groups: vec!["dev".to_owned()], uid: None }))
                }
                None if vector["error"].is_null() => Ok(None),
                None => Err(()),
                Some(_) if note == "NUL byte" || note == "newline and tab" => Err(()),
                Some(user) => {
                    Ok(Some(Identity { user: user.to_owned(), groups, uid: (!uid.is_empty()).then(|| uid.to_owned()) }))
                }
            };
            let read = Identity::of_subject(subject).map_err(|_| ());
            assert_eq!(read, expected, "{note}: {subject}");
        }
    }

    #[test]
    fn headers_that_could_be_taken_for_an_identity_are_known() {
        let lists = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let headers = IdentityHeaders {
            user: lists(&["x-remote-user", "x-forwarded-user"]),
            group: lists(&["x-remote-group"]),
            uid: lists(&["x-remote-uid"]),
            extra_prefix: lists(&["x-remote-extra-", "x_extra_"]),
        };
        for (name, expected) in [
            ("x-remote-user", true),
            ("X-Remote-User", true),
            ("x_remote_user", true),
            ("X-REMOTE_group", true),
            ("x-forwarded-user", true),
            ("x-remote-uid", true),
            ("x-remote-extra-", true),
            ("x-remote-extra-scopes%2fa", true),
            ("x_remote-extra_dept", true),
            ("X-Extra-Team", true),
            ("x-remote-users", false),
            ("x-remote-use", false),
            ("x-remote-extra", false),
            ("x-remote", false),
            ("", false),
            ("authorization", false),
            ("impersonate-user", false),
        ] {
            assert_eq!(headers.may_hold(name), expected, "{name}");
        }
    }

    #[test]
    fn what_is_no_subject_is_refused() {
        for (subject, expected, why) in [
            ("CN", IdentityError::Malformed, "no value"),
            ("=x", IdentityError::Malformed, "no attribute"),
            ("CN=a,", IdentityError::Malformed, "something is missing"),
            ("CN=a,,O=b", IdentityError::Malformed, "nothing between"),
            ("CN=a\\", IdentityError::Malformed, "an open escape"),
            ("CN=a\\C", IdentityError::Malformed, "half an escape"),
            ("CN=a\\FF", IdentityError::NoText, "not UTF-8"),
            ("CN=#020101", IdentityError::NoText, "a number as a name"),
            ("O=#0402FFFF,CN=a", IdentityError::NoText, "bytes as an organization"),
            ("1.3.6.1.4.1.57683.2=#020101,CN=a", IdentityError::NoText, "a number as a UID"),
            ("1.3.6.1.4.1.57683.2=#0C05753D37,CN=a", IdentityError::NoText, "a length that lies"),
            ("1.3.6.1.4.1.57683.2=#0C0,CN=a", IdentityError::NoText, "half a byte"),
            ("1.3.6.1.4.1.57683.2=#,CN=a", IdentityError::NoText, "no bytes"),
            ("1.3.6.1.4.1.57683.2=#0C00,CN=a", IdentityError::Uid, "an empty UID"),
            ("1.3.6.1.4.1.57683.2=#0C0161,1.3.6.1.4.1.57683.2=#0C0162,CN=a", IdentityError::Uid, "two UIDs"),
            ("CN=a\\0Db", IdentityError::NoHeader, "a line end"),
            ("CN=\\ a", IdentityError::NoHeader, "a blank in front is cut off on the way"),
            ("CN=a,O=b\\ ", IdentityError::NoHeader, "a blank behind too"),
            ("CN=a,O=", IdentityError::NoHeader, "an empty header is dropped"),
        ] {
            assert_eq!(Identity::of_subject(subject), Err(expected), "{why}: {subject}");
        }
    }

    #[test]
    fn a_uid_has_at_most_255_bytes() {
        let subject =
            |length: &str, bytes: usize| format!("1.3.6.1.4.1.57683.2=#0C{length}{},CN=a", "61".repeat(bytes));
        let uid = |subject: &str| Identity::of_subject(subject).map(|identity| identity.unwrap().uid.unwrap().len());
        assert_eq!(uid(&subject("7F", 127)), Ok(127));
        assert_eq!(uid(&subject("81FF", 255)), Ok(255));
        assert_eq!(uid(&subject("820100", 256)), Err(IdentityError::NoText));
    }

    #[test]
    fn no_text_kills_anything() {
        for line in VECTORS.lines() {
            let vector: Json = serde_json::from_str(line).unwrap();
            let Some(subject) = vector["rfc2253_reversed"].as_str() else { continue };
            for cut in 0..subject.len() {
                let _read_or_refused = subject.get(..cut).map(Identity::of_subject);
                let _read_or_refused = subject.get(cut..).map(Identity::of_subject);
            }
        }
    }
}
