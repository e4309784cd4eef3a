//! The table: which apiservers serve a type.
//!
//! Built from the last good discovery documents and then only read. A look-up hashes the path's own bytes, probes
//! once and answers with a bit set; it allocates nothing.

use std::hash::{BuildHasher, Hasher};
use std::rc::Rc;

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

/// Types and who serves them. Group-versions that are excluded never enter it.
#[derive(Debug, Default)]
pub struct Table {
    entries: HashTable<Entry>,
    names: Vec<u8>,
    hasher: FixedState,
}

/// One type; its four names lie behind each other in [`Table::names`].
#[derive(Debug)]
struct Entry {
    start: u32,
    lengths: [u16; 4],
    apiservers: ApiserverSet,
}

/// Group, version, resource, subresource.
type Names<'n> = [&'n [u8]; 4];

impl Table {
    /// Builds the table from documents, each with the index of its apiserver. What stands in `exclusions` is left
    /// out, so that a look-up answers "nobody" for it.
    pub fn build<'d>(documents: impl IntoIterator<Item = (usize, &'d Document)>, exclusions: &Exclusions) -> Self {
        let mut table = Self::default();
        for (apiserver, document) in documents {
            for group_version in &document.group_versions {
                let (group, version) = (group_version.group.as_bytes(), group_version.version.as_bytes());
                if exclusions.contain(group, version) {
                    continue;
                }
                for resource in &group_version.resources {
                    let name = resource.name.as_bytes();
                    table.insert([group, version, name, b""], apiserver);
                    for subresource in &resource.subresources {
                        table.insert([group, version, name, subresource.as_bytes()], apiserver);
                    }
                }
            }
        }
        table
    }

    /// The apiservers whose document lists the resource (down to its subresource).
    pub fn servers_of(&self, resource: &Resource<'_>) -> ApiserverSet {
        let names = [resource.group, resource.version, resource.resource, resource.subresource];
        let entry = self.entries.find(hash(&self.hasher, names), |entry| entry.has_names(&self.names, names));
        entry.map(|entry| entry.apiservers).unwrap_or_default()
    }

    /// How many types (resources and subresources) the table holds.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the table holds no type at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn insert(&mut self, names: Names<'_>, apiserver: usize) {
        let Self { entries, names: stored, hasher } = self;
        let hashed = hash(hasher, names);
        if let Some(entry) = entries.find_mut(hashed, |entry| entry.has_names(stored, names)) {
            entry.apiservers = entry.apiservers.union(ApiserverSet::only(apiserver));
            return;
        }
        // Names beyond these sizes (64 KiB each, 4 GiB in all) cannot be asked for over HTTP: leave them out.
        let (Some(lengths), Ok(start)) = (lengths_of(names), u32::try_from(stored.len())) else {
            return;
        };
        for name in names {
            stored.extend_from_slice(name);
        }
        let entry = Entry { start, lengths, apiservers: ApiserverSet::only(apiserver) };
        entries.insert_unique(hashed, entry, |entry| hash(hasher, entry.names(stored).unwrap_or_default()));
    }
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
}

impl View {
    /// State of the documents that tell about an API group.
    pub fn health(&self, group: &[u8]) -> Health {
        match Half::of_group(group) {
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

    fn servers(table: &Table, path: &str) -> Vec<usize> {
        let path = DecodedPath::new(path.as_bytes()).unwrap();
        let Target::Resource(resource) = path.target() else { panic!("no resource") };
        table.servers_of(&resource).iter().collect()
    }

    #[test]
    fn types_are_found_with_all_who_serve_them() {
        let old = document(&[("", "v1", "pods", &["log", "status"]), ("apps", "v1", "deployments", &[])]);
        let new = document(&[
            ("", "v1", "pods", &["log", "resize"]),
            ("apps", "v1", "deployments", &["scale"]),
            ("depot.k8s.io", "v1", "crates", &[]),
            ("depot.k8s.io", "v1", "crates", &["status"]),
        ]);
        let table = Table::build([(0, &old), (63, &new)], &Exclusions::default());
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
    }

    #[test]
    fn excluded_group_versions_are_served_by_nobody() {
        let document = document(&[
            ("toys.example.com", "v1", "widgets", &[]),
            ("hangar.k8s.io", "v1", "planes", &[]),
            ("hangar.k8s.io", "v2", "planes", &[]),
        ]);
        let table = Table::build([(0, &document)], &excluding(&[("hangar.k8s.io", Some("v1"))]));
        assert!(servers(&table, "/apis/toys.example.com/v1/widgets").is_empty());
        assert!(servers(&table, "/apis/hangar.k8s.io/v1/planes").is_empty());
        assert_eq!(servers(&table, "/apis/hangar.k8s.io/v2/planes"), [0]);
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
