//! One order out of several: the one in which merged groups, versions and resources stand.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::discovery::json::sorted_names;

/// All names of all lists, each once, in an order that keeps what the lists agree on; where they say nothing, by bytes.
/// The order means something to clients: the first version of a group is the preferred one, and a kind without a group is
/// looked for in the first group that has it.
///
/// If a list holds all names already, the first such list is taken as it is. If the lists contradict each other, all names
/// stand by their bytes. Both as in Kubernetes' own peer-aggregated discovery. No list may hold a name twice.
pub(super) fn in_common_order<'n>(lists: &[Vec<&'n str>]) -> Vec<&'n str> {
    let names = sorted_names(lists.iter().flatten().copied());
    if let Some(complete) = lists.iter().find(|list| list.len() == names.len()) {
        return complete.clone();
    }
    let rank = |name: &&str| names.binary_search(name).unwrap_or_default();
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); names.len()];
    let mut waits_for: Vec<usize> = vec![0; names.len()];
    // Edges between neighbours say the same as edges between all that stand in one list.
    for (before, after) in lists.iter().flat_map(|list| list.iter().zip(list.iter().skip(1))) {
        let after = rank(after);
        if let (Some(followers), Some(count)) = (followers.get_mut(rank(before)), waits_for.get_mut(after)) {
            followers.push(after);
            *count = count.saturating_add(1);
        }
    }
    let mut ready: BinaryHeap<Reverse<usize>> = BinaryHeap::new();
    let free = waits_for.iter().enumerate().filter(|(_, count)| **count == 0);
    free.for_each(|(rank, _)| ready.push(Reverse(rank)));
    let mut ordered = Vec::with_capacity(names.len());
    while let Some(Reverse(next)) = ready.pop() {
        ordered.extend(names.get(next));
        for follower in followers.get(next).into_iter().flatten() {
            let Some(count) = waits_for.get_mut(*follower) else { continue };
            *count = count.saturating_sub(1);
            if *count == 0 {
                ready.push(Reverse(*follower));
            }
        }
    }
    if ordered.len() == names.len() { ordered } else { names }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn what_the_lists_agree_on_is_kept() {
        for (lists, expected, why) in [
            (&[][..], "", "nothing"),
            (&["c a b"][..], "c a b", "one list"),
            (&["b c", "a"], "a b c", "nothing in common: by bytes"),
            (&["c a", "a b"], "c a b", "a chain"),
            (&["z a", "z b"], "z a b", "a common start"),
            (&["a z", "b z"], "a b z", "a common end"),
            (&["b", "a", "b a"], "b a", "the third is complete"),
            (&["a b", "b a"], "a b", "both are complete: the first"),
            (&["a b c", "b a d"], "a b c d", "a contradiction: by bytes"),
            (&["z y", "b a", "a b"], "a b y z", "a contradiction spoils the order of others"),
            (&["10", "9", "B", "a"], "10 9 B a", "by bytes"),
        ] {
            let lists: Vec<Vec<_>> = lists.iter().map(|list| list.split(' ').collect()).collect();
            assert_eq!(in_common_order(&lists).join(" "), expected, "{why}");
        }
    }
}
