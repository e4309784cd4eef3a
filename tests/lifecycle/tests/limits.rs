//! What is too large to be shared by the workers of one Envoy: each then helps itself.

use std::time::Duration;

use host_emulator::{Answer, Host, HttpCall, Level, RootId, Vm, Worker};
use lifecycle::{COMMON, NEW, SIDECAR, discovery, document, from_cluster, get, request};

/// What the two workers need: a limit that lets the documents pass, and nothing else to poll.
fn configuration() -> String {
    SIDECAR.replace(
        "\"local\"",
        r#""discovery": {"maxDocumentBytes": 33554432}, "exclusions": {"apiServices": false}, "local""#,
    )
}

/// Two workers, the second of which was configured later and follows.
fn workers(host: &Host) -> [(Worker, RootId); 2] {
    [(); 2].map(|()| {
        let worker = host.worker();
        let root = worker.run(|vm| vm.configure(configuration()).unwrap()).unwrap();
        (worker, root)
    })
}

/// A tenth of a second; whom each worker has polled.
fn tick(host: &Host, workers: &[(Worker, RootId); 2], upstream: fn(&HttpCall) -> Answer) -> [usize; 2] {
    host.advance(Duration::from_millis(100));
    [0, 1].map(|index| {
        let (worker, root) = &workers[index];
        let root = *root;
        let poll = move |vm: &mut Vm| {
            vm.tick(root);
            let calls = vm.calls();
            calls.iter().for_each(|call| vm.respond(call.token, upstream(call)));
            calls.len()
        };
        worker.run(poll).unwrap()
    })
}

fn logged(worker: &Worker, text: &'static str) -> bool {
    let look =
        move |vm: &mut Vm| vm.take_logs().iter().any(|line| line.level == Level::Error && line.message.contains(text));
    worker.run(look).unwrap()
}

fn rerouted_to((worker, root): &(Worker, RootId)) -> Option<String> {
    let root = *root;
    let look = move |vm: &mut Vm| {
        assert_eq!(get(vm, root, COMMON).filter_state_text("mixed_version_proxy.cluster"), None);
        let outcome = get(vm, root, NEW);
        outcome.filter_state_text("mixed_version_proxy.cluster").map(str::to_owned)
    };
    worker.run(look).unwrap()
}

/// The types in the cluster's discovery, as a client of this worker sees it.
fn types_told((worker, root): &(Worker, RootId)) -> Vec<bool> {
    const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    let root = *root;
    let ask = move |vm: &mut Vm| {
        let mut headers = request("/apis");
        headers.set("accept", AGGREGATED.as_bytes());
        let stream = vm.request(root, headers, true).stream;
        vm.response(stream, [(":status", "304"), ("audit-id", "1f1c7ea8")], from_cluster("cp-0"));
        vm.run_for_with(Duration::from_millis(3), |call| Some(large_documents(call)));
        let reply = vm.finish(stream).local_reply.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.text());
        let body = reply.text();
        ["deployments", "crates", "boxes"].map(|name| body.contains(&format!("\"resource\":\"{name}\""))).to_vec()
    };
    worker.run(ask).unwrap()
}

/// A table of more than 16 MiB: three hundred types with names of 60,000 bytes.
fn large_table(call: &HttpCall) -> Answer {
    if (call.path(), call.upstream.as_str()) != ("/apis", "cp-1-poll") {
        return discovery(call);
    }
    let resource = |number| format!(r#"{{"resource":"{number:060000}","verbs":["get"]}},"#);
    let resources: String = (0..300).map(resource).collect();
    let body = document("depot.k8s.io", "crates").replace("\"resources\":[", &format!("\"resources\":[{resources}"));
    let Answer::Response { headers, .. } = discovery(call) else { unreachable!("an answer") };
    Answer::Response { headers, body: body.into_bytes() }
}

/// Three documents of 25 MiB, more than 64 MiB together.
fn large_documents(call: &HttpCall) -> Answer {
    let (resource, filling) = match call.upstream.as_str() {
        "cp-0-poll" => ("deployments", "a"),
        "cp-1-poll" => ("crates", "b"),
        _ => ("boxes", "c"),
    };
    if call.path() != "/apis" {
        return discovery(call);
    }
    let etag = format!("\"{filling}\"");
    if call.headers.text("if-none-match") == Some(&etag) {
        return Answer::new(304, [("etag", etag)], "");
    }
    let member = format!(r#""kind":"APIGroupDiscoveryList","filling":"{}""#, filling.repeat(25 << 20));
    let body = document(&format!("{resource}.k8s.io"), resource).replace(r#""kind":"APIGroupDiscoveryList""#, &member);
    let content_type = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    Answer::new(200, [("content-type", content_type), ("etag", &*etag)], body)
}

#[test]
fn a_table_that_is_too_large_is_polled_by_each_worker() {
    let host = Host::new();
    let workers = workers(&host);
    let mut polls = [0; 2];
    for _ in 0..10 {
        let polled = tick(&host, &workers, large_table);
        polls = [polls[0] + polled[0], polls[1] + polled[1]];
    }
    assert!(polls.iter().all(|count| *count >= 9), "each polls everything: {polls:?}");
    for (index, worker) in workers.iter().enumerate() {
        assert_eq!(rerouted_to(worker).as_deref(), Some("cp-1"), "worker {index}");
    }
    assert!(logged(&workers[0].0, "each worker polls for itself: "));
}

#[test]
fn documents_that_are_too_large_together_are_merged_all_the_same() {
    let host = Host::new();
    let [first, second] = workers(&host);
    let both = [first, second];
    for _ in 0..10 {
        tick(&host, &both, large_documents);
    }
    assert!(logged(&both[0].0, "bytes of documents are too many to merge"));
    for (index, worker) in both.iter().enumerate() {
        assert_eq!(types_told(worker), [true; 3], "worker {index}");
    }
    // Whoever takes the lead does not find the documents, and asks for all of them.
    let [first, second] = both;
    drop(first);
    let third = host.worker();
    let root = third.run(|vm| vm.configure(configuration()).unwrap()).unwrap();
    let both = [second, (third, root)];
    for _ in 0..80 {
        tick(&host, &both, large_documents);
    }
    for (index, worker) in both.iter().enumerate() {
        assert_eq!(types_told(worker), [true; 3], "later, worker {index}");
    }
}
