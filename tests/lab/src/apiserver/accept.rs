//! Content negotiation as kube-apiservers do it (k8s.io/apiserver, munnerz/goautoneg), odd corners included.

use std::collections::HashMap;

/// The encodings an apiserver has, in its own order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Json,
    Yaml,
    Protobuf,
}

impl Encoding {
    const ALL: [Self; 3] = [Self::Json, Self::Yaml, Self::Protobuf];

    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Yaml => "application/yaml",
            Self::Protobuf => "application/vnd.kubernetes.protobuf",
        }
    }
}

/// What is asked for at `/api` and `/apis`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Discovery {
    /// The aggregated document; `true`: of this apiserver alone.
    Aggregated(Encoding, bool),
    Legacy(Encoding),
    /// Refused by the handler.
    NotAcceptable,
    /// Refused by go-restful before the handler is asked; its Status reads differently.
    NotRepresentable,
}

/// Which discovery document an Accept header asks for. `path` is `/api`, `/api/`, `/apis` or `/apis/`.
pub(crate) fn discovery(path: &str, accept: &str) -> Discovery {
    if path != "/apis/"
        && let Some((encoding, params)) = choose(accept, aggregated_is_allowed)
        && !accept.is_empty()
    {
        let nopeer = params.get("profile").is_some_and(|profile| profile == "nopeer");
        return Discovery::Aggregated(encoding, nopeer);
    }
    let core = path.starts_with("/api/") || path == "/api";
    if core && !go_restful_produces(accept) {
        return Discovery::NotRepresentable;
    }
    plain(accept).map_or(Discovery::NotAcceptable, Discovery::Legacy)
}

/// The encoding of a plain object (a Status, a legacy document); `None`: not acceptable.
pub(crate) fn plain(accept: &str) -> Option<Encoding> {
    choose(accept, |params| !params.contains_key("as") && !params.contains_key("g") && !params.contains_key("v"))
        .map(|(encoding, _)| encoding)
}

/// Whether a clause asks for resource objects in a transformed form, for instance a Table.
pub(crate) fn asks_for(accept: &str, kind: &str) -> bool {
    parse(accept).iter().any(|clause| clause.params.get("as").is_some_and(|have| have == kind))
}

/// go-restful's own check of the routes below `/api`: it knows no `application/*`.
pub(crate) fn go_restful_produces(accept: &str) -> bool {
    accept.is_empty()
        || accept.split(',').any(|clause| {
            let media_type = clause.split(';').next().unwrap_or_default().trim_matches(' ');
            media_type == "*/*" || Encoding::ALL.iter().any(|encoding| encoding.media_type() == media_type)
        })
}

fn aggregated_is_allowed(params: &HashMap<String, String>) -> bool {
    let is = |name, value| params.get(name).is_some_and(|have| have == value);
    is("g", "apidiscovery.k8s.io") && is("v", "v2") && is("as", "APIGroupDiscoveryList")
}

fn choose(
    accept: &str,
    transform_is_allowed: impl Fn(&HashMap<String, String>) -> bool,
) -> Option<(Encoding, HashMap<String, String>)> {
    if accept.is_empty() {
        return Some((Encoding::Json, HashMap::new()));
    }
    for clause in parse(accept) {
        for encoding in Encoding::ALL {
            let (main, sub) = encoding.media_type().split_once('/').unwrap_or_default();
            let matches = match (clause.main.as_str(), clause.sub.as_str()) {
                ("*", "*") => true,
                (have, "*") => have == main,
                have => have == (main, sub),
            };
            let stream_is_fine = clause.params.get("stream").is_none_or(|stream| stream == "watch");
            let version_is_fine = !clause.params.contains_key("sv");
            if matches && stream_is_fine && version_is_fine && transform_is_allowed(&clause.params) {
                return Some((encoding, clause.params));
            }
        }
    }
    None
}

#[derive(Debug)]
struct Clause {
    main: String,
    sub: String,
    q: f32,
    params: HashMap<String, String>,
}

/// The clauses, best first.
fn parse(accept: &str) -> Vec<Clause> {
    let mut clauses: Vec<Clause> = accept.split(',').filter_map(parse_clause).collect();
    // Go sorts short lists by insertion, and `better` is no order, so that the result depends on the algorithm.
    for i in 1..clauses.len() {
        let mut j = i;
        while j > 0 && better(&clauses[j], &clauses[j - 1]) {
            clauses.swap(j, j - 1);
            j -= 1;
        }
    }
    clauses
}

fn parse_clause(clause: &str) -> Option<Clause> {
    let mut parts = clause.trim_matches(' ').split(';');
    let media_type = parts.next()?;
    let (main, sub) = match media_type.split_once('/') {
        Some((_, sub)) if sub.contains('/') => return None,
        Some((main, sub)) if !sub.is_empty() => (main.trim_matches(' '), sub.trim_matches(' ')),
        _ if media_type.trim_matches(['/', ' ']) == "*" => ("*", "*"),
        _ => return None,
    };
    let mut parsed = Clause { main: main.to_owned(), sub: sub.to_owned(), q: 1.0, params: HashMap::new() };
    for param in parts {
        let Some((name, value)) = param.split_once('=') else { continue };
        if value.is_empty() || value.contains('=') {
            continue;
        }
        match name.trim_matches(' ') {
            "q" => parsed.q = value.parse().unwrap_or(0.0),
            name => {
                parsed.params.insert(name.to_owned(), value.trim_matches(' ').to_owned());
            }
        }
    }
    Some(parsed)
}

fn better(a: &Clause, b: &Clause) -> bool {
    a.q > b.q || (a.main != "*" && b.main == "*") || (a.sub != "*" && b.sub == "*")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn every_vector_is_answered_as_kubernetes_own_code_does() {
        let vectors = fixtures::vectors("accept.jsonl").unwrap();
        assert!(vectors.len() > 100);
        for vector in vectors {
            let accept = vector["accept"][0].as_str().unwrap_or_default();
            let got = match discovery(vector["path"].as_str().unwrap(), accept) {
                Discovery::Aggregated(encoding, nopeer) => {
                    let parameters = ";g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
                    let name = if nopeer { "v2-nopeer" } else { "v2" };
                    (name, format!("{}{parameters}", encoding.media_type()))
                }
                Discovery::Legacy(encoding) => ("legacy", encoding.media_type().to_owned()),
                Discovery::NotAcceptable | Discovery::NotRepresentable => ("406", "application/json".to_owned()),
            };
            let want = (vector["representation"].as_str().unwrap(), vector["contentType"].as_str().unwrap());
            assert_eq!((got.0, got.1.as_str()), want, "{vector}");
        }
    }
}
