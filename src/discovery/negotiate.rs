//! What a client of `/apis` and `/api` asks for: which form of discovery, and whether it has it already.

use crate::discovery::document::Half;

/// The media type of the aggregated form that is merged.
pub const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// What the client shall get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The view of the whole cluster, in this form.
    Merged(Form),
    /// The view of the apiserver alone: `profile=nopeer`.
    Own,
    /// A form that is not merged (protobuf, YAML, v2beta1), or none that there is.
    Unmergeable,
}

/// The clauses of an Accept header that are read. Clients send a handful, and Kubernetes' order costs the square of them.
const MAX_CLAUSES: usize = 64;

/// A form of discovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// All resources in one document: `APIGroupDiscoveryList`, version v2, in JSON.
    Aggregated,
    /// Group by group: `APIGroupList`, `APIVersions` and so on in JSON.
    Legacy,
}

/// Reads the Accept header of a request for a discovery root.
///
/// Like a kube-apiserver: a clause of the aggregated form wins over all others, wherever it stands and whatever its
/// quality; among those the quality counts, then the client's order. Unlike one, a client that would take JSON gets JSON
/// even where it prefers what cannot be merged.
pub fn wanted(half: Half, accept: Option<&[u8]>, has_trailing_slash: bool) -> Wanted {
    let accept = match accept {
        None => "",
        Some(accept) => match std::str::from_utf8(accept) {
            Ok(accept) => accept,
            Err(_) => return Wanted::Unmergeable,
        },
    };
    if accept.is_empty() {
        return Wanted::Merged(Form::Legacy);
    }
    let clauses = in_order_of_preference(accept.split(',').filter_map(Clause::parse).take(MAX_CLAUSES).collect());
    // The handler of "/apis/" knows no aggregated form.
    let has_aggregated = half == Half::Core || !has_trailing_slash;
    let mut aggregated = clauses.iter().filter(|clause| has_aggregated && clause.asks == Asks::Aggregated);
    if aggregated.clone().next().is_some_and(|first| first.is_for_own_view) {
        return Wanted::Own;
    }
    if aggregated.any(|clause| clause.takes_json() && !clause.is_for_own_view) {
        return Wanted::Merged(Form::Aggregated);
    }
    // The handler of "/api" is another one than that of "/apis", and knows less.
    let is_known =
        |clause: &&Clause<'_>| half == Half::Groups || matches!(clause.media_type, "application/json" | "*/*");
    let mut plain = clauses.iter().filter(|clause| clause.asks == Asks::Plain).filter(is_known);
    if plain.any(Clause::takes_json) { Wanted::Merged(Form::Legacy) } else { Wanted::Unmergeable }
}

/// Whether a client takes JSON for a document that has one form only, such as `/apis/apps/v1`.
pub fn takes_json(accept: Option<&[u8]>) -> bool {
    let Some(accept) = accept.filter(|accept| !accept.is_empty()) else { return true };
    let Ok(accept) = std::str::from_utf8(accept) else { return false };
    accept.split(',').filter_map(Clause::parse).any(|clause| clause.asks == Asks::Plain && clause.takes_json())
}

/// Whether a client that sent this `If-None-Match` has the document with this (strong) entity tag: a list, weak tags and
/// `*` as RFC 9110 reads them. Apiservers understand no more than one strong tag.
pub fn is_unchanged(if_none_match: &[u8], etag: &str) -> bool {
    let mut rest = if_none_match.trim_ascii();
    if rest == b"*" {
        return true;
    }
    while !rest.is_empty() {
        rest = rest.strip_prefix(b"W/").unwrap_or(rest);
        let Some(behind_quote) = rest.strip_prefix(b"\"") else { return false };
        let Some(length) = behind_quote.iter().position(|byte| *byte == b'"') else { return false };
        let (opaque, behind) = behind_quote.split_at_checked(length).unwrap_or_default();
        if etag.strip_prefix('"').and_then(|etag| etag.strip_suffix('"')).map(str::as_bytes) == Some(opaque) {
            return true;
        }
        let behind = behind.get(1..).unwrap_or_default().trim_ascii_start();
        rest = behind.strip_prefix(b",").unwrap_or_default().trim_ascii_start();
    }
    false
}

/// One clause of an Accept header.
#[derive(Debug, Clone)]
struct Clause<'a> {
    media_type: &'a str,
    /// The two halves of the media type; a lone `*` is both.
    kind: &'a str,
    subtype: &'a str,
    quality: f64,
    asks: Asks,
    /// `profile=nopeer`.
    is_for_own_view: bool,
}

/// What the parameters of a clause ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asks {
    Aggregated,
    Plain,
    /// Another conversion, or one that a discovery handler does not do.
    Other,
}

impl<'a> Clause<'a> {
    /// Reads a clause as Kubernetes' negotiation does: names and values are compared as they are, in their case and with
    /// their quotes; what is not `name=value` is skipped.
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(|part| part.trim_matches(' '));
        let media_type = parts.next()?;
        let (kind, subtype) = if media_type == "*" { ("*", "*") } else { media_type.split_once('/')? };
        if subtype.contains('/') {
            return None;
        }
        let mut clause = Self { media_type, kind, subtype, quality: 1.0, asks: Asks::Plain, is_for_own_view: false };
        let (mut group, mut version, mut target, mut is_refused) = (None, None, None, false);
        for parameter in parts {
            let Some((name, value)) =
                parameter.split_once('=').filter(|(_, value)| !value.is_empty() && !value.contains('='))
            else {
                continue;
            };
            let (name, raw) = (name.trim_matches(' '), value);
            let value = raw.trim_matches(' ');
            match name {
                // Of this one the blanks are not taken away, and a blank is no number.
                "q" => clause.quality = raw.parse().unwrap_or(0.0),
                "g" => group = Some(value),
                "v" => version = Some(value),
                "as" => target = Some(value),
                "profile" => clause.is_for_own_view = value == "nopeer",
                "stream" if value == "watch" => {}
                "stream" | "sv" => is_refused = true,
                _ => {}
            }
        }
        clause.asks = match (group, version, target) {
            _ if is_refused => Asks::Other,
            (None, None, None) => Asks::Plain,
            (Some("apidiscovery.k8s.io"), Some("v2"), Some("APIGroupDiscoveryList")) => Asks::Aggregated,
            _ => Asks::Other,
        };
        Some(clause)
    }

    fn takes_json(&self) -> bool {
        matches!((self.kind, self.subtype), ("application" | "*", "*") | ("application", "json"))
    }

    /// Kubernetes' order. It is none in the mathematical sense, so the way of sorting matters too.
    fn goes_before(&self, other: &Self) -> bool {
        self.quality > other.quality
            || (self.kind != "*" && other.kind == "*")
            || (self.subtype != "*" && other.subtype == "*")
    }
}

/// Sorts by insertion, as Go does with up to a dozen elements.
fn in_order_of_preference(clauses: Vec<Clause<'_>>) -> Vec<Clause<'_>> {
    let mut sorted: Vec<Clause<'_>> = Vec::with_capacity(clauses.len());
    for clause in clauses {
        let stays = sorted.iter().rposition(|before| !clause.goes_before(before));
        sorted.insert(stays.map_or(0, |place| place.saturating_add(1)), clause);
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use serde_json::Value;

    /// What Kubernetes' own handlers answer (see `tests/vectors/README.md`).
    const VECTORS: &str = include_str!("../../tests/vectors/accept.jsonl");

    #[test]
    fn every_vector_is_read_as_kubernetes_reads_it() {
        for line in VECTORS.lines() {
            let vector: Value = serde_json::from_str(line).unwrap();
            let path = vector["path"].as_str().unwrap();
            let half = if path.starts_with("/apis") { Half::Groups } else { Half::Core };
            let first = vector["accept"].as_array().unwrap().first();
            let accept = first.map(|accept| accept.as_str().unwrap());
            let is_json = vector["contentType"].as_str().unwrap().starts_with("application/json");
            let mentions_json = accept.is_some_and(|accept| accept.contains("json") || accept.contains('*'));
            let expected = match vector["representation"].as_str().unwrap() {
                "v2" if is_json => Wanted::Merged(Form::Aggregated),
                "legacy" if is_json => Wanted::Merged(Form::Legacy),
                "v2-nopeer" => Wanted::Own,
                // What they prefer is not JSON, but they would take it: see the other table.
                "v2" if mentions_json => continue,
                _ => Wanted::Unmergeable,
            };
            let wanted = wanted(half, accept.map(str::as_bytes), path.ends_with('/'));
            assert_eq!(wanted, expected, "{line}");
        }
    }

    #[test]
    fn who_takes_json_gets_the_merge() {
        let protobuf = "application/vnd.kubernetes.protobuf";
        let v2 = "g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
        for (accept, expected, why) in [
            (
                format!("{protobuf};{v2},application/json;{v2};q=0.5"),
                Wanted::Merged(Form::Aggregated),
                "aggregated JSON",
            ),
            (format!("{protobuf};{v2},application/json"), Wanted::Merged(Form::Legacy), "legacy JSON"),
            (format!("{protobuf},application/json"), Wanted::Merged(Form::Legacy), "client-go with protobuf"),
            (format!("{protobuf},*/*"), Wanted::Merged(Form::Legacy), "an old client-go with protobuf"),
            (format!("{protobuf};{v2}"), Wanted::Unmergeable, "protobuf alone"),
            (protobuf.to_owned(), Wanted::Unmergeable, "protobuf alone"),
            ("application/json\u{e9}".to_owned(), Wanted::Unmergeable, "another type"),
        ] {
            assert_eq!(wanted(Half::Groups, Some(accept.as_bytes()), false), expected, "{why}: {accept}");
        }
        assert_eq!(wanted(Half::Groups, Some(b"application/json\xff"), false), Wanted::Unmergeable, "not text");
        for (accept, expected) in [
            (None, true),
            (Some("application/json"), true),
            (Some("application/vnd.kubernetes.protobuf,application/json;q=0.1"), true),
            (Some("*/*"), true),
            (Some("application/yaml"), false),
            (Some("application/json;as=Table;g=meta.k8s.io;v=v1"), false),
        ] {
            assert_eq!(takes_json(accept.map(str::as_bytes)), expected, "{accept:?}");
        }
    }

    #[test]
    fn a_long_list_costs_no_more_than_a_short_one() {
        // A header may be as long as a mebibyte; sorted as it is, this one would keep a worker for minutes.
        let accept = "*,".repeat(200_000) + &"a/b,".repeat(100_000);
        assert_eq!(wanted(Half::Groups, Some(accept.as_bytes()), false), Wanted::Merged(Form::Legacy));
        let late = "a/b,".repeat(MAX_CLAUSES) + "application/json";
        assert_eq!(wanted(Half::Groups, Some(late.as_bytes()), false), Wanted::Unmergeable, "too far behind");
    }

    #[test]
    fn conditions_are_read_as_http_has_them() {
        let etag = "\"E1\"";
        for (if_none_match, expected) in [
            ("\"E1\"", true),
            ("W/\"E1\"", true),
            ("*", true),
            (" \"E0\", \"E1\" ", true),
            ("\"E0\",W/\"E1\"", true),
            ("\"E,0\",\"E1\"", true),
            ("\"E0\"", false),
            ("E1", false),
            ("\"E1", false),
            ("\"E1\"x", true),
            ("\"E0\"x\"E1\"", false),
            ("", false),
            (",", false),
            ("\"e1\"", false),
        ] {
            assert_eq!(is_unchanged(if_none_match.as_bytes(), etag), expected, "{if_none_match}");
        }
    }
}
