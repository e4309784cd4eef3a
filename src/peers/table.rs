//! The table: which apiservers serve a type.
//!
//! Made of what apiservers have said last, one half of one apiserver after the other. The documents themselves are not
//! kept: one bit for each apiserver at each type says the same. A look-up hashes the path's own bytes, probes once and
//! answers with a bit set; it allocates nothing.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher};
use std::rc::Rc;
use std::time::Duration;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use crate::discovery::document::{Document, Half};
use crate::peers::exclusions::Exclusions;
use crate::target::Resource;

/// Most apiservers that can be configured: one bit each in an [`ApiserverSet`].
pub const MAX_APISERVERS: usize = 64;

/// A set of apiservers, each named by its index in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ApiserverSet(u64);

impl ApiserverSet {
    /// No apiserver.
    pub const EMPTY: Self = Self(0);

    /// The first `count` apiservers.
    pub fn first(count: usize) -> Self {
        (0..count).collect()
    }

    /// Only this one.
    pub const fn only(index: usize) -> Self {
        if index < MAX_APISERVERS { Self(1 << index) } else { Self::EMPTY }
    }

    /// Whether the apiserver is in the set.
    pub fn contains(self, index: usize) -> bool {
        !self.intersection(Self::only(index)).is_empty()
    }

    /// Whether all of `other` are in the set.
    pub const fn contains_all(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether nobody is in the set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Those in both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Those in either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The members in the order of the configuration.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MAX_APISERVERS).filter(move |index| self.contains(*index))
    }

    /// The set as bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The set of these bits.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// One of the members, the same chance for each; `random` is any number. `None` if nobody is in the set.
    pub fn pick(self, random: u32) -> Option<usize> {
        let nth = random.checked_rem(self.0.count_ones())?;
        self.iter().nth(usize::try_from(nth).ok()?)
    }
}

impl FromIterator<usize> for ApiserverSet {
    fn from_iter<I: IntoIterator<Item = usize>>(indexes: I) -> Self {
        indexes.into_iter().fold(Self::EMPTY, |set, index| set.union(Self::only(index)))
    }
}

/// How much the documents of one half can be relied upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Health {
    /// Apiservers of which a good document was had at some time; the rest are *unknown*.
    pub known: ApiserverSet,
    /// Apiservers whose latest poll was answered; a known one that is not fresh is *failing*.
    pub fresh: ApiserverSet,
}

/// What the table says of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Listing {
    /// Apiservers whose last good document lists it.
    pub servers: ApiserverSet,
    /// Its group-version is left alone: see [`Exclusions`].
    pub is_excluded: bool,
    /// When an apiserver took it out of its document for the last time; `None` if none ever did. Tells something only
    /// once nobody lists it any more.
    pub vanished_at: Option<Duration>,
}

/// Types and who serves them. Immutable: every change makes another one, so that readers never see half of it.
#[derive(Debug, Clone, Default)]
pub struct Table {
    entries: HashTable<Entry>,
    names: Vec<u8>,
    hasher: FixedState,
}

/// One type; its four names lie behind each other in [`Table::names`].
#[derive(Debug, Clone, Copy)]
struct Entry {
    start: u32,
    lengths: [u16; 4],
    listing: Listing,
}

/// Group, version, resource, subresource.
pub(super) type Names<'n> = [&'n [u8]; 4];

impl Table {
    /// What is known of the resource (down to its subresource). Probes once and allocates nothing.
    pub fn look_up(&self, resource: &Resource<'_>) -> Listing {
        self.find([resource.group, resource.version, resource.resource, resource.subresource])
    }

    /// How many types (resources and subresources) the table holds.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the table holds no type at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The table after an apiserver has said what one half of it serves. Types of a group-version that is stale there
    /// are kept: a backend that cannot be reached just now takes no type away.
    pub fn with_document(&self, apiserver: usize, half: Half, document: &Document, context: Context<'_>) -> Self {
        let said = ApiserverSet::only(apiserver);
        let stale: HashSet<_> = document
            .group_versions
            .iter()
            .filter(|group_version| group_version.is_stale)
            .map(|group_version| (group_version.group.as_bytes(), group_version.version.as_bytes()))
            .collect();
        let is_stale = |[group, version, ..]: Names<'_>| stale.contains(&(group, version));
        let mut next = Self::default();
        for (names, listing) in self.iter() {
            let is_concerned = Half::of_group(names[0]) == half && !is_stale(names);
            let servers = if is_concerned { listing.servers.without(said) } else { listing.servers };
            next.insert(names, Listing { servers, ..listing });
        }
        for group_version in &document.group_versions {
            let (group, version) = (group_version.group.as_bytes(), group_version.version.as_bytes());
            let is_excluded = context.exclusions.contain(group, version);
            let listing = Listing { servers: said, is_excluded, vanished_at: None };
            for resource in &group_version.resources {
                let name = resource.name.as_bytes();
                next.insert([group, version, name, b""], listing);
                for subresource in &resource.subresources {
                    next.insert([group, version, name, subresource.as_bytes()], listing);
                }
            }
        }
        next.date_what_vanished(self, context.now);
        next
    }

    /// The table after somebody else's was read: of each half it is believed about the apiservers in `believed` (of
    /// `/api`, of `/apis`), and about nobody else. `others` are its types, with the sets already in our order.
    pub(super) fn adopting<'n>(
        &self,
        others: impl Iterator<Item = (Names<'n>, Listing)>,
        believed: [ApiserverSet; 2],
        context: Context<'_>,
    ) -> Self {
        let believed = |[group, ..]: Names<'_>| match (Half::of_group(group), believed) {
            (Half::Core, [core, _]) => core,
            (Half::Groups, [_, groups]) => groups,
        };
        let mut next = Self::default();
        for (names, listing) in self.iter() {
            next.insert(names, Listing { servers: listing.servers.without(believed(names)), ..listing });
        }
        for (names, listing) in others {
            let servers = listing.servers.intersection(believed(names));
            if !servers.is_empty() || listing.vanished_at.is_some() {
                let is_excluded = context.exclusions.contain(names[0], names[1]);
                next.insert(names, Listing { servers, is_excluded, ..listing });
            }
        }
        next.date_what_vanished(self, context.now);
        next
    }

    /// The table with other exclusions.
    pub fn with_exclusions(&self, exclusions: &Exclusions) -> Self {
        let mut next = Self::default();
        for (names, listing) in self.iter() {
            next.insert(names, Listing { is_excluded: exclusions.contain(names[0], names[1]), ..listing });
        }
        next
    }

    /// The table without the types that vanished before a moment; `None` if there are none.
    pub fn without_vanished_before(&self, moment: Duration) -> Option<Self> {
        let is_over = |listing: &Listing| {
            listing.servers.is_empty() && listing.vanished_at.is_some_and(|vanished_at| vanished_at < moment)
        };
        if !self.entries.iter().any(|entry| is_over(&entry.listing)) {
            return None;
        }
        let mut next = Self::default();
        for (names, listing) in self.iter().filter(|(_, listing)| !is_over(listing)) {
            next.insert(names, listing);
        }
        Some(next)
    }

    /// Whether there are types that nobody lists any more and that are not excluded.
    pub(super) fn has_vanished_types(&self) -> bool {
        self.entries.iter().any(|entry| entry.listing.servers.is_empty() && !entry.listing.is_excluded)
    }

    /// Whether there are types of a group, or of one version of it, that are not excluded; those that have vanished count.
    pub fn has_types_of(&self, group: &[u8], version: Option<&[u8]>) -> bool {
        self.iter().any(|([of_group, of_version, ..], listing)| {
            of_group == group && version.is_none_or(|version| of_version == version) && !listing.is_excluded
        })
    }

    /// All types in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Names<'_>, Listing)> {
        self.entries.iter().filter_map(|entry| Some((entry.names(&self.names)?, entry.listing)))
    }

    /// Adds a type; one that is there gets the servers of both.
    pub(super) fn insert(&mut self, names: Names<'_>, listing: Listing) {
        let Self { entries, names: stored, hasher } = self;
        let hashed = hash(hasher, names);
        if let Some(entry) = entries.find_mut(hashed, |entry| entry.has_names(stored, names)) {
            let servers = entry.listing.servers.union(listing.servers);
            let vanished_at = listing.vanished_at.max(entry.listing.vanished_at);
            entry.listing = Listing { servers, vanished_at, ..listing };
            return;
        }
        // Names beyond these sizes (64 KiB each, 4 GiB in all) cannot be asked for over HTTP: leave them out.
        let (Some(lengths), Ok(start)) = (lengths_of(names), u32::try_from(stored.len())) else { return };
        for name in names {
            stored.extend_from_slice(name);
        }
        let entry = Entry { start, lengths, listing };
        entries.insert_unique(hashed, entry, |entry| hash(hasher, entry.names(stored).unwrap_or_default()));
    }

    /// Notes which types an apiserver has taken out of its document since `before`.
    fn date_what_vanished(&mut self, before: &Self, now: Duration) {
        let Self { entries, names: stored, .. } = self;
        for entry in entries {
            let was = entry.names(stored).map(|names| before.find(names).servers).unwrap_or_default();
            if !was.without(entry.listing.servers).is_empty() {
                entry.listing.vanished_at = entry.listing.vanished_at.max(Some(now));
            }
        }
    }

    fn find(&self, names: Names<'_>) -> Listing {
        let entry = self.entries.find(hash(&self.hasher, names), |entry| entry.has_names(&self.names, names));
        entry.map(|entry| entry.listing).unwrap_or_default()
    }
}

/// The same types with the same listings, in whatever order they came.
impl PartialEq for Table {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().all(|(names, listing)| other.find(names) == listing)
    }
}

/// What a change of the table needs to know beside the document.
#[derive(Debug, Clone, Copy)]
pub struct Context<'c> {
    /// Group-versions that are left alone.
    pub exclusions: &'c Exclusions,
    /// The time.
    pub now: Duration,
}

impl Entry {
    fn names<'n>(&self, stored: &'n [u8]) -> Option<Names<'n>> {
        let mut rest = stored.get(usize::try_from(self.start).ok()?..)?;
        let mut names = Names::default();
        for (name, length) in names.iter_mut().zip(self.lengths) {
            (*name, rest) = rest.split_at_checked(length.into())?;
        }
        Some(names)
    }

    fn has_names(&self, stored: &[u8], names: Names<'_>) -> bool {
        lengths_of(names) == Some(self.lengths) && self.names(stored) == Some(names)
    }
}

fn lengths_of(names: Names<'_>) -> Option<[u16; 4]> {
    let mut lengths = [0; 4];
    for (length, name) in lengths.iter_mut().zip(names) {
        *length = u16::try_from(name.len()).ok()?;
    }
    Some(lengths)
}

fn hash(hasher: &FixedState, names: Names<'_>) -> u64 {
    let mut hasher = hasher.build_hasher();
    for name in names {
        hasher.write(name);
        // Keeps ("ab", "c") and ("a", "bc") apart.
        hasher.write_usize(name.len());
    }
    hasher.finish()
}

/// The table together with how far it can be relied upon: all that decisions are made from.
#[derive(Debug, Default)]
pub struct View {
    /// Who serves what; shared, since health changes more often than documents do.
    pub table: Rc<Table>,
    /// State of the `/api` documents.
    pub core: Health,
    /// State of the `/apis` documents.
    pub groups: Health,
    /// Apiservers that have just failed a request: asked only where nobody else can be.
    pub avoided: ApiserverSet,
}

impl View {
    /// State of the documents that tell about an API group.
    pub const fn health(&self, group: &[u8]) -> Health {
        self.health_of(Half::of_group(group))
    }

    /// State of the documents of a half.
    pub const fn health_of(&self, half: Half) -> Health {
        match half {
            Half::Core => self.core,
            Half::Groups => self.groups,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use crate::discovery::document::{ApiResource, GroupVersion};
    use crate::target::{DecodedPath, Target};
    use crate::testing::excluding;

    fn document(types: &[(&str, &str, &str, &[&str])]) -> Document {
        let group_version = |&(group, version, resource, subresources): &(&str, &str, &str, &[&str])| GroupVersion {
            group: group.to_owned(),
            version: version.to_owned(),
            is_stale: false,
            resources: vec![ApiResource {
                name: resource.to_owned(),
                subresources: subresources.iter().map(ToString::to_string).collect(),
            }],
        };
        Document { group_versions: types.iter().map(group_version).collect() }
    }

    fn listing(table: &Table, path: &str) -> Listing {
        let path = DecodedPath::new(path.as_bytes()).unwrap();
        let Target::Resource(resource) = path.target() else { panic!("no resource") };
        table.look_up(&resource)
    }

    fn servers(table: &Table, path: &str) -> Vec<usize> {
        listing(table, path).servers.iter().collect()
    }

    /// What apiservers say one after the other, a second apart.
    fn said(documents: &[(usize, Half, &Document)], exclusions: &Exclusions) -> Table {
        let mut table = Table::default();
        for (second, (apiserver, half, document)) in (1..).zip(documents) {
            let context = Context { exclusions, now: Duration::from_secs(second) };
            table = table.with_document(*apiserver, *half, document, context);
        }
        table
    }

    #[test]
    fn types_are_found_with_all_who_serve_them() {
        let core = |subresources| document(&[("", "v1", "pods", subresources)]);
        let (old_core, new_core) = (core(&["log", "status"]), core(&["log", "resize"]));
        let old = document(&[("apps", "v1", "deployments", &[])]);
        let new = document(&[
            ("apps", "v1", "deployments", &["scale"]),
            ("depot.k8s.io", "v1", "crates", &[]),
            ("depot.k8s.io", "v1", "crates", &["status"]),
        ]);
        let documents = [
            (0, Half::Core, &old_core),
            (0, Half::Groups, &old),
            (63, Half::Core, &new_core),
            (63, Half::Groups, &new),
        ];
        let table = said(&documents, &Exclusions::default());
        for (path, expected, why) in [
            ("/api/v1/pods", vec![0, 63], "on both"),
            ("/api/v1/namespaces/n/pods/p/log", vec![0, 63], "a subresource on both"),
            ("/api/v1/namespaces/n/pods/p/resize", vec![63], "a subresource that one has"),
            ("/api/v1/namespaces/n/pods/p/nosuch", vec![], "a subresource that nobody has"),
            ("/apis/depot.k8s.io/v1/crates/c/status", vec![63], "listed twice: united"),
            ("/apis/depot.k8s.io/v1/crates", vec![63], "a group that one has"),
            ("/apis/depot.k8s.io/v2/crates", vec![], "another version"),
            ("/apis/depot.k8s/io.v1/crates", vec![], "the same letters, split elsewhere"),
        ] {
            assert_eq!(servers(&table, path), expected, "{path}: {why}");
        }
        assert_eq!(table.len(), 8);
        // Each says the same again.
        let again: Vec<_> = documents.iter().chain(&documents).copied().collect();
        assert_eq!(said(&again, &Exclusions::default()), table);
    }

    #[test]
    fn a_name_of_64_kibibytes_is_left_out() {
        let (longest, too_long) = ("x".repeat((64 << 10) - 1), "y".repeat(64 << 10));
        let document = document(&[
            ("depot.k8s.io", "v1", &too_long, &[]),
            ("depot.k8s.io", "v1", &longest, &[&too_long]),
            ("depot.k8s.io", "v1", "crates", &[]),
        ]);
        let table = said(&[(0, Half::Groups, &document)], &Exclusions::default());
        let resources: Vec<_> = table.iter().map(|([_, _, resource, _], _)| resource.len()).collect();
        assert_eq!(resources.iter().sum::<usize>(), longest.len() + "crates".len(), "{resources:?}");
        assert_eq!(servers(&table, "/apis/depot.k8s.io/v1/crates"), [0], "the others are there");
    }

    #[test]
    fn a_half_speaks_only_for_itself() {
        let (pods, deployments) =
            (document(&[("", "v1", "pods", &[])]), document(&[("apps", "v1", "deployments", &[])]));
        let documents = [(0, Half::Core, &pods), (0, Half::Groups, &deployments), (0, Half::Core, &pods)];
        let table = said(&documents, &Exclusions::default());
        assert_eq!(servers(&table, "/apis/apps/v1/deployments"), [0]);
        assert_eq!(servers(&table, "/api/v1/pods"), [0]);
    }

    #[test]
    fn what_vanishes_everywhere_is_remembered() {
        let (with, without) = (document(&[("depot.k8s.io", "v1", "crates", &[])]), document(&[]));
        let steps = [(0, Half::Groups, &with), (1, Half::Groups, &with), (0, Half::Groups, &without)];
        let table = said(&steps, &Exclusions::default());
        let crates = |table: &Table| listing(table, "/apis/depot.k8s.io/v1/crates");
        let seconds = Duration::from_secs;
        let one_left = (servers(&table, "/apis/depot.k8s.io/v1/crates"), crates(&table).vanished_at);
        assert_eq!(one_left, (vec![1], Some(seconds(3))), "one of two has dropped it");
        assert!(table.without_vanished_before(seconds(100)).is_none(), "and the other one lists it");

        let gone = said(
            &[steps[0], steps[1], steps[2], (1, Half::Groups, &without), (1, Half::Groups, &without)],
            &Exclusions::default(),
        );
        let vanished_at = Duration::from_secs(4);
        assert_eq!(crates(&gone), Listing { vanished_at: Some(vanished_at), ..Listing::default() });
        assert!(gone.without_vanished_before(vanished_at).is_none(), "not yet");
        let forgotten = gone.without_vanished_before(Duration::from_secs(5)).unwrap();
        assert_eq!((crates(&forgotten), forgotten.len()), (Listing::default(), 0));

        let back = said(&[steps[0], steps[2], steps[0]], &Exclusions::default());
        assert_eq!(servers(&back, "/apis/depot.k8s.io/v1/crates"), [0], "it is back");
    }

    #[test]
    fn adopting_the_same_again_changes_nothing() {
        let crates = [&b"depot.k8s.io"[..], b"v1", b"crates", b""];
        let before =
            said(&[(0, Half::Groups, &document(&[("depot.k8s.io", "v1", "crates", &[])]))], &Exclusions::default());
        let context = Context { exclusions: &Exclusions::default(), now: Duration::from_secs(5) };
        // A time to come is nothing that a worker tells, and must not come and go all the same.
        for vanished_at in [None, Some(4), Some(5), Some(100)].map(|seconds| seconds.map(Duration::from_secs)) {
            let told = || std::iter::once((crates, Listing { vanished_at, ..Listing::default() }));
            let once = before.adopting(told(), [ApiserverSet::EMPTY, ApiserverSet::only(0)], context);
            assert_eq!(once.adopting(told(), [ApiserverSet::EMPTY; 2], context), once, "{vanished_at:?}");
        }
    }

    #[test]
    fn a_stale_group_version_takes_nothing_away() {
        let full = document(&[("depot.k8s.io", "v1", "crates", &["status"]), ("depot.k8s.io", "v2", "crates", &[])]);
        let mut stale = document(&[("depot.k8s.io", "v1", "pallets", &[]), ("depot.k8s.io", "v2", "pallets", &[])]);
        stale.group_versions[0].is_stale = true;
        let table = said(&[(0, Half::Groups, &full), (0, Half::Groups, &stale)], &Exclusions::default());
        assert_eq!(servers(&table, "/apis/depot.k8s.io/v1/crates/c/status"), [0], "stale: kept");
        assert_eq!(servers(&table, "/apis/depot.k8s.io/v1/pallets"), [0], "and what it does list counts");
        assert!(servers(&table, "/apis/depot.k8s.io/v2/crates").is_empty(), "current: believed");
        let once = said(&[(0, Half::Groups, &full), (0, Half::Groups, &stale)], &Exclusions::default()).len();
        let mut again = vec![(0, Half::Groups, &full)];
        again.extend([(0, Half::Groups, &stale); 20]);
        assert_eq!(said(&again, &Exclusions::default()).len(), once, "however often it is told");
    }

    #[test]
    fn excluded_group_versions_are_marked() {
        let document = document(&[
            ("toys.example.com", "v1", "widgets", &[]),
            ("hangar.k8s.io", "v1", "planes", &[]),
            ("hangar.k8s.io", "v2", "planes", &[]),
        ]);
        let table = said(&[(0, Half::Groups, &document)], &excluding(&[("hangar.k8s.io", Some("v1"))]));
        let excluded = |table: &Table, path| listing(table, path).is_excluded;
        for (path, expected) in [
            ("/apis/toys.example.com/v1/widgets", true),
            ("/apis/hangar.k8s.io/v1/planes", true),
            ("/apis/hangar.k8s.io/v2/planes", false),
        ] {
            assert_eq!(excluded(&table, path), expected, "{path}");
            assert_eq!(servers(&table, path), [0], "{path}: still known");
        }
        let other = table.with_exclusions(&excluding(&[("hangar.k8s.io", Some("v2"))]));
        assert!(
            !excluded(&other, "/apis/hangar.k8s.io/v1/planes") && excluded(&other, "/apis/hangar.k8s.io/v2/planes")
        );
    }

    #[test]
    fn a_pick_is_even_and_never_leaves_the_set() {
        let set: ApiserverSet = [1, 5, 63].into_iter().collect();
        let mut hits = [0; MAX_APISERVERS];
        for random in 0..300 {
            hits[set.pick(random).unwrap()] += 1;
        }
        assert_eq!((hits[1], hits[5], hits[63]), (100, 100, 100));
        assert_eq!(ApiserverSet::EMPTY.pick(7), None);
        assert_eq!(set.pick(u32::MAX), Some(1), "4294967295 is a multiple of three");
    }

    #[test]
    fn a_set_holds_64_and_no_more() {
        assert_eq!(ApiserverSet::first(64).iter().count(), 64);
        assert!(ApiserverSet::only(64).is_empty());
        assert!(ApiserverSet::first(3).contains_all(ApiserverSet::only(2)));
        assert!(!ApiserverSet::first(3).contains_all(ApiserverSet::only(3)));
    }
}
