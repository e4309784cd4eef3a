//! One HTTP/2 connection of a stub apiserver.

use std::{
    convert::Infallible,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Instant,
};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::{Notify, mpsc};

use super::{
    Peer, Shared,
    http1::{KEPT_BODY, filled},
    message::{Body, HttpVersion, Request, Response},
};
use crate::{socket::Socket, wire::Wire};

pub(crate) async fn serve(shared: Arc<Shared>, wire: Wire<Socket>, peer: Peer) {
    let peer = Arc::new(peer);
    let goodbye = Arc::new(Notify::new());
    let say_goodbye = goodbye.clone();
    let service = service_fn(move |request| serve_one(shared.clone(), peer.clone(), say_goodbye.clone(), request));
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    let mut connection = pin!(connection.serve_connection(TokioIo::new(wire), service));
    loop {
        tokio::select! {
            // An error here is the client's end of the connection.
            _ = connection.as_mut() => return,
            () = goodbye.notified() => connection.as_mut().graceful_shutdown(),
        }
    }
}

/// An error resets the stream.
async fn serve_one(
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    goodbye: Arc<Notify>,
    incoming: http::Request<Incoming>,
) -> io::Result<http::Response<Outgoing>> {
    let (parts, mut body) = incoming.into_parts();
    let mut headers = Vec::new();
    if let Some(authority) = parts.uri.authority() {
        headers.push((Bytes::from_static(b"host"), Bytes::copy_from_slice(authority.as_str().as_bytes())));
    }
    let regular = parts.headers.iter();
    headers.extend(regular.map(|(name, value)| {
        (Bytes::copy_from_slice(name.as_str().as_bytes()), Bytes::copy_from_slice(value.as_bytes()))
    }));
    let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
    let mut request = Request {
        id: shared.next_id(),
        received: Instant::now(),
        connection: peer.connection,
        version: HttpVersion::Http2,
        method: parts.method.as_str().to_owned(),
        target: Bytes::copy_from_slice(target.as_bytes()),
        headers,
        body_length: None,
        body: Bytes::new(),
        client_subject: peer.subject.clone(),
        server_name: peer.server_name.clone(),
    };
    shared.record(&request);
    let (mut length, mut kept) = (0, BytesMut::new());
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
            length += data.len() as u64;
            kept.extend_from_slice(&data[..data.len().min(KEPT_BODY - kept.len())]);
        }
    }
    request.body_length = Some(length);
    request.body = kept.freeze();
    shared.note_body(&request);
    let response = shared.answer(&request).await.ok_or(io::ErrorKind::ConnectionReset)?;
    // To Go's server this header means GOAWAY: no new streams, and those that are open go on.
    if response.headers.iter().any(|(name, value)| name.eq_ignore_ascii_case("connection") && value == b"close") {
        goodbye.notify_one();
    }
    outgoing(response)
}

fn outgoing(response: Response) -> io::Result<http::Response<Outgoing>> {
    let mut builder = http::Response::builder().status(response.status);
    for (name, value) in &response.headers {
        // They mean the connection, which HTTP/2 does not have.
        if !["connection", "transfer-encoding", "upgrade"].iter().any(|own| name.eq_ignore_ascii_case(own)) {
            builder = builder.header(name, value.as_slice());
        }
    }
    let length = match &response.body {
        Body::Full(body) if !matches!(response.status, 204 | 304) => Some(body.len() as u64),
        Body::Cut { announced, .. } => *announced,
        _ => None,
    };
    if let (Some(length), false) = (length, response.has_header("content-length")) {
        builder = builder.header("content-length", length);
    }
    builder.body(Outgoing::new(response.body)).map_err(io::Error::other)
}

/// A body on its way out.
enum Outgoing {
    Pieces(Box<dyn Iterator<Item = Bytes> + Send + Sync>),
    Stream(mpsc::UnboundedReceiver<Bytes>),
    Cut(Option<Bytes>),
}

impl Outgoing {
    fn new(body: Body) -> Self {
        match body {
            Body::Full(body) | Body::Chunked(body) => Self::Pieces(Box::new(Some(body).into_iter())),
            Body::Stream(pieces) => Self::Stream(pieces),
            Body::Filled { before, length, after } => Self::Pieces(Box::new(filled(before, length, after))),
            Body::Cut { sent, .. } => Self::Cut(Some(sent)),
            Body::Echo => Self::Pieces(Box::new(std::iter::empty())),
        }
    }
}

impl hyper::body::Body for Outgoing {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let next: Result<Option<Bytes>, Infallible> = match self.get_mut() {
            Self::Pieces(pieces) => Ok(pieces.find(|piece| !piece.is_empty())),
            Self::Stream(pieces) => Ok(ready!(pieces.poll_recv(cx))),
            Self::Cut(sent) => match sent.take() {
                Some(sent) => Ok(Some(sent)),
                None => return Poll::Ready(Some(Err(io::ErrorKind::ConnectionReset.into()))),
            },
        };
        let Ok(next) = next;
        Poll::Ready(next.map(|piece| Ok(Frame::data(piece))))
    }
}
