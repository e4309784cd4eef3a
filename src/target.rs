//! Request path to [`Target`], exactly as kube-apiserver's own `RequestInfoFactory` reads it.
//!
//! The path is percent-decoded once and split afterwards, so an encoded slash separates segments like a plain one.
//! Nothing here changes bytes: what goes upstream is what the client sent.

use std::borrow::Cow;

use crate::hex;

/// What a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target<'p> {
    /// A resource of some group-version: the only requests that the filter ever reroutes or guards.
    Resource(Resource<'p>),
    /// A document that tells what there is.
    Discovery(Discovery<'p>),
    /// Everything else: health, `/version`, and paths that an apiserver may read otherwise than we do.
    Other,
}

/// A document that tells what there is. One trailing slash means nothing but for roots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discovery<'p> {
    /// `/api` or `/apis`.
    Root {
        /// It is `/api`.
        is_core: bool,
        /// A slash stands behind it.
        has_trailing_slash: bool,
    },
    /// `/apis/GROUP`.
    Group(&'p [u8]),
    /// `/apis/GROUP/VERSION`, or `/api/VERSION` with an empty group.
    GroupVersion {
        /// API group.
        group: &'p [u8],
        /// Version inside the group.
        version: &'p [u8],
    },
    /// `/openapi/v3`.
    OpenApiRoot,
    /// `/openapi/v3/KEY`: a schema document, such as that of the key `apis/apps/v1`.
    OpenApiSchema(&'p [u8]),
}

/// The resource that a request names. Every part is the decoded bytes of the path; kube-apiserver does not require
/// UTF-8 there, so neither do we.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resource<'p> {
    /// API group; empty for the core group (`/api`).
    pub group: &'p [u8],
    /// Version inside the group, such as `v1`.
    pub version: &'p [u8],
    /// Plural resource name, such as `pods`.
    pub resource: &'p [u8],
    /// Subresource such as `status`; empty if there is none.
    pub subresource: &'p [u8],
    /// Namespace; empty if the request names none.
    pub namespace: &'p [u8],
    /// Object name; empty for collections.
    pub name: &'p [u8],
    /// The verb prefix `proxy` stands before the resource.
    pub is_proxied: bool,
}

impl Resource<'_> {
    /// Whether the apiserver hands the request on to a pod, a node or a service, where a GET may do anything.
    pub fn reaches_backend(&self) -> bool {
        self.is_proxied || matches!(self.subresource, b"exec" | b"attach" | b"portforward" | b"proxy")
    }
}

/// A request path after percent-decoding, which borrows the bytes of the request unless something was encoded.
#[derive(Debug)]
pub struct DecodedPath<'r>(Cow<'r, [u8]>);

/// Longer paths (without their query) are none of a resource for us: names have 253 bytes at most, so what follows is a
/// backend's. A request keeps its path until its answer comes, and clients choose how long it is.
const MAX_PATH_BYTES: usize = 8 << 10;

/// The part of a request target that tells what it is about: the query is cut off.
pub fn without_query(mut request_target: Vec<u8>) -> Vec<u8> {
    // Below this it is not worth another allocation to give memory back.
    const WORTH_SHRINKING: usize = 1 << 10;
    let query = request_target.iter().position(|byte| *byte == b'?');
    request_target.truncate(query.unwrap_or(request_target.len()));
    if request_target.capacity().saturating_sub(request_target.len()) > WORTH_SHRINKING {
        request_target.shrink_to_fit();
    }
    request_target
}

impl<'r> DecodedPath<'r> {
    /// Decodes the path of a request target (`:path` with its query, or the absolute form).
    ///
    /// `None` where Go's `net/http` refuses the request with a 400 before any routing: an invalid escape, a control
    /// byte or a blank, or no path at all (`*`, `CONNECT`); and where it is longer than 8 KiB.
    pub fn new(request_target: &'r [u8]) -> Option<Self> {
        let before_query = request_target.split(|byte| *byte == b'?').next()?;
        let has_odd_byte = before_query.iter().any(|byte| byte.is_ascii_control() || *byte == b' ');
        if before_query.len() > MAX_PATH_BYTES || has_odd_byte {
            return None;
        }
        let path = path_behind_authority(before_query)?;
        if path.contains(&b'%') {
            percent_decode(path).map(|path| Self(Cow::Owned(path)))
        } else {
            Some(Self(Cow::Borrowed(path)))
        }
    }

    /// What the path is about. An *odd* path is [`Target::Other`]: one with an empty segment (but for
    /// one trailing slash), `.` or `..`, up to the subresource.
    pub fn target(&self) -> Target<'_> {
        match Reading::of(&self.0) {
            Some(reading) if !reading.is_odd => Target::Resource(reading.resource),
            Some(_) => Target::Other,
            None => Discovery::of(&self.0).map_or(Target::Other, Target::Discovery),
        }
    }
}

impl<'p> Discovery<'p> {
    fn of(path: &'p [u8]) -> Option<Self> {
        if let Some(key) = path.strip_prefix(b"/openapi/v3/").filter(|key| !key.is_empty()) {
            return Some(Self::OpenApiSchema(key));
        }
        let mut segments = Segments::new(path);
        let first = segments.next()?;
        let (second, third) = (segments.next(), segments.next());
        if segments.are_odd(false) || segments.next().is_some() {
            return None;
        }
        let has_trailing_slash = path.ends_with(b"/");
        match (first, second, third) {
            (b"api", None, None) => Some(Self::Root { is_core: true, has_trailing_slash }),
            (b"apis", None, None) => Some(Self::Root { is_core: false, has_trailing_slash }),
            (b"api", Some(version), None) => Some(Self::GroupVersion { group: b"", version }),
            (b"apis", Some(group), None) => Some(Self::Group(group)),
            (b"apis", Some(group), Some(version)) => Some(Self::GroupVersion { group, version }),
            (b"openapi", Some(b"v3"), None) if !has_trailing_slash => Some(Self::OpenApiRoot),
            _ => None,
        }
    }
}

/// The path of a request target without its query: what stands behind the authority, if there is one.
fn path_behind_authority(before_query: &[u8]) -> Option<&[u8]> {
    if before_query.first() == Some(&b'/') {
        return Some(before_query);
    }
    // Absolute form ("http://host/path", also "http:/path") and authority form ("host:port/path"). Envoy turns both
    // into plain paths, so they are met only where something else hands us the target.
    let scheme_end = before_query.iter().position(|byte| *byte == b':')?;
    let behind_scheme = before_query.get(scheme_end.checked_add(1)?..)?;
    let behind_slashes = behind_scheme.strip_prefix(b"//").unwrap_or(behind_scheme);
    let authority_end = behind_slashes.iter().position(|byte| *byte == b'/').unwrap_or(behind_slashes.len());
    let (authority, path) = behind_slashes.split_at_checked(authority_end)?;
    let plausible = authority.contains(&b'[') == authority.contains(&b']') && !authority.contains(&b'%');
    plausible.then_some(path)
}

/// Decodes `%XX`, once; `None` if an escape is not two hexadecimal digits.
fn percent_decode(path: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(path.len());
    let mut bytes = path.iter();
    while let Some(&byte) = bytes.next() {
        decoded.push(if byte == b'%' {
            let high = hex::digit(*bytes.next()?)?;
            let low = hex::digit(*bytes.next()?)?;
            (high << 4) | low
        } else {
            byte
        });
    }
    Some(decoded)
}

/// The resource in a decoded path, and whether the path is one that we had better not touch.
struct Reading<'p> {
    resource: Resource<'p>,
    /// An empty segment (but for one trailing slash), `.` or `..`, up to the subresource. Apiservers, their
    /// aggregation layer and proxies disagree on such paths, so the filter leaves them and their answers alone.
    /// What follows the subresource belongs to the backend behind it and is never looked at.
    is_odd: bool,
}

impl<'p> Reading<'p> {
    /// Reads a path as `RequestInfoFactory.NewRequestInfo` does (prefixes `api` and `apis`); `None`: not a resource
    /// request, or one that the factory refuses (a `watch` or `proxy` prefix with nothing behind it).
    fn of(path: &'p [u8]) -> Option<Self> {
        let mut segments = Segments::new(path);
        let group: &[u8] = match segments.next()? {
            b"api" => b"",
            b"apis" => segments.next()?,
            _ => return None,
        };
        let version = segments.next()?;
        let mut first = segments.next()?;
        // A verb may stand before the resource: "/api/v1/watch/pods". Behind "proxy" there is no subresource.
        let has_subresource = first != b"proxy";
        if first == b"watch" || first == b"proxy" {
            first = segments.next()?;
        }

        let (mut resource, mut namespace, mut subresource) = (first, None, None);
        let mut name;
        if first == b"namespaces" {
            namespace = segments.next();
            name = namespace;
            match namespace.and_then(|_| segments.next()) {
                // The two subresources that namespaces themselves have.
                Some(segment @ (b"status" | b"finalize")) => subresource = Some(segment),
                Some(segment) => {
                    resource = segment;
                    name = segments.next();
                    subresource = name.filter(|_| has_subresource).and_then(|_| segments.next());
                }
                None => {}
            }
        } else {
            name = segments.next();
            subresource = name.filter(|_| has_subresource).and_then(|_| segments.next());
        }
        let reached_backend_path = if has_subresource { subresource.is_some() } else { name.is_some() };
        let resource = Resource {
            group,
            version,
            resource,
            subresource: subresource.filter(|_| has_subresource).unwrap_or_default(),
            namespace: namespace.unwrap_or_default(),
            name: name.unwrap_or_default(),
            is_proxied: !has_subresource,
        };
        Some(Self { resource, is_odd: segments.are_odd(reached_backend_path) })
    }
}

/// The segments of a path without its outer slashes, and what was odd about those taken so far.
struct Segments<'p> {
    rest: Option<&'p [u8]>,
    leading_slashes: usize,
    trailing_slashes: usize,
    took_odd_one: bool,
}

impl<'p> Segments<'p> {
    fn new(path: &'p [u8]) -> Self {
        let leading_slashes = path.iter().take_while(|byte| **byte == b'/').count();
        let behind_leading = path.get(leading_slashes..).unwrap_or_default();
        let trailing_slashes = behind_leading.iter().rev().take_while(|byte| **byte == b'/').count();
        let inner = behind_leading.get(..behind_leading.len().saturating_sub(trailing_slashes)).unwrap_or_default();
        Self { rest: (!inner.is_empty()).then_some(inner), leading_slashes, trailing_slashes, took_odd_one: false }
    }

    fn next(&mut self) -> Option<&'p [u8]> {
        let rest = self.rest?;
        let mut halves = rest.splitn(2, |byte| *byte == b'/');
        let segment = halves.next()?;
        self.rest = halves.next();
        self.took_odd_one |= matches!(segment, b"" | b"." | b"..");
        Some(segment)
    }

    fn are_odd(&self, reached_backend_path: bool) -> bool {
        self.took_odd_one || self.leading_slashes != 1 || (!reached_backend_path && self.trailing_slashes > 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use serde_json::Value;

    /// Questions and answers of Kubernetes' own `RequestInfoFactory` (see `tests/vectors/README.md`).
    const REQUEST_INFO: &str = include_str!("../tests/vectors/request-info.jsonl");

    fn base64(text: &str) -> Vec<u8> {
        const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let digits: Vec<u32> =
            text.bytes().filter_map(|b| ALPHABET.iter().position(|a| *a == b)).map(|p| p as u32).collect();
        let mut bytes = Vec::new();
        for chunk in digits.chunks(4) {
            let word = chunk.iter().fold(0, |word, digit| (word << 6) | digit) << (6 * (4 - chunk.len()));
            bytes.extend_from_slice(&word.to_be_bytes()[1..chunk.len()]);
        }
        bytes
    }

    /// The member of a vector as exact bytes: its base64 twin where the text is lossy.
    fn member(vector: &Value, twins: &str, key: &str, own: Option<&Value>) -> Vec<u8> {
        match vector.get(twins).and_then(|twin| twin.get(key)).and_then(Value::as_str) {
            Some(encoded) => base64(encoded),
            None => own.and_then(Value::as_str).unwrap_or_default().as_bytes().to_vec(),
        }
    }

    #[test]
    fn every_vector_is_read_as_kubernetes_reads_it() {
        let mut rows = 0;
        for line in REQUEST_INFO.lines() {
            let vector: Value = serde_json::from_str(line).unwrap();
            let target = match vector.get("target_b64").and_then(Value::as_str) {
                Some(encoded) => base64(encoded),
                None => vector["target"].as_str().unwrap().as_bytes().to_vec(),
            };
            let decoded = DecodedPath::new(&target);
            let read = decoded.as_ref().and_then(|path| Reading::of(&path.0)).map(|reading| reading.resource);
            if !vector["ok"].as_bool().unwrap() || vector["resource"].is_null() {
                assert_eq!(read, None, "{line}");
            } else {
                let field = |key| member(&vector, "resource_b64", key, vector["resource"].get(key));
                let read = read.unwrap_or_else(|| panic!("not read as a resource: {line}"));
                assert_eq!(read.group, field("group"), "{line}");
                assert_eq!(read.version, field("version"), "{line}");
                assert_eq!(read.resource, field("resource"), "{line}");
                assert_eq!(read.subresource, field("subresource"), "{line}");
                assert_eq!(read.namespace, field("namespace"), "{line}");
                if !vector.get("name_from_query").and_then(Value::as_bool).unwrap_or_default() {
                    assert_eq!(read.name, field("name"), "{line}");
                }
            }
            rows += 1;
        }
        assert!(rows > 600, "only {rows} vectors were read");
    }

    fn target(path: &str) -> String {
        match DecodedPath::new(path.as_bytes()).as_ref().map(DecodedPath::target) {
            None => "refused".to_owned(),
            Some(Target::Discovery(_) | Target::Other) => "other".to_owned(),
            Some(Target::Resource(r)) => {
                let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
                format!("{}/{} {} [{}]", text(r.group), text(r.version), text(r.resource), text(r.subresource))
            }
        }
    }

    #[test]
    fn paths_have_targets() {
        for (path, expected, why) in [
            ("/api/v1/pods", "/v1 pods []", "a collection of the core group"),
            ("/apis/apps/v1/namespaces/a/deployments/d/scale", "apps/v1 deployments [scale]", "a subresource"),
            ("/api/v1/namespaces/shop/pods/p/log?follow=true", "/v1 pods [log]", "the query is not the path's"),
            ("/healthz", "other", "no resource request"),
            ("/apis", "other", "discovery"),
            ("/apis/apps/v1", "other", "a group-version document"),
            ("/openapi/v3/apis/apps/v1", "other", "OpenAPI"),
            ("/", "other", "the root"),
            ("", "refused", "no path"),
            ("*", "refused", "OPTIONS *"),
            // Verb prefixes (real clients still use them).
            ("/api/v1/watch/namespaces/shop/pods", "/v1 pods []", "the watch prefix is no resource"),
            (
                "/apis/depot.example.k8s.io/v1/watch/crates/c1",
                "depot.example.k8s.io/v1 crates []",
                "watch of one object",
            ),
            (
                "/apis/mirror.example/v1/proxy/namespaces/d/targets/t1/deep/path",
                "mirror.example/v1 targets []",
                "behind the proxy prefix there is no subresource",
            ),
            ("/api/v1/watch", "other", "a bare prefix"),
            ("/api/v1/namespaces/watch/pods", "/v1 pods []", "a namespace called watch"),
            ("/api/v1/namespaces/shop/pods/watch", "/v1 pods []", "a pod called watch"),
        ] {
            assert_eq!(target(path), expected, "{path}: {why}");
        }
    }

    #[test]
    fn odd_paths_are_left_alone() {
        for (path, expected, why) in [
            ("/api/v1/pods/", "/v1 pods []", "one trailing slash is allowed"),
            ("/api/v1/pods//", "other", "two are not"),
            ("//api/v1/pods", "other", "a doubled slash in front"),
            ("/api//v1/pods", "other", "an empty segment"),
            ("/apis//v1/pods", "other", "reads like core pods, and is not"),
            ("/api/v1/namespaces//pods", "other", "an empty namespace"),
            ("/api/v1/./pods", "other", "a dot segment"),
            ("/api/v1/pods/..", "other", "a dot-dot segment"),
            ("/api/v1/pods/%2e%2E", "other", "the same, encoded"),
            ("/api/v1/pods/%2F", "other", "an encoded slash makes an empty segment, too"),
            ("/api/v1/pods/...", "/v1 pods []", "three dots are a name"),
            ("/api/v1/pods/p/proxy/a/../b//c", "/v1 pods [proxy]", "behind the subresource all is the backend's"),
            ("/api/v1/pods/p/log//", "/v1 pods [log]", "slashes behind it as well"),
            ("/api/v1/proxy/pods/p//x/..", "/v1 pods []", "and behind the name under the proxy prefix"),
            ("/api/v1/pods/p%00%ff", "/v1 pods []", "odd bytes in names are just bytes"),
            ("/api/v1/pods/%zz", "refused", "an invalid escape"),
            ("/api/v1/pods/%2", "refused", "a cut escape"),
            ("/api/v1/%70ods", "/v1 pods []", "encoded letters are letters"),
            ("/api%2Fv1%2fpods", "/v1 pods []", "encoded slashes are slashes"),
            ("/api/v1/pods/%252e%252e", "/v1 pods []", "decoded once, not twice"),
        ] {
            assert_eq!(target(path), expected, "{path}: {why}");
        }
    }

    #[test]
    fn what_a_backend_gets_is_told_from_what_an_apiserver_does() {
        for (path, expected) in [
            ("/api/v1/namespaces/n/pods/p", false),
            ("/api/v1/namespaces/n/pods/p/log", false),
            ("/api/v1/namespaces/n/pods/p/exec", true),
            ("/api/v1/namespaces/n/pods/p/attach", true),
            ("/api/v1/namespaces/n/pods/p/portforward", true),
            ("/api/v1/namespaces/n/services/s/proxy/x", true),
            ("/api/v1/nodes/n/proxy", true),
            ("/api/v1/proxy/namespaces/n/services/s", true),
            ("/api/v1/watch/namespaces/n/pods", false),
        ] {
            let decoded = DecodedPath::new(path.as_bytes()).unwrap();
            let Target::Resource(resource) = decoded.target() else { panic!("{path}") };
            assert_eq!(resource.reaches_backend(), expected, "{path}");
        }
    }

    #[test]
    fn a_request_keeps_no_more_than_its_path() {
        let query = "y".repeat(900_000);
        let kept = without_query(format!("/api/v1/pods?labelSelector={query}").into_bytes());
        assert_eq!(kept, b"/api/v1/pods");
        assert!(kept.capacity() < 1_100, "{} bytes", kept.capacity());
        assert_eq!(without_query(b"/api/v1/pods".to_vec()), b"/api/v1/pods");
    }

    #[test]
    fn a_path_of_more_than_eight_kibibytes_is_about_nothing() {
        for (length, is_read) in [(8 << 10, true), ((8 << 10) + 1, false), (900_000, false)] {
            let start = "/api/v1/namespaces/n/services/s/proxy/";
            let path = format!("{start}{}", "y".repeat(length - start.len()));
            assert_eq!(DecodedPath::new(path.as_bytes()).is_some(), is_read, "{length}");
            let with_query = format!("{path}?{}", "x".repeat(10_000));
            assert_eq!(DecodedPath::new(with_query.as_bytes()).is_some(), is_read, "{length}: a query does not count");
        }
    }

    #[test]
    fn a_path_without_escapes_is_not_copied() {
        assert!(matches!(DecodedPath::new(b"/api/v1/pods?x=%2F").unwrap().0, Cow::Borrowed(b"/api/v1/pods")));
    }
}
