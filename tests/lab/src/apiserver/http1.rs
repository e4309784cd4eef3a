//! One HTTP/1.1 connection of a stub apiserver.

use std::{io, sync::Arc, time::Instant};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{
    Peer, Shared,
    message::{Body, HttpVersion, Request, Response},
};
use crate::{
    socket::Socket,
    wire::{self, Framing, Head, Wire},
};

/// How much of a request's body is kept, in bytes.
pub(crate) const KEPT_BODY: usize = 64 * 1024;

/// The letters of [`Body::Filled`].
static FILLING: [u8; 64 * 1024] = [b'x'; 64 * 1024];

/// What becomes of the connection after an answer.
enum Next {
    Keep,
    Close,
    Reset,
}

pub(crate) async fn serve(shared: Arc<Shared>, mut wire: Wire<Socket>, peer: Peer) {
    loop {
        // An error here is the client's end of the connection.
        match serve_one(&shared, &mut wire, &peer).await {
            Ok(Next::Keep) => {}
            Ok(Next::Reset) => return wire.stream.reset(),
            Ok(Next::Close) | Err(_) => {
                let _ = wire.stream.shutdown().await;
                return;
            }
        }
    }
}

async fn serve_one(shared: &Arc<Shared>, wire: &mut Wire<Socket>, peer: &Peer) -> io::Result<Next> {
    let Some(head) = wire.head().await? else { return Ok(Next::Close) };
    let Some((mut request, keep)) = request(shared, &head, peer) else {
        let refusal = Response::bare(400).header("Connection", "close").text("400 Bad Request");
        write(wire, "GET", refusal).await?;
        return Ok(Next::Close);
    };
    shared.record(&request);
    let expects = wire::lists_token(&head.headers, "expect", "100-continue");
    if expects {
        wire.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
    }
    read_body(wire, wire::request_framing(&head.headers), &mut request).await?;
    shared.note_body(&request);
    let answered = tokio::select! {
        answered = shared.answer(&request) => answered,
        gone = client_gone(wire) => return Err(gone),
    };
    let Some(response) = answered else { return Ok(Next::Reset) };
    let next = write(wire, &request.method, response).await?;
    Ok(if keep {
        next
    } else if matches!(next, Next::Keep) {
        Next::Close
    } else {
        next
    })
}

/// The request, and whether the connection can be kept; `None`: no request line.
fn request(shared: &Shared, head: &Head, peer: &Peer) -> Option<(Request, bool)> {
    let line = &head.start_line;
    let first = line.iter().position(|byte| *byte == b' ')?;
    let last = line.iter().rposition(|byte| *byte == b' ').filter(|last| *last > first)?;
    let old = &line[last + 1..] == b"HTTP/1.0";
    let keep = !old && !wire::lists_token(&head.headers, "connection", "close");
    let request = Request {
        id: shared.next_id(),
        received: Instant::now(),
        connection: peer.connection,
        version: HttpVersion::Http1,
        method: String::from_utf8_lossy(&line[..first]).into_owned(),
        target: line.slice(first + 1..last),
        headers: head.headers.clone(),
        body_length: None,
        body: Bytes::new(),
        client_subject: peer.subject.clone(),
        server_name: peer.server_name.clone(),
    };
    Some((request, keep))
}

async fn read_body(wire: &mut Wire<Socket>, mut framing: Framing, request: &mut Request) -> io::Result<()> {
    let mut length = 0;
    let mut kept = BytesMut::new();
    while let Some(piece) = wire.piece(&mut framing).await? {
        length += piece.len() as u64;
        kept.extend_from_slice(&piece[..piece.len().min(KEPT_BODY - kept.len())]);
    }
    request.body_length = Some(length);
    request.body = kept.freeze();
    Ok(())
}

/// Ends when the client ends the connection; what it sends early is kept.
async fn client_gone(wire: &mut Wire<Socket>) -> io::Error {
    loop {
        match wire.fill().await {
            Ok(0) => return io::ErrorKind::ConnectionAborted.into(),
            Ok(_) => {}
            Err(error) => return error,
        }
    }
}

async fn write(wire: &mut Wire<Socket>, method: &str, response: Response) -> io::Result<Next> {
    let mut head = head(&response);
    if method == "HEAD" || matches!(response.status, 204 | 304) {
        wire.stream.write_all(&head).await?;
        wire.stream.flush().await?;
        return Ok(Next::Keep);
    }
    match response.body {
        Body::Full(body) => {
            // One write, so that small answers travel in one packet.
            head.extend_from_slice(&body);
            wire.stream.write_all(&head).await?;
        }
        Body::Chunked(body) => {
            if !body.is_empty() {
                chunk(&mut head, &body);
            }
            head.extend_from_slice(b"0\r\n\r\n");
            wire.stream.write_all(&head).await?;
        }
        Body::Stream(mut pieces) => {
            wire.stream.write_all(&head).await?;
            wire.stream.flush().await?;
            loop {
                let piece = tokio::select! {
                    piece = pieces.recv() => piece,
                    gone = client_gone(wire) => return Err(gone),
                };
                let Some(piece) = piece else { break };
                let mut framed = Vec::with_capacity(piece.len() + 16);
                chunk(&mut framed, &piece);
                wire.stream.write_all(&framed).await?;
                wire.stream.flush().await?;
            }
            wire.stream.write_all(b"0\r\n\r\n").await?;
        }
        Body::Filled { before, length, after } => {
            wire.stream.write_all(&head).await?;
            for piece in filled(before, length, after) {
                wire.stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes()).await?;
                wire.stream.write_all(&piece).await?;
                wire.stream.write_all(b"\r\n").await?;
            }
            wire.stream.write_all(b"0\r\n\r\n").await?;
        }
        Body::Cut { sent, announced, reset } => {
            match announced {
                Some(_) => head.extend_from_slice(&sent),
                None if sent.is_empty() => {}
                None => chunk(&mut head, &sent),
            }
            wire.stream.write_all(&head).await?;
            wire.stream.flush().await?;
            return Ok(if reset { Next::Reset } else { Next::Close });
        }
        Body::Echo => {
            wire.stream.write_all(&head).await?;
            return echo(wire).await;
        }
    }
    wire.stream.flush().await?;
    Ok(Next::Keep)
}

fn head(response: &Response) -> Vec<u8> {
    let mut head = format!("HTTP/1.1 {} {}\r\n", response.status, reason(response.status)).into_bytes();
    for (name, value) in &response.headers {
        line(&mut head, name, value);
    }
    if !response.has_header("date") && response.status != 101 {
        line(&mut head, "Date", httpdate::fmt_http_date(std::time::SystemTime::now()).as_bytes());
    }
    let framed = response.has_header("content-length") || response.has_header("transfer-encoding");
    if !framed && !matches!(response.status, 101 | 204 | 304) {
        match &response.body {
            Body::Full(body) => line(&mut head, "Content-Length", body.len().to_string().as_bytes()),
            Body::Cut { announced: Some(length), .. } => {
                line(&mut head, "Content-Length", length.to_string().as_bytes())
            }
            Body::Echo => {}
            _ => line(&mut head, "Transfer-Encoding", b"chunked"),
        }
    }
    head.extend_from_slice(b"\r\n");
    head
}

fn line(into: &mut Vec<u8>, name: &str, value: &[u8]) {
    into.extend_from_slice(name.as_bytes());
    into.extend_from_slice(b": ");
    into.extend_from_slice(value);
    into.extend_from_slice(b"\r\n");
}

fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("Unknown")
}

fn chunk(into: &mut Vec<u8>, data: &[u8]) {
    into.extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
    into.extend_from_slice(data);
    into.extend_from_slice(b"\r\n");
}

/// The pieces of [`Body::Filled`].
pub(crate) fn filled(before: Bytes, length: u64, after: Bytes) -> impl Iterator<Item = Bytes> + Send {
    let mut letters = length.saturating_sub((before.len() + after.len()) as u64);
    let filling = std::iter::from_fn(move || {
        let size = letters.min(FILLING.len() as u64);
        letters -= size;
        (size > 0).then(|| Bytes::from_static(&FILLING).slice(..size as usize))
    });
    std::iter::once(before).chain(filling).chain(std::iter::once(after)).filter(|piece| !piece.is_empty())
}

async fn echo(wire: &mut Wire<Socket>) -> io::Result<Next> {
    wire.stream.flush().await?;
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let size = wire.read(&mut buffer).await?;
        if size == 0 {
            return Ok(Next::Close);
        }
        wire.stream.write_all(&buffer[..size]).await?;
        wire.stream.flush().await?;
    }
}
