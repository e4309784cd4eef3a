//! Who asks: client certificate, front proxy headers, bearer token.

use std::collections::HashMap;

use super::{
    message::{HttpVersion, Request, Response},
    route::{Resource, Route},
    status::{Details, Status, qualified},
};

/// The common name of the client certificate whose bearer may say in headers who asks.
pub const FRONT_PROXY: &str = "front-proxy-client";

/// The user of a request without any credential.
pub const ANONYMOUS: &str = "system:anonymous";

/// The user; `None`: nobody issued that token.
pub(crate) fn user(request: &Request, tokens: Option<&HashMap<String, String>>) -> Option<String> {
    let certificate = request.client_subject.as_ref().map_or("", |subject| subject.common_name.as_str());
    if certificate == FRONT_PROXY
        && let Some(user) = request.header("x-remote-user")
    {
        return Some(user);
    }
    if !certificate.is_empty() {
        return Some(certificate.to_owned());
    }
    let token = request.header("authorization").and_then(|value| value.strip_prefix("Bearer ").map(str::to_owned));
    match (token, tokens) {
        (Some(token), Some(tokens)) => tokens.get(&token).cloned(),
        _ => Some(ANONYMOUS.to_owned()),
    }
}

/// Whether the connection ends with the answer: on HTTP/2, for whoever is not authenticated, whatever the answer
/// (k8s.io/apiserver: `UnauthenticatedHTTP2DOSMitigation`). Without known tokens nobody has to authenticate.
pub(crate) fn ends_connection(request: &Request, user: Option<&str>, tokens: Option<&HashMap<String, String>>) -> bool {
    request.version == HttpVersion::Http2 && tokens.is_some() && user.is_none_or(|user| user == ANONYMOUS)
}

/// The answer to a user without rights.
pub(crate) fn forbidden(request: &Request, route: &Route, user: &str, watch: bool) -> Response {
    match route {
        Route::Resource(resource) => forbidden_resource(resource, user, resource.verb(&request.method, watch)),
        _ => {
            let (verb, path) = (request.method.to_lowercase(), request.path());
            let message = format!("forbidden: User \"{user}\" cannot {verb} path \"{path}\"");
            Status::new(403, "Forbidden", &message).details(Details::default())
        }
    }
    .response(request)
}

fn forbidden_resource(of: &Resource, user: &str, verb: &str) -> Status {
    let mut what = qualified(&of.group, &of.resource);
    if !of.name.is_empty() {
        what = format!("{what} \"{}\"", of.name);
    }
    let resource = match of.subresource.as_str() {
        "" => of.resource.clone(),
        subresource => format!("{}/{subresource}", of.resource),
    };
    let scope = match of.namespace.as_str() {
        "" => "at the cluster scope".to_owned(),
        namespace => format!("in the namespace \"{namespace}\""),
    };
    let group = &of.group;
    let message = format!(
        "{what} is forbidden: User \"{user}\" cannot {verb} resource \"{resource}\" in API group \"{group}\" {scope}"
    );
    let details =
        Details { name: of.name.clone(), group: group.clone(), kind: of.resource.clone(), retry_after_seconds: 0 };
    Status::new(403, "Forbidden", &message).details(details)
}
