//! The ways a stub apiserver can be told to fail, and which requests that concerns.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::watch;

use super::message::{Request, Response};

type Predicate = Arc<dyn Fn(&Request) -> bool + Send + Sync>;
type Answer = Arc<dyn Fn(&Request) -> Response + Send + Sync>;

/// Which requests a fault concerns.
#[derive(Clone)]
pub enum Scope {
    /// The `/api` document.
    Api,
    /// The `/apis` document.
    Apis,
    /// Both discovery documents.
    Discovery,
    /// Every request.
    All,
    /// The filter's polls, and nothing that a client asks.
    Polls,
    /// What the test says; see [`Scope::when`] and [`Scope::path`].
    When(Predicate),
}

impl Scope {
    /// The requests for which `predicate` is true.
    pub fn when(predicate: impl Fn(&Request) -> bool + Send + Sync + 'static) -> Self {
        Self::When(Arc::new(predicate))
    }

    /// The requests whose target without the query is `path`, byte for byte.
    pub fn path(path: &str) -> Self {
        let path = path.to_owned();
        Self::when(move |request| request.path() == path)
    }

    pub(crate) fn concerns(&self, request: &Request) -> bool {
        let path = request.path();
        match self {
            Self::Api => path == "/api",
            Self::Apis => path == "/apis",
            Self::Discovery => path == "/api" || path == "/apis",
            Self::All => true,
            Self::Polls => request.is_poll(),
            Self::When(predicate) => predicate(request),
        }
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Api => "Api",
            Self::Apis => "Apis",
            Self::Discovery => "Discovery",
            Self::All => "All",
            Self::Polls => "Polls",
            Self::When(_) => "When(..)",
        })
    }
}

/// What goes wrong. A request that meets several faults waits for all delays and gates first; then the first of the
/// others decides.
#[derive(Clone)]
pub enum Fault {
    /// The whole request is read, then the connection is reset (HTTP/2: the stream) without a byte of an answer.
    Reset,
    /// The usual answer's head, then a reset.
    ResetAfterHeaders,
    /// The usual answer's head and half of its body, then a reset.
    ResetMidBody,
    /// The usual answer's head and half of its body, then an orderly end of the connection.
    CutBody,
    /// No answer, until the client gives up.
    Hang,
    /// The usual answer once the test opens the gate.
    Hold(Gate),
    /// The usual answer, later.
    Delay(Duration),
    /// A `Status` of this code, with `Retry-After` in seconds if given.
    Status(u16, Option<u64>),
    /// A 200 of the aggregated type without any group.
    EmptyDocument,
    /// A 200 of the aggregated type that holds a document of another kind.
    WrongKind,
    /// A 200 of the aggregated type that is no JSON.
    NotJson,
    /// A 200 of the aggregated type that is no UTF-8.
    NotUtf8,
    /// A 200 of the aggregated type and this many bytes.
    Oversized(u64),
    /// What the test says; see [`Fault::answer`].
    Answer(Answer),
}

impl Fault {
    /// An answer that the test makes.
    pub fn answer(answer: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        Self::Answer(Arc::new(answer))
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reset => f.write_str("Reset"),
            Self::ResetAfterHeaders => f.write_str("ResetAfterHeaders"),
            Self::ResetMidBody => f.write_str("ResetMidBody"),
            Self::CutBody => f.write_str("CutBody"),
            Self::Hang => f.write_str("Hang"),
            Self::Hold(gate) => write!(f, "Hold({} waiting)", gate.waiting()),
            Self::Delay(time) => write!(f, "Delay({time:?})"),
            Self::Status(code, retry_after) => write!(f, "Status({code}, {retry_after:?})"),
            Self::EmptyDocument => f.write_str("EmptyDocument"),
            Self::WrongKind => f.write_str("WrongKind"),
            Self::NotJson => f.write_str("NotJson"),
            Self::NotUtf8 => f.write_str("NotUtf8"),
            Self::Oversized(bytes) => write!(f, "Oversized({bytes})"),
            Self::Answer(_) => f.write_str("Answer(..)"),
        }
    }
}

/// Holds requests until the test opens it; then it stays open.
#[derive(Clone)]
pub struct Gate {
    open: Arc<watch::Sender<bool>>,
    waiting: Arc<AtomicUsize>,
}

impl Gate {
    /// A closed gate.
    pub fn closed() -> Self {
        Self { open: Arc::new(watch::Sender::new(false)), waiting: Arc::default() }
    }

    /// Lets all pass that wait, and all that come.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// How many requests wait at this moment.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    pub(crate) async fn pass(&self) {
        struct Waiting<'a>(&'a AtomicUsize);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let _waiting = Waiting(&self.waiting);
        // The sender lives as long as this gate.
        let _ = self.open.subscribe().wait_for(|open| *open).await;
    }
}

/// A fault in force.
#[derive(Debug)]
pub(crate) struct ActiveFault {
    pub(crate) id: u64,
    pub(crate) scope: Scope,
    pub(crate) fault: Fault,
    /// How many more requests it concerns; absent: all.
    pub(crate) left: Option<u32>,
}
