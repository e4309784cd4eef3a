//! Aggregated discovery documents (`APIGroupDiscoveryList`), read for one question: which types does an apiserver
//! serve?
//!
//! An apiserver offers two, one of the core group under `/api` and one of all other groups under `/apis`: its two
//! [halves](Half). They are fetched, kept and lost independently of each other.

use std::borrow::Cow;

use serde::Deserialize;

use crate::discovery::api_services::GroupVersionName;
use crate::quote::{clipped, quoted, quoted_bytes};

/// Accept clauses of a poll, best first: the apiserver's own view without its peers' (`profile=nopeer`, else servers
/// from 1.35 on may answer for their peers as well), the same from servers that ignore `profile`, the beta form that
/// servers before 1.30 have, and plain JSON so that a server without any of them answers 200 rather than 406 and can
/// be named in the log for what it is.
pub const POLL_ACCEPT: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList;profile=nopeer,\
                               application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
                               application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,\
                               application/json;q=0.9";

/// serde's words can hold a value from the document, whatever its length.
pub(super) const MAX_REASON_CHARS: usize = 200;

/// One of the two discovery documents of an apiserver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Half {
    /// `/api`: the core group.
    Core,
    /// `/apis`: all named groups.
    Groups,
}

impl Half {
    /// Both halves.
    pub const ALL: [Self; 2] = [Self::Core, Self::Groups];

    /// The half that tells about an API group.
    pub const fn of_group(group: &[u8]) -> Self {
        if group.is_empty() { Self::Core } else { Self::Groups }
    }

    /// The path under which an apiserver serves this half.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Core => "/api",
            Self::Groups => "/apis",
        }
    }
}

/// The types of one half, as the apiserver listed them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Group-versions in the apiserver's order; a group-version that is listed twice stands here twice.
    pub group_versions: Vec<GroupVersion>,
}

/// One version of one API group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupVersion {
    /// Group name, empty for the core group.
    pub group: String,
    /// Version name.
    pub version: String,
    /// The apiserver could not reach the backend of this group-version just now (`freshness: Stale`): its list of
    /// resources says nothing.
    pub is_stale: bool,
    /// Resources with what hangs below them.
    pub resources: Vec<ApiResource>,
}

/// One resource of a group-version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiResource {
    /// Plural name, such as `pods`.
    pub name: String,
    /// Names of its subresources, such as `status`.
    pub subresources: Vec<String>,
}

/// Why an answer is not a discovery document that could be believed.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The media type is not JSON (a login page, a load balancer's own answer).
    #[error("the answer is {content_type} and not application/json")]
    NotJson {
        /// What the answer calls itself, quoted.
        content_type: String,
    },
    /// The body is not JSON of the expected shape; cut and non-UTF-8 bodies end up here.
    #[error("the document cannot be read: {reason}")]
    Malformed {
        /// Where and why, clipped.
        reason: String,
    },
    /// JSON, but another kind: an old server's `APIGroupList`, or a `Status` under a 200.
    #[error("the document is a {kind} of {api_version} and not an aggregated discovery document")]
    WrongKind {
        /// Member `kind`, quoted.
        kind: String,
        /// Member `apiVersion`, quoted.
        api_version: String,
    },
    /// No group at all, or none with a resource. Such an apiserver is implausible; it is what a half-started one or a
    /// broken cache says.
    #[error("the document lists no group with a resource")]
    Empty,
}

/// The body of an answer as text: JSON is UTF-8.
///
/// # Errors
/// [`DocumentError::Malformed`].
pub fn text(body: &[u8]) -> Result<&str, DocumentError> {
    str::from_utf8(body).map_err(|error| DocumentError::Malformed { reason: format!("{error}") })
}

impl Document {
    /// Reads the body of a 200 answer for `half`. The parser goes by what the answer says of itself (media type,
    /// `kind`, `apiVersion`), never by what was asked: servers may ignore Accept.
    ///
    /// # Errors
    /// See [`DocumentError`]; an answer that is refused must not replace the last good document.
    pub fn parse(half: Half, content_type: &[u8], body: &str) -> Result<Self, DocumentError> {
        let media_type = content_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
        if !media_type.eq_ignore_ascii_case(b"application/json") {
            return Err(DocumentError::NotJson { content_type: quoted_bytes(content_type) });
        }
        let list: wire::List<'_> = serde_json::from_str(body)
            .map_err(|error| DocumentError::Malformed { reason: clipped(&format!("{error}"), MAX_REASON_CHARS) })?;
        let is_aggregated = list.kind == "APIGroupDiscoveryList"
            && matches!(&*list.api_version, "apidiscovery.k8s.io/v2" | "apidiscovery.k8s.io/v2beta1");
        if !is_aggregated {
            return Err(DocumentError::WrongKind { kind: quoted(&list.kind), api_version: quoted(&list.api_version) });
        }
        let group_versions: Vec<_> = list
            .items
            .unwrap_or_default()
            .into_iter()
            .filter(|group| Half::of_group(group.name().as_bytes()) == half)
            .flat_map(wire::Group::into_group_versions)
            .collect();
        let has_resources = group_versions.iter().any(|group_version| !group_version.resources.is_empty());
        if has_resources { Ok(Self { group_versions }) } else { Err(DocumentError::Empty) }
    }

    /// The group-versions that are stale.
    pub fn stale(&self) -> impl Iterator<Item = GroupVersionName> {
        let stale = self.group_versions.iter().filter(|group_version| group_version.is_stale);
        stale.map(|group_version| GroupVersionName::new(&group_version.group, &group_version.version))
    }
}

/// The JSON shapes, forgiving wherever a server may leave out or null a member that we do not need.
mod wire {
    use super::{ApiResource, Cow, Deserialize, GroupVersion};

    #[derive(Deserialize)]
    pub(super) struct List<'d> {
        #[serde(borrow, default)]
        pub(super) kind: Cow<'d, str>,
        #[serde(borrow, default, rename = "apiVersion")]
        pub(super) api_version: Cow<'d, str>,
        #[serde(borrow)]
        pub(super) items: Option<Vec<Group<'d>>>,
    }

    #[derive(Deserialize)]
    pub(super) struct Group<'d> {
        #[serde(borrow)]
        metadata: Option<Metadata<'d>>,
        #[serde(borrow)]
        versions: Option<Vec<Version<'d>>>,
    }

    #[derive(Deserialize)]
    struct Metadata<'d> {
        #[serde(borrow, default)]
        name: Cow<'d, str>,
    }

    #[derive(Deserialize)]
    struct Version<'d> {
        #[serde(borrow)]
        version: Option<Cow<'d, str>>,
        #[serde(borrow)]
        freshness: Option<Cow<'d, str>>,
        #[serde(borrow)]
        resources: Option<Vec<Resource<'d>>>,
    }

    #[derive(Deserialize)]
    struct Resource<'d> {
        #[serde(borrow)]
        resource: Option<Cow<'d, str>>,
        #[serde(borrow)]
        subresources: Option<Vec<Subresource<'d>>>,
    }

    #[derive(Deserialize)]
    struct Subresource<'d> {
        #[serde(borrow)]
        subresource: Option<Cow<'d, str>>,
    }

    impl<'d> Group<'d> {
        /// Empty for the core group.
        pub(super) fn name(&self) -> &str {
            self.metadata.as_ref().map_or("", |metadata| &metadata.name)
        }

        /// Entries without a name are left out.
        pub(super) fn into_group_versions(self) -> impl Iterator<Item = GroupVersion> + use<'d> {
            let group = self.name().to_owned();
            self.versions.unwrap_or_default().into_iter().filter_map(move |version| {
                Some(GroupVersion {
                    group: group.clone(),
                    version: version.version?.into_owned(),
                    is_stale: version.freshness.as_deref() == Some("Stale"),
                    resources: version.resources.unwrap_or_default().into_iter().filter_map(Resource::named).collect(),
                })
            })
        }
    }

    impl Resource<'_> {
        fn named(self) -> Option<ApiResource> {
            let subresources = self.subresources.unwrap_or_default().into_iter();
            Some(ApiResource {
                name: self.resource?.into_owned(),
                subresources: subresources.filter_map(|sub| Some(sub.subresource?.into_owned())).collect(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    const V2: &[u8] = b"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

    fn count(document: &Document) -> (usize, usize) {
        let resources = document.group_versions.iter().flat_map(|gv| &gv.resources);
        let with_subresources = resources.map(|resource| 1 + resource.subresources.len()).sum();
        (document.group_versions.len(), with_subresources)
    }

    #[test]
    fn recorded_documents_are_read_whole() {
        // Group-versions under /apis, and resources and subresources of both halves, as counted on the real servers.
        for (server, api, apis, expected) in [
            (
                "1.34.4",
                include_str!("../../tests/fixtures/discovery/1.34.4/api.poll-accept.json"),
                include_str!("../../tests/fixtures/discovery/1.34.4/apis.poll-accept.json"),
                (21, 111),
            ),
            (
                "1.36.3",
                include_str!("../../tests/fixtures/discovery/1.36.3/api.poll-accept.json"),
                include_str!("../../tests/fixtures/discovery/1.36.3/apis.poll-accept.json"),
                (21, 113),
            ),
            (
                "1.37.2",
                include_str!("../../tests/fixtures/discovery/1.37.2/api.poll-accept.json"),
                include_str!("../../tests/fixtures/discovery/1.37.2/apis.poll-accept.json"),
                (22, 121),
            ),
        ] {
            let core = count(&Document::parse(Half::Core, V2, api).unwrap());
            let groups = count(&Document::parse(Half::Groups, V2, apis).unwrap());
            assert_eq!((groups.0, core.1 + groups.1), expected, "{server}");
        }
    }

    #[test]
    fn what_is_no_document_is_refused() {
        let json = b"application/json".as_slice();
        for (content_type, body, expected, why) in [
            (b"text/html".as_slice(), "<html>", "text/html", "a login page"),
            (b"", "{}", "not application/json", "no media type"),
            (json, "{\"kind\":\"APIGroupDiscoveryList\",\"apiVer", "cannot be read", "a cut body"),
            (json, "", "cannot be read", "an empty body"),
            (json, "[]", "cannot be read", "an array"),
            (json, r#"{"kind":"APIGroupList","apiVersion":"v1","groups":[]}"#, "APIGroupList", "the old list"),
            (json, r#"{"kind":"APIVersions","versions":["v1"]}"#, "APIVersions", "the old list of /api"),
            (json, r#"{"kind":"Status","apiVersion":"v1","code":404}"#, "Status", "a Status under a 200"),
            (json, "{}", "is a \"\"", "an empty object"),
            (
                json,
                r#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[{"metadata":{"name":"apps"},"versions":[{"version":"v1","resources":[]}]}]}"#,
                "no group",
                "a group without a resource",
            ),
            (
                json,
                r#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v3","items":[]}"#,
                "v3",
                "a version that is not known",
            ),
            (
                json,
                r#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[]}"#,
                "no group",
                "no items",
            ),
            (
                json,
                r#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":null}"#,
                "no group",
                "null items",
            ),
            (
                json,
                r#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2"}"#,
                "no group",
                "missing items",
            ),
            (
                json,
                r#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[{"metadata":{"name":""},"versions":[{"version":"v1","resources":[]}]}]}"#,
                "no group",
                "only the core group, which belongs to /api",
            ),
        ] {
            let error = Document::parse(Half::Groups, content_type, body).unwrap_err().to_string();
            assert!(error.contains(expected), "{why}: {error}");
        }
        let long = format!("{{\"kind\":\"{}\",\"apiVersion\":\"v1\"}}", "x".repeat(1 << 20));
        let list = format!("{{\"kind\":\"x\",\"items\":\"{}\"}}", "x".repeat(1 << 20));
        for body in [long, list] {
            let error = Document::parse(Half::Groups, json, &body).unwrap_err().to_string();
            assert!(error.len() < 1_000, "{} bytes of outside text in a message", error.len());
        }
        let mut not_utf8 = br#"{"kind":"APIGroupDiscoveryList","apiVersion":""#.to_vec();
        not_utf8.extend_from_slice(b"\xff\"}");
        assert!(text(&not_utf8).is_err(), "bytes that are not UTF-8");
    }

    #[test]
    fn members_that_are_missing_or_null_cost_nothing() {
        let body = r#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2beta1","new":{"member":1},"items":[
            {"metadata":{"name":"a.k8s.io","creationTimestamp":null},"versions":[
                {"version":"v1","resources":[
                    {"resource":"plain"},
                    {"resource":null},
                    {"verbs":["get"]},
                    {"resource":"nulls","responseKind":null,"verbs":null,"scope":null,"subresources":null},
                    {"resource":"sub/|*","subresources":[{"subresource":"st\u0061tus","verbs":null}]}]},
                {"version":"v2","freshness":"Stale"},
                {"version":"v3","resources":null,"freshness":"Current"},
                {"resources":[{"resource":"unnamed"}]},
                {"version":null}]},
            {"metadata":null,"versions":[]},
            {"metadata":{"name":"b.k8s.io"},"versions":null},
            {"versions":[]}]}"#;
        let document = Document::parse(Half::Groups, b"Application/JSON; x=y", body).unwrap();
        let versions: Vec<_> =
            document.group_versions.iter().map(|gv| (gv.version.as_str(), gv.is_stale, gv.resources.len())).collect();
        assert_eq!(versions, [("v1", false, 3), ("v2", true, 0), ("v3", false, 0)]);
        assert_eq!(document.group_versions[0].resources[2].subresources, ["status"]);
    }
}
