//! Which endpoint of a kube-apiserver a request target leads to.

/// An endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/api`, `/api/`, `/apis`, `/apis/`: the path as it came.
    Discovery(String),
    Group(String),
    GroupVersion(String, String),
    Resource(Resource),
    OpenApiV3Root,
    /// The document's path below `/openapi/v3/`.
    OpenApiV3(String),
    OpenApiV2,
    Version,
    Health,
    /// Anything else, and what no mux would find: the decoded path.
    Unknown(String),
    /// An invalid escape: Go's HTTP server refuses the request.
    Malformed,
}

/// A resource request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Resource {
    pub(crate) group: String,
    pub(crate) version: String,
    /// Empty at cluster scope.
    pub(crate) namespace: String,
    pub(crate) resource: String,
    /// Empty for a collection.
    pub(crate) name: String,
    pub(crate) subresource: String,
    /// Asked by the `/watch/` prefix.
    pub(crate) watch_prefix: bool,
}

impl Resource {
    /// Kubernetes' verb for a method.
    pub(crate) fn verb(&self, method: &str, watch: bool) -> &'static str {
        match method {
            "POST" => "create",
            "PUT" => "update",
            "PATCH" => "patch",
            "DELETE" if self.name.is_empty() => "deletecollection",
            "DELETE" => "delete",
            _ if watch => "watch",
            _ if self.name.is_empty() => "list",
            _ => "get",
        }
    }

    /// `apps/v1`, and `v1` for the core group.
    pub(crate) fn group_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }
}

/// Finds the endpoint of a request target.
pub(crate) fn route(target: &str) -> Route {
    let target = match target.split_once("://") {
        // The absolute form: authority first. A colon in a path or query is no scheme.
        Some((scheme, rest)) if !scheme.contains(['/', '?']) => &rest[rest.find('/').unwrap_or(rest.len())..],
        _ => target,
    };
    let path = target.split('?').next().unwrap_or_default();
    let Some(path) = percent_decode(path) else { return Route::Malformed };
    if path.contains("//") {
        return Route::Unknown(path);
    }
    let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
    match segments[..] {
        ["api"] | ["apis"] => Route::Discovery(path),
        ["apis", group] => Route::Group(group.to_owned()),
        ["api", version] => Route::GroupVersion(String::new(), version.to_owned()),
        ["apis", group, version] => Route::GroupVersion(group.to_owned(), version.to_owned()),
        ["api", version, ref rest @ ..] => Route::Resource(resource("", version, rest)),
        ["apis", group, version, ref rest @ ..] => Route::Resource(resource(group, version, rest)),
        ["openapi", "v2"] => Route::OpenApiV2,
        ["openapi", "v3"] => Route::OpenApiV3Root,
        ["openapi", "v3", ref rest @ ..] => Route::OpenApiV3(rest.join("/")),
        ["version"] => Route::Version,
        ["healthz" | "livez" | "readyz", ..] => Route::Health,
        _ => Route::Unknown(path),
    }
}

fn resource(group: &str, version: &str, mut rest: &[&str]) -> Resource {
    let mut found = Resource { group: group.to_owned(), version: version.to_owned(), ..Resource::default() };
    let mut proxy_prefix = false;
    if let ["watch" | "proxy", behind @ ..] = rest
        && !behind.is_empty()
    {
        found.watch_prefix = rest[0] == "watch";
        proxy_prefix = rest[0] == "proxy";
        rest = behind;
    }
    if let ["namespaces", namespace, behind @ ..] = rest {
        found.namespace = (*namespace).to_owned();
        if behind.first().is_some_and(|next| !matches!(*next, "status" | "finalize")) {
            rest = behind;
        }
    }
    let segment = |index: usize| rest.get(index).copied().unwrap_or_default().to_owned();
    found.resource = segment(0);
    found.name = segment(1);
    if !proxy_prefix {
        found.subresource = segment(2);
    }
    found
}

/// The first value of a query parameter, decoded.
pub(crate) fn query_value(target: &str, name: &str) -> Option<String> {
    let (_, query) = target.split_once('?')?;
    query.split('&').find_map(|pair| {
        let (have, value) = pair.split_once('=').unwrap_or((pair, ""));
        (percent_decode(have)? == name).then(|| percent_decode(&value.replace('+', " ")))?
    })
}

/// `None`: an invalid escape. Bytes that are no UTF-8 become U+FFFD.
fn percent_decode(text: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let (high, low) = (digit()?, digit()?);
        decoded.push(u8::try_from(high * 16 + low).ok()?);
    }
    Some(String::from_utf8_lossy(&decoded).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(target: &str) -> String {
        match route(target) {
            Route::Resource(r) => {
                let watch = if r.watch_prefix { " watch" } else { "" };
                format!("{}|{}|{}|{}{watch}", r.group_version(), r.resource, r.name, r.subresource)
            }
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn targets_are_read_as_an_apiserver_reads_them() {
        let rows = [
            ("/api/v1/pods", "v1|pods||"),
            ("/api/v1/namespaces/d/pods/p/exec?command=sh", "v1|pods|p|exec"),
            ("/api/v1/namespaces/d", "v1|namespaces|d|"),
            ("/api/v1/namespaces/d/status", "v1|namespaces|d|status"),
            ("/api/v1/watch/namespaces/d/pods", "v1|pods|| watch"),
            ("/api/v1/proxy/nodes/n/metrics", "v1|nodes|n|"),
            ("/api/v1/namespaces/d/pods/p/proxy/a/b", "v1|pods|p|proxy"),
            ("/apis/apps/v1/namespaces/d/deployments/", "apps/v1|deployments||"),
            ("/apis/apps%2Fv1/deployments/x/statu%73", "apps/v1|deployments|x|status"),
            ("http://host:1/apis/apps/v1/deployments", "apps/v1|deployments||"),
            ("/apis/apps/v1/deployments?x=http://y", "apps/v1|deployments||"),
            ("/apis", "Discovery(\"/apis\")"),
            ("/apis/", "Discovery(\"/apis/\")"),
            ("/apis//apps/v1/deployments", "Unknown(\"/apis//apps/v1/deployments\")"),
            ("/apis/apps/v1/%zz", "Malformed"),
        ];
        for (target, want) in rows {
            assert_eq!(parts(target), want, "{target}");
        }
        assert_eq!(query_value("/x?a=1&labelSelector=lab-bytes%3D7", "labelSelector").as_deref(), Some("lab-bytes=7"));
    }
}
