//! Group-versions that the filter leaves alone: those of CRDs and aggregated APIs, which all apiservers serve alike
//! because they live in shared storage and not in one server's version.

use crate::config::GroupVersionPattern;

/// Group-versions that are never rerouted and whose 404s are believed.
#[derive(Debug, Clone, Default)]
pub struct Exclusions {
    configured: Vec<GroupVersionPattern>,
}

impl Exclusions {
    /// The exclusions that the operator has listed.
    pub fn new(configured: &[GroupVersionPattern]) -> Self {
        Self { configured: configured.to_vec() }
    }

    /// Whether a group-version is left alone.
    pub fn contain(&self, group: &[u8], version: &[u8]) -> bool {
        !can_be_built_in(group)
            || self.configured.iter().any(|pattern| {
                pattern.group.as_bytes() == group
                    && pattern.version.as_ref().is_none_or(|excluded| excluded.as_bytes() == version)
            })
    }
}

/// Whether an apiserver could have the group built in: their names have no dot (`apps`) or end in `.k8s.io`, which
/// Kubernetes reserves for itself.
pub fn can_be_built_in(group: &[u8]) -> bool {
    !group.contains(&b'.') || group.ends_with(b".k8s.io")
}

#[cfg(test)]
mod tests {
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use crate::testing::excluding;

    #[test]
    fn groups_are_excluded_by_name_or_by_list() {
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
}
