//! The listener of a stub apiserver, which can be closed and opened again on the same port.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    task::{JoinHandle, JoinSet},
};
use tokio_rustls::TlsAcceptor;

use super::{Peer, Shared, http1, http2};
use crate::{certs, lock, socket::Socket, wire::Wire};

/// What an HTTP/2 client with prior knowledge says first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0";

pub(crate) struct Server {
    addr: SocketAddr,
    /// Bound but never listening: keeps the port from others while the stub is stopped.
    _reserved: TcpSocket,
    shared: Arc<Shared>,
    tls: Option<TlsAcceptor>,
    accepting: Mutex<Option<JoinHandle<()>>>,
    connections: Arc<Mutex<JoinSet<()>>>,
    counter: Arc<AtomicU64>,
}

impl Server {
    pub(crate) fn bind(addr: SocketAddr, shared: Arc<Shared>, tls: Option<TlsAcceptor>) -> io::Result<Self> {
        let reserved = bind(addr)?;
        let server = Self {
            addr: reserved.local_addr()?,
            _reserved: reserved,
            shared,
            tls,
            accepting: Mutex::default(),
            connections: Arc::default(),
            counter: Arc::default(),
        };
        server.listen()?;
        Ok(server)
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn connections(&self) -> u64 {
        self.counter.load(Ordering::SeqCst)
    }

    pub(crate) fn listen(&self) -> io::Result<()> {
        let mut accepting = lock(&self.accepting);
        if accepting.is_some() {
            return Ok(());
        }
        let listener = bind(self.addr)?.listen(1024)?;
        let (shared, tls) = (self.shared.clone(), self.tls.clone());
        let (connections, counter) = (self.connections.clone(), self.counter.clone());
        *accepting = Some(tokio::spawn(accept(listener, shared, tls, connections, counter)));
        Ok(())
    }

    pub(crate) async fn refuse(&self) {
        let accepting = lock(&self.accepting).take();
        if let Some(task) = accepting {
            task.abort();
            // Once the task has ended its listener is closed.
            let _ = task.await;
        }
    }

    pub(crate) async fn close_connections(&self) {
        let mut connections = std::mem::take(&mut *lock(&self.connections));
        connections.shutdown().await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(task) = lock(&self.accepting).take() {
            task.abort();
        }
        lock(&self.connections).abort_all();
    }
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Two sockets on one port, of which one at most listens; and no waiting for the last connections' TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

async fn accept(
    listener: TcpListener,
    shared: Arc<Shared>,
    tls: Option<TlsAcceptor>,
    connections: Arc<Mutex<JoinSet<()>>>,
    counter: Arc<AtomicU64>,
) {
    loop {
        let Ok((tcp, _)) = listener.accept().await else {
            // A connection that ended before it was accepted; or no file descriptor is left, and others must end first.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let peer = Peer { connection: counter.fetch_add(1, Ordering::SeqCst), ..Peer::default() };
        let mut connections = lock(&connections);
        while connections.try_join_next().is_some() {}
        connections.spawn(serve(tcp, tls.clone(), shared.clone(), peer));
    }
}

async fn serve(tcp: TcpStream, tls: Option<TlsAcceptor>, shared: Arc<Shared>, mut peer: Peer) {
    let _ = tcp.set_nodelay(true);
    let socket = match tls {
        None => Socket::Plain(tcp),
        Some(acceptor) => match acceptor.accept(tcp).await {
            Ok(stream) => {
                let session = stream.get_ref().1;
                peer.subject = session.peer_certificates().and_then(|chain| certs::subject(chain.first()?));
                peer.server_name = session.server_name().map(str::to_owned);
                Socket::Tls(Box::new(stream.into()))
            }
            Err(_) => {
                shared.failed_handshakes.fetch_add(1, Ordering::SeqCst);
                return;
            }
        },
    };
    let by_alpn = socket.alpn() == Some(b"h2");
    let mut wire = Wire::new(socket);
    if by_alpn || starts_with_preface(&mut wire).await {
        http2::serve(shared, wire, peer).await;
    } else {
        http1::serve(shared, wire, peer).await;
    }
}

async fn starts_with_preface(wire: &mut Wire<Socket>) -> bool {
    loop {
        let seen = wire.buffer.len().min(PREFACE.len());
        if wire.buffer[..seen] != PREFACE[..seen] {
            return false;
        }
        if seen == PREFACE.len() {
            return true;
        }
        if !matches!(wire.fill().await, Ok(1..)) {
            return false;
        }
    }
}
