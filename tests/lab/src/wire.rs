//! HTTP/1.1 as bytes: message heads and body framing, shared by the client and the stub apiservers.
//!
//! Written here and not taken from a library, because libraries tidy up (header case and order, odd targets) what the
//! tests are about.

use std::{
    io::{self, Error, ErrorKind},
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// Header names and values as they stand on the wire, in their order.
pub(crate) type RawHeaders = Vec<(Bytes, Bytes)>;

/// Heads longer than this are refused; Envoy's own limit is 60 KiB.
const LONGEST_HEAD: usize = 1 << 20;

/// A stream and what has been read from it but not used.
pub(crate) struct Wire<S> {
    pub(crate) stream: S,
    pub(crate) buffer: BytesMut,
}

/// Where a body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// After this many more bytes.
    Length(u64),
    /// With the empty chunk.
    Chunked,
    /// With the connection.
    UntilClose,
    /// It has ended.
    Done,
}

/// A message's start line and headers.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) start_line: Bytes,
    pub(crate) headers: RawHeaders,
}

impl<S: AsyncRead + Unpin> Wire<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, buffer: BytesMut::new() }
    }

    /// Reads more bytes; 0: the peer has closed.
    pub(crate) async fn fill(&mut self) -> io::Result<usize> {
        self.buffer.reserve(16 * 1024);
        self.stream.read_buf(&mut self.buffer).await
    }

    /// The next message's head; `None` if the peer closed before its first byte.
    pub(crate) async fn head(&mut self) -> io::Result<Option<Head>> {
        loop {
            if let Some(end) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                let head = self.buffer.split_to(end + 4).freeze();
                return parse_head(&head.slice(..end)).map(Some);
            }
            if self.buffer.len() > LONGEST_HEAD {
                return Err(Error::new(ErrorKind::InvalidData, "a message head of more than 1 MiB"));
            }
            if self.fill().await? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { Err(cut("a message head")) };
            }
        }
    }

    /// The next piece of a body, as it came; `None` at the body's end. Trailers are read and dropped.
    pub(crate) async fn piece(&mut self, framing: &mut Framing) -> io::Result<Option<Bytes>> {
        match *framing {
            Framing::Done | Framing::Length(0) => {
                *framing = Framing::Done;
                Ok(None)
            }
            Framing::Length(left) => {
                if self.buffer.is_empty() && self.fill().await? == 0 {
                    return Err(cut("a body"));
                }
                let size = self.buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                *framing = Framing::Length(left - size as u64);
                Ok(Some(self.buffer.split_to(size).freeze()))
            }
            Framing::UntilClose => {
                if self.buffer.is_empty() && self.fill().await? == 0 {
                    *framing = Framing::Done;
                    return Ok(None);
                }
                Ok(Some(self.buffer.split().freeze()))
            }
            Framing::Chunked => self.chunk(framing).await,
        }
    }

    async fn chunk(&mut self, framing: &mut Framing) -> io::Result<Option<Bytes>> {
        let line = self.line().await?;
        let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
        let size = std::str::from_utf8(digits).ok().and_then(|digits| usize::from_str_radix(digits, 16).ok());
        let size = size.ok_or_else(|| Error::new(ErrorKind::InvalidData, "an unreadable chunk size"))?;
        if size == 0 {
            while !self.line().await?.is_empty() {}
            *framing = Framing::Done;
            return Ok(None);
        }
        while self.buffer.len() < size + 2 {
            if self.fill().await? == 0 {
                return Err(cut("a chunk"));
            }
        }
        let data = self.buffer.split_to(size).freeze();
        if self.buffer.split_to(2) != b"\r\n"[..] {
            return Err(Error::new(ErrorKind::InvalidData, "a chunk without its line end"));
        }
        Ok(Some(data))
    }

    async fn line(&mut self) -> io::Result<Bytes> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|window| window == b"\r\n") {
                let line = self.buffer.split_to(end + 2).freeze();
                return Ok(line.slice(..end));
            }
            if self.fill().await? == 0 {
                return Err(cut("a line"));
            }
        }
    }
}

/// As a plain stream, which begins with what was read too far.
impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.buffer.is_empty() {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        let size = this.buffer.len().min(buf.remaining());
        buf.put_slice(&this.buffer.split_to(size));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

/// How a request's body is framed.
pub(crate) fn request_framing(headers: &RawHeaders) -> Framing {
    body_framing(headers).unwrap_or(Framing::Done)
}

/// How a response's body is framed.
pub(crate) fn response_framing(method: &[u8], status: u16, headers: &RawHeaders) -> Framing {
    if method == b"HEAD" || matches!(status, 100..=199 | 204 | 304) {
        return Framing::Done;
    }
    body_framing(headers).unwrap_or(Framing::UntilClose)
}

/// The first header of that name, in any case.
pub(crate) fn header<'a>(headers: &'a RawHeaders, name: &str) -> Option<&'a [u8]> {
    let found = headers.iter().find(|(have, _)| have.eq_ignore_ascii_case(name.as_bytes()));
    found.map(|(_, value)| value.as_ref())
}

/// Whether a list header such as `Connection` or `Transfer-Encoding` names `token`, in any case.
pub(crate) fn lists_token(headers: &RawHeaders, name: &str, token: &str) -> bool {
    let lines = headers.iter().filter(|(have, _)| have.eq_ignore_ascii_case(name.as_bytes()));
    let mut tokens = lines.flat_map(|(_, value)| value.split(|byte| *byte == b','));
    tokens.any(|have| have.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
}

fn body_framing(headers: &RawHeaders) -> Option<Framing> {
    if lists_token(headers, "transfer-encoding", "chunked") {
        return Some(Framing::Chunked);
    }
    let length = header(headers, "content-length")?;
    std::str::from_utf8(length).ok()?.trim().parse().ok().map(Framing::Length)
}

fn parse_head(head: &Bytes) -> io::Result<Head> {
    let mut start_line = None;
    let mut headers = RawHeaders::new();
    let mut rest = head.clone();
    loop {
        let end = rest.windows(2).position(|window| window == b"\r\n");
        let line = rest.slice(..end.unwrap_or(rest.len()));
        if start_line.is_none() {
            start_line = Some(line);
        } else {
            let colon = line.iter().position(|byte| *byte == b':');
            let colon = colon.ok_or_else(|| Error::new(ErrorKind::InvalidData, "a header line without a colon"))?;
            headers.push((line.slice(..colon), line.slice_ref(line[colon + 1..].trim_ascii())));
        }
        match end {
            Some(end) => rest = rest.slice(end + 2..),
            None => return Ok(Head { start_line: start_line.unwrap_or_default(), headers }),
        }
    }
}

fn cut(what: &str) -> Error {
    Error::new(ErrorKind::UnexpectedEof, format!("the peer closed within {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn body(bytes: &[u8], mut framing: Framing) -> io::Result<Vec<u8>> {
        let mut wire = Wire::new(bytes);
        let mut all = Vec::new();
        while let Some(piece) = wire.piece(&mut framing).await? {
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }

    #[tokio::test]
    async fn heads_keep_order_case_doubles_and_bytes() {
        let bytes = b"GET /a%2Fb\xff HTTP/1.1\r\nHost: x\r\nacCept:  a \r\naccept:b\xfe\r\nempty:\r\n\r\nrest";
        let mut wire = Wire::new(&bytes[..]);
        let head = wire.head().await.unwrap().unwrap();
        assert_eq!(head.start_line, &b"GET /a%2Fb\xff HTTP/1.1"[..]);
        let headers: Vec<_> = head.headers.iter().map(|(name, value)| (&name[..], &value[..])).collect();
        assert_eq!(headers, [(&b"Host"[..], &b"x"[..]), (b"acCept", b"a"), (b"accept", b"b\xfe"), (b"empty", b"")]);
        assert_eq!(wire.buffer, &b"rest"[..]);
    }

    #[tokio::test]
    async fn bodies_end_where_their_framing_says() {
        type Row = (&'static str, Framing, &'static [u8], Result<&'static [u8], ErrorKind>);
        let rows: [Row; 7] = [
            ("a length", Framing::Length(3), b"abcdef", Ok(b"abc")),
            ("a length that is not met", Framing::Length(9), b"abc", Err(ErrorKind::UnexpectedEof)),
            ("until close", Framing::UntilClose, b"abc", Ok(b"abc")),
            (
                "chunks with extension and trailer",
                Framing::Chunked,
                b"2;x=y\r\nab\r\n1\r\nc\r\n0\r\nT: t\r\n\r\n",
                Ok(b"abc"),
            ),
            ("a chunk that is cut", Framing::Chunked, b"5\r\nab", Err(ErrorKind::UnexpectedEof)),
            ("no last chunk", Framing::Chunked, b"2\r\nab\r\n", Err(ErrorKind::UnexpectedEof)),
            ("a chunk size that is none", Framing::Chunked, b"zz\r\nab\r\n", Err(ErrorKind::InvalidData)),
        ];
        for (sentence, framing, bytes, want) in rows {
            let got = body(bytes, framing).await.map_err(|error| error.kind());
            assert_eq!(got.as_deref(), want.as_ref().map(|bytes| *bytes), "{sentence}");
        }
    }
}
