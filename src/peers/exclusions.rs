//! Group-versions that the filter leaves alone: those of CRDs and aggregated APIs, which all apiservers serve alike
//! because they live in shared storage and not in one server's version.

use std::time::Duration;

use crate::config::GroupVersionPattern;
use crate::discovery::api_services::GroupVersionName;

/// Group-versions that are never rerouted and whose 404s are believed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exclusions {
    configured: Vec<GroupVersionPattern>,
    /// From APIService objects: the list as it was last, with what has been in it not long ago. Sorted by name. Empty
    /// until the first list is there, and where the poller may not list them.
    learned: Vec<Excluded>,
}

/// A group-version that is excluded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Excluded {
    pub(super) name: GroupVersionName,
    /// When it was in the list for the last time; `None` while it is.
    pub(super) vanished_at: Option<Duration>,
}

impl Exclusions {
    /// The exclusions that the operator has listed.
    pub fn new(configured: &[GroupVersionPattern]) -> Self {
        Self { configured: configured.to_vec(), learned: Vec::new() }
    }

    /// Whether a group-version is left alone: by its name, by what was learned, or by configuration.
    pub fn contain(&self, group: &[u8], version: &[u8]) -> bool {
        let order = |excluded: &Excluded| {
            let name = &excluded.name;
            name.group.as_bytes().cmp(group).then_with(|| name.version.as_bytes().cmp(version))
        };
        !can_be_built_in(group)
            || self.learned.binary_search_by(order).is_ok()
            || self.configured.iter().any(|pattern| {
                pattern.group.as_bytes() == group
                    && pattern.version.as_ref().is_none_or(|excluded| excluded.as_bytes() == version)
            })
    }

    /// Takes a list of group-versions that are not built in. What has vanished from it stays excluded until
    /// [`Self::forget_before`]: an apiserver that has just started tells less than there is.
    pub fn learn(&mut self, listed: Vec<GroupVersionName>, now: Duration) {
        let mut learned: Vec<_> = listed.into_iter().map(|name| Excluded { name, vanished_at: None }).collect();
        let vanished = std::mem::take(&mut self.learned).into_iter();
        let vanished = vanished.map(|known| Excluded { vanished_at: known.vanished_at.or(Some(now)), ..known });
        learned.extend(vanished);
        self.adopt(learned);
    }

    /// Believes that what vanished before a moment is gone; whether there was any.
    pub fn forget_before(&mut self, moment: Duration) -> bool {
        let before = self.learned.len();
        self.learned.retain(|excluded| excluded.vanished_at.is_none_or(|vanished_at| vanished_at >= moment));
        self.learned.len() != before
    }

    /// What has been learned.
    pub(super) fn learned(&self) -> &[Excluded] {
        &self.learned
    }

    /// Takes over what somebody has learned. Of two entries with one name the first counts.
    pub(super) fn adopt(&mut self, learned: Vec<Excluded>) {
        self.learned.clear();
        for excluded in learned {
            if let Err(place) = self.learned.binary_search_by(|known| known.name.cmp(&excluded.name)) {
                self.learned.insert(place, excluded);
            }
        }
    }
}

/// Whether an apiserver could have the group built in: their names have no dot (`apps`) or end in `.k8s.io`, which
/// Kubernetes reserves for itself.
pub fn can_be_built_in(group: &[u8]) -> bool {
    !group.contains(&b'.') || group.ends_with(b".k8s.io")
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use crate::testing::excluding;

    fn name(group: &str, version: &str) -> GroupVersionName {
        GroupVersionName { group: group.to_owned(), version: version.to_owned() }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn names_and_configuration_exclude() {
        let exclusions = excluding(&[("metrics.k8s.io", None), ("hangar.k8s.io", Some("v1"))]);
        for (group, version, expected, why) in [
            ("", "v1", false, "the core group"),
            ("apps", "v1", false, "no dot"),
            ("storage.k8s.io", "v1", false, "a built-in name"),
            ("toys.example.com", "v1", true, "nobody builds that in"),
            ("k8s.io", "v1", true, "not below k8s.io"),
            ("notk8s.io", "v1", true, "only looks like it"),
            ("metrics.k8s.io", "v1beta1", true, "a whole group from the list"),
            ("hangar.k8s.io", "v1", true, "one version from the list"),
            ("hangar.k8s.io", "v2", false, "another version of it"),
        ] {
            assert_eq!(exclusions.contain(group.as_bytes(), version.as_bytes()), expected, "{group}/{version}: {why}");
        }
    }

    #[test]
    fn what_is_learned_decides_per_group_and_version() {
        let mut exclusions = excluding(&[("metrics.k8s.io", None)]);
        exclusions.learn(vec![name("hangar.k8s.io", "v1"), name("gateway.k8s.io", "v1beta1")], seconds(1));
        for (group, version, expected, why) in [
            ("toys.example.com", "v2", true, "not in the list, but nobody builds that in"),
            ("hangar.k8s.io", "v1", true, "a CRD's in a group with a built-in name"),
            ("hangar.k8s.io", "v2", false, "built in"),
            ("metrics.k8s.io", "v1beta1", true, "from the configuration as ever"),
        ] {
            assert_eq!(exclusions.contain(group.as_bytes(), version.as_bytes()), expected, "{group}/{version}: {why}");
        }
    }

    #[test]
    fn a_list_that_shrinks_is_believed_later() {
        let mut exclusions = Exclusions::default();
        exclusions.learn(vec![name("toys.k8s.io", "v1"), name("a.k8s.io", "v1")], seconds(1));
        exclusions.learn(vec![name("a.k8s.io", "v1")], seconds(10));
        exclusions.learn(vec![], seconds(20));
        assert!(exclusions.contain(b"toys.k8s.io", b"v1"));
        assert!(!exclusions.forget_before(seconds(10)), "the first is gone since second 10");
        assert!(exclusions.forget_before(seconds(11)));
        assert!(!exclusions.contain(b"toys.k8s.io", b"v1"));
        assert!(exclusions.contain(b"a.k8s.io", b"v1"), "gone since second 20");
        exclusions.learn(vec![name("a.k8s.io", "v1")], seconds(21));
        assert!(!exclusions.forget_before(seconds(1000)), "back in the list");
    }
}
