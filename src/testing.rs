//! Small builders for the tables of tests.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use crate::config::{Config, GroupVersionPattern};
use crate::discovery::document::{ApiResource, Document, GroupVersion, Half};
use crate::peers::exclusions::Exclusions;
use crate::peers::table::{ApiserverSet, Context, Health, Table, View};

/// What an apiserver of a version was seen to answer: a file in `tests/fixtures/discovery`.
macro_rules! recorded {
    ($version:literal, $file:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/discovery/", $version, "/", $file, ".json"))
    };
}
pub(crate) use recorded;

/// A set of apiservers.
pub(crate) const fn set(indexes: &[usize]) -> ApiserverSet {
    let mut set = ApiserverSet::EMPTY;
    let mut rest = indexes;
    while let [first, others @ ..] = rest {
        set = set.union(ApiserverSet::only(*first));
        rest = others;
    }
    set
}

/// A configuration of three apiservers, `cp-0` to `cp-2`. `mode` holds words: `sidecar` (beside `cp-0`) or `gateway`,
/// `disabled`, `dry-run`.
pub(crate) fn config(mode: &str) -> Config {
    let mut text = r#"{"apiservers":[{"name":"cp-0","cluster":"cp-0"},{"name":"cp-1","cluster":"cp-1"},
        {"name":"cp-2","cluster":"cp-2"}]"#
        .to_owned();
    for word in mode.split(' ') {
        text += match word {
            "sidecar" => r#","local":"cp-0""#,
            "gateway" => "",
            "disabled" => r#","peerProxying":"Disabled""#,
            "dry-run" => r#","peerProxying":"DryRun""#,
            word => panic!("{word}: no such mode"),
        };
    }
    text += "}";
    Config::parse(text.as_bytes()).unwrap()
}

/// Exclusions as an operator would list them: groups, each whole or one version of it.
pub(crate) fn excluding(patterns: &[(&str, Option<&str>)]) -> Exclusions {
    let pattern = |(group, version): &(&str, Option<&str>)| GroupVersionPattern {
        group: (*group).to_owned(),
        version: version.map(str::to_owned),
    };
    Exclusions::new(&patterns.iter().map(pattern).collect::<Vec<_>>())
}

/// A view in which the types (`resource` or `resource/subresource`) of `depot.k8s.io/v1` and `toys.example.com/v1`
/// stand in the documents of the given apiservers, and in which both halves are in the same state.
pub(crate) fn view(types: &[(&str, Vec<usize>)], health: Health) -> View {
    let servers: BTreeSet<usize> = types.iter().flat_map(|(_, servers)| servers.iter().copied()).collect();
    let context = Context { exclusions: &Exclusions::default(), now: Duration::ZERO };
    let table = servers.into_iter().fold(Table::default(), |table, server| {
        let names = types.iter().filter(|(_, servers)| servers.contains(&server)).map(|(name, _)| *name);
        let group_versions = names.flat_map(|name| document(name).group_versions).collect();
        table.with_document(server, Half::Groups, &Document { group_versions }, context)
    });
    View { table: Rc::new(table), core: health, groups: health, avoided: ApiserverSet::EMPTY }
}

fn document(type_name: &str) -> Document {
    let (resource, subresource) = type_name.split_once('/').unwrap_or((type_name, ""));
    let group_version = |group: &str| GroupVersion {
        group: group.to_owned(),
        version: "v1".to_owned(),
        is_stale: false,
        resources: vec![ApiResource {
            name: resource.to_owned(),
            subresources: (!subresource.is_empty()).then(|| subresource.to_owned()).into_iter().collect(),
        }],
    };
    Document { group_versions: vec![group_version("depot.k8s.io"), group_version("toys.example.com")] }
}
