//! What clients are told in discovery, compared with the truth.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use mixed_version_proxy::discovery::document::Half;

use super::clients::Outcome;
use super::{Sim, millis, tell};
use crate::Broken;
use crate::catalogue::{self, TYPES, TypeId};
use crate::documents::{self, Listed};
use crate::streams::{Origin, Reply, Stream};
use crate::world::Polled;

/// Between two questions to one apiserver: a document may be so much older than the request for it.
pub(super) const SPACING: Duration = millis(100);

/// Most documents that are remembered.
const MOST_READ: usize = 200;

impl Sim {
    /// An apiserver answers a client's request for a discovery document.
    pub(super) fn tells_client(&mut self, stream: u32, half: Half) -> Reply {
        let refused = || Reply::by_apiserver(503, 200, Origin::Refused);
        let Some((apiserver, if_none_match)) =
            self.streams.get(&stream).map(|stream| (stream.apiserver, stream.if_none_match.clone()))
        else {
            return refused();
        };
        let answer = self.tells(apiserver, Polled::half(half), if_none_match.as_deref());
        let origin = if answer.says.is_some() { Origin::Done } else { Origin::Refused };
        let length = answer.body.len() as u32;
        let is_of_half = |kind: &TypeId| Half::of_group(TYPES[*kind].group.as_bytes()) == half;
        let says = answer.says.filter(|_| answer.status == 200);
        let says = says.map(|says| Rc::new(says.iter().copied().filter(is_of_half).collect()));
        let retry_after = answer.retry_after.is_some();
        Reply { etag: answer.etag, says, retry_after, ..Reply::by_apiserver(answer.status, length, origin) }
    }

    /// The merged document that a stream gets now.
    pub(super) fn served(&mut self, number: u32) -> Option<Rc<Listed>> {
        let stream = self.streams.get(&number)?;
        let half = stream.sent.discovery?;
        let text = self.roots.get(&stream.root)?.root.told(half)?;
        let listed = match self.read.get(text) {
            Some(listed) => Rc::clone(listed),
            None => {
                let (text, listed) = (text.to_owned(), Rc::new(documents::read(text)));
                if self.read.len() >= MOST_READ {
                    self.read.clear();
                }
                self.read.insert(text, Rc::clone(&listed));
                listed
            }
        };
        self.summary.documents += 1;
        // One mark is enough, and only this half has it.
        self.summary.marked += u64::from(listed.is_incomplete());
        tell!(
            self,
            "stream {number}: {} types, incomplete: {} {:?} {:?}",
            listed.types.len(),
            listed.is_incomplete(),
            listed.types,
            listed.stale
        );
        Some(listed)
    }

    /// Compares a document with the truth. Returns the types that it lacks because their apiservers do not answer the
    /// questions of this Envoy: their last documents count, and nothing better can be known.
    pub(super) fn check_document(&mut self, stream: &Stream, half: Half, listed: &Listed) -> BTreeSet<TypeId> {
        self.summary.checks += 1;
        let mut unanswered = BTreeSet::new();
        let Some(placed) = self.roots.get(&stream.root) else { return unanswered };
        // Where not one apiserver lets itself be polled, clients see each one's own discovery.
        if listed.is_incomplete() || stream.sent.discovery.is_none() {
            return (0..TYPES.len()).collect();
        }
        let clock = self.clock(stream.envoy);
        let (config, ledger) = (&placed.root.config, &self.envoys[stream.envoy].ledger);
        let is_missing = |kind: &TypeId| {
            let names = &TYPES[*kind];
            names.definition.is_none()
                && Half::of_group(names.group.as_bytes()) == half
                && !listed.types.contains(kind)
                && !listed.stale.contains(&(names.group.to_owned(), names.version.to_owned()))
        };
        let from = stream.sent_at.saturating_sub(SPACING);
        // Kubernetes' own merge lets what one calls current win over what another calls stale.
        let is_stale =
            |kind| config.apiservers.iter().any(|configured| ledger.may_be_stale(&configured.discovery_cluster, kind));
        let mut lie = None;
        for kind in (0..TYPES.len()).filter(is_missing) {
            if is_stale(kind) {
                unanswered.insert(kind);
                continue;
            }
            for (apiserver, configured) in placed.root.apiservers.iter().zip(&config.apiservers) {
                let server = &self.apiservers[*apiserver];
                let cluster = &configured.discovery_cluster;
                let has_answered = configured.cluster == stream.cluster;
                let may_be_mute = !has_answered
                    && (self.is_asking(stream.envoy, *apiserver, Polled::half(half))
                        || ledger.has_failed_since(cluster, Polled::half(half), from));
                let listed_last = ledger.listed_last(cluster, kind, placed.root.ticked_at);
                let story = if listed_last.is_some_and(|listed| listed + config.discovery.forget_after > clock) {
                    format!("cp-{apiserver} listed it {:?} ago", listed_last.map(|listed| clock - listed))
                } else if !server.had_throughout(kind, from, self.now) {
                    continue;
                } else if may_be_mute {
                    unanswered.insert(kind);
                    continue;
                } else {
                    format!("cp-{apiserver} serves it")
                };
                let (envoy, root, label) = (stream.envoy, stream.root, TYPES[kind].label());
                lie = lie.or(Some(format!("envoy {envoy} root {root} does not list {label}: {story}")));
            }
        }
        if let Some(story) = lie.filter(|_| self.judges_documents()) {
            self.broke(Broken::IncompletePassedForComplete, story);
        }
        self.summary.unanswered += u64::from(!unanswered.is_empty());
        unanswered
    }

    /// After the faults: the document lists what is served, and says that this is all.
    pub(super) fn check_discovery_probe(&mut self, stream: &Stream, half: Half, outcome: &Outcome) {
        let Some(placed) = self.roots.get(&stream.root) else { return };
        let members = placed.root.apiservers.iter();
        let releases = members.filter_map(|member| self.apiservers[*member].release());
        let served = releases.flat_map(|release| catalogue::served(release, self.etcd.definitions));
        let is_of_half = |kind: &TypeId| Half::of_group(TYPES[*kind].group.as_bytes()) == half;
        let truth: BTreeSet<TypeId> = served.filter(is_of_half).collect();
        let is_right = match outcome {
            Outcome::Discovered(listed) => listed.types == truth && listed.stale.is_empty(),
            Outcome::Cut => placed.until.is_some(),
            Outcome::Answered(_) | Outcome::Unavailable { .. } => false,
        };
        if !is_right {
            let (envoy, root) = (stream.envoy, stream.root);
            let story = format!("envoy {envoy} root {root}: {half:?} is {outcome:?}, really {truth:?}");
            self.broke(Broken::StaysWrong, story);
        }
    }
}
