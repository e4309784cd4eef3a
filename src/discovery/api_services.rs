//! APIService objects, read for one question: which group-versions are built into an apiserver, and which live in the
//! shared storage (those of CRDs and aggregated APIs)?

use std::borrow::Cow;

use serde::Deserialize;

use super::document::MAX_REASON_CHARS;
use crate::quote::{clipped, quoted};

/// Where every apiserver lists its APIService objects.
pub const PATH: &str = "/apis/apiregistration.k8s.io/v1/apiservices";

/// Metadata is enough, and much smaller.
pub const ACCEPT: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// Says how an object came to be: `onstart` for what an apiserver has built in, `true` for a CRD's; absent for an
/// aggregated API, which somebody made by hand.
const AUTOMANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";

/// One group-version.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupVersionName {
    /// Group, empty for the core group.
    pub group: String,
    /// Version.
    pub version: String,
}

impl GroupVersionName {
    /// The version of the group.
    pub fn new(group: &str, version: &str) -> Self {
        Self { group: group.to_owned(), version: version.to_owned() }
    }
}

/// Why an answer is no list of APIServices.
#[derive(Debug, thiserror::Error)]
pub enum ApiServicesError {
    /// Not JSON of the expected shape.
    #[error("the list of APIServices cannot be read: {0}")]
    Malformed(String),
    /// JSON, but another kind.
    #[error("the answer is a {0} and not a list of APIServices' metadata")]
    WrongKind(String),
}

/// The group-versions in a `PartialObjectMetadataList` (or the full list) of APIServices that are not built in.
///
/// An empty list is believed: it excludes nothing, and what vanishes from it stays excluded for a while anyway.
///
/// # Errors
/// See [`ApiServicesError`].
pub fn not_built_in(body: &[u8]) -> Result<Vec<GroupVersionName>, ApiServicesError> {
    let list: List<'_> = serde_json::from_slice(body)
        .map_err(|error| ApiServicesError::Malformed(clipped(&format!("{error}"), MAX_REASON_CHARS)))?;
    if !matches!(&*list.kind, "PartialObjectMetadataList" | "APIServiceList") {
        return Err(ApiServicesError::WrongKind(quoted(&list.kind)));
    }
    let items = list.items.unwrap_or_default().into_iter();
    let others = items.filter(|item| item.metadata.automanaged().as_deref() != Some("onstart"));
    Ok(others.filter_map(|item| item.metadata.group_version()).collect())
}

#[derive(Deserialize)]
struct List<'d> {
    #[serde(borrow, default)]
    kind: Cow<'d, str>,
    #[serde(borrow)]
    items: Option<Vec<Item<'d>>>,
}

#[derive(Deserialize)]
struct Item<'d> {
    #[serde(borrow, default)]
    metadata: Metadata<'d>,
}

#[derive(Deserialize, Default)]
struct Metadata<'d> {
    #[serde(borrow, default)]
    name: Cow<'d, str>,
    #[serde(default)]
    labels: Option<std::collections::HashMap<String, String>>,
}

impl Metadata<'_> {
    fn automanaged(&self) -> Option<Cow<'_, str>> {
        self.labels.as_ref()?.get(AUTOMANAGED).map(|value| Cow::Borrowed(value.as_str()))
    }

    /// The name of an APIService is `version.group`, and `v1.` for the core group.
    fn group_version(&self) -> Option<GroupVersionName> {
        let (version, group) = self.name.split_once('.')?;
        Some(GroupVersionName { group: group.to_owned(), version: version.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn a_recorded_list_excludes_nothing_that_is_built_in() {
        let partial = include_bytes!("../../tests/fixtures/discovery/1.37.2/apiservices.partial.json");
        let full = include_bytes!("../../tests/fixtures/discovery/1.37.2/apiservices.json");
        assert_eq!(not_built_in(partial).unwrap(), []);
        assert_eq!(not_built_in(full).unwrap(), []);
    }

    #[test]
    fn what_is_not_built_in_is_told_by_its_label() {
        let body = br#"{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","items":[
            {"metadata":{"name":"v1.","labels":{"kube-aggregator.kubernetes.io/automanaged":"onstart"}}},
            {"metadata":{"name":"v1.apps","labels":{"kube-aggregator.kubernetes.io/automanaged":"onstart"}}},
            {"metadata":{"name":"v1.toys.example.com","labels":{"kube-aggregator.kubernetes.io/automanaged":"true"}}},
            {"metadata":{"name":"v1beta1.metrics.k8s.io","labels":{"k8s-app":"metrics-server"}}},
            {"metadata":{"name":"v2.bare.example.com"}},
            {"metadata":{"name":"v3.null.example.com","labels":null}},
            {"metadata":{"name":"noversion"}},
            {"metadata":{}},
            {}]}"#;
        let names: Vec<_> =
            not_built_in(body).unwrap().into_iter().map(|gv| format!("{}/{}", gv.group, gv.version)).collect();
        assert_eq!(
            names,
            ["toys.example.com/v1", "metrics.k8s.io/v1beta1", "bare.example.com/v2", "null.example.com/v3"]
        );
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for (body, expected) in [
            ("", "cannot be read"),
            ("{\"kind\":\"PartialObjectMetadataList\",\"items\":[", "cannot be read"),
            ("{\"kind\":\"Status\",\"code\":403}", "\"Status\""),
            ("{}", "\"\""),
        ] {
            let error = not_built_in(body.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{body}: {error}");
        }
    }
}
