//! Client certificates written by hand: the library knows one value per attribute type, Kubernetes reads every `O`.

use rcgen::{KeyPair, PublicKeyData};

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const UTF8_STRING: u8 = 0x0c;
const OBJECT_IDENTIFIER: u8 = 0x06;

/// SEQUENCE { OBJECT IDENTIFIER ecdsa-with-SHA256 }
const ECDSA_WITH_SHA256: [u8; 12] = [0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02];

/// SEQUENCE { SEQUENCE { extKeyUsage, OCTET STRING { SEQUENCE { clientAuth } } } }
const EXTENSIONS: [u8; 23] = [
    0x30, 0x15, 0x30, 0x13, 0x06, 0x03, 0x55, 0x1d, 0x25, 0x04, 0x0c, 0x30, 0x0a, 0x06, 0x08, 0x2b, 0x06, 0x01, 0x05,
    0x05, 0x07, 0x03, 0x02,
];

/// An X.501 name of single-valued UTF8String attributes, in their order.
pub(super) fn name(attributes: &[(&[u64], &str)]) -> Vec<u8> {
    let mut relative = Vec::new();
    for (identifier, value) in attributes {
        let attribute = [tlv(OBJECT_IDENTIFIER, &object_identifier(identifier)), tlv(UTF8_STRING, value.as_bytes())];
        relative.extend(tlv(SET, &tlv(SEQUENCE, &attribute.concat())));
    }
    tlv(SEQUENCE, &relative)
}

/// The part of a certificate that is signed.
pub(super) fn client_certificate(issuer: &[u8], subject: &[u8], key: &KeyPair) -> Vec<u8> {
    // A positive INTEGER of eight bytes.
    let serial = (fastrand::u64(..) >> 1 | 1 << 62).to_be_bytes();
    let validity = [tlv(0x17, b"200101000000Z"), tlv(0x17, b"491231235959Z")].concat();
    let parts = [
        tlv(0xa0, &tlv(0x02, &[2])),
        tlv(0x02, &serial),
        ECDSA_WITH_SHA256.to_vec(),
        issuer.to_vec(),
        tlv(SEQUENCE, &validity),
        subject.to_vec(),
        key.subject_public_key_info(),
        tlv(0xa3, &EXTENSIONS),
    ];
    tlv(SEQUENCE, &parts.concat())
}

/// The whole certificate.
pub(super) fn signed(body: &[u8], signature: &[u8]) -> Vec<u8> {
    let bits = [&[0], signature].concat();
    tlv(SEQUENCE, &[body.to_vec(), ECDSA_WITH_SHA256.to_vec(), tlv(0x03, &bits)].concat())
}

fn tlv(tag: u8, value: &[u8]) -> Vec<u8> {
    let length = value.len().to_be_bytes();
    let mut out = vec![tag];
    if value.len() < 0x80 {
        out.push(value.len() as u8);
    } else {
        let significant = length.iter().position(|byte| *byte != 0).unwrap_or(length.len());
        out.push(0x80 | (length.len() - significant) as u8);
        out.extend_from_slice(&length[significant..]);
    }
    out.extend_from_slice(value);
    out
}

/// The first two arcs of all identifiers used here fit one byte.
fn object_identifier(arcs: &[u64]) -> Vec<u8> {
    let (first, rest) = arcs.split_at(2);
    let mut out = vec![(first[0] * 40 + first[1]) as u8];
    for arc in rest {
        let septets = (1..).find(|count| count * 7 >= 64 || arc >> (count * 7) == 0).unwrap_or(1);
        for index in (0..septets).rev() {
            let more = if index == 0 { 0 } else { 0x80 };
            out.push((arc >> (index * 7) & 0x7f) as u8 | more);
        }
    }
    out
}

pub(super) fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let mut word = [0; 4];
        word[1..=group.len()].copy_from_slice(group);
        let word = u32::from_be_bytes(word);
        for index in 0..4 {
            let letter = LETTERS[(word >> (18 - 6 * index) & 0x3f) as usize];
            text.push(if index <= group.len() { char::from(letter) } else { '=' });
        }
    }
    text
}
