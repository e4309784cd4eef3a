//! A request's answer, as a kube-apiserver with these documents gives it. Pure but for watches, which stay open.

use std::io::Write;

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{
    State,
    accept::{self, Discovery, Encoding},
    auth,
    documents::Document,
    message::{Body, Request, Response},
    route::{self, Resource, Route},
    status::Status,
};
use crate::discovery;

/// From here on JSON is gzipped for those who accept it, in bytes (k8s.io/apiserver: `defaultGzipThresholdBytes`).
const GZIP_FROM: usize = 128 * 1024;

/// The media type of the aggregated document in JSON.
pub const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// Names of objects that do not exist begin with this.
pub const MISSING: &str = "nope";

/// The name of the one object in every list.
pub const THE_OBJECT: &str = "lab";

/// A collection's label selector `lab-bytes=N` asks for a list of N bytes.
pub const BIG_LIST: &str = "lab-bytes=";

pub(crate) fn answer(name: &str, state: &mut State, request: &Request) -> Response {
    let target = request.target();
    let route = route::route(&target);
    let user = auth::user(request, state.tokens.as_ref());
    let ends_connection = auth::ends_connection(request, user.as_deref(), state.tokens.as_ref());
    let response = authorized(state, request, &route, user)
        .map_or_else(|refused| refused, |user| routed(name, state, request, &target, route, &user));
    let mut response = response.header("X-Served-By", name);
    if ends_connection {
        response = response.header("Connection", "close");
    }
    if state.starting {
        for (name, value) in &mut response.headers {
            if name.starts_with("X-Kubernetes-Pf-") {
                value.clear();
            }
        }
    }
    response.sorted()
}

/// The user, or the refusal.
fn authorized(state: &State, request: &Request, route: &Route, user: Option<String>) -> Result<String, Response> {
    let user = user.ok_or_else(|| Status::unauthorized().response(request))?;
    let public = matches!(route, Route::Health | Route::Version | Route::Malformed);
    let anonymous = state.tokens.is_some() && user == auth::ANONYMOUS && !public;
    if anonymous || state.without_rights.contains(&user) && !matches!(route, Route::Discovery(_)) && !public {
        return Err(auth::forbidden(request, route, &user, is_watch(route, &request.target())));
    }
    Ok(user)
}

fn routed(name: &str, state: &mut State, request: &Request, target: &str, route: Route, user: &str) -> Response {
    match route {
        Route::Malformed => {
            let response = Response::bare(400).header("Content-Type", "text/plain; charset=utf-8");
            response.header("Connection", "close").body("400 Bad Request")
        }
        Route::Discovery(path) => discovery_root(state, request, &path),
        Route::Group(group) => match state.documents.legacy_group(&group) {
            Some(text) => plain(request, text, false),
            None => unknown_group(state, request),
        },
        Route::GroupVersion(group, version) => match state.documents.legacy_group_version(&group, &version) {
            Some(text) => plain(request, text, false),
            None => unknown_version(state, request, &group),
        },
        Route::Resource(resource) => of_resource(name, state, request, target, &resource, user),
        Route::OpenApiV3Root => openapi_root(state),
        Route::OpenApiV3(path) => openapi(state, request, &path),
        Route::OpenApiV2 => Response::new(200).json(&json!({"swagger": "2.0", "paths": {}, "servedBy": name})),
        Route::Version if request.method != "GET" => Status::method_not_allowed().response(request),
        Route::Version => plain(request, state.documents.version(), false),
        Route::Health if state.starting => Response::new(500).text("not yet\n"),
        Route::Health => Response::new(200).text("ok"),
        Route::Unknown(_) => page_not_found(),
    }
}

fn discovery_root(state: &State, request: &Request, path: &str) -> Response {
    let core = path.starts_with("/api/") || path == "/api";
    match accept::discovery(path, &first_accept(request)) {
        Discovery::Aggregated(Encoding::Json, alone) => aggregated(request, state.documents.aggregated(core, alone)),
        Discovery::Legacy(Encoding::Json) => plain(request, state.documents.legacy_root(core), !core),
        // The stub speaks JSON only.
        Discovery::Aggregated(..) | Discovery::Legacy(_) | Discovery::NotAcceptable => not_acceptable(request),
        Discovery::NotRepresentable => not_representable(request, ""),
    }
}

/// The aggregated document of either half.
pub(crate) fn aggregated(request: &Request, document: &Document) -> Response {
    let head = |status| {
        Response::new(status)
            .header("Cache-Control", "public")
            .header("Etag", document.etag.as_str())
            .header("Vary", "Accept")
    };
    if request.header_values("if-none-match").first() == Some(&document.etag) {
        return head(304);
    }
    compressed(request, head(200).header("Content-Type", AGGREGATED), document.text.clone())
}

/// A 200 of the aggregated type with any bytes, as only a broken apiserver or something in between sends it.
pub(crate) fn broken_document(text: impl Into<Bytes>) -> Response {
    let text = text.into();
    Response::new(200)
        .header("Cache-Control", "public")
        .header("Content-Type", AGGREGATED)
        .header("Vary", "Accept")
        .chunked(text)
        .sorted()
}

fn compressed(request: &Request, response: Response, text: Bytes) -> Response {
    let accepts = request.header("accept-encoding").unwrap_or_default();
    let accepts = accepts.split(',').any(|token| token.split(';').next().unwrap_or_default().trim() == "gzip");
    if !accepts || text.len() < GZIP_FROM {
        return response.chunked(text);
    }
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    match encoder.write_all(&text).and_then(|()| encoder.finish()) {
        Ok(zipped) => response.header("Content-Encoding", "gzip").add_header("Vary", "Accept-Encoding").chunked(zipped),
        Err(_) => response.chunked(text),
    }
}

/// A plain JSON document.
fn plain(request: &Request, text: Vec<u8>, chunked: bool) -> Response {
    if accept::plain(&first_accept(request)).is_none() {
        return not_acceptable(request);
    }
    let response = Response::new(200).header("Content-Type", "application/json");
    // Go sends the length of what fits its 2 KiB buffer.
    if chunked || text.len() > 2048 { response.chunked(text) } else { response.body(text) }
}

fn of_resource(
    name: &str,
    state: &mut State,
    request: &Request,
    target: &str,
    asked: &Resource,
    user: &str,
) -> Response {
    let Resource { group, version, .. } = asked;
    let document = &state.documents.half(group).value;
    if discovery::find_version(document, group, version).is_none() {
        return unknown_version(state, request, group);
    }
    let Some(found) = discovery::find_resource(document, group, version, &asked.resource) else {
        return unknown_route(request, group);
    };
    let found = if asked.subresource.is_empty() {
        found
    } else {
        match discovery::find_subresource(found, &asked.subresource) {
            Some(subresource) => subresource,
            None if is_built_in(group) => return unknown_route(request, group),
            None => return Status::no_such_object(group, &asked.resource, &asked.name).response(request),
        }
    };
    let watch = is_watch(&Route::Resource(asked.clone()), target);
    let verb = asked.verb(&request.method, watch);
    let has = |verb: &str| found["verbs"].as_array().is_some_and(|verbs| verbs.iter().any(|have| have == verb));
    // A verb for the wrong kind of path: POST of an object, PUT of a collection, HEAD of anything.
    let misplaced = match verb {
        "create" => !asked.name.is_empty() && asked.subresource.is_empty(),
        "update" | "patch" => asked.name.is_empty(),
        _ => false,
    };
    let proxied = asked.subresource == "proxy";
    if !proxied
        && (misplaced || !has(verb) || !matches!(request.method.as_str(), "GET" | "POST" | "PUT" | "PATCH" | "DELETE"))
    {
        return Status::method_not_allowed().response(request);
    }
    let kind = found["responseKind"]["kind"].as_str().unwrap_or_default().to_owned();
    let missing = asked.name.starts_with(MISSING);
    if let Some(protocol) = upgrade(request, &asked.subresource)
        && !missing
    {
        let mut response = Response::new(101).header("Connection", "Upgrade").header("Upgrade", protocol);
        response.body = Body::Echo;
        return response;
    }
    if !accept::go_restful_produces(&first_accept(request)) {
        let watches = ", application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch";
        return not_representable(request, if asked.name.is_empty() { watches } else { "" });
    }
    if missing {
        return Status::no_such_object(group, &asked.resource, &asked.name).response(request);
    }
    if watch {
        return open_watch(state, asked);
    }
    if request.is_api_services() && verb == "list" {
        return api_services(state, request);
    }
    object_or_list(name, request, target, asked, &kind, user)
}

fn object_or_list(name: &str, request: &Request, target: &str, asked: &Resource, kind: &str, user: &str) -> Response {
    let group_version = asked.group_version();
    let list = asked.name.is_empty() && matches!(request.method.as_str(), "GET" | "HEAD");
    if let Some(length) = big_list(target)
        && list
    {
        let before = format!(
            "{{\"kind\":\"{kind}List\",\"apiVersion\":\"{group_version}\",\"metadata\":{{\"resourceVersion\":\"1\"}},\
             \"items\":[],\"servedBy\":\"{name}\",\"filling\":\""
        );
        let mut response = Response::new(200).header("Content-Type", "application/json");
        response.body = Body::Filled { before: before.into(), length, after: Bytes::from_static(b"\"}\n") };
        return response;
    }
    let mut metadata = json!({"name": if list { THE_OBJECT } else { asked.name.as_str() }});
    if !asked.namespace.is_empty() {
        metadata["namespace"] = asked.namespace.as_str().into();
    }
    if request.method == "GET" && accept::asks_for(&first_accept(request), "Table") {
        return Response::new(200).json(&table(name, &metadata));
    }
    let mut body = if list {
        let item = json!({"kind": kind, "apiVersion": group_version, "metadata": metadata});
        json!({"kind": format!("{kind}List"), "metadata": {"resourceVersion": "1"}, "items": [item]})
    } else {
        json!({"kind": kind, "metadata": metadata})
    };
    body["apiVersion"] = group_version.into();
    body["servedBy"] = name.into();
    body["user"] = user.into();
    if let Some(received) = request.body_length.filter(|length| *length > 0) {
        body["receivedBytes"] = received.into();
    }
    Response::new(if request.method == "POST" { 201 } else { 200 }).json(&body)
}

/// What kubectl prints: the one object, and who served it.
fn table(name: &str, metadata: &Value) -> Value {
    let column = |name: &str, format: &str| json!({"name": name, "type": "string", "format": format, "description": name, "priority": 0});
    let object = json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata});
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": "1"},
        "columnDefinitions": [column("Name", "name"), column("Served By", "")],
        "rows": [{"cells": [metadata["name"], name], "object": object}],
    })
}

fn open_watch(state: &mut State, asked: &Resource) -> Response {
    let (sender, receiver) = mpsc::unbounded_channel();
    state.watches.retain(|watch| !watch.sender.is_closed());
    state.watches.push(Watch { resource: asked.resource.clone(), sender });
    let mut response = Response::new(200).header("Content-Type", "application/json");
    response.body = Body::Stream(receiver);
    response
}

/// An open watch.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) resource: String,
    pub(crate) sender: mpsc::UnboundedSender<Bytes>,
}

fn api_services(state: &State, request: &Request) -> Response {
    let list: Value = if accept::asks_for(&first_accept(request), "PartialObjectMetadataList") {
        state.documents.partial_api_services()
    } else {
        state.documents.api_services.clone()
    };
    let mut text = list.to_string();
    text.push('\n');
    compressed(request, Response::new(200).header("Content-Type", "application/json"), text.into())
}

fn openapi_root(state: &State) -> Response {
    file().header("Content-Type", "text/plain; charset=utf-8").body(state.documents.openapi_root())
}

fn openapi(state: &State, request: &Request, path: &str) -> Response {
    let Some(hash) = state.documents.openapi_hash(path) else {
        return Response::new(404);
    };
    if route::query_value(&request.target(), "hash").is_some_and(|have| have != hash) {
        return Response::new(301).header("Location", format!("/openapi/v3/{path}?hash={hash}"));
    }
    let etag = format!("\"{hash}\"");
    let conditions = request.header_values("if-none-match").join(",");
    let is_unchanged = |condition: &str| condition == "*" || condition.trim_start_matches("W/") == etag;
    if conditions.split(',').map(str::trim).any(is_unchanged) {
        return Response::new(304).header("Etag", etag).header("Vary", "Accept");
    }
    let response = file().header("Etag", etag).header("Vary", "Accept").header("Content-Type", "application/json");
    response.body(state.documents.openapi(path).to_string())
}

/// A 200 as Go's `http.ServeContent` makes it.
fn file() -> Response {
    let now = httpdate::fmt_http_date(std::time::SystemTime::now());
    Response::new(200).header("Accept-Ranges", "bytes").header("Last-Modified", now)
}

fn unknown_version(state: &State, request: &Request, group: &str) -> Response {
    if group.is_empty() || discovery::find_group(&state.documents.apis.value, group).is_some() {
        unknown_route(request, group)
    } else {
        unknown_group(state, request)
    }
}

/// An unknown version or resource of a known group: a Status where the group is built in, plain text for CRDs and
/// aggregated APIs.
fn unknown_route(request: &Request, group: &str) -> Response {
    if is_built_in(group) { Status::no_such_route().response(request) } else { page_not_found() }
}

fn unknown_group(state: &State, request: &Request) -> Response {
    if state.starting { Status::starting().response(request) } else { page_not_found() }
}

fn page_not_found() -> Response {
    Response::new(404).text("404 page not found\n")
}

/// Of groups with a dot only `*.k8s.io` can be built in.
fn is_built_in(group: &str) -> bool {
    !group.contains('.') || group.ends_with(".k8s.io")
}

fn not_acceptable(request: &Request) -> Response {
    let message = "only the following media types are accepted: application/json, application/yaml, \
                   application/vnd.kubernetes.protobuf";
    Status::new(406, "NotAcceptable", message).response(request)
}

fn not_representable(request: &Request, more: &str) -> Response {
    let message = format!(
        "406: Not Acceptable\n\nAvailable representations: application/json, application/yaml, \
         application/vnd.kubernetes.protobuf{more}"
    );
    Status::new(406, "NotAcceptable", &message).details(super::status::Details::default()).response(request)
}

fn is_watch(route: &Route, target: &str) -> bool {
    let Route::Resource(resource) = route else { return false };
    let watch = route::query_value(target, "watch");
    resource.watch_prefix || watch.is_some_and(|watch| matches!(watch.as_str(), "" | "1" | "true"))
}

fn big_list(target: &str) -> Option<u64> {
    route::query_value(target, "labelSelector")?.strip_prefix(BIG_LIST)?.parse().ok()
}

/// The protocol to switch to.
fn upgrade(request: &Request, subresource: &str) -> Option<String> {
    let streams = matches!(subresource, "exec" | "attach" | "portforward" | "proxy");
    let connection = request.header_values("connection").join(",").to_lowercase();
    let asked = streams && connection.split(',').any(|token| token.trim() == "upgrade");
    let protocol = asked.then(|| request.header("upgrade")).flatten()?;
    let known = protocol.eq_ignore_ascii_case("websocket") || protocol.eq_ignore_ascii_case("SPDY/3.1");
    known.then_some(protocol)
}

/// Apiservers read the first line only.
fn first_accept(request: &Request) -> String {
    request.header("accept").unwrap_or_default()
}
