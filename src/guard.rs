//! The answer's half of the work: is this 404 to be believed?
//!
//! A 404 on a resource means "no such object", which is innocent, or "no such route", which is a lie if some other
//! apiserver serves the type: the garbage collector deletes what depends on an owner that it takes for gone. A 404 that
//! may be the second is believed only if the apiservers, asked after that request was sent, confirm it; else the client is
//! told 503.

use std::time::Duration;

use crate::peers::exclusions::Exclusions;
use crate::peers::table::{ApiserverSet, View};
use crate::target::Resource;

pub mod held;

/// Who was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// This apiserver (index in the configuration): a reroute's target, or the local one.
    One(usize),
    /// Some apiserver behind the default cluster of a gateway; it is not known which.
    AnyOne,
    /// A cluster that belongs to none of the configured apiservers.
    Stranger,
}

/// What the headers of a 404 tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotFound {
    /// It came from upstream and carries the `Audit-Id` that every apiserver sets: not Envoy's own "no route".
    pub is_by_apiserver: bool,
    /// See [`looks_like_missing_route`].
    pub looks_like_missing_route: bool,
}

/// What is done with a 404.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The client gets it as it is.
    Pass,
    /// The client gets a 503 instead.
    Refuse(WhyRefused),
    /// It is held until these apiservers, asked after the request was sent, have said what is expected.
    Ask {
        /// Who is asked; never empty.
        whom: ApiserverSet,
        /// What each of them has to say for the 404 to be believed.
        expected: Expected,
    },
}

/// What an apiserver has to say for a 404 to be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// It lists the type: then the object is missing.
    StillListed,
    /// It does not list the type, and neither does anybody else.
    ListedByNobody,
}

/// Why a 404 is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyRefused {
    /// No apiserver made it.
    NotByApiserver,
    /// The apiserver that answered does not list the type, and another one does or did until just now.
    ListedByAnother,
    /// Not everybody could be asked, or one whose group-version is stale has said nothing of it.
    Unconfirmed,
    /// Nobody lists the type any more, but somebody did not long ago: controllers still hold that discovery.
    Vanished,
}

impl WhyRefused {
    /// The reason in a word, for logs and `%RESPONSE_CODE_DETAILS%`.
    pub const fn word(self) -> &'static str {
        match self {
            Self::NotByApiserver => "not_by_apiserver",
            Self::ListedByAnother => "listed_by_another",
            Self::Unconfirmed => "unconfirmed",
            Self::Vanished => "vanished",
        }
    }
}

/// Judges a 404 for `resource`. `apiservers` are all that are configured; a type that vanished after `vanished_after`
/// counts as served.
pub fn judge(
    not_found: NotFound,
    resource: &Resource<'_>,
    asked: Asked,
    view: &View,
    apiservers: ApiserverSet,
    exclusions: &Exclusions,
    vanished_after: Duration,
) -> Verdict {
    if !not_found.is_by_apiserver {
        return Verdict::Refuse(WhyRefused::NotByApiserver);
    }
    if exclusions.contain(resource.group, resource.version) {
        return Verdict::Pass;
    }
    let listing = view.table.look_up(resource);
    let health = view.health(resource.group);
    let may_serve_it = listing.servers.union(apiservers.without(health.known));
    // Those one of which has answered, if they can be told.
    let candidates = match asked {
        Asked::One(apiserver) => ApiserverSet::only(apiserver).intersection(may_serve_it),
        Asked::AnyOne => may_serve_it,
        Asked::Stranger => ApiserverSet::EMPTY,
    };
    if !candidates.is_empty() && !not_found.looks_like_missing_route {
        return Verdict::Pass;
    }
    // Somebody who is known not to serve it may have answered: a gateway cannot tell.
    let may_be_another = asked == Asked::AnyOne && !may_serve_it.contains_all(health.known);
    if !candidates.is_empty() && !may_be_another {
        // Those that fail their polls, too: a balancer may have found one back, as another version, before we have.
        return Verdict::Ask { whom: candidates, expected: Expected::StillListed };
    }
    if !listing.servers.is_empty() {
        return Verdict::Refuse(WhyRefused::ListedByAnother);
    }
    if listing.vanished_at.is_some_and(|vanished_at| vanished_at >= vanished_after) {
        return Verdict::Refuse(WhyRefused::Vanished);
    }
    Verdict::Ask { whom: apiservers, expected: Expected::ListedByNobody }
}

/// Whether a 404 has the form that apiservers give to an unknown group, version, resource or subresource. Told from the
/// headers alone, for those answers have a fixed body. Measured on kube-apiserver 1.34.4, 1.36.3 and 1.37.2.
///
/// An unknown group is answered as plain text of 19 bytes; all else as a `Status` in the negotiated type with an empty
/// `details`. What has no length, is encoded or of another type cannot be told and counts as such a 404.
pub fn looks_like_missing_route(
    content_type: Option<&[u8]>,
    content_length: Option<&[u8]>,
    content_encoding: Option<&[u8]>,
) -> bool {
    let length = content_length.and_then(|text| std::str::from_utf8(text).ok()?.parse::<u32>().ok());
    let (Some(content_type), Some(length), None) = (content_type, length, content_encoding) else {
        return true;
    };
    let media_type = content_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    match media_type.to_ascii_lowercase().as_slice() {
        b"text/plain" => length == 19,
        // Compact, and pretty-printed.
        b"application/json" => matches!(length, 174 | 206),
        b"application/vnd.kubernetes.protobuf" => length == 116,
        b"application/yaml" => length == 154,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use std::rc::Rc;

    use crate::discovery::document::{Document, Half};
    use crate::peers::table::{Context, Health};
    use crate::target::{DecodedPath, Target};
    use crate::testing::{set, view};

    const EVERYBODY: ApiserverSet = set(&[0, 1, 2]);
    const ALL_FRESH: Health = Health { known: EVERYBODY, fresh: EVERYBODY };
    const MISSING_OBJECT: NotFound = NotFound { is_by_apiserver: true, looks_like_missing_route: false };
    const MISSING_ROUTE: NotFound = NotFound { is_by_apiserver: true, looks_like_missing_route: true };
    const FOREIGN: NotFound = NotFound { is_by_apiserver: false, looks_like_missing_route: true };

    fn verdict(group: &str, servers: &[usize], health: Health, asked: Asked, not_found: NotFound) -> Verdict {
        let path = format!("/apis/{group}/v1/crates/c");
        let decoded = DecodedPath::new(path.as_bytes()).unwrap();
        let Target::Resource(resource) = decoded.target() else { panic!("{path} is no resource") };
        let view = view(&[("crates", servers.to_vec())], health);
        let long_ago = Duration::from_secs(1);
        judge(not_found, &resource, asked, &view, EVERYBODY, &Exclusions::default(), long_ago)
    }

    #[test]
    fn a_404_is_believed_or_not() {
        use Asked::{AnyOne, One, Stranger};
        use WhyRefused::{ListedByAnother, NotByApiserver};
        let refuse = Verdict::Refuse;
        let still = |whom| Verdict::Ask { whom: set(whom), expected: Expected::StillListed };
        let nobody = Verdict::Ask { whom: EVERYBODY, expected: Expected::ListedByNobody };
        let (pass, depot) = (Verdict::Pass, "depot.k8s.io");
        let third_failing = Health { known: EVERYBODY, fresh: set(&[0, 1]) };
        let third_unknown = Health { known: set(&[0, 1]), fresh: set(&[0, 1]) };
        let first_unknown = Health { known: set(&[1, 2]), fresh: set(&[1, 2]) };
        let all_failing = Health { known: EVERYBODY, fresh: set(&[]) };
        let nothing_known = Health::default();
        for (group, servers, health, asked, not_found, expected, why) in [
            (depot, &[0, 1, 2][..], ALL_FRESH, One(0), MISSING_OBJECT, pass, "the everyday missing object"),
            (depot, &[0, 1, 2], ALL_FRESH, One(0), MISSING_ROUTE, still(&[0]), "does it list it still?"),
            (depot, &[0, 1, 2], all_failing, One(0), MISSING_ROUTE, still(&[0]), "failing: asked all the same"),
            (depot, &[0, 1, 2], ALL_FRESH, One(0), FOREIGN, refuse(NotByApiserver), "Envoy's own 404"),
            ("toys.example.com", &[], nothing_known, One(0), MISSING_ROUTE, pass, "nobody builds that group in"),
            ("toys.example.com", &[], ALL_FRESH, One(0), FOREIGN, refuse(NotByApiserver), "and still not Envoy's 404"),
            (depot, &[1], ALL_FRESH, One(0), MISSING_ROUTE, refuse(ListedByAnother), "local does not know it"),
            (depot, &[1], ALL_FRESH, One(0), MISSING_OBJECT, refuse(ListedByAnother), "whatever the 404 looks like"),
            (depot, &[1], ALL_FRESH, One(2), MISSING_ROUTE, refuse(ListedByAnother), "nor does this peer"),
            (depot, &[1], ALL_FRESH, One(1), MISSING_OBJECT, pass, "rerouted to one that lists it"),
            (depot, &[1], ALL_FRESH, One(1), MISSING_ROUTE, still(&[1]), "does the peer list it still?"),
            (depot, &[1], ALL_FRESH, Stranger, MISSING_OBJECT, refuse(ListedByAnother), "an unknown cluster answered"),
            (depot, &[], ALL_FRESH, Stranger, MISSING_ROUTE, nobody, "nobody lists it, whoever answered"),
            (depot, &[], ALL_FRESH, One(0), MISSING_ROUTE, nobody, "nobody lists it: ask all"),
            (depot, &[], third_failing, One(0), MISSING_ROUTE, nobody, "one is failing: ask it, too"),
            (depot, &[], third_unknown, One(0), MISSING_ROUTE, nobody, "one is unknown: ask it, too"),
            (depot, &[], nothing_known, One(0), MISSING_ROUTE, still(&[0]), "nothing is known yet: does it list it?"),
            (
                depot,
                &[],
                nothing_known,
                One(0),
                MISSING_OBJECT,
                pass,
                "the asked one is unknown, the object is missing",
            ),
            (depot, &[1], first_unknown, One(0), MISSING_OBJECT, pass, "the same"),
            (depot, &[1], first_unknown, One(0), MISSING_ROUTE, still(&[0]), "unknown: does it list it?"),
            (depot, &[0, 1, 2], ALL_FRESH, AnyOne, MISSING_OBJECT, pass, "gateway: all list it"),
            (depot, &[0, 1, 2], ALL_FRESH, AnyOne, MISSING_ROUTE, still(&[0, 1, 2]), "gateway: do all list it still?"),
            (
                depot,
                &[0, 1, 2],
                third_failing,
                AnyOne,
                MISSING_ROUTE,
                still(&[0, 1, 2]),
                "gateway: the failing one may be back",
            ),
            (
                depot,
                &[0, 1, 2],
                all_failing,
                AnyOne,
                MISSING_ROUTE,
                still(&[0, 1, 2]),
                "gateway: any of them may be back",
            ),
            (
                depot,
                &[1],
                ALL_FRESH,
                AnyOne,
                MISSING_ROUTE,
                refuse(ListedByAnother),
                "gateway, Disabled: who answered?",
            ),
            (depot, &[1], ALL_FRESH, AnyOne, MISSING_OBJECT, pass, "gateway, Disabled: one that lists it answered"),
            (
                depot,
                &[0, 1],
                third_unknown,
                AnyOne,
                MISSING_ROUTE,
                still(&[0, 1, 2]),
                "gateway: the third may have answered",
            ),
            (depot, &[], ALL_FRESH, AnyOne, MISSING_OBJECT, nobody, "gateway: nobody lists it"),
        ] {
            assert_eq!(verdict(group, servers, health, asked, not_found), expected, "{group} {asked:?}: {why}");
        }
    }

    #[test]
    fn a_type_that_has_just_vanished_is_still_missed() {
        let decoded = DecodedPath::new(b"/apis/depot.k8s.io/v1/crates").unwrap();
        let Target::Resource(resource) = decoded.target() else { panic!("no resource") };
        let listed = view(&[("crates", vec![0])], ALL_FRESH);
        let gone = Document { group_versions: vec![] };
        let context = Context { exclusions: &Exclusions::default(), now: Duration::from_secs(50) };
        let table = listed.table.with_document(0, Half::Groups, &gone, context);
        let view = View { table: Rc::new(table), ..listed };
        let verdict = |vanished_after| {
            let after = Duration::from_secs(vanished_after);
            judge(MISSING_ROUTE, &resource, Asked::One(0), &view, EVERYBODY, &Exclusions::default(), after)
        };
        assert_eq!(verdict(50), Verdict::Refuse(WhyRefused::Vanished));
        assert_eq!(verdict(51), Verdict::Ask { whom: EVERYBODY, expected: Expected::ListedByNobody });
    }

    #[test]
    fn recorded_404s_are_told_apart() {
        for (content_type, length, encoding, expected, why) in [
            ("text/plain; charset=utf-8", "19", "", true, "unknown group"),
            ("application/json", "174", "", true, "unknown resource"),
            ("application/json", "206", "", true, "unknown resource, pretty"),
            ("application/vnd.kubernetes.protobuf", "116", "", true, "unknown resource in protobuf"),
            ("application/yaml", "154", "", true, "unknown resource in YAML"),
            ("application/json", "188", "", false, "missing object"),
            ("application/json", "235", "", false, "missing object, pretty"),
            ("application/vnd.kubernetes.protobuf", "109", "", false, "missing object in protobuf"),
            ("application/yaml", "162", "", false, "missing object in YAML"),
            ("application/json; charset=utf-8", "188", "", false, "parameters do not matter"),
            ("application/json", "174", "gzip", true, "an encoded body has another length"),
            ("application/json", "188", "gzip", true, "an encoded body has another length"),
            ("application/json", "", "", true, "no length"),
            ("application/json", "-1", "", true, "a broken length"),
            ("", "188", "", true, "no type"),
            ("text/html", "188", "", true, "another type"),
            ("text/plain", "188", "", false, "plain text of a backend"),
        ] {
            let present = |text: &'static str| (!text.is_empty()).then_some(text.as_bytes());
            let looks = looks_like_missing_route(present(content_type), present(length), present(encoding));
            assert_eq!(looks, expected, "{content_type} {length}: {why}");
        }
    }
}
