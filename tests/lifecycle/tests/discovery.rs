//! Requests for discovery: what goes upstream, what comes back in the place of the answer, and who waits for what.

use std::time::Duration;

use host_emulator::{
    Action, Answer, Headers, Host, HttpCall, LocalReply, Outcome, Progress, RootId, StreamId, Vm, Worker,
};
use lifecycle::{SIDECAR, answer, discovery, document, from_cluster, poll, request};
use mixed_version_proxy::metrics::{NO_PEER_REQUESTS, UNMERGED_REQUESTS};

const V2: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

fn configured(configuration: &'static str, test: impl FnOnce(&mut Vm, RootId) + Send + 'static) {
    Host::new()
        .vm(move |vm| {
            let root = vm.configure(configuration).unwrap();
            test(vm, root);
        })
        .unwrap();
}

/// Runs a test in a VM of its own that knows what all apiservers say.
fn settled(test: impl FnOnce(&mut Vm, RootId) + Send + 'static) {
    configured(SIDECAR, |vm, root| {
        poll(vm);
        test(vm, root);
    });
}

fn get(path: &str, accept: &str) -> Headers {
    asking("GET", path, accept)
}

fn asking(method: &str, path: &str, accept: &str) -> Headers {
    Headers::new().with(":method", method).with(":path", path).with(":authority", "kubernetes").with("accept", accept)
}

/// An apiserver's answer that says that its document is the one with the tag that all have here.
fn unchanged() -> Headers {
    Headers::new()
        .with(":status", "304")
        .with("audit-id", "1f1c7ea8")
        .with("etag", "\"tag\"")
        .with("x-kubernetes-pf-flowschema-uid", "schema")
        .with("warning", "299 - \"deprecated\"")
        .with("x-other", "not for the client")
}

/// What comes at once of a request that `cp-0` answers with these headers.
fn asked(vm: &mut Vm, root: RootId, request: Headers, answer: Headers) -> Outcome {
    let stream = vm.request(root, request, true).stream;
    vm.response(stream, answer, from_cluster("cp-0"))
}

/// What comes in the end, if all apiservers say then what they said before.
fn answered(vm: &mut Vm, root: RootId, request: Headers, answer: Headers) -> Outcome {
    let outcome = asked(vm, root, request, answer);
    settle(vm, outcome, discovery)
}

/// What comes of a held answer, when `upstream` answers the questions.
fn settle(vm: &mut Vm, mut outcome: Outcome, upstream: fn(&HttpCall) -> Answer) -> Outcome {
    if outcome.response == Progress::Held {
        // Questions follow each other no sooner.
        vm.run_for_with(Duration::from_millis(101), |call| Some(upstream(call)));
        outcome.local_reply = reply_on(vm, outcome.stream);
    }
    outcome
}

/// Answers all questions that are on their way.
fn answer_all(vm: &mut Vm, upstream: impl Fn(&HttpCall) -> Answer) {
    vm.calls().iter().for_each(|call| vm.respond(call.token, upstream(call)));
}

#[track_caller]
fn reply(outcome: &Outcome) -> LocalReply {
    outcome.local_reply.clone().expect("an answer of the filter's own")
}

fn text(reply: &LocalReply) -> String {
    String::from_utf8(reply.body.clone()).unwrap()
}

fn reply_on(vm: &Vm, stream: StreamId) -> Option<LocalReply> {
    vm.stream(stream).local_reply
}

#[test]
fn the_apiserver_is_asked_on_its_own_condition_and_the_client_gets_the_merge() {
    settled(|vm, root| {
        let asked = get("/apis?timeout=32s", V2).with("if-none-match", "\"E0\"");
        let outcome = vm.request(root, asked, true);
        let upstream = &outcome.request_headers;
        assert_eq!(upstream.text("if-none-match"), Some("\"tag\""), "its own tag, not the client's");
        assert!(upstream.text("accept").unwrap().contains("profile=nopeer"), "{upstream:?}");
        assert_eq!(upstream.text(":path"), Some("/apis?timeout=32s"));
        let outcome = vm.response(outcome.stream, unchanged(), from_cluster("cp-0"));
        let reply = reply(&settle(vm, outcome, discovery));
        assert_eq!(reply.status, 200);
        for (name, expected) in [
            ("content-type", Some(V2)),
            ("cache-control", Some("public")),
            ("vary", Some("Accept")),
            ("audit-id", Some("1f1c7ea8")),
            ("x-kubernetes-pf-flowschema-uid", Some("schema")),
            ("warning", Some("299 - \"deprecated\"")),
            ("x-other", None),
        ] {
            assert_eq!(reply.headers.text(name), expected, "{name}");
        }
        let body = text(&reply);
        let places = ["\"apps\"", "\"depot.k8s.io\"", "\"crates\""].map(|name| body.find(name).expect(name));
        assert!(places.is_sorted(), "{body}");
    });
}

#[test]
fn the_clients_condition_is_about_the_merge() {
    settled(|vm, root| {
        let first = reply(&answered(vm, root, get("/apis", V2), unchanged()));
        let etag = first.headers.text("etag").unwrap().to_owned();
        assert_ne!(etag, "\"tag\"");
        for (condition, expected, why) in [
            (etag.clone(), 304, "it has the merge"),
            (format!("W/{etag}"), 304, "weak"),
            (format!("\"E0\", {etag}"), 304, "one of several"),
            ("*".to_owned(), 304, "any"),
            ("\"tag\"".to_owned(), 200, "it has the apiserver's own document"),
            ("\"E0\"".to_owned(), 200, "it has another"),
        ] {
            let outcome = answered(vm, root, get("/apis", V2).with("if-none-match", condition), unchanged());
            let reply = reply(&outcome);
            assert_eq!(reply.status, expected, "{why}");
            assert_eq!(reply.body.is_empty(), expected == 304, "{why}");
            assert_eq!(reply.headers.text("etag"), Some(etag.as_str()), "{why}");
            assert_eq!(reply.headers.text("content-type").is_some(), expected == 200, "{why}");
        }
    });
}

#[test]
fn what_is_not_for_the_filter_stays_as_it_is() {
    let nopeer = format!("{V2};profile=nopeer");
    let v2beta1 = "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList";
    let disabled = SIDECAR.replace("\"local\"", "\"peerAggregatedDiscovery\": \"Disabled\", \"local\"");
    let dry_run = SIDECAR.replace("\"local\"", "\"peerProxying\": \"DryRun\", \"local\"");
    for (configuration, method, path, accept, why) in [
        (SIDECAR, "GET", "/apis", nopeer.as_str(), "asks for the apiserver's own view"),
        (SIDECAR, "GET", "/apis", v2beta1, "a form that is not merged"),
        (SIDECAR, "GET", "/apis", "application/vnd.kubernetes.protobuf", "an encoding that is not merged"),
        (SIDECAR, "GET", "/apis/", V2, "a path that is not merged in this form"),
        (SIDECAR, "POST", "/apis", V2, "no read"),
        (SIDECAR, "GET", "/api", "application/json", "the apiserver's own is right"),
        (SIDECAR, "GET", "/openapi/v2", "application/json", "not merged"),
        (SIDECAR, "GET", "/version", "application/json", "no discovery"),
        (SIDECAR, "GET", "//apis", V2, "odd"),
        (&disabled, "GET", "/apis", V2, "switched off"),
        (&disabled, "GET", "/apis/depot.k8s.io", "application/json", "switched off"),
        (&disabled, "GET", "/openapi/v3", "application/json", "switched off"),
        (&dry_run, "GET", "/apis", V2, "a dry run"),
    ] {
        let configuration = configuration.to_owned();
        let asked = asking(method, path, accept).with("if-none-match", "\"E0\"");
        Host::new()
            .vm(move |vm| {
                let root = vm.configure(configuration).unwrap();
                poll(vm);
                let outcome = vm.request(root, asked.clone(), true);
                for name in ["accept", "if-none-match"] {
                    assert_eq!(outcome.request_headers.text(name), asked.text(name), "{why}: {name}");
                }
                let outcome = vm.response(outcome.stream, answer(200, "application/json", 9), from_cluster("cp-0"));
                assert_eq!((outcome.action, outcome.local_reply.is_none()), (Action::Continue, true), "{why}");
                let count = |name| usize::from(vm.metric(name) > 0);
                let is_counted = count(NO_PEER_REQUESTS) + count(UNMERGED_REQUESTS);
                assert_eq!(
                    is_counted,
                    usize::from(why.contains("own view") || why.contains("that is not merged")),
                    "{why}"
                );
            })
            .unwrap();
    }
}

#[test]
fn other_answers_pass() {
    settled(|vm, root| {
        for (path, accept, status) in [
            ("/apis", V2, 401),
            ("/apis", V2, 403),
            ("/apis", V2, 406),
            ("/apis", V2, 429),
            ("/apis", V2, 500),
            ("/apis", V2, 503),
            ("/apis/depot.k8s.io", "application/json", 403),
            ("/apis/depot.k8s.io/v1", "application/json", 401),
            ("/openapi/v3", "application/json", 404),
        ] {
            let outcome = answered(vm, root, get(path, accept), answer(status, "application/json", 99));
            assert_eq!((outcome.action, outcome.local_reply.is_none()), (Action::Continue, true), "{path} {status}");
        }
    });
}

/// What the apiservers say once `cp-0` has a custom resource.
fn with_custom_resource(call: &HttpCall) -> Answer {
    match (call.path(), call.upstream.as_str()) {
        ("/apis", "cp-0-poll") => {
            Answer::new(200, [("content-type", V2), ("etag", "\"newer\"")], document("hangar.example.com", "planes"))
        }
        _ => discovery(call),
    }
}

#[test]
fn who_has_just_made_a_type_finds_it() {
    settled(|vm, root| {
        let changed = || answer(200, V2, 999).with("etag", "\"newer\"");
        let outcome = asked(vm, root, get("/apis", V2), changed());
        assert_eq!(outcome.action, Action::Pause, "the apiserver's document is another one than we know");
        let second = asked(vm, root, get("/apis", V2), changed());
        vm.run_for(Duration::from_millis(2));
        let questions = vm.calls();
        let whom: Vec<_> = questions.iter().map(|call| (call.upstream.as_str(), call.path())).collect();
        let each = ["cp-0-poll", "cp-1-poll", "cp-2-poll"].map(|cluster| (cluster, "/apis"));
        assert_eq!(whom, each, "one question to each for all that wait");
        answer_all(vm, with_custom_resource);
        for stream in [outcome.stream, second.stream] {
            let body = text(&reply_on(vm, stream).expect("an answer"));
            assert!(body.contains("\"planes\"") && body.contains("\"crates\""), "{body}");
        }
        let outcome = vm.request(root, get("/apis", V2), true);
        assert_eq!(outcome.request_headers.text("if-none-match"), Some("\"newer\""), "known from now on");
    });
}

/// What the apiservers say once `cp-2` has been upgraded.
fn with_upgraded_peer(call: &HttpCall) -> Answer {
    match (call.path(), call.upstream.as_str()) {
        ("/apis", "cp-2-poll") => Answer::new(200, [("content-type", V2)], document("hangar.k8s.io", "planes")),
        _ => discovery(call),
    }
}

#[test]
fn what_a_peer_has_served_since_an_instant_is_listed() {
    for accept in [V2, "application/json"] {
        settled(move |vm, root| {
            let outcome = asked(vm, root, get("/apis", accept), unchanged());
            assert_eq!(outcome.response, Progress::Held, "somebody may take what is missing for gone");
            let body = text(&reply(&settle(vm, outcome, with_upgraded_peer)));
            assert!(body.contains("\"hangar.k8s.io\""), "{accept}: {body}");
        });
    }
}

/// What comes of the calls while `cp-2` says nothing.
fn all_but_cp_2(call: &HttpCall) -> Option<Answer> {
    (call.upstream != "cp-2-poll").then(|| discovery(call))
}

#[test]
fn a_peer_that_fails_its_polls_is_waited_for_a_second() {
    settled(|vm, root| {
        // It is being replaced.
        vm.run_for_with(Duration::from_secs(6), |call| all_but_cp_2(call).or(Some(Answer::Failure)));
        vm.run_for_with(Duration::from_millis(101), all_but_cp_2);
        let outcome = asked(vm, root, get("/apis", V2), unchanged());
        vm.run_for_with(Duration::from_millis(900), all_but_cp_2);
        assert_eq!(reply_on(vm, outcome.stream), None, "it may be back");
        vm.run_for_with(Duration::from_millis(200), all_but_cp_2);
        let last_known = text(&reply_on(vm, outcome.stream).expect("an answer"));
        assert!(last_known.contains("\"crates\"") && !last_known.contains("incomplete"), "its last word counts");
        answer_all(vm, |_| Answer::Failure);

        vm.run_for_with(Duration::from_millis(200), all_but_cp_2);
        let outcome = asked(vm, root, get("/apis", V2), unchanged());
        let body = text(&reply(&settle(vm, outcome, with_upgraded_peer)));
        assert!(body.contains("\"hangar.k8s.io\""), "it is back: {body}");
    });
}

#[test]
fn a_peer_that_hangs_costs_a_walk_through_all_groups_one_wait() {
    settled(|vm, root| {
        vm.run_for_with(Duration::from_secs(6), |call| all_but_cp_2(call).or(Some(Answer::Failure)));
        vm.run_for_with(Duration::from_millis(101), all_but_cp_2);
        let outcome = asked(vm, root, get("/apis", "*/*"), unchanged());
        vm.run_for_with(Duration::from_millis(1_101), all_but_cp_2);
        assert!(reply_on(vm, outcome.stream).is_some());
        for path in ["/apis/apps", "/apis/apps/v1", "/apis/depot.k8s.io/v1"] {
            let outcome = asked(vm, root, get(path, "*/*"), answer(200, "application/json", 99));
            vm.run_for_with(Duration::from_millis(202), all_but_cp_2);
            let is_answered =
                outcome.response != Progress::Held || vm.stream(outcome.stream).response != Progress::Held;
            assert!(is_answered, "{path}");
        }
    });
}

#[test]
fn a_peer_that_has_asked_for_peace_is_left_in_it() {
    settled(|vm, root| {
        fn busy(call: &HttpCall) -> Answer {
            let refusal = || Answer::new(429, [("retry-after", "20")], "");
            if call.upstream == "cp-2-poll" { refusal() } else { discovery(call) }
        }
        vm.run_for_with(Duration::from_secs(6), |call| Some(busy(call)));
        let outcome = asked(vm, root, get("/apis", V2), unchanged());
        vm.run_for(Duration::from_millis(101));
        assert!(vm.calls().iter().all(|call| call.upstream != "cp-2-poll"), "{:?}", vm.calls());
        answer_all(vm, busy);
        assert!(text(&reply_on(vm, outcome.stream).expect("an answer")).contains("\"crates\""));
    });
}

#[test]
fn a_question_that_fails_leaves_what_was_known_and_says_that_it_is_not_all() {
    for failure in [Answer::Failure, Answer::new(403, [("content-type", "application/json")], "{}")] {
        settled(move |vm, root| {
            let changed = || answer(200, V2, 999).with("etag", "\"newer\"");
            let outcome = asked(vm, root, get("/apis", V2), changed());
            vm.run_for(Duration::from_millis(2));
            answer_all(vm, |call| if call.upstream == "cp-0-poll" { failure.clone() } else { discovery(call) });
            let body = text(&reply_on(vm, outcome.stream).expect("an answer"));
            assert!(body.contains("\"crates\"") && body.contains("incomplete"), "what is known of the cluster: {body}");
            let next = asked(vm, root, get("/apis", V2), changed());
            assert!(text(&reply(&next)).contains("incomplete"), "it is left in peace, nobody waits for it");
            poll(vm);
            let after = answered(vm, root, get("/apis", V2), unchanged());
            assert!(!text(&reply(&after)).contains("incomplete"), "all is known again");
        });
    }
}

#[test]
fn a_client_that_goes_away_leaves_nothing_behind() {
    settled(|vm, root| {
        let outcome = asked(vm, root, get("/apis", V2), answer(200, V2, 999).with("etag", "\"newer\""));
        vm.finish(outcome.stream);
        vm.run_for(Duration::from_millis(2));
        answer_all(vm, with_custom_resource);
        assert_eq!(vm.misuse(), Vec::<String>::new());
    });
}

#[test]
fn until_all_have_been_tried_nobody_is_told_half_of_it() {
    configured(SIDECAR, |vm, root| {
        let ask = |vm: &mut Vm, path: &str, accept: &str| {
            reply(&asked(vm, root, get(path, accept), answer(200, accept, 999)))
        };
        for (path, accept) in [("/apis", V2), ("/api", V2), ("/apis", "application/json")] {
            let reply = ask(vm, path, accept);
            assert_eq!((reply.status, reply.headers.text("retry-after")), (503, Some("1")), "{path}");
            assert!(text(&reply).contains("\"kind\":\"Status\""), "{path}");
        }
        // One of them is dead.
        fn with_a_dead_one(call: &HttpCall) -> Answer {
            let is_dead = call.upstream == "cp-1-poll";
            if is_dead { Answer::local(503, "no healthy upstream") } else { discovery(call) }
        }
        vm.run_for_with(Duration::from_secs(1), |call| Some(with_a_dead_one(call)));
        let outcome = asked(vm, root, get("/apis", V2), unchanged());
        let reply = reply(&settle(vm, outcome, with_a_dead_one));
        assert_eq!(reply.status, 200);
        let body = text(&reply);
        assert!(body.contains("\"incomplete.mixed-version-proxy\"") && body.contains("\"Stale\""), "{body}");
        let (path, json) = ("/apis/incomplete.mixed-version-proxy/v1", "application/json");
        let outcome = asked(vm, root, get(path, json), answer(404, json, 99));
        assert_eq!(settle(vm, outcome, with_a_dead_one).local_reply.map(|reply| reply.status), Some(503));
        // And comes to life.
        poll(vm);
        let outcome = answered(vm, root, get("/apis", V2), unchanged());
        assert!(!text(&outcome.local_reply.unwrap()).contains("incomplete"));
    });
}

#[test]
fn legacy_discovery_names_nothing_that_is_not_there() {
    settled(|vm, root| {
        let json = "application/json";
        let missing = || answer(404, "text/plain; charset=utf-8", 19);
        let list = text(&reply(&answered(vm, root, get("/apis", json), unchanged())));
        assert!(list.contains("\"kind\":\"APIGroupList\"") && list.contains("\"depot.k8s.io/v1\""), "{list}");
        for (path, answer_of_local, expected, why) in [
            ("/apis/depot.k8s.io", missing(), Some("\"kind\":\"APIGroup\""), "a peer's group"),
            ("/apis/depot.k8s.io/", missing(), Some("\"kind\":\"APIGroup\""), "a slash means nothing"),
            ("/apis/depot.k8s.io/v1", missing(), Some("\"name\":\"crates\""), "a peer's version"),
            ("/apis/depot.k8s.io/v1/", missing(), Some("\"name\":\"crates\""), "a slash means nothing"),
            ("/apis/apps/v1", answer(200, json, 99), None, "the same everywhere"),
            ("/api/v1", answer(200, json, 99), None, "the same everywhere"),
            ("/api", answer(200, json, 99), None, "the same everywhere"),
            ("/apis/depot.k8s.io/v2", missing(), None, "nobody has it"),
            ("/apis/nosuch.k8s.io", missing(), None, "nobody has it"),
            ("/apis/toys.example.com/v1", missing(), None, "a custom resource is a local matter"),
        ] {
            let outcome = answered(vm, root, get(path, "application/vnd.kubernetes.protobuf, */*"), answer_of_local);
            let body = outcome.local_reply.as_ref().map(text);
            assert_eq!(body.is_some(), expected.is_some(), "{path}: {why}: {body:?}");
            if let (Some(reply), Some(expected)) = (&outcome.local_reply, expected) {
                assert!(text(reply).contains(expected), "{path}: {why}: {body:?}");
                assert_eq!((reply.status, reply.headers.text("content-type")), (200, Some(json)), "{path}");
                assert_eq!(reply.headers.text("cache-control"), Some("no-cache, private"), "{path}");
                assert_eq!(reply.headers.text("etag"), None, "{path}");
            }
        }
        // A peer that does not answer could have it by now.
        let without_cp_2 = |call: &HttpCall| all_but_cp_2(call).unwrap_or(Answer::Failure);
        vm.run_for_with(Duration::from_secs(6), |call| Some(without_cp_2(call)));
        for path in ["/apis/nosuch.k8s.io", "/apis/depot.k8s.io/v2"] {
            let outcome = asked(vm, root, get(path, json), missing());
            let outcome = settle(vm, outcome, without_cp_2);
            assert_eq!(outcome.local_reply.map(|reply| reply.status), Some(503), "{path}");
        }
    });
}

#[test]
fn a_schema_is_had_where_its_hash_comes_from() {
    let root_of = |call: &HttpCall, has_schema: bool| {
        let entry =
            |key: &str| format!(r#""{key}":{{"serverRelativeURL":"/openapi/v3/{key}?hash={}"}}"#, call.upstream);
        let mut entries = vec![entry("apis/apps/v1")];
        entries.extend(has_schema.then(|| entry("apis/depot.k8s.io/v1")));
        Answer::new(200, [("content-type", "text/plain")], format!(r#"{{"paths":{{{}}}}}"#, entries.join(",")))
    };
    let upstream = move |call: &HttpCall| match call.path() {
        "/openapi/v3" => root_of(call, call.upstream == "cp-1-poll"),
        _ => discovery(call),
    };
    configured(SIDECAR, move |vm, root| {
        vm.run_for_with(Duration::from_secs(6), |call| Some(upstream(call)));
        for (path, expected, why) in [
            ("/openapi/v3/apis/depot.k8s.io/v1?hash=1", Some("cp-1"), "only a peer has it"),
            ("/openapi/v3/apis/apps/v1?hash=1", None, "to be had here"),
            ("/openapi/v3/apis/nosuch.k8s.io/v1", None, "nobody has it"),
        ] {
            let outcome = vm.request(root, request(path), true);
            assert_eq!(outcome.filter_state_text("mixed_version_proxy.cluster"), expected, "{why}");
            assert_eq!(outcome.request_headers.get("x-kubernetes-peer-proxied").is_some(), expected.is_some(), "{why}");
        }
        let looped = request("/openapi/v3/apis/depot.k8s.io/v1").with("x-kubernetes-peer-proxied", "true");
        assert!(vm.request(root, looped, true).filter_state.is_empty(), "one hop and no more");

        let question = get("/openapi/v3", "application/json").with("x-kubernetes-peer-proxied", "true");
        let outcome = asked(vm, root, question, answer(200, "text/plain", 99));
        assert_eq!(outcome.action, Action::Continue, "another Envoy wants the apiserver's own");

        let outcome = asked(vm, root, get("/openapi/v3", "application/json"), answer(200, "text/plain", 99));
        assert_eq!(outcome.response, Progress::Held, "schemas of custom resources change without a trace elsewhere");
        vm.run_for(Duration::from_millis(2));
        let question = vm.calls().remove(0);
        assert_eq!((question.upstream.as_str(), question.path()), ("cp-0-poll", "/openapi/v3"));
        vm.respond(question.token, upstream(&question));
        let reply = reply_on(vm, outcome.stream).expect("an answer");
        assert_eq!(reply.headers.text("content-type"), Some("text/plain; charset=utf-8"));
        let body = text(&reply);
        assert!(body.contains("depot.k8s.io/v1?hash=cp-1-poll") && body.contains("apps/v1?hash=cp-0-poll"), "{body}");
    });
}

#[test]
fn a_gateway_asks_one_that_it_knows() {
    let gateway = r#"{"apiservers": [
        {"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
        {"name": "cp-1", "cluster": "cp-1", "discoveryCluster": "cp-1-poll"}]}"#;
    configured(gateway, |vm, root| {
        poll(vm);
        for _ in 0..20 {
            let outcome = vm.request(root, get("/apis", V2), true);
            let cluster = outcome.filter_state_text("mixed_version_proxy.cluster").map(str::to_owned).unwrap();
            assert_eq!(outcome.request_headers.text("if-none-match"), Some("\"tag\""));
            let outcome = vm.response(outcome.stream, unchanged(), from_cluster(&cluster));
            assert!(text(&reply(&settle(vm, outcome, discovery))).contains("\"crates\""), "{cluster}");
        }
        vm.run_for_with(Duration::from_secs(60), |_| Some(Answer::Failure));
        let outcome = vm.request(root, get("/apis", V2), true);
        assert!(outcome.filter_state.is_empty(), "nobody answers polls: the balancer may know better");
        assert_eq!(outcome.request_headers.get("if-none-match"), None);
        let outcome = vm.response(outcome.stream, answer(200, V2, 99), from_cluster("apiservers"));
        let outcome = settle(vm, outcome, |_| Answer::Failure);
        assert!(text(&reply(&outcome)).contains("\"crates\""), "the last good documents count");
    });
}

#[test]
fn all_workers_say_the_same_and_a_new_configuration_at_once_something_else() {
    let host = Host::new();
    let workers = [host.worker(), host.worker()];
    let roots = workers.each_ref().map(|worker| worker.run(|vm| vm.configure(SIDECAR).unwrap()).unwrap());
    for _ in 0..20 {
        host.advance(Duration::from_millis(100));
        for (worker, root) in workers.iter().zip(roots) {
            worker
                .run(move |vm| {
                    vm.tick(root);
                    vm.calls().iter().for_each(|call| vm.respond(call.token, discovery(call)));
                })
                .unwrap();
        }
    }
    let told = |worker: usize, root: RootId| {
        workers[worker].run(move |vm| reply(&answered(vm, root, get("/apis", V2), unchanged()))).unwrap()
    };
    let (first, second) = (told(0, roots[0]), told(1, roots[1]));
    assert!(text(&first).contains("\"crates\""));
    assert_eq!((&first.body, first.headers.text("etag")), (&second.body, second.headers.text("etag")));

    // cp-1 is removed; no tick has come yet.
    let smaller = r#"{"apiservers": [
        {"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
        {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll"}], "local": "cp-0"}"#;
    let root = workers[1].run(move |vm| vm.configure(smaller).unwrap()).unwrap();
    let after = told(1, root);
    assert_eq!(after.status, 200, "what is known is told at once");
    assert!(text(&after).contains("\"apps\"") && !text(&after).contains("\"crates\""), "{}", text(&after));
}

/// Ticks of all workers for a while, in which the apiservers answer at once.
fn let_pass(host: &Host, seconds: u32, workers: &[(&Worker, RootId)], upstream: fn(&HttpCall) -> Answer) {
    for _ in 0..seconds * 10 {
        host.advance(Duration::from_millis(100));
        for (worker, root) in workers {
            let root = *root;
            worker
                .run(move |vm| {
                    vm.tick(root);
                    vm.calls().iter().for_each(|call| vm.respond(call.token, upstream(call)));
                })
                .unwrap();
        }
    }
}

fn configure(worker: &Worker, configuration: &'static str) -> RootId {
    worker.run(move |vm| vm.configure(configuration).unwrap()).unwrap()
}

/// `cp-0` has been replaced by a newer version.
fn upgraded(call: &HttpCall) -> Answer {
    match (call.path(), call.upstream.as_str()) {
        ("/apis", "cp-0-poll") => {
            Answer::new(200, [("content-type", V2), ("etag", "\"newer\"")], document("hangar.k8s.io", "planes"))
        }
        _ => discovery(call),
    }
}

#[test]
fn what_the_leader_has_merged_for_a_client_is_told_to_all() {
    let host = Host::new();
    let (leader, follower) = (host.worker(), host.worker());
    let (leading, following) = (configure(&leader, SIDECAR), configure(&follower, SIDECAR));
    let workers = [(&leader, leading), (&follower, following)];
    let_pass(&host, 1, &workers, discovery);
    leader
        .run(move |vm| {
            let changed = answer(200, V2, 999).with("etag", "\"newer\"");
            let outcome = asked(vm, leading, get("/apis", V2), changed);
            assert!(text(&reply(&settle(vm, outcome, upgraded))).contains("\"planes\""));
        })
        .unwrap();
    let_pass(&host, 1, &workers, upgraded);
    // Only a peer has this one by now.
    let missing = || answer(404, "text/plain; charset=utf-8", 19);
    for (worker, root) in workers {
        let outcome = worker.run(move |vm| {
            let outcome = asked(vm, root, get("/apis/apps/v1", "*/*"), missing());
            settle(vm, outcome, upgraded)
        });
        assert!(text(&reply(&outcome.unwrap())).contains("\"deployments\""));
    }
}

#[test]
fn an_older_configuration_learns_what_peers_say_while_a_newer_one_leads() {
    const LARGER: &str = r#"{"apiservers": [
        {"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
        {"name": "cp-1", "cluster": "cp-1", "discoveryCluster": "cp-1-poll"},
        {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll"},
        {"name": "cp-3", "cluster": "cp-3", "discoveryCluster": "cp-3-poll"}], "local": "cp-1"}"#;
    let host = Host::new();
    let worker = host.worker();
    let older = configure(&worker, SIDECAR.replace("\"local\": \"cp-0\"", "\"local\": \"cp-1\"").leak());
    let_pass(&host, 1, &[(&worker, older)], discovery);
    let newer = configure(&worker, LARGER);
    let_pass(&host, 10, &[(&worker, newer), (&worker, older)], upgraded);
    for root in [newer, older] {
        let told = worker.run(move |vm| {
            let stream = vm.request(root, get("/apis", V2), true).stream;
            let outcome = vm.response(stream, unchanged(), from_cluster("cp-1"));
            reply(&settle(vm, outcome, upgraded))
        });
        assert!(text(&told.unwrap()).contains("\"planes\""));
    }
}

/// What `cp-1` says can be read, but not be merged.
fn unmergeable(call: &HttpCall) -> Answer {
    let mut answer = discovery(call);
    if let ("/apis", "cp-1-poll", Answer::Response { body, .. }) = (call.path(), call.upstream.as_str(), &mut answer) {
        *body = document("depot.k8s.io", "crates").replace("\"verbs\"", "\"responseKind\":1,\"verbs\"").into();
    }
    answer
}

#[test]
fn all_workers_know_that_nothing_can_be_merged() {
    let host = Host::new();
    let (leader, follower) = (host.worker(), host.worker());
    let workers = [(&leader, configure(&leader, SIDECAR)), (&follower, configure(&follower, SIDECAR))];
    let_pass(&host, 1, &workers, unmergeable);
    for (worker, root) in workers {
        let asked = worker.run(move |vm| vm.request(root, get("/apis", V2), true)).unwrap();
        assert_eq!(asked.request_headers.text("accept"), Some(V2), "each apiserver's own");
    }
}

#[test]
fn what_no_apiserver_has_answered_stays_as_it_is() {
    settled(|vm, root| {
        let envoys = |details: &str| [("response.code_details", details.as_bytes().to_vec())];
        for (path, status, details, why) in [
            ("/apis/depot.k8s.io/v1", "404", "route_not_found", "nobody has authorized this"),
            ("/apis/depot.k8s.io", "404", "direct_response", "nor this"),
            ("/apis", "200", "direct_response", "nor this"),
            ("/apis/depot.k8s.io", "404", "via_upstream", "not an apiserver's: no audit ID"),
        ] {
            let stream = vm.request(root, get(path, "*/*"), true).stream;
            let outcome = vm.response(stream, Headers::new().with(":status", status), envoys(details));
            assert!(outcome.local_reply.is_none(), "{path}: {why}");
        }
    });
}

#[test]
fn an_answer_in_another_form_than_the_client_s_never_reaches_it() {
    configured(SIDECAR, |vm, root| {
        let outcome = vm.request(root, get("/api", "application/json"), true);
        assert_ne!(outcome.request_headers.text("accept"), Some("application/json"));
        // Meanwhile it has turned out that the apiserver's own would have been right.
        poll(vm);
        let outcome = vm.response(outcome.stream, answer(200, V2, 99).with("etag", "\"tag\""), from_cluster("cp-0"));
        let reply = reply(&settle(vm, outcome, discovery));
        assert_eq!((reply.status, reply.headers.text("retry-after")), (503, Some("1")));
    });
}

#[test]
fn a_group_that_was_there_until_a_moment_ago_is_not_missing() {
    settled(|vm, root| {
        let json = "application/json";
        let status = |vm: &mut Vm, path: &str, upstream: fn(&HttpCall) -> Answer| {
            let outcome = asked(vm, root, get(path, json), answer(404, "text/plain; charset=utf-8", 19));
            settle(vm, outcome, upstream).local_reply.map(|reply| reply.status)
        };
        for path in ["/api/v1", "/apis/apps", "/apis/apps/v1"] {
            assert_eq!(status(vm, path, discovery), Some(503), "{path}: it says that it has it");
        }
        // All of them are another version now.
        fn replaced(call: &HttpCall) -> Answer {
            match call.path() {
                "/apis" => Answer::new(200, [("content-type", V2)], document("hangar.k8s.io", "planes")),
                _ => discovery(call),
            }
        }
        for path in ["/apis/apps", "/apis/apps/v1", "/apis/depot.k8s.io/v1"] {
            assert_eq!(status(vm, path, replaced), Some(503), "{path}: it has just vanished");
        }
        assert_eq!(status(vm, "/apis/apps/v2", replaced), None, "it was never there");
    });
}

#[test]
fn a_group_that_a_peer_has_since_an_instant_is_not_missing() {
    for (path, expected) in [("/apis/hangar.k8s.io", "\"APIGroup\""), ("/apis/hangar.k8s.io/v1", "\"planes\"")] {
        settled(move |vm, root| {
            let outcome = asked(vm, root, get(path, "*/*"), answer(404, "text/plain; charset=utf-8", 19));
            let outcome = settle(vm, outcome, with_upgraded_peer);
            assert!(text(&reply(&outcome)).contains(expected), "{path}");
        });
    }
}

#[test]
fn a_custom_resource_that_polls_do_not_tell_of_is_missed() {
    fn refused(call: &HttpCall) -> Answer {
        match call.upstream.as_str() {
            "cp-0-poll" => Answer::new(403, [("content-type", "application/json")], "{}"),
            _ => discovery(call),
        }
    }
    let host = Host::new();
    let (leader, follower) = (host.worker(), host.worker());
    let workers = [(&leader, configure(&leader, SIDECAR)), (&follower, configure(&follower, SIDECAR))];
    let_pass(&host, 1, &workers, discovery);
    let_pass(&host, 10, &workers, refused);
    // The credential of the polls is no longer good, and somebody makes a custom resource definition.
    for _ in 0..3 {
        for (worker, root) in workers {
            let changed = answer(200, V2, 999).with("etag", "\"newer\"");
            let told = worker.run(move |vm| {
                let outcome = asked(vm, root, get("/apis", V2), changed);
                reply(&settle(vm, outcome, refused))
            });
            assert!(text(&told.unwrap()).contains("incomplete"));
        }
        let_pass(&host, 6, &workers, refused);
    }
    let_pass(&host, 10, &workers, discovery);
    for (worker, root) in workers {
        let told = worker.run(move |vm| reply(&answered(vm, root, get("/apis", V2), unchanged())));
        assert!(!text(&told.unwrap()).contains("incomplete"));
    }
}

#[test]
fn documents_that_got_lost_are_asked_for_again() {
    let host = Host::new();
    let worker = host.worker();
    let root = worker.run(|vm| vm.configure(SIDECAR).unwrap()).unwrap();
    worker.run(poll).unwrap();
    // Another configuration's leader, which has just lost the lead, writes over what it does not know.
    let is_documents = |key: &[u8]| key.ends_with(b"/documents");
    let (_, key, _) = host.all_shared_data().into_iter().find(|(_, key, _)| is_documents(key)).expect("a record");
    host.set_shared_data(key, b"");
    let told = worker
        .run(move |vm| {
            // One interval to notice, one to ask.
            vm.run_for_with(Duration::from_secs(16), |call| {
                let answer = discovery(call);
                let is_known = call.headers.text("if-none-match") == Some("\"tag\"");
                Some(if is_known { Answer::new(304, [("etag", "\"tag\"")], "") } else { answer })
            });
            reply(&answered(vm, root, get("/apis", V2), unchanged()))
        })
        .unwrap();
    let body = text(&told);
    assert!(body.contains("\"crates\"") && !body.contains("incomplete"), "{body}");
}

#[test]
fn what_a_configuration_that_merges_nothing_has_polled_is_there_for_the_next() {
    configured(SIDECAR, |vm, root| {
        poll(vm);
        vm.shutdown(root);
        // It finds another document of cp-1 than the one before.
        fn another(call: &HttpCall) -> Answer {
            match (call.upstream.as_str(), call.path()) {
                ("cp-1-poll", "/apis") => {
                    Answer::new(200, [("content-type", V2), ("etag", "\"tag\"")], document("depot.k8s.io", "barrels"))
                }
                _ => discovery(call),
            }
        }
        let disabled =
            vm.configure(SIDECAR.replace("\"local\"", "\"peerAggregatedDiscovery\": \"Disabled\", \"local\""));
        vm.run_for_with(Duration::from_secs(11), |call| Some(another(call)));
        vm.shutdown(disabled.unwrap());
        let next = vm.configure(SIDECAR).unwrap();
        let outcome = asked(vm, next, get("/apis", V2), unchanged());
        let body = text(&reply(&settle(vm, outcome, another)));
        assert!(body.contains("\"barrels\""), "{body}");
        // The type that is gone is missed for a while.
        assert!(body.contains("incomplete.mixed-version-proxy"), "{body}");
    });
}
