//! The bodies of discovery documents, as the leader keeps them in Envoy's shared data for whoever has to merge.
//!
//! No VM keeps them: they are read when a merge is due. Apiservers of one version have the same body, which stands here
//! once.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::discovery::document::Half;

/// Of the layout; raised with every change of it.
const LAYOUT: u8 = 1;

/// The largest record that is published: the largest clusters' documents have some 5 MB.
pub const MAX_BYTES: usize = 64 << 20;

/// One of the three documents of an apiserver that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// `/api`, aggregated.
    Core,
    /// `/apis`, aggregated.
    Groups,
    /// `/openapi/v3`.
    OpenApi,
}

impl Kind {
    /// All of them, in the order in which they stand wherever there is one value for each.
    pub const ALL: [Self; 3] = [Self::Core, Self::Groups, Self::OpenApi];

    /// The document of a half.
    pub const fn of(half: Half) -> Self {
        match half {
            Half::Core => Self::Core,
            Half::Groups => Self::Groups,
        }
    }

    /// What belongs to this one, of values in the order of [`Self::ALL`].
    pub fn of_all<T>(self, values: &[T]) -> Option<&T> {
        Self::ALL.iter().zip(values).find(|(kind, _)| **kind == self).map(|(_, value)| value)
    }
}

/// A document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept<'s> {
    /// Name of the apiserver.
    pub name: &'s str,
    /// Where it is polled.
    pub discovery_cluster: &'s str,
    /// Which document.
    pub kind: Kind,
    /// When the question was sent that it answered: a later one is newer.
    pub version: Duration,
    /// The body.
    pub body: &'s str,
}

/// The record.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Documents<'s> {
    #[serde(borrow)]
    entries: Vec<Entry<'s>>,
    #[serde(borrow)]
    bodies: Vec<&'s str>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry<'s> {
    name: &'s str,
    discovery_cluster: &'s str,
    kind: Kind,
    version: Duration,
    /// Which of the bodies.
    body: u32,
}

/// Why a record is not used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentsError {
    /// More than [`MAX_BYTES`].
    #[error("{0} bytes of documents are too many to merge")]
    TooLarge(usize),
    /// Another layout, or no record at all.
    #[error("not a record of documents of layout {LAYOUT}")]
    Unreadable,
}

impl<'s> Documents<'s> {
    /// A record of these.
    pub fn of(kept: impl Iterator<Item = Kept<'s>>) -> Self {
        let mut documents = Self::default();
        for Kept { name, discovery_cluster, kind, version, body } in kept {
            let place = documents.bodies.iter().position(|have| *have == body).unwrap_or_else(|| {
                documents.bodies.push(body);
                documents.bodies.len().saturating_sub(1)
            });
            let Ok(body) = u32::try_from(place) else { continue };
            documents.entries.push(Entry { name, discovery_cluster, kind, version, body });
        }
        documents
    }

    /// A document and its version. The same name elsewhere is another apiserver.
    pub fn find(&self, name: &str, discovery_cluster: &str, kind: Kind) -> Option<(Duration, &'s str)> {
        let is_meant = |entry: &&Entry<'_>| {
            entry.name == name && entry.discovery_cluster == discovery_cluster && entry.kind == kind
        };
        let entry = self.entries.iter().find(is_meant)?;
        Some((entry.version, self.bodies.get(usize::try_from(entry.body).ok()?)?))
    }

    /// The bytes to publish.
    ///
    /// # Errors
    /// [`DocumentsError::TooLarge`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, DocumentsError> {
        let size = self.bodies.iter().map(|body| body.len()).fold(0, usize::saturating_add);
        if size > MAX_BYTES {
            return Err(DocumentsError::TooLarge(size));
        }
        postcard::to_extend(self, vec![LAYOUT]).map_err(|_| DocumentsError::Unreadable)
    }

    /// Reads what was published.
    ///
    /// # Errors
    /// [`DocumentsError::Unreadable`].
    pub fn from_bytes(bytes: &'s [u8]) -> Result<Self, DocumentsError> {
        let (layout, rest) = bytes.split_first().ok_or(DocumentsError::Unreadable)?;
        if *layout != LAYOUT {
            return Err(DocumentsError::Unreadable);
        }
        postcard::from_bytes(rest).map_err(|_| DocumentsError::Unreadable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn kept(name: &'static str, kind: Kind, body: &'static str) -> Kept<'static> {
        Kept { name, discovery_cluster: "poll", kind, version: Duration::from_secs(7), body }
    }

    #[test]
    fn documents_come_back_and_equal_bodies_stand_once() {
        let body = "a body of some length, so that a second one would show";
        let all =
            [kept("cp-1", Kind::Groups, body), kept("cp-2", Kind::Groups, body), kept("cp-2", Kind::Core, "another")];
        let bytes = Documents::of(all.into_iter()).to_bytes().unwrap();
        let read = Documents::from_bytes(&bytes).unwrap();
        for document in all {
            let found = read.find(document.name, document.discovery_cluster, document.kind);
            assert_eq!(found, Some((document.version, document.body)));
        }
        assert_eq!(read.find("cp-1", "elsewhere", Kind::Groups), None, "another apiserver of that name");
        assert_eq!(read.find("cp-1", "poll", Kind::OpenApi), None);
        assert!(bytes.windows(body.len()).filter(|window| *window == body.as_bytes()).count() == 1);
    }

    #[test]
    fn documents_that_are_too_large_together_are_not_published() {
        let text = "x".repeat(MAX_BYTES);
        let (half, rest) = text.split_at(MAX_BYTES / 2);
        let of = |bodies: &[&str]| {
            let kept = bodies.iter().map(|body| Kept { body, ..kept("cp-1", Kind::Groups, "") });
            Documents::of(kept).to_bytes().map(|bytes| bytes.len() / MAX_BYTES)
        };
        assert_eq!(of(&[half, rest, half]), Ok(0), "equal ones count once");
        assert_eq!(
            of(&[half, text.split_at(MAX_BYTES - 1).0]),
            Err(DocumentsError::TooLarge(MAX_BYTES / 2 + MAX_BYTES - 1))
        );
        assert_eq!(of(&[&text]), Ok(1), "just as many as may be");
        assert_eq!(of(&[&text, "y"]), Err(DocumentsError::TooLarge(MAX_BYTES + 1)));
    }

    #[test]
    fn other_bytes_are_refused_and_kill_nothing() {
        let bytes = Documents::of([kept("cp-1", Kind::Core, "body")].into_iter()).to_bytes().unwrap();
        for cut in 0..bytes.len() {
            assert_eq!(Documents::from_bytes(&bytes[..cut]), Err(DocumentsError::Unreadable), "cut at {cut}");
        }
        for position in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[position] = value;
                if let Ok(read) = Documents::from_bytes(&changed) {
                    let _found_or_not = read.find("cp-1", "poll", Kind::Core);
                }
            }
        }
    }
}
