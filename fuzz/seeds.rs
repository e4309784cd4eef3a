//! Where a fuzzer begins: what real apiservers and Kubernetes' own code have said, and records of our own.

use std::fs;
use std::path::Path;
use std::time::Duration;

use mixed_version_proxy::discovery::document::Half;
use mixed_version_proxy::peers::cluster_discovery::{self, Known, Stamp};
use mixed_version_proxy::peers::documents::{Documents, Kept, Kind};
use mixed_version_proxy::peers::exclusions::Exclusions;
use mixed_version_proxy::peers::refresh::{Answer, Peers, Role, Settings, Subject};
use mixed_version_proxy::peers::table::Table;
use serde_json::Value;

use super::targets::NAMES;

/// The seeds of a target. `tests` is the folder of that name, with the fixtures and the vectors.
pub fn of(target: &str, tests: &Path) -> Vec<Vec<u8>> {
    let documents = || ["apis.v2.json", "api.v2.json"].map(|name| recorded(tests, name));
    match target {
        "path" => strings(tests, "request-info", &["target"]),
        "document" => {
            let lists = ["apiservices.partial.json", "apiservices.json", "apis.legacy.json", "apis.poll-accept.json"];
            documents().into_iter().chain(lists.map(|name| recorded(tests, name))).flatten().collect()
        }
        "merge" => {
            let [groups, core] = documents();
            let mut seeds = vec![joined(0, &groups), joined(0b1000_1011, &core)];
            for (line, flags) in lines(tests, "merge").iter().zip((0..16).cycle()) {
                let servers = line["servers"].as_array().into_iter().flatten().take(3);
                let texts: Vec<_> = servers.map(|server| server["apis"].to_string().into_bytes()).collect();
                seeds.push(joined(flags, &texts));
            }
            seeds
        }
        "open_api" => {
            let roots = recorded(tests, "openapi-v3-root.json");
            let few =
                br#"{"paths":{"api/v1":{"serverRelativeURL":"/openapi/v3/api/v1?hash=1"},"version":null}}"#.to_vec();
            let other = br#"{"paths":{"api/v1":{"serverRelativeURL":"/openapi/v3/api/v1?hash=2"}}}"#.to_vec();
            vec![
                joined(0, &roots),
                joined(3, &roots),
                joined(1, &[few.clone(), other.clone()]),
                joined(2, &[few, other]),
            ]
        }
        "subject" => strings(tests, "identity", &["rfc2253_reversed"]),
        "config" => configurations(),
        "shared_data" => records(tests),
        "headers" => header_values(tests),
        "refresh" => stories(tests),
        target => panic!("{target}: no such target"),
    }
}

fn recorded(tests: &Path, name: &str) -> Vec<Vec<u8>> {
    let versions = ["1.34.4", "1.36.3", "1.37.2"].iter();
    versions.map(|version| fs::read(tests.join("fixtures/discovery").join(version).join(name)).unwrap()).collect()
}

fn lines(tests: &Path, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(tests.join(format!("vectors/{name}.jsonl"))).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn strings(tests: &Path, name: &str, members: &[&str]) -> Vec<Vec<u8>> {
    let of_line = |line: &Value| -> Vec<Vec<u8>> {
        members.iter().filter_map(|member| Some(line[*member].as_str()?.as_bytes().to_vec())).collect()
    };
    lines(tests, name).iter().flat_map(of_line).collect()
}

fn joined(flags: u8, texts: &[Vec<u8>]) -> Vec<u8> {
    [vec![flags], texts.join(&0)].concat()
}

fn configurations() -> Vec<Vec<u8>> {
    let apiservers = r#""apiservers":[{"name":"cp-0","cluster":"cp-0","discoveryCluster":"cp-0-poll","frontProxyCluster":"cp-0-f"},
        {"name":"cp-1","cluster":"cp-1","frontProxyCluster":"cp-1-f"}]"#;
    let all = format!(
        r#"{{{apiservers},"local":"cp-0","peerProxying":"DryRun","peerAggregatedDiscovery":"Disabled","status":{{"retryAfterSeconds":7}},
        "discovery":{{"refreshInterval":"1m30s","timeout":"1.5s","forgetAfter":"0s","maxDocumentBytes":4096,"authority":"[::1]:6443"}},
        "exclusions":{{"apiServices":false,"groupVersions":["metrics.k8s.io","a.k8s.io/v1"],"gracePeriod":"5m"}},
        "reroute":{{"by":"Header","key":"x-reroute"}},
        "identity":{{"clientCertificates":"RequestHeader","headers":{{"user":["X-Remote-User"],"group":["X-Remote-Group"]}}}}}}"#
    );
    // {"apiservers": [{"name": "a", "cluster": "a"}]} as a google.protobuf.Struct.
    let field = |key: &[u8], value: Vec<u8>| {
        let entry = [&[0x0a, key.len() as u8], key, &[0x12, value.len() as u8], &value].concat();
        [vec![0x0a, entry.len() as u8], entry].concat()
    };
    let string = || vec![0x1a, 1, b'a'];
    let apiserver = [field(b"name", string()), field(b"cluster", string())].concat();
    let apiserver = [vec![0x2a, apiserver.len() as u8], apiserver].concat();
    let list = [vec![0x0a, apiserver.len() as u8], apiserver].concat();
    let list = [vec![0x32, list.len() as u8], list].concat();
    vec![format!("{{{apiservers}}}").into_bytes(), all.into_bytes(), field(b"apiservers", list)]
}

fn settings() -> Settings {
    let second = Duration::from_secs(1);
    Settings {
        apiservers: NAMES.len(),
        local: Some(0),
        interval: second,
        timeout: second,
        forget_after: second,
        max_document_bytes: 1 << 20,
        api_services: true,
        grace_period: second,
        merges: true,
    }
}

/// Small documents, so that a fuzzer has something to change.
fn small(half: Half) -> Vec<u8> {
    let (group, resource) = if half == Half::Core { ("", "pods") } else { ("apps", "deployments") };
    format!(
        r#"{{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","metadata":{{}},"items":[{{"metadata":{{"name":"{group}"}},"versions":[{{"version":"v1","resources":[{{"resource":"{resource}","responseKind":{{"group":"","version":"","kind":"A"}},"scope":"Namespaced","singularResource":"a","verbs":["get"],"subresources":[{{"subresource":"status","verbs":["get"]}}]}}],"freshness":"Current"}}]}}]}}"#
    )
    .into_bytes()
}

const API_SERVICES: &[u8] = br#"{"kind":"PartialObjectMetadataList","items":[{"metadata":{"name":"v1.example.com","labels":{"kube-aggregator.kubernetes.io/automanaged":"true"}}}]}"#;
const OPEN_API: &[u8] = br#"{"paths":{"apis/apps/v1":{"serverRelativeURL":"/openapi/v3/apis/apps/v1?hash=1"}}}"#;

fn snapshot() -> Vec<u8> {
    let mut peers = Peers::new(settings(), Exclusions::default());
    let now = Duration::from_secs(1000);
    for question in peers.due(now, Role::Leader) {
        let body = match question.id.subject {
            Subject::Half(half) => small(half),
            Subject::OpenApi => OPEN_API.to_vec(),
            Subject::ApiServices => API_SERVICES.to_vec(),
        };
        let (content_type, etag) = (&b"application/json"[..], Some(&b"\"tag\""[..]));
        let answer = Answer::Response { status: 200, content_type, etag, retry_after: None, body: &body };
        peers.answered(question.id, answer, now, 0);
    }
    peers.snapshot(NAMES.into_iter()).to_bytes().unwrap()
}

fn records(tests: &Path) -> Vec<Vec<u8>> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let bodies = [text(&small(Half::Core)), text(&small(Half::Groups)), text(OPEN_API)];
    let kept = NAMES.iter().flat_map(|(name, discovery_cluster)| {
        Kind::ALL.into_iter().zip(&bodies).map(move |(kind, body)| {
            let version = Duration::from_secs(7);
            Kept { name, discovery_cluster, kind, version, body }
        })
    });
    let documents = Documents::of(kept).to_bytes().unwrap();
    let other = text(&recorded(tests, "apis.v2.json")[0]);
    let [core, groups, open_api] = bodies.each_ref().map(|body| Some(body.as_str()));
    let discovery = cluster_discovery::make(&cluster_discovery::Sources {
        apiservers: vec![
            Known { name: "cp-0", documents: [core, groups, open_api], etags: [None; 2] },
            Known { name: "cp-1", documents: [core, Some(&other), None], etags: [Some("\"tag\""); 2] },
        ],
        local: Some(0),
        exclusions: &Exclusions::default(),
        table: &Table::default(),
        is_incomplete: true,
        stamp: Stamp::default(),
    });
    vec![snapshot(), documents, discovery.unwrap()]
}

fn header_values(tests: &Path) -> Vec<Vec<u8>> {
    let accepts = lines(tests, "accept").into_iter().filter_map(|line| {
        let clauses = line["accept"].as_array()?.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",");
        Some(clauses.into_bytes())
    });
    let others = [
        "7",
        "\"a\", W/\"b\"\0\"b\"",
        "*\0\"a\"",
        "application/json; charset=utf-8\x00174\0gzip",
        "text/plain\x0019",
        "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_111}",
        "no_healthy_upstream",
        "response_timeout",
    ];
    accepts.chain(others.map(|value| value.as_bytes().to_vec())).collect()
}

/// Steps of the target `refresh`: settings, then pairs of what happens and how.
fn stories(tests: &Path) -> Vec<Vec<u8>> {
    let bodies = [small(Half::Core), small(Half::Groups), OPEN_API.to_vec(), API_SERVICES.to_vec()];
    let [first, .., last] = &recorded(tests, "apis.v2.json")[..] else { return Vec::new() };
    let steps: [&[u8]; 4] = [
        b"\x0f\x02\x03\x04\x04\x04\x08\x04\x0c\x14\x04\x04\x01\x04\x05\x0f\x00\x01\x0a\x02\x03\x34\x04\x34\x08\x54\x04\x64\x04\x0b\x01",
        b"\x0f\x02\x03\x04\x04\x04\x09\x04\x0c\x0e\x01\x0d\x02\x02\x04\x01\x14\x0c\x01\x0b\x01\x0d\x02\x08\x07\x02\x04\x0f\x01",
        b"\x0e\x02\x03\x74\x04\x04\x09\x0a\x01\x09\x02\x01\x28\x02\x05\x04\x01\x01\x78\x0b\x02\x0d\x09\x0d\x02",
        b"\x02\x02\x03\x04\x05\x04\x05\x04\x05\x01\x50\x02\x03\x04\x05\x0b\x01\x01\xff\x0b\x02\x0d\x01\x0e\x01\x0d\x02",
    ];
    let mut stories: Vec<_> =
        steps.iter().map(|steps| [vec![steps.to_vec()], bodies.to_vec()].concat().join(&0)).collect();
    stories.push(
        [b"\x0f\x02\x03\x04\x01\x04\x02\x04\x03\x01\x14\x02\x03\x04\x01".to_vec(), first.clone(), last.clone()]
            .join(&0),
    );
    stories
}
