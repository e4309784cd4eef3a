//! The fuzz targets: any bytes in, no panic, and a property that always holds.
//!
//! Several values in one input stand between NUL bytes, which none of them has a use for: so seeds are plain files, and
//! what a fuzzer changes stays in its place.

use std::time::Duration;

use mixed_version_proxy::config::Config;
use mixed_version_proxy::discovery::document::{self, Document, Half};
use mixed_version_proxy::discovery::merge::{Merged, Sources, merge as merged};
use mixed_version_proxy::discovery::negotiate::{is_unchanged, takes_json, wanted};
use mixed_version_proxy::discovery::open_api::{self, Root};
use mixed_version_proxy::discovery::{api_services, legacy};
use mixed_version_proxy::guard::looks_like_missing_route;
use mixed_version_proxy::identity::Identity;
use mixed_version_proxy::local_reply::UpstreamFailure;
use mixed_version_proxy::peers::backoff;
use mixed_version_proxy::peers::cluster_discovery::{self, ClusterDiscovery, Known, Stamp};
use mixed_version_proxy::peers::documents::{Documents, Kind};
use mixed_version_proxy::peers::exclusions::Exclusions;
use mixed_version_proxy::peers::refresh::{Answer, Change, Peers, PollError, QuestionId, Role, Settings, Subject};
use mixed_version_proxy::peers::snapshot::Snapshot;
use mixed_version_proxy::peers::table::{ApiserverSet, Context, Table, View};
use mixed_version_proxy::target::{DecodedPath, Resource, Target, without_query};
use serde_json::value::RawValue;

/// A target.
pub type TargetFn = fn(&[u8]);

/// All targets by their names.
pub const ALL: [(&str, TargetFn); 9] = [
    ("path", path),
    ("document", document),
    ("merge", merge),
    ("open_api", open_api),
    ("subject", subject),
    ("config", config),
    ("shared_data", shared_data),
    ("headers", headers),
    ("refresh", refresh),
];

fn values(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    data.split(|byte| *byte == 0)
}

/// The flags that an input begins with, and the texts behind them.
fn flags_and_texts(data: &[u8], most: usize) -> Option<(u8, Vec<&str>)> {
    let (flags, rest) = data.split_first()?;
    let texts: Vec<_> = values(rest).take(most).filter_map(|text| document::text(text).ok()).collect();
    Some((*flags, texts))
}

/// Messages go into logs, where a second line would be somebody else's.
#[track_caller]
fn assert_one_line(message: &dyn ToString) {
    let message = message.to_string();
    assert!(!message.contains(['\n', '\r']), "more than a line: {message:?}");
}

#[track_caller]
fn assert_json(text: &str) {
    assert!(serde_json::from_str::<&RawValue>(text).is_ok(), "no JSON: {text}");
}

/// Request targets. The query does not matter, and an escaped byte is that byte.
pub fn path(data: &[u8]) {
    let plain = without_query(data.to_vec());
    let (decoded, decoded_plain) = (DecodedPath::new(data), DecodedPath::new(&plain));
    assert_eq!(decoded.is_some(), decoded_plain.is_some());
    let (Some(decoded), Some(decoded_plain)) = (decoded, decoded_plain) else { return };
    let target = decoded.target();
    assert_eq!(target, decoded_plain.target());
    if let Target::Resource(Resource { group, version, resource, subresource, namespace, name, .. }) = target {
        assert!(!version.is_empty() && !resource.is_empty());
        assert!([group, version, resource, subresource, namespace, name].iter().all(|part| !part.contains(&b'/')));
    }
    if plain.first() == Some(&b'/') && !plain.contains(&b'%') && plain.len() < 2000 {
        let escaped = plain.iter().skip(1).map(|byte| format!("%{byte:02x}")).collect::<String>();
        let escaped = format!("/{escaped}");
        let decoded = DecodedPath::new(escaped.as_bytes());
        assert_eq!(decoded.as_ref().map(DecodedPath::target), Some(target));
    }
}

/// Answers to polls. What a document lists is found in the table that is made from it.
pub fn document(data: &[u8]) {
    if let Err(error) = api_services::not_built_in(data) {
        assert_one_line(&error);
    }
    let text = match document::text(data) {
        Ok(text) => text,
        Err(error) => return assert_one_line(&error),
    };
    for half in Half::ALL {
        let document = match Document::parse(half, b"application/json; charset=utf-8", text) {
            Ok(document) => document,
            Err(error) => {
                assert_one_line(&error);
                continue;
            }
        };
        let context = Context { exclusions: &Exclusions::default(), now: Duration::ZERO };
        let table = Table::default().with_document(0, half, &document, context);
        for group_version in &document.group_versions {
            let (group, version) = (group_version.group.as_bytes(), group_version.version.as_bytes());
            assert_eq!(Half::of_group(group), half);
            for listed in &group_version.resources {
                let (resource, no_name, is_proxied) = (listed.name.as_bytes(), &b""[..], false);
                for subresource in [""].into_iter().chain(listed.subresources.iter().map(String::as_str)) {
                    let subresource = subresource.as_bytes();
                    let asked = Resource {
                        group,
                        version,
                        resource,
                        subresource,
                        namespace: no_name,
                        name: no_name,
                        is_proxied,
                    };
                    assert!(table.look_up(&asked).servers.contains(0), "{asked:?} is not found");
                }
            }
        }
    }
}

/// One to three documents as one. A merge merged again is equal, and all that is made from it can be read.
pub fn merge(data: &[u8]) {
    let Some((flags, texts)) = flags_and_texts(data, 3) else { return };
    let half = if flags & 1 == 0 { Half::Groups } else { Half::Core };
    let local = (flags & 2 != 0).then_some(usize::from(flags >> 6));
    let is_local_matter = |group: &str, version: &str| flags & 4 != 0 && group.len() > version.len();
    // The mark is a group with a name.
    let is_incomplete = flags & 8 != 0 && half == Half::Groups;
    let sources = Sources { half, documents: &texts, local, is_local_matter: &is_local_matter, is_incomplete };
    match merged(&sources) {
        Ok(made) => {
            let text = made.to_text();
            let again = Sources { documents: &[&text], local: None, is_incomplete: false, ..sources };
            let again = merged(&again).expect("a merge is a document");
            assert_eq!(again.to_text(), text);
            assert_eq!(again.equals, Some(0));
            assert_legacy_is_json(&made);
        }
        Err(error) => assert_one_line(&error),
    }
    cluster(flags, &texts);
}

fn assert_legacy_is_json(made: &Merged<'_>) {
    assert_json(&legacy::group_list(&made.groups));
    assert_json(&legacy::versions(&made.groups));
    for group in &made.groups {
        assert_json(&legacy::group(group));
        for version in &group.versions {
            let resources = version.resources.as_deref().unwrap_or("[]");
            match legacy::resource_list(&group.name, &version.name, resources) {
                Ok(list) => assert_json(&list),
                Err(error) => assert_one_line(&error),
            }
        }
    }
}

/// Discovery of the whole cluster: what was written is read back, and what is read is JSON.
fn cluster(flags: u8, texts: &[&str]) {
    let exclusions = Exclusions::default();
    let context = Context { exclusions: &exclusions, now: Duration::ZERO };
    let mut table = Table::default();
    for (apiserver, text) in texts.iter().enumerate() {
        if let Ok(document) = Document::parse(Half::Groups, b"application/json", text) {
            table = table.with_document(apiserver, Half::Groups, &document, context);
        }
    }
    let names = ["cp-b", "cp-a", "cp-c"];
    let known = |(name, text)| Known { name, documents: [Some(text); 3], etags: [Some("\"tag\""), None] };
    let stamp = Stamp { poll_set: u64::from(flags), content: 7, versions: vec![[Some(Duration::MAX), None, None]] };
    let sources = cluster_discovery::Sources {
        apiservers: names.into_iter().zip(texts.iter().copied()).map(known).collect(),
        local: (flags & 2 != 0).then_some(usize::from(flags >> 6)),
        exclusions: &exclusions,
        table: &table,
        is_incomplete: flags & 8 != 0,
        stamp: stamp.clone(),
    };
    let bytes = match cluster_discovery::make(&sources) {
        Ok(bytes) => bytes,
        Err(error) => return assert_one_line(&error),
    };
    let read = ClusterDiscovery::from_bytes(&bytes).expect("what was written can be read");
    assert_eq!(read.stamp, stamp);
    let bodies = Half::ALL.into_iter().flat_map(|half| [Some(read.aggregated(half).text), read.legacy(half)]);
    bodies.chain([read.open_api()]).flatten().filter(|body| !body.is_empty()).for_each(assert_json);
}

/// Roots of OpenAPI v3. A merge is a root, and merged again it is equal.
pub fn open_api(data: &[u8]) {
    let Some((flags, texts)) = flags_and_texts(data, 3) else { return };
    let mut roots = Vec::new();
    for (apiserver, text) in texts.into_iter().enumerate() {
        match Root::parse(text) {
            Ok(root) => roots.push((apiserver, root)),
            Err(error) => assert_one_line(&error),
        }
    }
    let given: Vec<_> = roots.iter().map(|(apiserver, _)| *apiserver).collect();
    let local = (flags & 1 != 0).then_some(usize::from(flags >> 6));
    let rank = |key: &str, apiserver: usize| {
        let _read = open_api::group_version(key);
        let number = key.len().wrapping_mul(31).wrapping_add(apiserver.wrapping_mul(usize::from(flags)));
        (flags & 2 == 0 || !number.is_multiple_of(3)).then_some(number & 7)
    };
    let merged = open_api::merge(roots, local, rank);
    for (key, owners) in &merged.elsewhere {
        assert!(!owners.is_empty() && owners.iter().all(|owner| given.contains(owner)), "{key} is nowhere");
        assert!(local.is_none() || owners.first().copied() != local, "{key} is here");
    }
    let again =
        open_api::merge(vec![(0, Root::parse(&merged.text).expect("a merge is a root"))], Some(0), |_, _| Some(0));
    assert_eq!((again.text, again.elsewhere), (merged.text, vec![]));
}

/// Subjects of certificates. An identity travels as it is, and is read back from another writing of it.
pub fn subject(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let defaults = Config::parse(br#"{"apiservers": [{"name": "cp-1", "cluster": "cp-1"}]}"#).expect("a configuration");
    let headers = defaults.identity.headers;
    let may_hold = headers.may_hold(text);
    assert_eq!(may_hold, headers.may_hold(&text.to_ascii_uppercase()));
    assert_eq!(may_hold, headers.may_hold(&text.replace('-', "_")));
    assert!(headers.may_hold(&format!("X-Remote_Extra-{text}")));
    let identity = match Identity::of_subject(text) {
        Ok(Some(identity)) => identity,
        Ok(None) => return,
        Err(error) => return assert_one_line(&error),
    };
    for value in [&identity.user].into_iter().chain(&identity.groups).chain(&identity.uid) {
        assert!(!value.is_empty() && value.trim_matches([' ', '\t']) == value, "{value:?}");
        assert!(!value.bytes().any(|byte| byte != b'\t' && byte.is_ascii_control()), "{value:?}");
    }
    let escaped = |kind: &str, value: &str| {
        let value: String = value.bytes().map(|byte| format!("\\{byte:02X}")).collect();
        format!("{kind}={value}")
    };
    let groups = identity.groups.iter().rev().map(|group| escaped("O", group));
    let written: Vec<_> = [escaped("CN", &identity.user)].into_iter().chain(groups).collect();
    let read = Identity::of_subject(&written.join(","));
    assert_eq!(read, Ok(Some(Identity { uid: None, ..identity })));
}

/// Configurations, as JSON text or as a serialized `Struct`.
pub fn config(data: &[u8]) {
    match Config::parse(data) {
        Ok(config) => {
            let count = config.apiservers.len();
            assert!((1..=64).contains(&count) && config.local.is_none_or(|local| local < count));
            assert!((1..=300).contains(&config.retry_after_seconds));
            let names: std::collections::HashSet<_> = config.apiservers.iter().map(|known| &known.name).collect();
            assert_eq!(names.len(), count);
            let peers = Peers::new(Settings::from(&config), Exclusions::new(&config.exclusions.group_versions));
            assert_eq!(peers.mark(), 0);
        }
        Err(error) => {
            assert_one_line(&error);
            assert!(error.to_string().contains(": "), "{error}");
        }
    }
}

/// Records in Envoy's shared data. What is read can be written and read again, and adopting twice changes nothing.
pub fn shared_data(data: &[u8]) {
    if let Ok(documents) = Documents::from_bytes(data) {
        let bytes = documents.to_bytes().expect("it is small");
        assert_eq!(Documents::from_bytes(&bytes).as_ref(), Ok(&documents));
        let _found_or_not = Kind::ALL.map(|kind| documents.find("cp-0", "cp-0-poll", kind));
    }
    if let Ok(discovery) = ClusterDiscovery::from_bytes(data) {
        for half in Half::ALL {
            let _texts = (discovery.aggregated(half), discovery.legacy(half));
        }
        let _others = (discovery.group("apps"), discovery.group_version("apps", "v1"), discovery.open_api());
        assert!(discovery.schema_owners("apis/apps/v1").count() <= data.len());
    }
    let Ok(snapshot) = Snapshot::from_bytes(data) else { return };
    let bytes = snapshot.to_bytes().expect("it is small");
    assert_eq!(Snapshot::from_bytes(&bytes).as_ref(), Ok(&snapshot));
    let mut peers = Peers::new(settings(0xff), Exclusions::default());
    let now = Duration::from_secs(1_000_000);
    for names in [names_in(&snapshot), NAMES.to_vec()] {
        peers.adopt(&snapshot, names.iter().copied(), now);
        assert!(!peers.adopt(&snapshot, names.iter().copied(), now), "adopted twice");
        assert_snapshot_is_read_back(&peers, &names);
    }
    peers.due(now, Role::Leader);
    peers.forget(Duration::MAX);
    peers.due(Duration::MAX, Role::Stray);
}

/// The apiservers of the tests.
pub const NAMES: [(&str, &str); 4] =
    [("cp-0", "cp-0-poll"), ("cp-1", "cp-1-poll"), ("cp-2", "cp-2-poll"), ("cp-3", "cp-3-poll")];

fn names_in<'s>(snapshot: &Snapshot<'s>) -> Vec<(&'s str, &'s str)> {
    snapshot.apiservers.iter().take(NAMES.len()).map(|known| (known.name, known.discovery_cluster)).collect()
}

#[track_caller]
fn assert_snapshot_is_read_back(peers: &Peers, names: &[(&str, &str)]) {
    let snapshot = peers.snapshot(names.iter().copied());
    let bytes = snapshot.to_bytes().expect("it is small");
    assert_eq!(Snapshot::from_bytes(&bytes), Ok(snapshot));
}

fn settings(flags: u8) -> Settings {
    Settings {
        apiservers: NAMES.len(),
        local: (flags & 1 != 0).then_some(0),
        interval: Duration::from_secs(5),
        timeout: Duration::from_secs(3),
        forget_after: Duration::from_secs(60),
        max_document_bytes: if flags & 2 != 0 { 1 << 20 } else { 1 << 10 },
        api_services: flags & 4 != 0,
        grace_period: Duration::from_secs(60),
        merges: flags & 8 != 0,
    }
}

/// Headers of requests and answers. A tag matches itself, and no `Retry-After` makes us blind for long.
pub fn headers(data: &[u8]) {
    let mut values = values(data);
    let (first, second, third) = (values.next().unwrap_or_default(), values.next(), values.next());
    if let Some(asked_for) = backoff::retry_after(first) {
        let wait = backoff::wait(Duration::from_secs(5), 1, Some(asked_for), 50);
        assert!((Duration::from_millis(500)..=Duration::from_secs(30)).contains(&wait));
    }
    for half in Half::ALL {
        let answers = [false, true].map(|has_slash| wanted(half, Some(first), has_slash));
        assert!(half == Half::Groups || answers[0] == answers[1], "a slash counts for /apis/ alone");
    }
    let with_json = [first, b",application/json"].concat();
    assert!(std::str::from_utf8(first).is_err() || takes_json(Some(&with_json)));
    let _either = takes_json(Some(first));
    if let Some(etag) = second.and_then(|etag| std::str::from_utf8(etag).ok()) {
        let _either = is_unchanged(first, etag);
        let quoted = format!("\"{}\"", etag.replace('"', ""));
        for own in [quoted.clone(), format!("W/{quoted}"), format!("\"x\" , {quoted}")] {
            assert!(is_unchanged(own.as_bytes(), &quoted), "{own}");
        }
    }
    let _either = looks_like_missing_route(Some(first), second, third);
    let failure = UpstreamFailure::from_details(first);
    let reset = [b"upstream_reset_before_response_started{", first].concat();
    assert!(failure.is_some() || UpstreamFailure::from_details(&reset).is_some(), "a reset is always a failure");
}

/// Everything that can happen to [`Peers`], in any order. The first value tells what happens; the others are what comes
/// in from outside.
pub fn refresh(data: &[u8]) {
    let mut values = values(data);
    let steps = values.next().unwrap_or_default();
    let Some((flags, steps)) = steps.split_first() else { return };
    let mut world = World {
        peers: Peers::new(settings(*flags), Exclusions::default()),
        other: Peers::new(settings(*flags), Exclusions::default()),
        now: Duration::from_secs(1000),
        asked: Vec::new(),
        bodies: values.take(32).collect(),
        is_forged: false,
    };
    // Enough for every turn that matters, and an input that a person can read.
    for step in steps.chunks_exact(2).take(200) {
        world.step(step[0], step[1]);
    }
    assert_snapshot_is_read_back(&world.peers, &NAMES);
}

struct World<'d> {
    peers: Peers,
    /// Another worker's.
    other: Peers,
    now: Duration,
    asked: Vec<QuestionId>,
    bodies: Vec<&'d [u8]>,
    /// A snapshot was adopted that no worker has made.
    is_forged: bool,
}

impl<'d> World<'d> {
    fn body(&self, number: u8) -> &'d [u8] {
        let place = usize::from(number).checked_rem(self.bodies.len());
        place.and_then(|place| self.bodies.get(place).copied()).unwrap_or_default()
    }

    fn step(&mut self, what: u8, how: u8) {
        let (now, number, before) = (self.now, usize::from(how), self.peers.view());
        let is_told = match what % 16 {
            0 => {
                self.now = now.saturating_add(Duration::from_millis(u64::from(how)));
                false
            }
            1 => {
                self.now = now.saturating_add(Duration::from_millis(500).saturating_mul(u32::from(how)));
                false
            }
            2 | 3 => {
                let mark = self.peers.mark();
                let role = [Role::Leader, Role::Follower, Role::Stray][number % 3];
                let ids: Vec<_> = self.peers.due(now, role).into_iter().map(|question| question.id).collect();
                assert!(ids.iter().all(|id| id.number > mark) && ids.is_sorted_by_key(|id| id.number));
                self.asked.extend(ids);
                false
            }
            4..=7 => self.answer(what, how),
            8 => {
                let subject =
                    [Subject::Half(Half::Core), Subject::Half(Half::Groups), Subject::OpenApi, Subject::ApiServices];
                let mark = self.peers.mark();
                // One more than there are.
                self.peers.ask(number % 5, subject[number / 5 % 4], mark, now);
                false
            }
            9 => {
                self.peers.hurry(number % 5, now);
                self.peers.note_request(now);
                false
            }
            10 => self.peers.avoid(number % 5),
            11 => self.peers.forget(now),
            12 => {
                let mut is_another = false;
                for id in self.peers.lost(now) {
                    is_another |= self.peers.answered(id, Answer::Failed(PollError::Lost), now, 50).view;
                }
                is_another
            }
            13 => self.adopt(how),
            14 => {
                std::mem::swap(&mut self.peers, &mut self.other);
                self.asked.clear();
                true
            }
            _ => {
                self.publish();
                false
            }
        };
        let after = self.peers.view();
        assert!(is_told || is_same(&before, &after), "the view has changed and nobody was told: {before:?} {after:?}");
        for (known, fresh) in [after.core, after.groups].map(|health| (health.known, health.fresh)) {
            assert!(self.is_forged || known.contains_all(fresh), "fresh and unknown: {fresh:?}");
            assert!(ApiserverSet::first(NAMES.len()).contains_all(known.union(fresh)));
        }
    }

    fn answer(&mut self, what: u8, how: u8) -> bool {
        const STATUSES: [u16; 8] = [200, 200, 200, 304, 403, 429, 503, 0];
        let Some(place) = usize::from(how).checked_rem(self.asked.len()) else { return false };
        let id = self.asked.swap_remove(place);
        let status = STATUSES[usize::from(what >> 4) % 8];
        let body = self.body(how);
        let etag = (how & 1 == 0).then_some(body.get(..8).unwrap_or(body));
        let content_type = &b"application/json"[..if how & 0x40 == 0 { 16 } else { 11 }];
        let response = || Answer::Response { status, content_type, etag, retry_after: Some(b"7"), body };
        let answer = if status == 0 { Answer::Failed(PollError::Reset) } else { response() };
        let change = self.peers.answered(id, answer, self.now, u32::from(how));
        assert_eq!(self.peers.answered(id, response(), self.now, 0), Change::default(), "an answer counts once");
        change.view
    }

    /// From the other worker, or what the input says.
    fn adopt(&mut self, how: u8) -> bool {
        let names = || NAMES.into_iter();
        if how & 1 == 0 {
            return self.peers.adopt(&self.other.snapshot(names()), names(), self.now);
        }
        let Ok(snapshot) = Snapshot::from_bytes(self.body(how >> 1)) else { return false };
        self.is_forged = true;
        self.peers.adopt(&snapshot, names(), self.now)
    }

    fn publish(&mut self) {
        let names = || NAMES.into_iter();
        let bytes = {
            let kept = self.peers.bodies(names(), &Documents::default());
            Documents::of(kept.into_iter()).to_bytes().expect("it is small")
        };
        let documents = Documents::from_bytes(&bytes).expect("what was written can be read");
        if let Some(stamp) = self.peers.stamp(1) {
            let made = cluster_discovery::make(&self.peers.cluster_sources(names(), &documents, stamp.clone()));
            if let Ok(made) = made {
                assert_eq!(ClusterDiscovery::from_bytes(&made).map(|read| read.stamp), Ok(stamp));
            }
        }
        if self.peers.has_bodies() {
            self.peers.forget_bodies();
        } else {
            self.peers.note_missing_bodies(names(), &documents);
        }
        assert!(!self.peers.has_bodies());
    }
}

fn is_same(before: &View, after: &View) -> bool {
    let rest = |view: &View| (view.core, view.groups, view.avoided);
    *before.table == *after.table && rest(before) == rest(after)
}
