//! A client that sends exactly the bytes it is given, and shows exactly the bytes it gets.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! # let stub = lab::StubApiserver::builder("cp-1", "1.37.2").start().await.unwrap();
//! use lab::Client;
//! let client = Client::plain(stub.addr());
//!
//! let answer = client.get("/api%2Fv1/pods").header("aCCept", "application/json").send().await.unwrap();
//! assert_eq!(answer.status, 200);
//!
//! let mut watch = client.get("/api/v1/pods?watch=1").open().await.unwrap();
//! stub.push_event(&serde_json::json!({"type": "BOOKMARK"}));
//! assert_eq!(&watch.next_chunk().await.unwrap().unwrap()[..], b"{\"type\":\"BOOKMARK\"}\n");
//!
//! let http2 = client.http2().await.unwrap();
//! let (a, b) = tokio::join!(client.get("/api").send_over(&http2), client.get("/apis").send_over(&http2));
//! assert_eq!((a.unwrap().status, b.unwrap().status), (200, 200));
//! # });
//! ```

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn::http2::SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::{
    certs::ClientTls,
    socket::Socket,
    wire::{self, Framing, RawHeaders, Wire},
};

/// How long [`Request::send`] and [`Request::open`] wait unless told otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Where requests go, and how.
#[derive(Clone)]
pub struct Client {
    address: SocketAddr,
    tls: Option<ClientTls>,
    headers: Vec<(Vec<u8>, Vec<u8>)>,
    timeout: Duration,
}

impl Client {
    /// Over plaintext.
    pub fn plain(address: SocketAddr) -> Self {
        Self { address, tls: None, headers: Vec::new(), timeout: TIMEOUT }
    }

    /// Over TLS.
    pub fn tls(address: SocketAddr, tls: ClientTls) -> Self {
        Self { tls: Some(tls), ..Self::plain(address) }
    }

    /// Sends this header with every request.
    pub fn with_header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.as_bytes().to_vec(), value.as_ref().to_vec()));
        self
    }

    /// Sends `Authorization: Bearer` with every request.
    pub fn with_token(self, token: &str) -> Self {
        self.with_header("authorization", format!("Bearer {token}"))
    }

    /// Waits this long for an answer ([`Request::send`]: with its body; [`Request::open`]: its head).
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// A GET of a request target, which is sent as it is.
    pub fn get(&self, target: impl AsRef<[u8]>) -> Request<'_> {
        self.request("GET", target)
    }

    /// A POST with a body.
    pub fn post(&self, target: impl AsRef<[u8]>, body: impl Into<Bytes>) -> Request<'_> {
        self.request("POST", target).body(body)
    }

    /// A DELETE.
    pub fn delete(&self, target: impl AsRef<[u8]>) -> Request<'_> {
        self.request("DELETE", target)
    }

    /// Any method.
    pub fn request(&self, method: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Request<'_> {
        Request {
            client: self,
            method: method.as_ref().to_vec(),
            target: target.as_ref().to_vec(),
            headers: self.headers.clone(),
            body: None,
            chunked: false,
        }
    }

    /// A connection for several requests one after the other, or for raw bytes.
    ///
    /// # Errors
    /// Refused, or no TLS.
    pub async fn connect(&self) -> Result<Connection> {
        Ok(Connection { wire: Wire::new(self.socket(&[b"http/1.1"]).await?) })
    }

    /// An HTTP/2 connection for many requests at once; with prior knowledge over plaintext, by ALPN over TLS.
    ///
    /// # Errors
    /// Refused, no TLS, or the server chose another protocol.
    pub async fn http2(&self) -> Result<Http2> {
        let socket = self.socket(&[b"h2"]).await?;
        ensure!(self.tls.is_none() || socket.alpn() == Some(b"h2"), "the server does not choose HTTP/2");
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await?;
        tokio::spawn(connection);
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        Ok(Http2 { sender, scheme, authority: self.address.to_string() })
    }

    async fn socket(&self, alpn: &[&[u8]]) -> Result<Socket> {
        let tcp = TcpStream::connect(self.address).await.with_context(|| format!("cannot reach {}", self.address))?;
        tcp.set_nodelay(true)?;
        Ok(match &self.tls {
            None => Socket::Plain(tcp),
            Some(tls) => {
                let connector = TlsConnector::from(tls.alpn(alpn));
                let stream =
                    connector.connect(tls.server_name.clone(), tcp).await.context("the TLS handshake failed")?;
                Socket::Tls(Box::new(stream.into()))
            }
        })
    }
}

/// A request to be sent.
#[must_use = "a request does nothing until it is sent"]
#[derive(Clone)]
pub struct Request<'a> {
    client: &'a Client,
    method: Vec<u8>,
    target: Vec<u8>,
    headers: Vec<(Vec<u8>, Vec<u8>)>,
    body: Option<Bytes>,
    chunked: bool,
}

impl Request<'_> {
    /// Adds a header line, as it is. `Host` (the server's address) and `Content-Length` are added unless they are
    /// given.
    pub fn header(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.as_ref().to_vec(), value.as_ref().to_vec()));
        self
    }

    /// Sets the body.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// Sends the body chunked, in one chunk, without a `Content-Length`.
    pub fn chunked(mut self) -> Self {
        self.chunked = true;
        self
    }

    /// Sends it over a connection of its own and reads the whole answer.
    ///
    /// # Errors
    /// No connection, no whole answer, or not in time.
    pub async fn send(self) -> Result<Answer> {
        let timeout = self.client.timeout;
        let answer = async { self.open_untimed().await?.whole().await };
        tokio::time::timeout(timeout, answer).await.with_context(|| format!("no whole answer within {timeout:?}"))?
    }

    /// Sends it over a connection of its own and reads the answer's head; the body can be read as it comes.
    ///
    /// # Errors
    /// No connection, no head, or not in time.
    pub async fn open(self) -> Result<Opened> {
        let timeout = self.client.timeout;
        let opened = self.open_untimed();
        tokio::time::timeout(timeout, opened).await.with_context(|| format!("no answer within {timeout:?}"))?
    }

    /// Sends it over this connection and reads the whole answer.
    ///
    /// # Errors
    /// No whole answer, or not in time.
    pub async fn send_on(self, connection: &mut Connection) -> Result<Answer> {
        let timeout = self.client.timeout;
        let bytes = self.bytes();
        let exchange = connection.exchange(&bytes, &self.method);
        tokio::time::timeout(timeout, exchange).await.with_context(|| format!("no whole answer within {timeout:?}"))?
    }

    /// Sends it over an HTTP/2 connection and reads the whole answer.
    ///
    /// # Errors
    /// No whole answer, not in time, or a target or header that HTTP/2 cannot carry.
    pub async fn send_over(self, http2: &Http2) -> Result<Answer> {
        let timeout = self.client.timeout;
        let answer = async { self.open_http2(http2).await?.whole().await };
        tokio::time::timeout(timeout, answer).await.with_context(|| format!("no whole answer within {timeout:?}"))?
    }

    /// Sends it over an HTTP/2 connection and reads the answer's head.
    ///
    /// # Errors
    /// No head, not in time, or a target or header that HTTP/2 cannot carry.
    pub async fn open_over(self, http2: &Http2) -> Result<Opened> {
        let timeout = self.client.timeout;
        let opened = self.open_http2(http2);
        tokio::time::timeout(timeout, opened).await.with_context(|| format!("no answer within {timeout:?}"))?
    }

    /// Sends it over this connection, which is its own from now on, and reads the answer's head.
    ///
    /// # Errors
    /// No head, or not in time.
    pub async fn open_on(self, connection: Connection) -> Result<Opened> {
        let timeout = self.client.timeout;
        let opened = self.open_untimed_on(connection);
        tokio::time::timeout(timeout, opened).await.with_context(|| format!("no answer within {timeout:?}"))?
    }

    async fn open_untimed(self) -> Result<Opened> {
        let connection = self.client.connect().await?;
        self.open_untimed_on(connection).await
    }

    async fn open_untimed_on(self, mut connection: Connection) -> Result<Opened> {
        connection.wire.stream.write_all(&self.bytes()).await?;
        connection.wire.stream.flush().await?;
        let head = read_head(&mut connection.wire).await?;
        let framing = wire::response_framing(&self.method, head.0, &head.1);
        let body = Incomplete::Http1(Box::new(connection.wire), framing);
        Ok(Opened { status: head.0, headers: head.1, body })
    }

    async fn open_http2(self, http2: &Http2) -> Result<Opened> {
        let target = std::str::from_utf8(&self.target).context("an HTTP/2 path that is no text")?;
        let uri = format!("{}://{}{target}", http2.scheme, http2.authority);
        let mut request = http::Request::builder().method(self.method.as_slice()).uri(uri);
        for (name, value) in &self.headers {
            request = request.header(name.as_slice(), value.as_slice());
        }
        let request = request.body(Full::new(self.body.unwrap_or_default())).context("not for HTTP/2")?;
        let response = http2.sender.clone().send_request(request).await?;
        let bytes = Bytes::copy_from_slice;
        let headers = response.headers().iter().map(|(name, value)| (bytes(name.as_ref()), bytes(value.as_bytes())));
        let (status, headers) = (response.status().as_u16(), headers.collect());
        Ok(Opened { status, headers, body: Incomplete::Http2(Box::new(response.into_body())) })
    }

    fn bytes(&self) -> Vec<u8> {
        let given = |name: &str| self.headers.iter().any(|(have, _)| have.eq_ignore_ascii_case(name.as_bytes()));
        let mut bytes = [&self.method, &b" "[..], &self.target, b" HTTP/1.1\r\n"].concat();
        let mut line = |name: &[u8], value: &[u8]| bytes.extend([name, b": ", value, b"\r\n"].concat());
        if !given("host") {
            line(b"Host", self.client.address.to_string().as_bytes());
        }
        for (name, value) in &self.headers {
            line(name, value);
        }
        let Some(body) = &self.body else { return [&bytes, &b"\r\n"[..]].concat() };
        if self.chunked {
            line(b"Transfer-Encoding", b"chunked");
            let size = format!("\r\n{:x}\r\n", body.len());
            return [&bytes, size.as_bytes(), body, b"\r\n0\r\n\r\n"].concat();
        }
        if !given("content-length") {
            line(b"Content-Length", body.len().to_string().as_bytes());
        }
        [&bytes, &b"\r\n"[..], body].concat()
    }
}

/// An HTTP/1.1 connection.
pub struct Connection {
    wire: Wire<Socket>,
}

impl Connection {
    /// Sends any bytes and reads one answer; `method` decides whether it has a body.
    ///
    /// # Errors
    /// The connection ends before the answer does.
    pub async fn exchange(&mut self, bytes: &[u8], method: &[u8]) -> Result<Answer> {
        self.write(bytes).await?;
        self.answer(method).await
    }

    /// Sends any bytes.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.wire.stream.write_all(bytes).await?;
        Ok(self.wire.stream.flush().await?)
    }

    /// Reads one answer.
    ///
    /// # Errors
    /// The connection ends before the answer does.
    pub async fn answer(&mut self, method: &[u8]) -> Result<Answer> {
        let (status, headers) = read_head(&mut self.wire).await?;
        let mut framing = wire::response_framing(method, status, &headers);
        let mut body = BytesMut::new();
        while let Some(piece) = self.wire.piece(&mut framing).await? {
            body.extend_from_slice(&piece);
        }
        Ok(Answer { status, headers, body: body.freeze() })
    }
}

/// An HTTP/2 connection; clones share it.
#[derive(Clone)]
pub struct Http2 {
    sender: SendRequest<Full<Bytes>>,
    scheme: &'static str,
    authority: String,
}

impl Http2 {
    /// Whether it is still there. After a GOAWAY it is, as long as streams are open.
    pub fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// Headers as on the wire, in their order.
    pub headers: Vec<(Bytes, Bytes)>,
    /// The body, chunks joined, not decompressed.
    pub body: Bytes,
}

impl Answer {
    /// The first header of that name, in any case.
    pub fn header(&self, name: &str) -> Option<String> {
        wire::header(&self.headers, name).map(|value| String::from_utf8_lossy(value).into_owned())
    }

    /// All headers of that name, in any case, in their order.
    pub fn header_values(&self, name: &str) -> Vec<String> {
        let found = self.headers.iter().filter(|(have, _)| have.eq_ignore_ascii_case(name.as_bytes()));
        found.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).collect()
    }

    /// The body as text; bytes that are not UTF-8 become U+FFFD.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    ///
    /// # Errors
    /// It is none; the message shows it.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("{} with no JSON: {}", self.status, self.text()))
    }

    /// The body without its gzip, if it has one.
    ///
    /// # Errors
    /// It says gzip and is none.
    pub fn gunzipped(&self) -> Result<Bytes> {
        if self.header("content-encoding").as_deref() != Some("gzip") {
            return Ok(self.body.clone());
        }
        let mut out = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&self.body[..]), &mut out)?;
        Ok(out.into())
    }
}

/// An answer whose body is still coming.
pub struct Opened {
    /// The status code.
    pub status: u16,
    /// Headers as on the wire, in their order.
    pub headers: Vec<(Bytes, Bytes)>,
    body: Incomplete,
}

enum Incomplete {
    Http1(Box<Wire<Socket>>, Framing),
    Http2(Box<Incoming>),
}

impl Opened {
    /// The first header of that name, in any case.
    pub fn header(&self, name: &str) -> Option<String> {
        wire::header(&self.headers, name).map(|value| String::from_utf8_lossy(value).into_owned())
    }

    /// The next piece of the body (a chunk where it is chunked); `None` at its orderly end.
    ///
    /// # Errors
    /// The connection ends before the body does.
    pub async fn next_chunk(&mut self) -> Result<Option<Bytes>> {
        match &mut self.body {
            Incomplete::Http1(wire, framing) => Ok(wire.piece(framing).await?),
            Incomplete::Http2(body) => loop {
                match body.frame().await {
                    None => return Ok(None),
                    Some(frame) => match frame?.into_data() {
                        Ok(data) if data.is_empty() => {}
                        Ok(data) => return Ok(Some(data)),
                        Err(_) => {}
                    },
                }
            },
        }
    }

    /// Reads the body to its end and counts its bytes without keeping them.
    ///
    /// # Errors
    /// The connection ends before the body does.
    pub async fn count(mut self) -> Result<u64> {
        let mut count = 0;
        while let Some(piece) = self.next_chunk().await? {
            count += piece.len() as u64;
        }
        Ok(count)
    }

    /// Reads the body to its end.
    ///
    /// # Errors
    /// The connection ends before the body does.
    pub async fn whole(mut self) -> Result<Answer> {
        let mut body = BytesMut::new();
        while let Some(piece) = self.next_chunk().await? {
            body.extend_from_slice(&piece);
        }
        Ok(Answer { status: self.status, headers: self.headers, body: body.freeze() })
    }

    /// After a 101: the connection, for any bytes in both directions.
    ///
    /// # Errors
    /// It was no 101.
    pub fn upgraded(self) -> Result<impl AsyncRead + AsyncWrite + Unpin + Send> {
        match self.body {
            Incomplete::Http1(wire, _) if self.status == 101 => Ok(*wire),
            _ => bail!("no upgrade but status {}", self.status),
        }
    }
}

/// Status and headers; interim answers but 101 are skipped.
async fn read_head(wire: &mut Wire<Socket>) -> Result<(u16, RawHeaders)> {
    loop {
        let head = wire.head().await?.context("the connection ended before an answer")?;
        let code = head.start_line.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
        let code = std::str::from_utf8(code).ok().and_then(|code| code.parse().ok());
        let code = code.with_context(|| format!("no status line: {:?}", head.start_line))?;
        if code == 101 || code >= 200 {
            return Ok((code, head.headers));
        }
    }
}
