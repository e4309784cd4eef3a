//! Who a request comes from: what it says itself, what an apiserver is told and believes.

use base64::{Engine, prelude::BASE64_STANDARD};
use lab::{
    apiserver::{FRONT_PROXY, Request},
    fixtures,
};

/// Whether the apiserver believes what the request's headers say of its sender.
pub fn is_believed(request: &Request) -> bool {
    request.client_subject.as_ref().is_some_and(|subject| subject.common_name == FRONT_PROXY)
}

/// Every header that says who somebody is.
pub fn identity(request: &Request) -> Vec<(String, String)> {
    let headers = request.headers.iter().map(|(name, value)| {
        (String::from_utf8_lossy(name).to_lowercase().replace('_', "-"), String::from_utf8_lossy(value).into_owned())
    });
    headers.filter(|(name, _)| name.starts_with("x-remote")).collect()
}

/// The subject of one of the identity vectors, in DER.
///
/// # Panics
/// There is no vector with this note.
pub fn subject(note: &str) -> Vec<u8> {
    let vectors = fixtures::vectors("identity.jsonl").expect("the vectors");
    let vector = vectors.iter().find(|vector| vector["note"] == note).expect(note);
    BASE64_STANDARD.decode(vector["subject_der_b64"].as_str().expect("base64")).expect("base64")
}

/// A header that would make its sender somebody else, written in one of many ways.
pub fn forged(random: &mut fastrand::Rng) -> (String, Vec<u8>) {
    let names = ["x-remote-user", "x-remote-group", "x-remote-uid", "x-remote-extra-scopes", "x-remote-extra-a%2fb"];
    let name = names[random.usize(..names.len())];
    let name: String = name
        .chars()
        .map(|c| match c {
            '-' if random.u8(..4) == 0 => '_',
            c if random.bool() => c.to_ascii_uppercase(),
            c => c,
        })
        .collect();
    let values: [&[u8]; 6] = [b"root", b"system:masters", b"", b"caf\xc3\xa9", b"a,b", b"  system:admin"];
    (name, values[random.usize(..values.len())].to_vec())
}
