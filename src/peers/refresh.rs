//! Polling: when to ask whom, and what an answer changes.
//!
//! A state machine without I/O. Time comes in as a [`Duration`] since any fixed moment of a monotonic clock; questions
//! come out and somebody else sends them. A poll that fails never takes away what an earlier one told: while an
//! apiserver is configured, its last good document counts and its silence is doubt.

use std::time::Duration;

use crate::discovery::document::{Document, DocumentError, Half};
use crate::peers::table::{ApiserverSet, Health};

/// How much longer than the call's own timeout we wait before we take an answer for lost. Envoy answers every call at its
/// timeout at the latest; this is for the day when it does not, and must only be longer than a busy worker's delay.
const LOST_ANSWER_GRACE: Duration = Duration::from_secs(1);

/// Polls of all apiservers.
#[derive(Debug)]
pub struct Refresh {
    /// One of each half for each apiserver, in the order of the configuration.
    apiservers: Vec<[Poll; 2]>,
    interval: Duration,
    timeout: Duration,
    max_document_bytes: usize,
}

/// What is known of one half of one apiserver.
#[derive(Debug, Default)]
struct Poll {
    document: Option<Document>,
    etag: Option<String>,
    is_fresh: bool,
    /// The words of the last failure, so that the log tells a change and not every repetition.
    failure: Option<String>,
    next_due: Duration,
    attempt: u64,
    /// Until when the answer to `attempt` is awaited.
    awaited_until: Option<Duration>,
}

/// A poll that is due: `GET half.path()` on the apiserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Which poll this is; to be handed back with the answer.
    pub id: QuestionId,
    /// Entity tag of the document that we have: an unchanged one is answered with a 304 without a body.
    pub if_none_match: Option<String>,
}

/// Names one attempt of one poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuestionId {
    /// Index of the apiserver in the configuration.
    pub apiserver: usize,
    /// The document asked for.
    pub half: Half,
    attempt: u64,
}

/// What came back.
#[derive(Debug)]
pub enum Answer<'a> {
    /// An HTTP answer.
    Response {
        /// Status code.
        status: u16,
        /// Header `content-type`, empty if absent.
        content_type: &'a [u8],
        /// Header `etag`.
        etag: Option<&'a [u8]>,
        /// The whole body.
        body: &'a [u8],
    },
    /// No answer at all.
    Failed(PollError),
}

/// Why a poll brought no document.
#[derive(Debug, thiserror::Error)]
pub enum PollError {
    /// Envoy did not take the call: no such cluster, no host, circuit breaker.
    #[error("Envoy does not take calls to cluster {cluster:?} (status {host_status})")]
    NotDispatched {
        /// The cluster that was named.
        cluster: String,
        /// Envoy's proxy-wasm status.
        host_status: u32,
    },
    /// The call was reset, or its answer was too large for Envoy.
    #[error("the call was reset before its answer was complete")]
    Reset,
    /// Envoy never came back with an answer.
    #[error("no answer and no timeout came back")]
    Lost,
    /// A header or the body could not be read from Envoy.
    #[error("Envoy does not hand over the answer (status {host_status})")]
    Unreadable {
        /// Envoy's proxy-wasm status.
        host_status: u32,
    },
    /// Another status than 200 and 304. Envoy's own answers for a dead apiserver are 503 and 504.
    #[error("status {status}{}", hint(*.status))]
    Status {
        /// The status code; 0 if there was none.
        status: u16,
    },
    /// A 304 although nothing is there that could be unchanged.
    #[error("304 without a document to keep")]
    NothingToKeep,
    /// Larger than `discovery.maxDocumentBytes`.
    #[error("{bytes} bytes, more than discovery.maxDocumentBytes")]
    TooLarge {
        /// Size of the body.
        bytes: usize,
    },
    /// A 200 that is no discovery document.
    #[error(transparent)]
    Document(#[from] DocumentError),
}

/// What an operator should look at first.
fn hint(status: u16) -> &'static str {
    match status {
        401 => ": the poll cluster's credential is not valid",
        403 => ": the poll cluster's credential may not read discovery (ClusterRole system:discovery)",
        406 => ": the apiserver has no aggregated discovery in JSON",
        503 | 504 => ": the apiserver cannot be reached or is not ready",
        _ => "",
    }
}

/// What an answer, or its absence, has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// A document is another one than before: the table must be built again.
    pub document: bool,
    /// The health of the half is another one than before.
    pub health: bool,
    /// What there is to log.
    pub event: Option<Event>,
}

/// A turn worth a log line: the first failure of a kind, and the end of failing.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Polls began to fail, or fail for another reason than before.
    Failing(String),
    /// A document is there for the first time, or again.
    Recovered,
}

impl Refresh {
    /// Nothing is known and all is due at once.
    pub fn new(apiservers: usize, interval: Duration, timeout: Duration, max_document_bytes: usize) -> Self {
        let apiservers = (0..apiservers).map(|_| <[Poll; 2]>::default()).collect();
        Self { apiservers, interval, timeout, max_document_bytes }
    }

    /// The polls that are due, each of which counts as sent from now on. A tick that comes late finds each poll due once.
    pub fn due(&mut self, now: Duration) -> Vec<Question> {
        let (interval, patience) = (self.interval, self.timeout.saturating_add(LOST_ANSWER_GRACE));
        let mut questions = Vec::new();
        for (apiserver, halves) in self.apiservers.iter_mut().enumerate() {
            for (half, poll) in Half::ALL.into_iter().zip(halves) {
                if poll.awaited_until.is_none() && poll.next_due <= now {
                    poll.next_due = now.saturating_add(interval);
                    poll.awaited_until = Some(now.saturating_add(patience));
                    poll.attempt = poll.attempt.wrapping_add(1);
                    let id = QuestionId { apiserver, half, attempt: poll.attempt };
                    questions.push(Question { id, if_none_match: poll.etag.clone() });
                }
            }
        }
        questions
    }

    /// Gives up the polls whose answer should have come long ago.
    pub fn lost(&mut self, now: Duration) -> Vec<QuestionId> {
        let mut lost = Vec::new();
        for (apiserver, halves) in self.apiservers.iter().enumerate() {
            for (half, poll) in Half::ALL.into_iter().zip(halves) {
                if poll.awaited_until.is_some_and(|deadline| deadline <= now) {
                    lost.push(QuestionId { apiserver, half, attempt: poll.attempt });
                }
            }
        }
        lost
    }

    /// Takes an answer. One that comes after its poll was given up changes nothing: older data never replaces newer.
    pub fn answered(&mut self, id: QuestionId, answer: Answer<'_>) -> Change {
        let max_document_bytes = self.max_document_bytes;
        let Some(poll) = self.poll_mut(id) else {
            return Change::default();
        };
        if poll.attempt != id.attempt || poll.awaited_until.take().is_none() {
            return Change::default();
        }
        let was_fresh = poll.is_fresh;
        let outcome = poll.take(id.half, answer, max_document_bytes);
        poll.is_fresh = outcome.is_ok();
        let health = was_fresh != poll.is_fresh;
        match outcome {
            Ok(document) => {
                poll.failure = None;
                Change { document, health, event: health.then_some(Event::Recovered) }
            }
            Err(error) => {
                let failure = error.to_string();
                let is_news = poll.failure.as_ref() != Some(&failure);
                let event = is_news.then(|| Event::Failing(failure.clone()));
                poll.failure = Some(failure);
                Change { document: false, health, event }
            }
        }
    }

    /// The last good documents, each with the index of its apiserver.
    pub fn documents(&self) -> impl Iterator<Item = (usize, &Document)> {
        let indexed = self.apiservers.iter().enumerate();
        indexed.flat_map(|(index, halves)| halves.iter().filter_map(move |poll| Some((index, poll.document.as_ref()?))))
    }

    /// How far the documents of a half can be relied upon.
    pub fn health(&self, half: Half) -> Health {
        let set = |is_member: fn(&Poll) -> bool| -> ApiserverSet {
            let members = self.apiservers.iter().enumerate().filter(|(_, halves)| is_member(poll_of(halves, half)));
            members.map(|(index, _)| index).collect()
        };
        Health { known: set(|poll| poll.document.is_some()), fresh: set(|poll| poll.is_fresh) }
    }

    fn poll_mut(&mut self, id: QuestionId) -> Option<&mut Poll> {
        let [core, groups] = self.apiservers.get_mut(id.apiserver)?;
        Some(match id.half {
            Half::Core => core,
            Half::Groups => groups,
        })
    }
}

const fn poll_of(halves: &[Poll; 2], half: Half) -> &Poll {
    let [core, groups] = halves;
    match half {
        Half::Core => core,
        Half::Groups => groups,
    }
}

impl Poll {
    /// Stores what a good answer says; whether the document is another one than before.
    fn take(&mut self, half: Half, answer: Answer<'_>, max_document_bytes: usize) -> Result<bool, PollError> {
        let (status, content_type, etag, body) = match answer {
            Answer::Response { status, content_type, etag, body } => (status, content_type, etag, body),
            Answer::Failed(error) => return Err(error),
        };
        match status {
            200 if body.len() > max_document_bytes => Err(PollError::TooLarge { bytes: body.len() }),
            200 => {
                let mut document = Document::parse(half, content_type, body)?;
                if let Some(previous) = &self.document {
                    document.keep_stale_from(previous);
                }
                // A tag that is not text could not be sent back; the next poll then gets the whole document.
                self.etag = etag.and_then(|etag| String::from_utf8(etag.to_vec()).ok());
                let is_another = self.document.as_ref() != Some(&document);
                self.document = Some(document);
                Ok(is_another)
            }
            304 if self.document.is_some() => Ok(false),
            304 => Err(PollError::NothingToKeep),
            status => Err(PollError::Status { status }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    const INTERVAL: Duration = Duration::from_secs(5);
    const TIMEOUT: Duration = Duration::from_secs(3);
    const V2: &[u8] = b"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn document(group: &str, resource: &str) -> String {
        format!(
            r#"{{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[{{"metadata":{{"name":"{group}"}},
            "versions":[{{"version":"v1","resources":[{{"resource":"{resource}"}}],"freshness":"Current"}}]}}]}}"#
        )
    }

    fn response<'a>(status: u16, body: &'a str) -> Answer<'a> {
        Answer::Response { status, content_type: V2, etag: Some(b"\"tag\""), body: body.as_bytes() }
    }

    /// One apiserver whose `/apis` has been read at second 0.
    fn with_document() -> Refresh {
        let mut refresh = Refresh::new(1, INTERVAL, TIMEOUT, 10_000);
        for question in refresh.due(seconds(0)) {
            let group = if question.id.half == Half::Core { "" } else { "depot.k8s.io" };
            let change = refresh.answered(question.id, response(200, &document(group, "crates")));
            assert_eq!(change, Change { document: true, health: true, event: Some(Event::Recovered) });
        }
        refresh
    }

    fn resources(refresh: &Refresh) -> Vec<String> {
        let group_versions = refresh.documents().flat_map(|(_, document)| &document.group_versions);
        group_versions.flat_map(|gv| gv.resources.iter().map(|r| format!("{}/{}", gv.group, r.name))).collect()
    }

    #[test]
    fn each_half_of_each_apiserver_is_due_once_an_interval() {
        let mut refresh = Refresh::new(2, INTERVAL, TIMEOUT, 10_000);
        let first = refresh.due(seconds(0));
        let asked: Vec<_> = first.iter().map(|question| (question.id.apiserver, question.id.half)).collect();
        assert_eq!(asked, [(0, Half::Core), (0, Half::Groups), (1, Half::Core), (1, Half::Groups)]);
        assert_eq!(refresh.due(seconds(1)), [], "all are on their way");
        for question in first {
            refresh.answered(question.id, response(503, ""));
        }
        assert_eq!(refresh.due(seconds(4)), [], "not before the interval is over");
        assert_eq!(refresh.due(seconds(95)).len(), 4, "a late tick causes one poll each");
        assert_eq!(refresh.due(seconds(95)), [], "and no burst");
    }

    #[test]
    fn no_failure_takes_a_document_away() {
        let oversized = document("depot.k8s.io", &"x".repeat(10_000));
        for (answer, expected, why) in [
            (response(503, ""), "status 503: the apiserver cannot be reached", "unreachable or not ready"),
            (response(403, "{}"), "status 403: the poll cluster's credential may not", "no rights"),
            (response(401, "{}"), "status 401: the poll cluster's credential is not", "a bad credential"),
            (response(404, "{}"), "status 404", "no such path"),
            (response(406, "{}"), "status 406: the apiserver has no aggregated", "an old apiserver"),
            (response(429, "{}"), "status 429", "too many requests"),
            (response(200, ""), "cannot be read", "an empty body"),
            (response(200, "{\"kind\":"), "cannot be read", "a cut body"),
            (response(200, "{\"kind\":\"Status\"}"), "is a \"Status\"", "another kind"),
            (response(200, &document("", "pods")), "no group", "the other half's document"),
            (response(200, &oversized), "more than discovery.maxDocumentBytes", "too large"),
            (Answer::Failed(PollError::Reset), "reset", "cut by the network"),
            (Answer::Failed(PollError::Lost), "no answer", "an answer that never came"),
        ] {
            let mut refresh = with_document();
            let before = resources(&refresh);
            let groups = refresh.due(seconds(5)).remove(1);
            let change = refresh.answered(groups.id, answer);
            let Some(Event::Failing(message)) = change.event else { panic!("{why}: nothing to log") };
            assert!(message.contains(expected), "{why}: {message}");
            assert!(change.health && !change.document, "{why}");
            assert_eq!(resources(&refresh), before, "{why}: the last good document stays");
            let health = refresh.health(Half::Groups);
            assert_eq!((health.known, health.fresh), (ApiserverSet::only(0), ApiserverSet::EMPTY), "{why}: failing");
            assert_eq!(refresh.health(Half::Core).fresh, ApiserverSet::only(0), "{why}: the other half is untouched");
        }
    }

    #[test]
    fn a_304_keeps_the_document_and_makes_it_fresh() {
        let mut refresh = with_document();
        let groups = refresh.due(seconds(5)).remove(1);
        assert_eq!(groups.if_none_match.as_deref(), Some("\"tag\""));
        refresh.answered(groups.id, response(503, ""));
        let groups = refresh.due(seconds(10)).remove(0);
        let change = refresh.answered(groups.id, response(304, ""));
        assert_eq!(change, Change { document: false, health: true, event: Some(Event::Recovered) });

        let mut nothing_yet = Refresh::new(1, INTERVAL, TIMEOUT, 10_000);
        let core = nothing_yet.due(seconds(0)).remove(0);
        let change = nothing_yet.answered(core.id, response(304, ""));
        assert!(matches!(change.event, Some(Event::Failing(message)) if message.contains("304 without")));
        assert_eq!(nothing_yet.health(Half::Core), Health::default());
    }

    #[test]
    fn a_failure_is_told_once_until_it_changes() {
        let mut refresh = with_document();
        let mut told = Vec::new();
        for (second, status) in [(5, 503), (10, 503), (15, 403), (20, 304), (25, 304)] {
            let groups = refresh.due(seconds(second)).pop().unwrap();
            let change = refresh.answered(groups.id, response(status, ""));
            told.push(match change.event {
                Some(Event::Failing(_)) => "failing",
                Some(Event::Recovered) => "recovered",
                None => "-",
            });
        }
        assert_eq!(told, ["failing", "-", "failing", "recovered", "-"]);
    }

    #[test]
    fn an_answer_that_never_comes_does_not_block_the_next_poll() {
        let mut refresh = with_document();
        let late = refresh.due(seconds(5)).remove(1);
        assert!(refresh.lost(seconds(8)).is_empty(), "still in time");
        for id in refresh.lost(seconds(9)) {
            refresh.answered(id, Answer::Failed(PollError::Lost));
        }
        let newer = refresh.due(seconds(10)).remove(1);
        let newer_body = document("depot.k8s.io", "newer");
        let older_body = document("depot.k8s.io", "older");
        assert_eq!(refresh.answered(late.id, response(200, &older_body)), Change::default(), "given up");
        assert!(refresh.answered(newer.id, response(200, &newer_body)).document);
        assert_eq!(refresh.answered(newer.id, response(200, &older_body)), Change::default(), "answered twice");
        assert_eq!(resources(&refresh), ["/crates", "depot.k8s.io/newer"]);
    }

    #[test]
    fn a_document_that_says_the_same_is_no_change() {
        let mut refresh = with_document();
        let groups = refresh.due(seconds(5)).remove(1);
        assert_eq!(refresh.answered(groups.id, response(200, &document("depot.k8s.io", "crates"))), Change::default());
    }
}
