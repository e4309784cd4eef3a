//! Discovery of the whole cluster, as `filter::discovery` and `filter::state` drive it.

use std::rc::Rc;
use std::time::Duration;

use mixed_version_proxy::config::PeerProxying;
use mixed_version_proxy::discovery::document::Half;
use mixed_version_proxy::guard::Asked;
use mixed_version_proxy::local_reply::Effect;
use mixed_version_proxy::peers::cluster_discovery::{self, ClusterDiscovery, Stamp};
use mixed_version_proxy::peers::documents::{Documents, Kind};
use mixed_version_proxy::peers::refresh::{Asking, PATIENCE_WITH_FAILING, Peers, QuestionId, Subject, Word};
use mixed_version_proxy::peers::table::ApiserverSet;

use super::{Fate, Root, Sent, To, names};
use crate::plant::Plant;
use crate::shared::SharedData;
use crate::streams::{Reply, VIA_UPSTREAM};

/// What clients are told of the whole cluster.
#[derive(Debug, Clone, Default)]
pub(super) enum Told {
    /// Nothing yet.
    #[default]
    NotYet,
    /// A [`ClusterDiscovery`].
    Merged { bytes: Rc<Vec<u8>>, stamp: Stamp },
}

/// An answer that waits until apiservers have told what they serve now.
#[derive(Debug)]
pub(super) struct Awaiting {
    pub(super) stream: u32,
    changed: Option<usize>,
    pending: ApiserverSet,
    patient_until: Duration,
    half: Half,
    mark: u64,
}

impl Told {
    const fn stamp(&self) -> Option<&Stamp> {
        match self {
            Self::NotYet => None,
            Self::Merged { stamp, .. } => Some(stamp),
        }
    }

    fn holds(&self, apiserver: usize, kind: Kind, version: Option<Duration>) -> bool {
        let held = self.stamp().and_then(|stamp| stamp.versions.get(apiserver)).and_then(|all| kind.of_all(all));
        held.is_some_and(|held| *held >= version && version.is_some())
    }
}

impl Root {
    /// The merged document that is served now; `None` until each apiserver has been tried.
    pub fn told(&self, half: Half) -> Option<&str> {
        let Told::Merged { bytes, .. } = &self.told else { return None };
        ClusterDiscovery::from_bytes(bytes).ok().map(|discovery| discovery.aggregated(half).text)
    }

    /// Prepares a request for a discovery document; the entity tag that it carries upstream.
    pub fn request_discovery(&mut self, half: Half, random: u32) -> (Sent, Option<String>) {
        self.has_requests = true;
        let effect = Effect::of_request(b"GET", true, false);
        let mut sent = Sent { path: None, discovery: None, to: To::Here, mark: self.peers.mark(), effect };
        if self.told(half).is_some_and(str::is_empty) {
            return (sent, None);
        }
        sent.discovery = Some(half);
        let whom = self.config.local.or_else(|| {
            let fresh = self.view.health_of(half).fresh.without(self.view.avoided);
            fresh.pick(random).filter(|_| self.config.peer_proxying == PeerProxying::Enabled)
        });
        if let (Some(apiserver), None) = (whom, self.config.local) {
            sent.to = To::Peer(apiserver);
        }
        let known = whom.and_then(|apiserver| {
            let (etag, version) = self.peers.document(apiserver, Kind::of(half));
            etag.filter(|_| self.told.holds(apiserver, Kind::of(half), version)).map(str::to_owned)
        });
        (sent, known)
    }

    pub(super) fn discovery_response(
        &mut self,
        shared: &mut SharedData,
        (half, sent): (Half, &Sent),
        asked: Asked,
        reply: &Reply,
        stream: u32,
        now: Duration,
    ) -> Fate {
        if !matches!(reply.status, 200 | 304) || reply.details != VIA_UPSTREAM {
            return Fate::Passes;
        }
        if matches!(self.told, Told::NotYet) {
            let passes = self.plant == Some(Plant::PassWhileUnsynced);
            return if passes { Fate::Passes } else { self.serve(half) };
        }
        let (kind, subject, mark) = (Kind::of(half), Subject::Half(half), sent.mark);
        let apiserver = match asked {
            Asked::One(apiserver) => Some(apiserver),
            Asked::AnyOne | Asked::Stranger => None,
        };
        let mut pending = ApiserverSet::EMPTY;
        if self.plant != Some(Plant::DiscoveryFromLastPoll) {
            let peers = self.view.health_of(half).known.without(apiserver.into_iter().collect());
            for peer in peers.iter().filter(|peer| !self.peers.was_just_asked(*peer, half, now)).collect::<Vec<_>>() {
                if self.peers.insist(peer, subject, mark, now) == Asking::Awaited {
                    pending = pending.union(ApiserverSet::only(peer));
                }
            }
        }
        let mut changed = None;
        if let Some(apiserver) = apiserver {
            let (etag, version) = self.peers.document(apiserver, kind);
            let is_unchanged = reply.status == 304 || (reply.etag.is_some() && reply.etag.as_deref() == etag);
            let is_told = is_unchanged && self.told.holds(apiserver, kind, version);
            if !is_told && self.peers.ask(apiserver, subject, mark, now) == Asking::Awaited {
                changed = Some(apiserver);
                pending = pending.union(ApiserverSet::only(apiserver));
            } else if !is_unchanged {
                self.note_outdated(shared, apiserver, subject, now);
            }
        }
        if pending.is_empty() {
            self.merge(shared, now);
            return self.serve(half);
        }
        self.call_at_once();
        let patient_until = now + PATIENCE_WITH_FAILING;
        self.awaiting.push(Awaiting { stream, changed, pending, patient_until, half, mark });
        Fate::Held
    }

    /// Serves those that have waited long enough for apiservers that fail their polls.
    pub fn lose_patience(&mut self, shared: &SharedData, now: Duration) {
        let fresh = Half::ALL.map(|half| (half, self.view.health_of(half).fresh));
        self.serve_if(shared, now, |awaiting| {
            for (_, fresh) in fresh.iter().filter(|(half, _)| *half == awaiting.half && awaiting.patient_until <= now) {
                let awaited = fresh.union(awaiting.changed.into_iter().collect());
                awaiting.pending = awaiting.pending.intersection(awaited);
            }
        });
    }

    pub(super) fn discovery_answered(&mut self, shared: &mut SharedData, id: QuestionId, word: Word, now: Duration) {
        let mut is_changed = false;
        for awaiting in &mut self.awaiting {
            let is_meant = Subject::Half(awaiting.half) == id.subject
                && awaiting.mark < id.number
                && awaiting.pending.contains(id.apiserver);
            is_changed |= is_meant && awaiting.changed == Some(id.apiserver);
            if is_meant {
                awaiting.pending = awaiting.pending.without(ApiserverSet::only(id.apiserver));
            }
        }
        if word == Word::Failed && is_changed {
            self.note_outdated(shared, id.apiserver, id.subject, now);
        }
        self.serve_if(shared, now, |_| {});
    }

    /// Requests for discovery that have waited and can be answered now.
    pub fn take_over(&mut self) -> Vec<(u32, Fate)> {
        std::mem::take(&mut self.over)
    }

    fn serve_if(&mut self, shared: &SharedData, now: Duration, mut look: impl FnMut(&mut Awaiting)) {
        let is_over = |awaiting: &mut Awaiting| {
            look(awaiting);
            awaiting.pending.is_empty()
        };
        let over: Vec<_> = self.awaiting.extract_if(.., is_over).collect();
        if !over.is_empty() {
            self.merge(shared, now);
        }
        let served: Vec<_> = over.iter().map(|awaiting| (awaiting.stream, self.serve(awaiting.half))).collect();
        self.over.extend(served);
    }

    fn serve(&self, half: Half) -> Fate {
        match self.told(half) {
            None => Fate::Replaced { retry: true, why: "not each apiserver has been tried" },
            Some("") => Fate::Replaced { retry: true, why: "no apiserver has told anything" },
            Some(_) => Fate::Served,
        }
    }

    fn note_outdated(&mut self, shared: &mut SharedData, apiserver: usize, subject: Subject, now: Duration) {
        self.peers.note_outdated(apiserver, subject);
        self.merge(shared, now);
    }

    pub(super) fn publish_discovery(&mut self, shared: &mut SharedData, now: Duration) {
        if self.peers.has_bodies() {
            let seen = shared.documents();
            let published = seen.value.as_deref().map(Documents::from_bytes).and_then(Result::ok).unwrap_or_default();
            let bodies = self.peers.bodies(names(&self.config), &published);
            let bytes = Documents::of(bodies.into_iter()).to_bytes();
            if bytes.is_ok_and(|bytes| shared.write_documents(bytes, &seen)) {
                self.peers.forget_bodies();
            }
        }
        self.merge(shared, now);
        if std::mem::take(&mut self.has_news_to_tell)
            && let Told::Merged { bytes, .. } = &self.told
        {
            shared.discovery = Some(bytes.to_vec());
        }
    }

    pub(super) fn adopt_discovery(&mut self, shared: &SharedData, now: Duration) {
        match self.published_discovery(shared) {
            Some(told) => {
                self.told = told;
                self.has_news_to_tell = false;
            }
            None => self.merge(shared, now),
        }
    }

    fn published_discovery(&self, shared: &SharedData) -> Option<Told> {
        let bytes = shared.discovery.clone()?;
        let stamp = ClusterDiscovery::from_bytes(&bytes).ok()?.stamp;
        let ours = self.peers.stamp(self.candidate.poll_set).filter(|_| !self.peers.is_outdated())?;
        stamp.covers(&ours).then(|| Told::Merged { bytes: Rc::new(bytes), stamp })
    }

    pub(super) fn merge(&mut self, shared: &SharedData, now: Duration) {
        let is_current = |peers: &Peers, told: &Told| {
            peers.stamp(self.candidate.poll_set).is_none_or(|stamp| told.stamp() == Some(&stamp))
        };
        let is_to_verify = self.leads() && self.verified + self.config.discovery.refresh_interval <= now;
        if is_to_verify {
            self.verified = now;
        }
        if is_current(&self.peers, &self.told) && !is_to_verify {
            return;
        }
        let published = shared.documents().value.unwrap_or_default();
        let published = Documents::from_bytes(&published).unwrap_or_default();
        self.peers.note_missing_bodies(names(&self.config), &published);
        if is_current(&self.peers, &self.told) {
            return;
        }
        let Some(stamp) = self.peers.stamp(self.candidate.poll_set) else { return };
        let documents = Documents::of(self.peers.bodies(names(&self.config), &published).into_iter());
        let sources = self.peers.cluster_sources(names(&self.config), &documents, stamp.clone());
        let bytes =
            cluster_discovery::make(&sources).unwrap_or_else(|error| panic!("believed, yet not merged: {error}"));
        self.told = Told::Merged { bytes: Rc::new(bytes), stamp };
        self.has_news_to_tell = true;
    }
}
