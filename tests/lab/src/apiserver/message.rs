//! Requests as they came, responses as they will go.

use std::{fmt, time::Instant};

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::mpsc;

/// The header that marks a request as rerouted, and every poll of the filter.
pub const LOOP_HEADER: &str = "x-kubernetes-peer-proxied";

/// The `Host` of everything that the filter itself asks, unless it is configured otherwise.
pub const FILTER_AUTHORITY: &str = "kubernetes.default.svc";

/// The protocol a request came over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HttpVersion {
    /// HTTP/1.1 (or 1.0).
    Http1,
    /// HTTP/2, with TLS or with prior knowledge.
    Http2,
}

/// A client certificate's subject.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Subject {
    /// The last common name, empty if there is none.
    pub common_name: String,
    /// The organizations, in the certificate's order.
    pub organizations: Vec<String>,
}

/// A request as it came over the wire.
#[derive(Clone)]
pub struct Request {
    /// Counts all requests of one stub, from 0.
    pub id: u64,
    /// When its head was complete.
    pub received: Instant,
    /// Counts the stub's connections, from 0: equal numbers are one connection.
    pub connection: u64,
    /// The protocol.
    pub version: HttpVersion,
    /// The method.
    pub method: String,
    /// The request target exactly as on the wire, escapes untouched. On HTTP/2 the `:path`.
    pub target: Bytes,
    /// Header names and values as on the wire, in their order. On HTTP/2 names are lower-case, `:authority` comes as
    /// `host`, and equal names stand together.
    pub headers: Vec<(Bytes, Bytes)>,
    /// The body's length in bytes; absent until all of it has come.
    pub body_length: Option<u64>,
    /// The body's first bytes, at most 64 KiB.
    pub body: Bytes,
    /// The subject of the client's certificate, if it showed one.
    pub client_subject: Option<Subject>,
    /// The server name that the client asked for in TLS.
    pub server_name: Option<String>,
}

impl Request {
    /// The target as text; bytes that are not UTF-8 become U+FFFD.
    pub fn target(&self) -> String {
        String::from_utf8_lossy(&self.target).into_owned()
    }

    /// The target without its query.
    pub fn path(&self) -> String {
        let target = self.target();
        target.split_once('?').map_or(target.clone(), |(path, _)| path.to_owned())
    }

    /// The first header of that name, in any case; bytes that are not UTF-8 become U+FFFD.
    pub fn header(&self, name: &str) -> Option<String> {
        self.header_values(name).into_iter().next()
    }

    /// All headers of that name, in any case, in their order.
    pub fn header_values(&self, name: &str) -> Vec<String> {
        let found = self.headers.iter().filter(|(have, _)| have.eq_ignore_ascii_case(name.as_bytes()));
        found.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).collect()
    }

    /// Whether it is one of the filter's polls of a discovery document: GET of `/api` or `/apis` with the loop header,
    /// `profile=nopeer` and the filter's authority. A client's request for discovery that was rerouted has all of that
    /// but the authority.
    pub fn is_poll(&self) -> bool {
        let accepts_nopeer = self.header("accept").is_some_and(|accept| accept.contains("profile=nopeer"));
        matches!(&self.target[..], b"/api" | b"/apis") && accepts_nopeer && self.is_by_filter()
    }

    /// Whether it is one of the filter's polls of the OpenAPI root.
    pub fn is_openapi_poll(&self) -> bool {
        &self.target[..] == b"/openapi/v3" && self.is_by_filter()
    }

    fn is_by_filter(&self) -> bool {
        let authority = self.header("host");
        self.method == "GET" && self.header(LOOP_HEADER).is_some() && authority.as_deref() == Some(FILTER_AUTHORITY)
    }

    /// Whether it asks for APIServices, as the filter does to learn what to exclude.
    pub fn is_api_services(&self) -> bool {
        self.path() == "/apis/apiregistration.k8s.io/v1/apiservices"
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {} {} (", self.id, self.method, self.target())?;
        for (name, value) in &self.headers {
            write!(f, "{}: {}; ", String::from_utf8_lossy(name), String::from_utf8_lossy(value))?;
        }
        write!(f, "body {:?})", self.body_length)
    }
}

/// A response's body and how it is framed.
#[derive(Debug)]
pub enum Body {
    /// With `Content-Length`.
    Full(Bytes),
    /// Chunked, in one chunk.
    Chunked(Bytes),
    /// Chunked, each piece as it comes, until the sender is dropped.
    Stream(mpsc::UnboundedReceiver<Bytes>),
    /// Chunked: `before`, letters, `after`, together `length` bytes; made while they are sent, never held in memory.
    Filled {
        /// What comes first.
        before: Bytes,
        /// The length of all, in bytes.
        length: u64,
        /// What comes last.
        after: Bytes,
    },
    /// The head and `sent`, then the connection ends although more was announced.
    Cut {
        /// What is sent of the body.
        sent: Bytes,
        /// The announced `Content-Length`; absent: chunked without a last chunk.
        announced: Option<u64>,
        /// A TCP reset rather than an orderly end. On HTTP/2 both reset the stream.
        reset: bool,
    },
    /// After a 101: sends back every byte it gets. HTTP/1.1 only.
    Echo,
}

/// A response.
#[derive(Debug)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Headers in the order they are sent; `Date`, `Content-Length` and `Transfer-Encoding` are added behind them
    /// unless they are here.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Body,
}

impl Response {
    /// A response as an apiserver makes it: with `Audit-Id`, `Cache-Control` and the flow control headers, no body.
    pub fn new(status: u16) -> Self {
        Self::bare(status)
            .header("Audit-Id", audit_id())
            .header("Cache-Control", "no-cache, private")
            .header("X-Kubernetes-Pf-Flowschema-Uid", "d85f51d6-832f-43a8-a17d-419ef9d60f1c")
            .header("X-Kubernetes-Pf-Prioritylevel-Uid", "75f0d188-3ad5-43ff-a536-751170c199d2")
    }

    /// A response without any header, as something that is no apiserver might make it.
    pub fn bare(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Body::Full(Bytes::new()) }
    }

    /// Sets a header; one of that name (in any case) is replaced.
    pub fn header(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.retain(|(have, _)| !have.eq_ignore_ascii_case(name));
        self.add_header(name, value)
    }

    /// Adds a header beside those of that name.
    pub fn add_header(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// Removes all headers of a name.
    pub fn without_header(mut self, name: &str) -> Self {
        self.headers.retain(|(have, _)| !have.eq_ignore_ascii_case(name));
        self
    }

    /// Sets the body, with `Content-Length`.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Body::Full(body.into());
        self
    }

    /// Sets the body, chunked.
    pub fn chunked(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Body::Chunked(body.into());
        self
    }

    /// Sets a JSON body and its `Content-Type`.
    pub fn json(self, value: &Value) -> Self {
        let mut text = value.to_string();
        text.push('\n');
        self.header("Content-Type", "application/json").body(text)
    }

    /// Sets a plain text body and its `Content-Type`, as Go's `http.Error` does.
    pub fn text(self, text: impl Into<Bytes>) -> Self {
        self.header("Content-Type", "text/plain; charset=utf-8").header("X-Content-Type-Options", "nosniff").body(text)
    }

    /// Sets a chunked body that the test feeds: what is sent into the sender goes out at once, dropping it ends the
    /// body.
    pub fn stream(mut self) -> (Self, mpsc::UnboundedSender<Bytes>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.body = Body::Stream(receiver);
        (self, sender)
    }

    /// Flow control comes behind authentication: who is refused there meets none.
    pub(crate) fn without_flow_control(self) -> Self {
        self.without_header("X-Kubernetes-Pf-Flowschema-Uid").without_header("X-Kubernetes-Pf-Prioritylevel-Uid")
    }

    pub(crate) fn has_header(&self, name: &str) -> bool {
        self.headers.iter().any(|(have, _)| have.eq_ignore_ascii_case(name))
    }

    /// Go writes headers sorted by name.
    pub(crate) fn sorted(mut self) -> Self {
        self.headers.sort_by(|a, b| a.0.cmp(&b.0));
        self
    }
}

fn audit_id() -> String {
    let random = fastrand::u128(..);
    let hex = format!("{random:032x}");
    format!("{}-{}-4{}-a{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
}
