//! What VMs keep: the same after a million requests and ten thousand refreshes as after a few.
//!
//! Two workers share what they know: one polls, the other adopts. Both see requests of all kinds, and the apiservers never
//! serve the same twice.

use std::alloc::System;
use std::collections::BTreeMap;
use std::time::Duration;

use host_emulator::{Answer, Headers, Host, HttpCall, Outcome, Progress, Properties, RootId, Vm, Worker};
use lifecycle::{API_SERVICES, COMMON, NEW, NOBODY, answer, document, from_cluster, request};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// A sidecar that takes client certificates.
const CERTIFICATES: &str = r#"{"apiservers": [
    {"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll", "frontProxyCluster": "cp-0-trusted"},
    {"name": "cp-1", "cluster": "cp-1", "discoveryCluster": "cp-1-poll", "frontProxyCluster": "cp-1-trusted"},
    {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll", "frontProxyCluster": "cp-2-trusted"}],
    "local": "cp-0", "identity": {"clientCertificates": "RequestHeader"}}"#;

/// In a round all documents are refreshed once, and each of the two workers sees so many requests.
const ROUNDS: usize = 10_000;
const REQUESTS: usize = 50;

/// Until all buffers have grown to their size, and types, exclusions and names of metrics are forgotten as often as new ones
/// come: after five minutes, which are sixty rounds.
const WARM_UP: usize = 200;

/// What may be kept at the end, and at any time between. A record of a hundred bytes kept by one request in a hundred would
/// be a megabyte; a refresh that kept seven bytes would show too. What is kept now and then, such as a document that waits to
/// be published or a table with one type more, is much smaller.
const SLACK: isize = 64 << 10;

const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
const INTERVAL: Duration = Duration::from_millis(5_100);

/// What an apiserver answers in a round: `cp-0` the same documents under another tag, and now and then nothing good; `cp-1`
/// always the same; `cp-2` a type that it has never had before, in the place of the last one. Other APIServices and schemas
/// too.
fn upstream(round: usize, call: &HttpCall) -> Option<Answer> {
    let (mut etag, body) = match (call.path(), call.upstream.as_str()) {
        (API_SERVICES, _) => (
            String::new(),
            format!(
                r#"{{"kind":"PartialObjectMetadataList","items":[{{"metadata":{{"name":"v1.g{round:06}.k8s.io"}}}}]}}"#
            ),
        ),
        ("/openapi/v3", _) => {
            let entry = format!(r#""apis/apps/v1":{{"serverRelativeURL":"/openapi/v3/apis/apps/v1?hash={round:06}"}}"#);
            (String::new(), format!(r#"{{"paths":{{{entry}}}}}"#))
        }
        ("/api", _) => ("\"core\"".to_owned(), document("", "pods")),
        (_, "cp-1-poll") => ("\"crates\"".to_owned(), document("depot.k8s.io", "crates")),
        (_, "cp-2-poll") => (format!("\"{round:06}\""), document("apps", &format!("things{round:06}"))),
        _ => ("\"apps\"".to_owned(), document("apps", "deployments")),
    };
    if call.upstream == "cp-0-poll" {
        match round % 10 {
            2 => return Some(Answer::Failure),
            3 => return Some(Answer::local(503, "upstream connect error")),
            4 => return Some(Answer::new(200, [("content-type", "application/json")], &body[..body.len() / 2])),
            // It never answers.
            5 => return None,
            6 => return Some(Answer::new(401, [("content-type", "application/json")], "{}")),
            _ => etag = etag.replacen('"', &format!("\"{round:06}"), 1),
        }
    }
    if !etag.is_empty() && call.headers.text("if-none-match") == Some(&etag) {
        return Some(Answer::new(304, [("etag", etag)], ""));
    }
    Some(Answer::new(200, [("content-type", AGGREGATED), ("etag", &*etag)], body))
}

/// How many things can become of an answer that the filter looks at.
const FATES: usize = 6;

/// One worker's Envoy.
struct Traffic {
    root: RootId,
    /// What became of the answers.
    fates: BTreeMap<&'static str, usize>,
}

impl Traffic {
    /// As many requests as [`REQUESTS`].
    fn round(&mut self, vm: &mut Vm, round: usize) {
        let missing = || answer(404, "application/json", 174);
        let unchanged = || Headers::new().with(":status", "304").with("audit-id", "1f1c7ea8").with("etag", "\"other\"");
        let thing = format!("/apis/apps/v1/namespaces/shop/things{round:06}");
        // Most stay, and their objects are there, or are missing as objects are.
        for _ in 0..20 {
            self.passes(vm, request(COMMON), answer(200, "application/json", 4_000));
        }
        for path in [COMMON, "/api/v1/nodes/n1", "/healthz", "//odd", "/api/v1/%zz", NEW, &*thing] {
            self.passes(vm, request(path), answer(404, "application/json", 300));
        }
        // Envoy's own answers.
        for details in ["upstream_reset_before_response_started{connection_termination}", "cluster_not_found"] {
            let stream = self.request(vm, request(COMMON));
            let own = Properties::new().with("response.code_details", details);
            let outcome = vm.response(stream.stream, answer(503, "text/plain", 98), own);
            self.finish(vm, round, outcome);
        }
        // Guarded.
        for path in [COMMON, NEW, NOBODY, "/apis/apps/v1/deployments", &*thing] {
            self.answered(vm, round, request(path), missing());
        }
        // Discovery: the cluster's document, the client's own condition, legacy and unmerged forms, news at an apiserver.
        for (path, accept, if_none_match, response) in [
            ("/apis", AGGREGATED, "\"nonsense\"", unchanged()),
            ("/apis", AGGREGATED, "*", unchanged()),
            ("/apis", "*/*", "", answer(200, AGGREGATED, 4_000)),
            ("/api", AGGREGATED, "", unchanged()),
            ("/apis", "application/vnd.kubernetes.protobuf", "", answer(200, "application/json", 4_000)),
            ("/apis/apps", "application/json", "", answer(200, "application/json", 4_000)),
            ("/apis/depot.k8s.io/v1", "application/json", "", missing()),
            ("/openapi/v3", "application/json", "", answer(200, "application/json", 4_000)),
            ("/openapi/v3/apis/apps/v1?hash=1", "application/json", "", answer(304, "application/json", 0)),
        ] {
            let mut headers = request(path);
            headers.set("accept", accept.as_bytes());
            headers.set("if-none-match", if_none_match.as_bytes());
            self.answered(vm, round, headers, response);
        }
        // Given up: before there is an answer, while it is held, and before the filter has seen anything.
        for path in [COMMON, NEW, "/apis"] {
            let outcome = self.request(vm, request(path));
            vm.finish(outcome.stream);
        }
        for path in [NOBODY, "/apis", "/openapi/v3"] {
            let mut headers = request(path);
            headers.set("accept", AGGREGATED.as_bytes());
            let outcome = self.request(vm, headers);
            let response = if path == NOBODY { missing() } else { answer(200, AGGREGATED, 4_000) };
            let outcome = vm.response(outcome.stream, response, from_cluster("cp-0"));
            *self.fates.entry(if outcome.response == Progress::Held { "given up" } else { "answered" }).or_default() +=
                1;
            vm.finish(outcome.stream);
        }
        let stream = vm.open(self.root);
        vm.finish(stream);
        vm.take_logs();
        vm.take_host_calls();
    }

    /// A client with a certificate, and a forged header.
    fn request(&self, vm: &mut Vm, headers: Headers) -> Outcome {
        let certificate = Properties::new()
            .with("connection.subject_peer_certificate", "O=dev,CN=alice")
            .with("connection.sha256_peer_certificate_digest", "ab12");
        vm.request_with(self.root, headers.with("x-remote-user", "root"), certificate, true)
    }

    fn passes(&mut self, vm: &mut Vm, headers: Headers, response: Headers) {
        let stream = self.request(vm, headers).stream;
        vm.response(stream, response, from_cluster("cp-0"));
        vm.finish(stream);
    }

    fn answered(&mut self, vm: &mut Vm, round: usize, headers: Headers, response: Headers) {
        let stream = self.request(vm, headers).stream;
        let outcome = vm.response(stream, response, from_cluster("cp-0"));
        self.finish(vm, round, outcome);
    }

    /// Lets the apiservers be asked, if they have to be.
    fn finish(&mut self, vm: &mut Vm, round: usize, outcome: Outcome) {
        if outcome.response == Progress::Held {
            vm.run_for_with(Duration::from_millis(3), |call| upstream(round, call));
        }
        let outcome = vm.finish(outcome.stream);
        let status = outcome.local_reply.as_ref().map(|reply| reply.status);
        let fate = match (outcome.response, status) {
            (Progress::Held, _) => "waits for Envoy's timeout",
            (_, None) => "passes",
            (_, Some(200 | 304)) => "the cluster's discovery",
            (_, Some(_)) => "an error of the filter",
        };
        *self.fates.entry(fate).or_default() += 1;
    }
}

/// A worker of the world.
struct Member {
    worker: Worker,
    traffic: Option<Traffic>,
}

impl Member {
    fn new(host: &Host) -> Self {
        let worker = host.worker();
        let root = worker.run(|vm| vm.configure(CERTIFICATES).unwrap()).unwrap();
        Self { worker, traffic: Some(Traffic { root, fates: BTreeMap::new() }) }
    }

    fn run(&mut self, job: impl FnOnce(&mut Traffic, &mut Vm) + Send + 'static) {
        let mut traffic = self.traffic.take().unwrap();
        let back = self.worker.run(move |vm| {
            job(&mut traffic, vm);
            traffic
        });
        self.traffic = Some(back.unwrap());
    }
}

/// One refresh of everything, and the requests.
fn round(leader: &mut Member, follower: &mut Member, round: usize) {
    leader.run(move |traffic, vm| {
        vm.run_for_with(INTERVAL, |call| upstream(round, call));
        traffic.round(vm, round);
    });
    follower.run(move |traffic, vm| {
        vm.tick(traffic.root);
        traffic.round(vm, round);
    });
}

#[test]
fn a_vm_keeps_nothing_of_what_is_over() {
    let host = Host::new();
    let (mut leader, mut follower) = (Member::new(&host), Member::new(&host));
    (0..WARM_UP).for_each(|number| round(&mut leader, &mut follower, number));
    let region = Region::new(ALLOCATOR);
    let mut most = 0;
    for number in WARM_UP..WARM_UP + ROUNDS {
        round(&mut leader, &mut follower, number);
        let change = region.change();
        let kept = change.bytes_allocated as isize - change.bytes_deallocated as isize;
        most = most.max(kept);
        assert!(kept < SLACK, "{kept} bytes more after {} rounds", number + 1 - WARM_UP);
    }
    // The world went on: the follower too knows the latest type.
    follower.run(|traffic, vm| {
        let path = format!("/apis/apps/v1/things{:06}", WARM_UP + ROUNDS - 1);
        let outcome = traffic.request(vm, request(&path));
        assert_eq!(outcome.filter_state_text("mixed_version_proxy.cluster"), Some("cp-2-trusted"));
        vm.finish(outcome.stream);
    });
    println!("{ROUNDS} refreshes and {} requests: never more than {most} bytes", ROUNDS * REQUESTS * 2);
    for member in [leader, follower] {
        let fates = member.traffic.unwrap().fates;
        println!("{fates:?}");
        assert!(fates.len() == FATES && fates.values().all(|count| *count > ROUNDS), "{fates:?}");
    }
}
