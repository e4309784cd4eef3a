//! The request's half of the work: does it stay *here*, or does it go to a peer?
//!
//! *Here* is the local apiserver in sidecar mode and the route's load-balanced default cluster in gateway mode.

use crate::config::{Config, PeerProxying};
use crate::peers::table::{ApiserverSet, View};
use crate::target::Resource;

/// Marks a request that has been rerouted once, as upstream's peer proxy does; such a request is never rerouted again.
/// Any value counts, for upstream takes only the first of several and clients could hide it behind their own.
pub const LOOP_HEADER: &str = "x-kubernetes-peer-proxied";

/// Where a request for a resource goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It stays.
    Here(WhyHere),
    /// It goes to this apiserver (index in the configuration).
    Reroute(usize),
}

/// Why a request stays here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyHere {
    /// Sidecar: the local apiserver lists the type. Gateway: every good document does.
    Listed,
    /// The local apiserver has not told yet what it serves, so nobody can say that it does not serve this.
    LocalUnknown,
    /// Its group-version is left alone: all apiservers serve it alike.
    Excluded,
    /// No good document lists the type. The answer is the guard's business.
    Unlisted,
    /// A peer lists it, but rerouting is switched off.
    Disabled,
    /// A peer lists it, but the request has been rerouted once already.
    Looped,
}

/// Decides about a request for `resource`.
///
/// `has_loop_header` is asked only when a reroute is due, for looking at a header costs a call to the host. `random` is
/// any number; it picks one of several apiservers. In [`PeerProxying::DryRun`] the answer is what would be done.
pub fn decide(
    resource: &Resource<'_>,
    view: &View,
    config: &Config,
    has_loop_header: impl FnOnce() -> bool,
    random: u32,
) -> Decision {
    let listing = view.table.look_up(resource);
    let (servers, health) = (listing.servers, view.health(resource.group));
    if listing.is_excluded {
        return Decision::Here(WhyHere::Excluded);
    }
    match config.local {
        Some(local) if servers.contains(local) => return Decision::Here(WhyHere::Listed),
        Some(local) if !health.known.contains(local) => return Decision::Here(WhyHere::LocalUnknown),
        None if !servers.is_empty() && servers.contains_all(health.known) => return Decision::Here(WhyHere::Listed),
        _ => {}
    }
    if servers.is_empty() {
        Decision::Here(WhyHere::Unlisted)
    } else if config.peer_proxying == PeerProxying::Disabled {
        Decision::Here(WhyHere::Disabled)
    } else if has_loop_header() {
        Decision::Here(WhyHere::Looped)
    } else {
        reachable_first(servers, health.fresh.without(view.avoided))
            .pick(random)
            .map_or(Decision::Here(WhyHere::Unlisted), Decision::Reroute)
    }
}

/// Those that answered their latest poll and request, or all if none of them did: a poll may fail where a request would
/// not.
fn reachable_first(servers: ApiserverSet, fresh: ApiserverSet) -> ApiserverSet {
    let reachable = servers.intersection(fresh);
    if reachable.is_empty() { servers } else { reachable }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use crate::peers::table::Health;
    use crate::target::{DecodedPath, Target};
    use crate::testing::{config, set, view};

    /// Three apiservers: `shared` is on all of them, `new` on 1 and 2, `newest` on 2 only, `gone` on nobody.
    const TYPES: &[(&str, &[usize])] =
        &[("shared", &[0, 1, 2]), ("new", &[1, 2]), ("newest", &[2]), ("old", &[0]), ("shared/fresh", &[1])];
    const ALL: Health = Health { known: set(&[0, 1, 2]), fresh: set(&[0, 1, 2]) };

    fn decision(mode: &str, path: &str, health: Health, looped: bool, random: u32) -> Decision {
        let decoded = DecodedPath::new(path.as_bytes()).unwrap();
        let Target::Resource(resource) = decoded.target() else { panic!("{path} is no resource") };
        let known: Vec<_> = TYPES
            .iter()
            .map(|(name, servers)| (*name, servers.iter().copied().filter(|s| health.known.contains(*s)).collect()))
            .collect();
        decide(&resource, &view(&known, health), &config(mode), || looped, random)
    }

    #[test]
    fn requests_go_where_their_type_is_served() {
        use Decision::{Here, Reroute};
        let unknown_local = Health { known: set(&[1, 2]), fresh: set(&[1, 2]) };
        let nothing_known = Health::default();
        let second_failing = Health { fresh: set(&[0, 2]), ..ALL };
        let peers_failing = Health { fresh: set(&[0]), ..ALL };
        for (mode, resource, health, random, expected, why) in [
            ("sidecar", "shared", ALL, 0, Here(WhyHere::Listed), "local serves it"),
            ("sidecar", "old", ALL, 0, Here(WhyHere::Listed), "only local serves it"),
            ("sidecar", "new", ALL, 0, Reroute(1), "one of those that serve it"),
            ("sidecar", "new", ALL, 1, Reroute(2), "the other one"),
            ("sidecar", "new", second_failing, 0, Reroute(2), "a reachable one first"),
            ("sidecar", "new", peers_failing, 1, Reroute(2), "none is reachable: its last document still counts"),
            ("sidecar", "shared/x/fresh", ALL, 0, Reroute(1), "down to the subresource"),
            ("sidecar", "gone", ALL, 0, Here(WhyHere::Unlisted), "nobody serves it"),
            ("sidecar", "new", unknown_local, 0, Here(WhyHere::LocalUnknown), "local might serve it"),
            ("sidecar", "new", nothing_known, 0, Here(WhyHere::LocalUnknown), "nothing is known"),
            ("sidecar disabled", "new", ALL, 0, Here(WhyHere::Disabled), "rerouting is off"),
            ("sidecar disabled", "shared", ALL, 0, Here(WhyHere::Listed), "and is not needed here"),
            ("sidecar dry-run", "new", ALL, 0, Reroute(1), "what would be done"),
            ("gateway", "shared", ALL, 0, Here(WhyHere::Listed), "all serve it: the default cluster balances"),
            ("gateway", "new", ALL, 0, Reroute(1), "some serve it"),
            ("gateway", "old", ALL, 0, Reroute(0), "one serves it"),
            ("gateway", "new", unknown_local, 0, Here(WhyHere::Listed), "every good document lists it"),
            ("gateway", "new", nothing_known, 0, Here(WhyHere::Unlisted), "nothing is known"),
            ("gateway disabled", "new", ALL, 0, Here(WhyHere::Disabled), "rerouting is off"),
            ("gateway", "gone", ALL, 0, Here(WhyHere::Unlisted), "nobody serves it"),
        ] {
            let path = format!("/apis/depot.k8s.io/v1/{resource}");
            assert_eq!(decision(mode, &path, health, false, random), expected, "{mode}, {resource}: {why}");
        }
    }

    #[test]
    fn one_hop_and_no_more() {
        let looped = decision("sidecar", "/apis/depot.k8s.io/v1/new", ALL, true, 0);
        assert_eq!(looped, Decision::Here(WhyHere::Looped));
    }

    #[test]
    fn the_loop_header_is_looked_at_only_when_a_reroute_is_due() {
        let decoded = DecodedPath::new(b"/apis/depot.k8s.io/v1/shared").unwrap();
        let Target::Resource(resource) = decoded.target() else { panic!("no resource") };
        let types = [("shared", vec![0, 1, 2])];
        decide(&resource, &view(&types, ALL), &config("sidecar"), || panic!("looked at"), 0);
    }

    #[test]
    fn an_excluded_group_version_stays() {
        let decoded = DecodedPath::new(b"/apis/toys.example.com/v1/new").unwrap();
        let Target::Resource(resource) = decoded.target() else { panic!("no resource") };
        let types = [("new", vec![1, 2])];
        let decision = decide(&resource, &view(&types, ALL), &config("sidecar"), || false, 0);
        assert_eq!(decision, Decision::Here(WhyHere::Excluded));
    }

    #[test]
    fn an_apiserver_that_has_just_failed_a_request_is_avoided_while_another_serves_the_same() {
        let decoded = DecodedPath::new(b"/apis/depot.k8s.io/v1/new").unwrap();
        let Target::Resource(resource) = decoded.target() else { panic!("no resource") };
        for (avoided, expected, why) in [
            (set(&[1]), vec![2], "the other one"),
            (set(&[1, 2]), vec![1, 2], "none is left: any"),
            (set(&[0]), vec![1, 2], "it does not serve this"),
        ] {
            let view = View { avoided, ..view(&[("new", vec![1, 2])], ALL) };
            let mut seen: Vec<_> =
                (0..2).map(|random| decide(&resource, &view, &config("sidecar"), || false, random)).collect();
            seen.dedup();
            assert_eq!(seen, expected.into_iter().map(Decision::Reroute).collect::<Vec<_>>(), "{why}");
        }
    }
}
