//! The root of OpenAPI v3: which schema documents there are, and where.
//!
//! Each entry holds the address of one document with a hash of its bytes, so that clients can keep it for ever. A merged
//! root names for each document the address that one apiserver gave, and the filter sends who asks for it there.

use crate::discovery::json::{Members, ShapeError, mentions_by_name, quoted, sorted_names};

/// Where an apiserver serves the root.
pub const PATH: &str = "/openapi/v3";

/// The content type that a kube-apiserver gives it, though it is JSON.
pub const CONTENT_TYPE: &str = "text/plain; charset=utf-8";

/// A root as one apiserver gave it.
#[derive(Debug)]
pub struct Root<'d> {
    /// Entries by keys such as `apis/apps/v1`, `api/v1` or `version`.
    paths: Members<'d>,
}

/// A root of several, and who gave which entry.
#[derive(Debug)]
pub struct MergedRoot {
    /// The body.
    pub text: String,
    /// Who serves a document, best first, for each document that the request must be sent elsewhere for.
    pub elsewhere: Vec<(String, Vec<usize>)>,
}

impl<'d> Root<'d> {
    /// Reads a body.
    ///
    /// # Errors
    /// [`ShapeError`]: it is none.
    pub fn parse(text: &'d str) -> Result<Self, ShapeError> {
        let paths = Members::parse(Members::parse(text)?.get("paths").unwrap_or_default())?;
        Ok(Self { paths })
    }
}

/// Merges roots, each with the number of the apiserver that gave it. `rank` tells of an entry's key and an apiserver how
/// good that one's document is (how many types it lists; 0 also where that means nothing), or `None` if the entry must not
/// come from there. Among equals `local` counts first, then the order of `roots`. `local` is `None` in a gateway, where
/// nobody knows who would answer, so that requests are sent to the one that was chosen unless all have the same entry.
pub fn merge(
    roots: Vec<(usize, Root<'_>)>,
    local: Option<usize>,
    rank: impl Fn(&str, usize) -> Option<usize>,
) -> MergedRoot {
    let (apiservers, lists): (Vec<_>, Vec<_>) =
        roots.into_iter().map(|(apiserver, root)| (apiserver, root.paths.0)).unzip();
    let mentions_of = mentions_by_name(&lists);
    let mut paths = Vec::new();
    let mut elsewhere = Vec::new();
    for key in sorted_names(lists.iter().flatten().map(|named| &*named.name)) {
        let entries: Vec<(usize, &str)> = mentions_of
            .get(key)
            .into_iter()
            .flatten()
            .filter_map(|mention| Some((*apiservers.get(mention.list)?, mention.named.text)))
            .collect();
        let ranked: Vec<_> = entries.iter().filter_map(|entry| Some((rank(key, entry.0)?, entry))).collect();
        let best = ranked.iter().map(|(rank, _)| *rank).max();
        let best = ranked.iter().filter(|(rank, _)| Some(*rank) == best).map(|(_, entry)| **entry);
        let (mut chosen, others): (Vec<_>, Vec<_>) = best.partition(|(apiserver, _)| Some(*apiserver) == local);
        chosen.extend(others);
        let Some((first, entry)) = chosen.first().copied() else { continue };
        let is_the_same_everywhere =
            entries.len() == apiservers.len() && entries.iter().all(|(_, other)| *other == entry);
        if local.map_or(!is_the_same_everywhere, |local| local != first) {
            elsewhere.push((key.to_owned(), chosen.iter().map(|(apiserver, _)| *apiserver).collect()));
        }
        paths.push(format!("{}:{entry}", quoted(key)));
    }
    MergedRoot { text: format!("{{\"paths\":{{{}}}}}", paths.join(",")), elsewhere }
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
            let merged = merge(parsed, local, |key, apiserver| rank(roots, key, apiserver));
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
        let merged = merge(vec![(0, Root::parse(recorded).unwrap())], Some(0), |_, _| Some(0));
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
