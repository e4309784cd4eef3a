//! Answers that are held until the apiservers have been asked.
//!
//! A state machine without I/O: streams are named by number, somebody else asks, and each answer to a question says which
//! held answers are to be let go, and how.

use std::time::Duration;

use super::{Expected, Verdict, WhyRefused};
use crate::discovery::api_services::GroupVersionName;
use crate::discovery::document::Half;
use crate::peers::table::{ApiserverSet, View};
use crate::target::{DecodedPath, Target};

/// All answers that one worker holds.
#[derive(Debug, Default)]
pub struct Held(Vec<Waiting>);

/// One of them.
#[derive(Debug)]
pub struct Waiting {
    /// The stream.
    pub stream: u32,
    /// The request's path as sent, a resource's.
    pub path: Vec<u8>,
    /// Only answers to questions with a higher number count: they were sent after the request.
    pub mark: u64,
    /// Which document tells.
    pub half: Half,
    /// Who has to answer yet.
    pub pending: ApiserverSet,
    /// What they have to say for the 404 to be believed.
    pub expected: Expected,
    /// The answer may be a backend's, which has seen the request and may have acted upon it.
    pub may_be_executed: bool,
}

/// A held answer that is to be let go.
#[derive(Debug, PartialEq, Eq)]
pub struct Released {
    /// The stream.
    pub stream: u32,
    /// How.
    pub verdict: Verdict,
    /// See [`Waiting::may_be_executed`].
    pub may_be_executed: bool,
}

impl Held {
    /// Holds an answer.
    pub fn hold(&mut self, waiting: Waiting) {
        self.0.push(waiting);
    }

    /// A stream has ended, or its answer was let go otherwise; whether it was held.
    pub fn drop_stream(&mut self, stream: u32) -> bool {
        let before = self.0.len();
        self.0.retain(|waiting| waiting.stream != stream);
        self.0.len() != before
    }

    /// How many answers are held.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no answer is held.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the answer of `apiserver` to the question number `number` about `half`. `view` is what is known now, that
    /// answer included; `stale` are the group-versions of which that answer says nothing, `None` if there was no good one.
    /// `vanished_after`: a type that vanished since counts as served.
    pub fn answered(
        &mut self,
        apiserver: usize,
        half: Half,
        number: u64,
        stale: Option<&[GroupVersionName]>,
        view: &View,
        vanished_after: Duration,
    ) -> Vec<Released> {
        let mut released = Vec::new();
        self.0.retain_mut(|waiting| {
            // A failure tells of trouble whenever it was asked: an apiserver that restarts meanwhile may come back as
            // another version, and "still listed" would then be said of that one.
            let is_too_old = stale.is_some() && number <= waiting.mark;
            if waiting.half != half || is_too_old || !waiting.pending.contains(apiserver) {
                return true;
            }
            let verdict = match stale {
                Some(stale) => waiting.heard(apiserver, stale, view, vanished_after),
                None => Some(UNCONFIRMED),
            };
            let Waiting { stream, may_be_executed, .. } = *waiting;
            released.extend(verdict.map(|verdict| Released { stream, verdict, may_be_executed }));
            verdict.is_none()
        });
        released
    }
}

const UNCONFIRMED: Verdict = Verdict::Refuse(WhyRefused::Unconfirmed);

impl Waiting {
    /// What follows from an apiserver's good answer; `None`: others have to answer yet.
    fn heard(
        &mut self,
        apiserver: usize,
        stale: &[GroupVersionName],
        view: &View,
        vanished_after: Duration,
    ) -> Option<Verdict> {
        self.pending = self.pending.without(ApiserverSet::only(apiserver));
        let decoded = DecodedPath::new(&self.path);
        let Some(Target::Resource(resource)) = decoded.as_ref().map(DecodedPath::target) else {
            return Some(UNCONFIRMED);
        };
        let listing = view.table.look_up(&resource);
        let is_confirmed = match self.expected {
            Expected::StillListed => listing.servers.contains(apiserver),
            Expected::ListedByNobody => listing.servers.is_empty(),
        };
        if !is_confirmed {
            return Some(Verdict::Refuse(WhyRefused::ListedByAnother));
        }
        // Then the view still holds what was said before, by another release maybe.
        let is_concerned = |name: &GroupVersionName| {
            name.group.as_bytes() == resource.group && name.version.as_bytes() == resource.version
        };
        if stale.iter().any(is_concerned) {
            return Some(UNCONFIRMED);
        }
        let has_just_vanished = listing.vanished_at.is_some_and(|vanished_at| vanished_at >= vanished_after);
        if listing.servers.is_empty() && has_just_vanished {
            return Some(Verdict::Refuse(WhyRefused::Vanished));
        }
        self.pending.is_empty().then_some(Verdict::Pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use crate::peers::table::Health;
    use crate::testing::{set, view};

    const ALL: Health = Health { known: set(&[0, 1]), fresh: set(&[0, 1]) };
    const LONG_AGO: Duration = Duration::from_secs(1);
    /// A good answer in which nothing is stale.
    const GOOD: Option<&[GroupVersionName]> = Some(&[]);

    fn waiting(stream: u32, mark: u64, pending: &[usize], expected: Expected) -> Waiting {
        let path = b"/apis/depot.k8s.io/v1/crates/c".to_vec();
        Waiting { stream, path, mark, half: Half::Groups, pending: set(pending), expected, may_be_executed: false }
    }

    fn held(waiting: impl IntoIterator<Item = Waiting>) -> Held {
        Held(waiting.into_iter().collect())
    }

    fn pass(stream: u32) -> Released {
        Released { stream, verdict: Verdict::Pass, may_be_executed: false }
    }

    fn refuse(stream: u32, why: WhyRefused) -> Released {
        Released { stream, verdict: Verdict::Refuse(why), may_be_executed: false }
    }

    #[test]
    fn all_that_wait_share_an_answer() {
        let mut held = held((0..40).map(|stream| waiting(stream, 7, &[0], Expected::StillListed)));
        assert!(held.drop_stream(0), "the first one aborts");
        assert!(!held.drop_stream(0));
        let view = view(&[("crates", vec![0])], ALL);
        let released = held.answered(0, Half::Groups, 8, GOOD, &view, LONG_AGO);
        assert_eq!(released, (1..40).map(pass).collect::<Vec<_>>(), "the others are answered");
        assert!(held.is_empty());
    }

    #[test]
    fn only_an_answer_to_a_later_question_counts() {
        let mut held = held([waiting(1, 7, &[0], Expected::StillListed), waiting(2, 8, &[0], Expected::StillListed)]);
        let view = view(&[("crates", vec![0])], ALL);
        assert_eq!(held.answered(0, Half::Groups, 7, GOOD, &view, LONG_AGO), []);
        let mut restarted = Held(vec![waiting(3, 7, &[0], Expected::StillListed)]);
        let refused = restarted.answered(0, Half::Groups, 7, None, &view, LONG_AGO);
        assert_eq!(refused, [refuse(3, WhyRefused::Unconfirmed)], "a failure counts whenever it was asked");
        assert_eq!(held.answered(0, Half::Core, 9, GOOD, &view, LONG_AGO), [], "the other half");
        assert_eq!(held.answered(1, Half::Groups, 9, GOOD, &view, LONG_AGO), [], "another apiserver");
        assert_eq!(held.answered(0, Half::Groups, 8, GOOD, &view, LONG_AGO), [pass(1)]);
        assert_eq!(held.answered(0, Half::Groups, 9, GOOD, &view, LONG_AGO), [pass(2)]);
    }

    #[test]
    fn the_asked_one_has_to_list_it_still() {
        for (servers, said, expected, why) in [
            (vec![0], GOOD, pass(1), "it does"),
            (vec![], GOOD, refuse(1, WhyRefused::ListedByAnother), "not any more"),
            (vec![1], GOOD, refuse(1, WhyRefused::ListedByAnother), "only another one does"),
            (vec![0], None, refuse(1, WhyRefused::Unconfirmed), "no answer"),
        ] {
            let mut held = held([waiting(1, 0, &[0], Expected::StillListed)]);
            let view = view(&[("crates", servers)], ALL);
            assert_eq!(held.answered(0, Half::Groups, 1, said, &view, LONG_AGO), [expected], "{why}");
        }
    }

    #[test]
    fn nobody_may_list_it_and_everybody_has_to_say_so() {
        let nobody = view(&[("other", vec![0, 1])], ALL);
        let mut both = held([waiting(1, 0, &[0, 1], Expected::ListedByNobody)]);
        assert_eq!(both.answered(1, Half::Groups, 1, GOOD, &nobody, LONG_AGO), [], "one of two");
        assert_eq!(both.answered(0, Half::Groups, 2, GOOD, &nobody, LONG_AGO), [pass(1)]);

        let mut one_lists = held([waiting(1, 0, &[0, 1], Expected::ListedByNobody)]);
        let listed = view(&[("crates", vec![1])], ALL);
        let refused = one_lists.answered(1, Half::Groups, 1, GOOD, &listed, LONG_AGO);
        assert_eq!(refused, [refuse(1, WhyRefused::ListedByAnother)]);

        let mut one_is_silent = held([waiting(1, 0, &[0, 1], Expected::ListedByNobody)]);
        assert_eq!(one_is_silent.answered(0, Half::Groups, 1, GOOD, &nobody, LONG_AGO), []);
        let refused = one_is_silent.answered(1, Half::Groups, 2, None, &nobody, LONG_AGO);
        assert_eq!(refused, [refuse(1, WhyRefused::Unconfirmed)]);
    }

    #[test]
    fn an_apiserver_whose_group_version_is_stale_confirms_nothing() {
        use Expected::{ListedByNobody, StillListed};
        let unconfirmed = refuse(1, WhyRefused::Unconfirmed);
        for (stale, servers, expected, verdict, why) in [
            (("depot.k8s.io", "v1"), vec![0], StillListed, &unconfirmed, "it is listed only because it was before"),
            (("depot.k8s.io", "v1"), vec![], ListedByNobody, &unconfirmed, "an empty list of a stale group-version"),
            (
                ("depot.k8s.io", "v1"),
                vec![1],
                StillListed,
                &refuse(1, WhyRefused::ListedByAnother),
                "a refusal stays one",
            ),
            (("depot.k8s.io", "v2"), vec![0], StillListed, &pass(1), "another version"),
            (("hangar.k8s.io", "v1"), vec![], ListedByNobody, &pass(1), "another group"),
        ] {
            let mut held = held([waiting(1, 0, &[0], expected)]);
            let stale = [GroupVersionName::new(stale.0, stale.1)];
            let released =
                held.answered(0, Half::Groups, 1, Some(&stale), &view(&[("crates", servers)], ALL), LONG_AGO);
            assert_eq!(released, std::slice::from_ref(verdict), "{why}");
        }
    }
}
