//! The truth: etcd and the apiserver processes. Knows nothing of the filter.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use mixed_version_proxy::discovery::document::Half;

use crate::catalogue::{self, DEFINITIONS, TYPES, TypeId};
use crate::documents::{self, Document};

/// An object's identity, never used twice.
pub type Uid = u64;

/// An object in etcd. Its versions are ways to look at it; it is stored once.
#[derive(Debug, Clone)]
pub struct Object {
    /// Identity.
    pub uid: Uid,
    /// The object that it depends on: type and name under which the owner reference finds it, and its identity.
    pub owner: Option<(TypeId, String, Uid)>,
}

/// All objects by group, resource and name.
#[derive(Debug, Default)]
pub struct Etcd {
    objects: BTreeMap<(&'static str, &'static str), BTreeMap<String, Object>>,
    last_uid: Uid,
    /// Which custom resources are defined.
    pub definitions: [bool; DEFINITIONS],
}

impl Etcd {
    /// Stores a new object; `None` if the name is taken.
    pub fn create(&mut self, kind: TypeId, name: &str, owner: Option<(TypeId, String, Uid)>) -> Option<Uid> {
        let objects = self.objects.entry((TYPES[kind].group, TYPES[kind].resource)).or_default();
        if objects.contains_key(name) {
            return None;
        }
        self.last_uid += 1;
        objects.insert(name.to_owned(), Object { uid: self.last_uid, owner });
        Some(self.last_uid)
    }

    /// The object of this name.
    pub fn get(&self, kind: TypeId, name: &str) -> Option<&Object> {
        self.objects.get(&(TYPES[kind].group, TYPES[kind].resource))?.get(name)
    }

    /// Removes the object of this name.
    pub fn delete(&mut self, kind: TypeId, name: &str) -> Option<Object> {
        self.objects.get_mut(&(TYPES[kind].group, TYPES[kind].resource))?.remove(name)
    }

    /// Removes all objects of a type whose names begin like this.
    pub fn delete_all(&mut self, kind: TypeId, prefix: &str) {
        if let Some(objects) = self.objects.get_mut(&(TYPES[kind].group, TYPES[kind].resource)) {
            objects.retain(|name, _| !name.starts_with(prefix));
        }
    }

    /// Removes or restores a definition; its objects go with it.
    pub fn define(&mut self, definition: usize, is_defined: bool) {
        self.definitions[definition] = is_defined;
        if !is_defined {
            for kind in TYPES.iter().filter(|kind| kind.definition == Some(definition)) {
                self.objects.remove(&(kind.group, kind.resource));
            }
        }
    }

    /// Names of a type's objects.
    pub fn names(&self, kind: TypeId) -> Vec<&String> {
        self.objects
            .get(&(TYPES[kind].group, TYPES[kind].resource))
            .map(|objects| objects.keys().collect())
            .unwrap_or_default()
    }

    /// Whether this very object is still there.
    pub fn lives(&self, kind: TypeId, name: &str, uid: Uid) -> bool {
        self.get(kind, name).is_some_and(|object| object.uid == uid)
    }
}

/// What an apiserver answers to discovery instead of the truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Garbage {
    /// Status 403.
    Forbidden,
    /// Status 429 with `Retry-After`.
    TooMany,
    /// Status 500.
    Error,
    /// A document cut in the middle.
    Truncated,
    /// A login page.
    Html,
    /// A `Status` under a 200.
    Status,
    /// A list without any group.
    Empty,
}

/// All kinds of [`Garbage`].
pub const GARBAGE: [Garbage; 7] = [
    Garbage::Forbidden,
    Garbage::TooMany,
    Garbage::Error,
    Garbage::Truncated,
    Garbage::Html,
    Garbage::Status,
    Garbage::Empty,
];

/// A group-version that an apiserver calls stale: it could not find out just now what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stale {
    /// A type of the group-version.
    pub kind: TypeId,
    /// No resource is listed in it; else those of before.
    pub is_empty: bool,
}

impl Stale {
    /// Whether a type is in the group-version.
    pub fn concerns(self, kind: TypeId) -> bool {
        let (this, other) = (&TYPES[self.kind], &TYPES[kind]);
        (this.group, this.version) == (other.group, other.version)
    }
}

/// One apiserver: a place where processes of different releases run one after the other.
#[derive(Debug, Default)]
pub struct Apiserver {
    /// When which release began to listen.
    pub processes: Vec<(Duration, usize)>,
    /// Whether the last of those processes runs.
    pub is_up: bool,
    /// The last process was told to stop and did so in order.
    pub stopped_cleanly: bool,
    /// Accepts and never answers until then.
    pub hangs_until: Duration,
    /// Answers late until then.
    pub slow_until: Duration,
    /// How late.
    pub slow_by: Duration,
    /// Answers discovery with garbage until then.
    pub garbage_until: Duration,
    /// Which.
    pub garbage: Option<Garbage>,
    /// Calls a group-version stale until then.
    pub stale_until: Duration,
    /// Which.
    pub stale: Option<Stale>,
    /// Raised with every stop and start: whatever was on its way is lost.
    pub epoch: u64,
}

impl Apiserver {
    /// The release that runs or ran last.
    pub fn release(&self) -> Option<usize> {
        self.processes.last().map(|(_, release)| *release)
    }

    /// Whether each process that ran (or was the last to have run) at some time between the two moments had the type.
    /// A dead one counts: nobody has said that it is gone.
    pub fn had_throughout(&self, kind: TypeId, from: Duration, to: Duration) -> bool {
        let first = self.processes.iter().rposition(|(since, _)| *since <= from);
        let Some(first) = first else { return false };
        let overlapping = self.processes[first..].iter().take_while(|(since, _)| *since <= to);
        overlapping.map(|(_, release)| release).all(|release| TYPES[kind].is_built_into(*release))
    }
}

/// An answer to a poll.
#[derive(Debug, Clone)]
pub struct PollAnswer {
    /// Status; 0: the call was reset.
    pub status: u16,
    /// Header `content-type`.
    pub content_type: &'static str,
    /// Header `etag`.
    pub etag: Option<String>,
    /// Header `retry-after`.
    pub retry_after: Option<&'static str>,
    /// Body.
    pub body: Rc<[u8]>,
    /// What a believable answer (200 or 304) says.
    pub says: Option<Rc<BTreeSet<TypeId>>>,
    /// Of what it says nothing, beyond what it lists.
    pub stale: Option<Stale>,
}

impl PollAnswer {
    /// An answer without a body, by Envoy or by an apiserver that refuses.
    pub fn bare(status: u16) -> Self {
        let (content_type, body) = ("text/plain", Vec::new().into());
        Self { status, content_type, etag: None, retry_after: None, body, says: None, stale: None }
    }
}

/// What is polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Polled {
    /// `/api`.
    Core,
    /// `/apis`.
    Groups,
    /// APIServices.
    ApiServices,
    /// `/openapi/v3`.
    OpenApi,
}

impl Polled {
    /// The discovery document of a half.
    pub const fn half(half: Half) -> Self {
        match half {
            Half::Core => Self::Core,
            Half::Groups => Self::Groups,
        }
    }

    /// Documents of other kinds have no entity tag.
    const fn is_discovery(self) -> bool {
        matches!(self, Self::Core | Self::Groups)
    }
}

const V2: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// Rendered documents: there are few different ones.
type Rendered = BTreeMap<(usize, [bool; DEFINITIONS], Polled, Option<Stale>), (Document, Rc<BTreeSet<TypeId>>)>;

/// Renders what apiservers tell; remembers what it has rendered.
#[derive(Debug, Default)]
pub struct Renderer(Rendered);

impl Renderer {
    /// The answer of an apiserver of this release.
    pub fn answer(
        &mut self,
        release: usize,
        definitions: [bool; DEFINITIONS],
        polled: Polled,
        stale: Option<Stale>,
        if_none_match: Option<&str>,
    ) -> PollAnswer {
        let stale = stale.filter(|_| polled.is_discovery());
        let (document, says) = self.0.entry((release, definitions, polled, stale)).or_insert_with(|| {
            let mut types = catalogue::served(release, definitions);
            types.retain(|kind| !stale.is_some_and(|stale| stale.is_empty && stale.concerns(*kind)));
            let document = match polled {
                Polled::Core => documents::discovery(&types, true, stale),
                Polled::Groups => documents::discovery(&types, false, stale),
                Polled::ApiServices => documents::api_services(&types),
                Polled::OpenApi => documents::open_api(&types),
            };
            (document, Rc::new(types))
        });
        let says = Some(Rc::clone(says));
        let etag = polled.is_discovery().then(|| document.etag.clone());
        if etag.is_some() && if_none_match == etag.as_deref() {
            return PollAnswer { etag, says, stale, ..PollAnswer::bare(304) };
        }
        let content_type = if polled.is_discovery() { V2 } else { "application/json" };
        PollAnswer { status: 200, content_type, etag, retry_after: None, body: Rc::clone(&document.body), says, stale }
    }

    /// An answer that must not be believed.
    pub fn garbage(&mut self, garbage: Garbage, release: usize, polled: Polled) -> PollAnswer {
        let ok = |content_type, body: &[u8]| PollAnswer { content_type, body: body.into(), ..PollAnswer::bare(200) };
        match garbage {
            Garbage::Forbidden => PollAnswer::bare(403),
            Garbage::TooMany => PollAnswer { retry_after: Some("1"), ..PollAnswer::bare(429) },
            Garbage::Error => PollAnswer::bare(500),
            Garbage::Truncated => {
                let whole = self.answer(release, [false; DEFINITIONS], polled, None, None);
                ok(V2, &whole.body[..whole.body.len() / 2])
            }
            Garbage::Html => ok("text/html", b"<html>please log in</html>"),
            Garbage::Status => ok("application/json", br#"{"kind":"Status","apiVersion":"v1","status":"Failure"}"#),
            Garbage::Empty => {
                ok(V2, br#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[]}"#)
            }
        }
    }
}
