//! Polls and questions: on their way to an apiserver, answered by it, and back.

use std::time::Duration;

use mixed_version_proxy::peers::refresh::{PollError, Question, QuestionId, Subject, Word};

use super::{Event, Sim, millis, tell};
use crate::root::Fate;
use crate::world::{PollAnswer, Polled};

/// A call that Envoy has taken from a root.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) root: u64,
    envoy: usize,
    apiserver: usize,
    polled: Polled,
    if_none_match: Option<String>,
    /// The process that has accepted it and does not answer.
    accepted_by: Option<u64>,
    sent_at: Duration,
    /// The same on the Envoy's clock.
    sent_on_clock: Duration,
}

fn polled(subject: Subject) -> Polled {
    match subject {
        Subject::Half(half) => Polled::half(half),
        Subject::ApiServices => Polled::ApiServices,
        Subject::OpenApi => Polled::OpenApi,
    }
}

impl Sim {
    pub(super) fn dispatch(&mut self, root: u64, question: Question) {
        let number = self.number();
        let Some(placed) = self.roots.get_mut(&root) else { return };
        placed.root.calls.insert(number, question.id);
        let (envoy, apiserver) = (placed.envoy, placed.root.apiservers[question.id.apiserver]);
        let timeout = placed.root.config.discovery.timeout;
        let call = Call {
            root,
            envoy,
            apiserver,
            polled: polled(question.id.subject),
            if_none_match: question.if_none_match,
            accepted_by: None,
            sent_at: self.now,
            sent_on_clock: self.clock(envoy),
        };
        tell!(self, "envoy {envoy} root {root} asks cp-{apiserver} for {:?} (#{})", call.polled, question.id.number);
        self.calls.insert(number, call);
        self.summary.polls += 1;
        if !self.is_peace && self.chance(2) {
            tell!(self, "  and will hear nothing, not even a timeout");
            self.summary.faults += 1;
            return;
        }
        let after = Duration::from_micros(self.rng.u64(100..2_000));
        self.at(after, Event::CallArrives(number));
        self.at(timeout, Event::CallTimesOut(number));
    }

    pub(super) fn call_arrives(&mut self, number: u64) {
        let Some(call) = self.calls.get(&number) else { return };
        let (envoy, apiserver, what) = (call.envoy, call.apiserver, call.polled);
        if let Some((until, is_quick)) = self.partitions.get(&(envoy, apiserver)).copied()
            && until > self.now
        {
            if is_quick {
                self.answer_call(number, PollAnswer::bare(503), millis(1));
            }
            return;
        }
        let server = &self.apiservers[apiserver];
        if call.accepted_by.is_some_and(|epoch| epoch != server.epoch) {
            return self.answer_call(number, PollAnswer::bare(0), millis(1));
        }
        if !server.is_up {
            return self.answer_call(number, PollAnswer::bare(503), millis(1));
        }
        if server.hangs_until > self.now {
            // It wakes up and answers, if anybody is still there.
            let (after, epoch) = (server.hangs_until - self.now, server.epoch);
            if let Some(call) = self.calls.get_mut(&number) {
                call.accepted_by = Some(epoch);
            }
            return self.at(after, Event::CallArrives(number));
        }
        let if_none_match = call.if_none_match.clone();
        let answer = self.tells(apiserver, what, if_none_match.as_deref());
        let mut after = Duration::from_micros(self.rng.u64(300..4_000));
        if self.apiservers[apiserver].slow_until > self.now {
            after += self.apiservers[apiserver].slow_by;
        } else if !self.is_peace && self.chance(20) {
            after += self.some_millis(1, 3_000);
        }
        self.answer_call(number, answer, after);
    }

    /// What an apiserver that runs answers to a request for a document.
    pub(super) fn tells(&mut self, apiserver: usize, what: Polled, if_none_match: Option<&str>) -> PollAnswer {
        let server = &self.apiservers[apiserver];
        let release = server.release().unwrap_or_default();
        if let Some(garbage) = server.garbage.filter(|_| server.garbage_until > self.now) {
            return self.renderer.garbage(garbage, release, what);
        }
        let stale = server.stale.filter(|_| server.stale_until > self.now);
        self.renderer.answer(release, self.etcd.definitions, what, stale, if_none_match)
    }

    /// Whether an Envoy waits for an apiserver's document.
    pub(super) fn is_asking(&self, envoy: usize, apiserver: usize, what: Polled) -> bool {
        self.calls.values().any(|call| (call.envoy, call.apiserver, call.polled) == (envoy, apiserver, what))
    }

    fn answer_call(&mut self, call: u64, answer: PollAnswer, after: Duration) {
        let epoch = self.apiservers[self.calls[&call].apiserver].epoch;
        self.at(after, Event::CallReturns { call, answer, epoch });
    }

    pub(super) fn call_returns(&mut self, number: u64, answer: PollAnswer, epoch: u64) {
        let Some(call) = self.calls.get(&number) else { return };
        let is_cut = self.apiservers[call.apiserver].epoch != epoch && answer.says.is_some();
        self.call_ends(number, if is_cut { PollAnswer::bare(0) } else { answer });
    }

    /// The root gets what has come of a call.
    pub(super) fn call_ends(&mut self, number: u64, answer: PollAnswer) {
        let Some(call) = self.calls.remove(&number) else { return };
        let Some(placed) = self.roots.get_mut(&call.root) else { return };
        let Some(id) = placed.root.calls.remove(&number) else { return };
        self.take(call.root, id, Some((&call, &answer)));
    }

    /// A root has given up a question.
    pub(super) fn lose(&mut self, root: u64, id: QuestionId) {
        if let Some(placed) = self.roots.get_mut(&root) {
            placed.root.calls.retain(|_, awaited| *awaited != id);
        }
        self.take(root, id, None);
    }

    fn take(&mut self, root: u64, id: QuestionId, returned: Option<(&Call, &PollAnswer)>) {
        let random = self.rng.u32(..);
        let (now, Some(placed)) = (self.now, self.roots.get_mut(&root)) else { return };
        let (envoy, apiserver) = (placed.envoy, placed.root.apiservers[id.apiserver]);
        let process = &mut self.envoys[envoy];
        let clock = now + process.clock;
        let answer = match returned {
            None => Err(PollError::Lost),
            Some((_, answer)) if answer.status == 0 => Err(PollError::Reset),
            Some((_, answer)) => Ok(answer),
        };
        let was_stopped_cleanly = self.apiservers[apiserver].stopped_cleanly;
        let (change, released) =
            placed.root.answered(&mut process.shared, id, answer, was_stopped_cleanly, clock, random);
        let (leads, ticked_at) = (placed.root.leads(), placed.root.ticked_at);
        if let Some((call, answer)) = returned
            && change.word == Some(Word::Good)
            && let Some(says) = &answer.says
        {
            let cluster = &placed.root.config.apiservers[id.apiserver].discovery_cluster;
            let (root, says) = ((root, leads, ticked_at), (says, answer.stale));
            process.ledger.told(cluster, call.polled, root, (call.sent_at, now), call.sent_on_clock, says);
        } else {
            let cluster = &placed.root.config.apiservers[id.apiserver].discovery_cluster;
            let wants_peace = returned.is_some_and(|(_, answer)| answer.retry_after.is_some());
            let in_peace_until = now + if wants_peace { Duration::from_secs(1) } else { Duration::ZERO };
            process.ledger.failed(cluster, polled(id.subject), in_peace_until);
        }
        let status = returned.map(|(_, answer)| answer.status);
        tell!(
            self,
            "envoy {envoy} root {root} hears {status:?} from cp-{apiserver} (#{}), {}{}{}",
            id.number,
            change.word.map_or("out of order".to_owned(), |word| format!("{word:?}")),
            if change.view { ", news" } else { "" },
            change.event.map(|event| format!(", {event:?}")).unwrap_or_default()
        );
        for released in released {
            let Some(placed) = self.roots.get(&root) else { return };
            let fate = placed.root.released(&released);
            self.lets_go(released.stream, fate);
        }
        self.serve_waiting(root);
    }

    /// Requests for discovery that have waited are answered.
    pub(super) fn serve_waiting(&mut self, root: u64) {
        let Some(placed) = self.roots.get_mut(&root) else { return };
        for (stream, fate) in placed.root.take_over() {
            self.lets_go(stream, fate);
        }
    }

    fn lets_go(&mut self, number: u32, fate: Fate) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        let Some((reply, since)) = stream.held.take() else { return };
        self.bound_wait(number, since);
        self.settles(number, reply, fate);
    }
}
