//! The root of OpenAPI v3: which schema documents there are, and where.
//!
//! Each entry holds the address of one document with a hash of its bytes, so that clients can keep it for ever. A merged
//! root names for each document the address that one apiserver gave, and the filter sends who asks for it there.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::discovery::document::MAX_REASON_CHARS;
use crate::quote::clipped;

/// Where an apiserver serves the root.
pub const PATH: &str = "/openapi/v3";

/// The content type that a kube-apiserver gives it, though it is JSON.
pub const CONTENT_TYPE: &str = "text/plain; charset=utf-8";

/// A root as one apiserver gave it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Root<'d> {
    #[serde(borrow)]
    paths: BTreeMap<Key<'d>, &'d RawValue>,
}

/// Such as `apis/apps/v1`, `api/v1` or `version`.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone, Serialize, Deserialize)]
struct Key<'d>(#[serde(borrow)] Cow<'d, str>);

/// A root of several, and who gave which entry.
#[derive(Debug)]
pub struct MergedRoot {
    /// The body.
    pub text: String,
    /// Who serves a document, best first, for each document that the request must be sent elsewhere for.
    pub elsewhere: Vec<(String, Vec<usize>)>,
}

/// Bodies that are no roots.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the root of OpenAPI v3 cannot be read: {reason}")]
pub struct RootError {
    /// Where and why, clipped.
    reason: String,
}

impl<'d> Root<'d> {
    /// Reads a body.
    ///
    /// # Errors
    /// See [`RootError`].
    pub fn parse(text: &'d str) -> Result<Self, RootError> {
        serde_json::from_str(text).map_err(|error| RootError { reason: clipped(&error.to_string(), MAX_REASON_CHARS) })
    }
}

/// Merges roots, each with the number of the apiserver that gave it. `rank` tells of an entry's key and an apiserver how
/// good that one's document is (how many types it lists; 0 also where that means nothing), or `None` if the entry must not
/// come from there. Among equals `local` counts first, then the order of `roots`. `local` is `None` in a gateway, where
/// nobody knows who would answer, so that requests are sent to the one that was chosen unless all have the same entry.
pub fn merge(
    roots: &[(usize, Root<'_>)],
    local: Option<usize>,
    rank: impl Fn(&str, usize) -> Option<usize>,
) -> Option<MergedRoot> {
    let mut listed: BTreeMap<&Key<'_>, Vec<(usize, &RawValue)>> = BTreeMap::new();
    for (apiserver, root) in roots {
        for (key, entry) in &root.paths {
            listed.entry(key).or_default().push((*apiserver, entry));
        }
    }
    let mut paths = BTreeMap::new();
    let mut elsewhere = Vec::new();
    for (key, entries) in listed {
        let ranked = entries.iter().filter_map(|entry| Some((rank(&key.0, entry.0)?, entry)));
        let Some(best) = ranked.clone().map(|(rank, _)| rank).max() else { continue };
        let mut chosen: Vec<_> = ranked.filter(|(rank, _)| *rank == best).map(|(_, entry)| *entry).collect();
        chosen.sort_by_key(|(apiserver, _)| Some(*apiserver) != local);
        let Some((first, entry)) = chosen.first().copied() else { continue };
        let is_the_same_everywhere =
            entries.len() == roots.len() && entries.iter().all(|(_, other)| other.get() == entry.get());
        if local.map_or(!is_the_same_everywhere, |local| local != first) {
            elsewhere.push((key.0.clone().into_owned(), chosen.iter().map(|(apiserver, _)| *apiserver).collect()));
        }
        paths.insert(key.clone(), entry);
    }
    let text = serde_json::to_string(&Root { paths }).ok()?;
    Some(MergedRoot { text, elsewhere })
}

/// The group and version of a key, empty for the core group; `None` if it is not a group-version's.
pub fn group_version(key: &str) -> Option<(&str, &str)> {
    let mut segments = key.split('/');
    let (group, version) = match (segments.next()?, segments.next()?) {
        ("api", version) => ("", version),
        ("apis", group) => (group, segments.next()?),
        _ => return None,
    };
    segments.next().is_none().then_some((group, version))
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    /// A root; entries as "key=hash".
    fn root(entries: &str) -> String {
        let entry = |entry: &str| {
            let (key, hash) = entry.split_once('=').unwrap();
            format!(r#""{key}":{{"serverRelativeURL":"/openapi/v3/{key}?hash={hash}"}}"#)
        };
        let entries: Vec<_> = entries.split(' ').map(entry).collect();
        format!(r#"{{"paths":{{{}}}}}"#, entries.join(","))
    }

    #[test]
    fn each_entry_is_that_of_the_apiserver_that_lists_most() {
        // How many types of a key an apiserver lists: the number in its hash; none: must not come from there.
        let rank = |roots: &[&str], key: &str, apiserver: usize| {
            let entry = roots[apiserver].split(' ').find_map(|entry| entry.strip_prefix(&format!("{key}="))).unwrap();
            entry.trim_start_matches(char::is_alphabetic).parse().ok()
        };
        for (roots, local, expected, elsewhere, why) in [
            (&["a=f1", "a=f1"][..], Some(0), "a=f1", "", "the same"),
            (&["a=f1", "a=e1 b=e1"], Some(0), "a=f1 b=e1", "b:1", "local first, others where it lacks the document"),
            (&["a=f1", "a=e2"], Some(0), "a=e2", "a:1", "the richer one"),
            (&["a=f1", "a=e2", "a=d2"], Some(0), "a=e2", "a:1,2", "two are as rich"),
            (&["a=f1", "a=e1"], Some(1), "a=e1", "", "local first among equals"),
            (&["a=fx", "a=e1"], Some(1), "a=e1", "", "not from there"),
            (&["a=f1 b=f1", "a=ex b=ex", "b=dx"], Some(0), "a=f1 b=f1", "", "nor from there"),
            (&["a=f1", "a=e1"], None, "a=f1", "a:0,1", "in a gateway the first, to be asked for there"),
            (&["a=f1", "a=f1"], None, "a=f1", "", "unless anybody may answer"),
            (&["a=f1", "a=f1 b=e1"], None, "a=f1 b=e1", "b:1", "one alone has it"),
        ] {
            let texts: Vec<_> = roots.iter().map(|entries| root(entries)).collect();
            let parsed: Vec<_> = texts.iter().map(|text| Root::parse(text).unwrap()).enumerate().collect();
            let merged = merge(&parsed, local, |key, apiserver| rank(roots, key, apiserver)).unwrap();
            assert_eq!(merged.text, root(expected), "{why}");
            let described = merged.elsewhere.iter().map(|(key, apiservers)| {
                format!("{key}:{}", apiservers.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
            });
            assert_eq!(described.collect::<Vec<_>>().join(" "), elsewhere, "{why}");
        }
    }

    #[test]
    fn a_recorded_root_alone_stays_as_it_is() {
        let recorded = include_str!("../../tests/fixtures/discovery/1.37.2/openapi-v3-root.json");
        let merged = merge(&[(0, Root::parse(recorded).unwrap())], Some(0), |_, _| Some(0)).unwrap();
        assert_eq!(merged.text, recorded);
        assert!(Root::parse("{}").is_err() && Root::parse("{\"paths\":[]}").is_err(), "no root");
    }

    #[test]
    fn keys_name_group_versions() {
        for (key, expected) in [
            ("api/v1", Some(("", "v1"))),
            ("apis/apps/v1", Some(("apps", "v1"))),
            ("apis/apps", None),
            ("api", None),
            ("version", None),
            ("apis/apps/v1/x", None),
            (".well-known/openid-configuration", None),
        ] {
            assert_eq!(group_version(key), expected, "{key}");
        }
    }
}
