//! Answers that are held until the apiservers have been asked: who is asked, who waits, and that nobody waits for ever.

use std::time::Duration;

use host_emulator::{Action, Answer, Headers, Host, HttpCall, Outcome, Progress, RootId, StreamId, Vm};
use lifecycle::{COMMON, NEW, NOBODY, SIDECAR, answer, discovery, from_cluster, get, poll};

/// Runs a test in a VM of its own, with a table that is complete.
fn settled(test: impl FnOnce(&mut Vm, RootId) + Send + 'static) {
    Host::new()
        .vm(|vm| {
            let root = vm.configure(SIDECAR).unwrap();
            poll(vm);
            test(vm, root);
        })
        .unwrap();
}

/// A 404 with the form of a missing route, from `cluster`, for a request that was sent now.
fn missing_route(vm: &mut Vm, root: RootId, path: &str, cluster: &str) -> Outcome {
    let stream = get(vm, root, path).stream;
    vm.response(stream, answer(404, "application/json", 174), from_cluster(cluster))
}

/// The questions that the root sends when its tick comes.
fn questions(vm: &mut Vm) -> Vec<HttpCall> {
    vm.run_for(Duration::from_millis(2));
    vm.calls()
}

fn names(questions: &[HttpCall]) -> Vec<String> {
    questions.iter().map(|call| format!("{} {}", call.upstream, call.path())).collect()
}

/// The verdict on a stream: the filter's status, `0` if the answer was let go, `None` while it is held.
fn verdict(vm: &Vm, stream: StreamId) -> Option<u32> {
    let outcome = vm.stream(stream);
    match outcome.response {
        Progress::Passed => Some(0),
        Progress::Replied => outcome.local_reply.map(|reply| reply.status),
        Progress::Held | Progress::Waiting => None,
    }
}

#[test]
fn what_nobody_lists_is_asked_of_everybody() {
    settled(|vm, root| {
        let held = missing_route(vm, root, NOBODY, "cp-0");
        assert_eq!(held.action, Action::Pause);
        let asked = questions(vm);
        assert_eq!(names(&asked), ["cp-0-poll /apis", "cp-1-poll /apis", "cp-2-poll /apis"]);
        for call in &asked {
            assert_eq!(verdict(vm, held.stream), None, "{} has not answered yet", call.upstream);
            vm.respond(call.token, discovery(call));
        }
        assert_eq!(verdict(vm, held.stream), Some(0));
    });
}

#[test]
fn what_the_apiserver_lists_is_asked_of_that_one_alone() {
    settled(|vm, root| {
        for (path, cluster, expected) in [
            (COMMON, "cp-0", "cp-0-poll /api"),
            (NEW, "cp-1", "cp-1-poll /apis"),
            ("/api/v1/namespaces/shop/pods/web", "cp-0", "cp-0-poll /api"),
        ] {
            let held = missing_route(vm, root, path, cluster);
            let asked = questions(vm);
            assert_eq!(names(&asked), [expected], "{path}");
            vm.respond(asked[0].token, discovery(&asked[0]));
            assert_eq!(verdict(vm, held.stream), Some(0), "{path}: still listed");
            vm.run_for(Duration::from_millis(200));
        }
    });
}

#[test]
fn an_apiserver_that_lists_it_no_longer_or_does_not_answer_makes_it_a_503() {
    let document = |group: &str| lifecycle::document(group, "things");
    let json = [("content-type", "application/json")];
    let stale = lifecycle::document("depot.k8s.io", "crates").replace("Current", "Stale");
    let answers: Vec<(Option<Answer>, &str)> = vec![
        (Some(Answer::new(200, json, document("apps"))), "a downgrade: the type is gone"),
        (Some(Answer::new(200, json, stale)), "stale: it does not know itself"),
        (Some(Answer::new(200, json, "{")), "a broken document"),
        (Some(Answer::new(403, json, "{}")), "no rights"),
        (Some(Answer::new(429, [("retry-after", "1")], "")), "too many requests"),
        (Some(Answer::local(503, "no healthy upstream")), "no host"),
        (Some(Answer::Failure), "reset"),
        (None, "nothing at all: Envoy's timeout"),
    ];
    for (given, why) in answers {
        settled(move |vm, root| {
            let held = missing_route(vm, root, NEW, "cp-1");
            let asked = questions(vm);
            match given {
                Some(given) => vm.respond(asked[0].token, given),
                None => vm.run_for(Duration::from_secs(4)),
            }
            assert_eq!(verdict(vm, held.stream), Some(503), "{why}");
            let reply = vm.stream(held.stream).local_reply.unwrap();
            assert_eq!(reply.headers.text("retry-after"), Some("1"), "{why}");
            assert_eq!(reply.headers.text("audit-id"), Some("1f1c7ea8"), "{why}");
        });
    }
}

#[test]
fn forty_wait_for_one_question_and_the_first_goes_away() {
    settled(|vm, root| {
        let held: Vec<_> = (0..40).map(|_| missing_route(vm, root, NEW, "cp-1").stream).collect();
        vm.finish(held[0]);
        let asked = questions(vm);
        assert_eq!(names(&asked), ["cp-1-poll /apis"]);
        vm.finish(held[20]);
        vm.respond(asked[0].token, discovery(&asked[0]));
        for (index, stream) in held.into_iter().enumerate().filter(|(index, _)| !matches!(index, 0 | 20)) {
            assert_eq!(verdict(vm, stream), Some(0), "waiter {index}");
        }
        assert_eq!(names(&questions(vm)), [""; 0], "and no more is asked");
    });
}

#[test]
fn an_answer_to_an_older_question_settles_nothing() {
    settled(|vm, root| {
        let first = missing_route(vm, root, NEW, "cp-1").stream;
        let asked = questions(vm);
        // Sent after the question: what it asked may be older than this request.
        let second = missing_route(vm, root, NEW, "cp-1").stream;
        vm.respond(asked[0].token, discovery(&asked[0]));
        assert_eq!((verdict(vm, first), verdict(vm, second)), (Some(0), None));
        assert_eq!(names(&questions(vm)), [""; 0], "questions are 100 ms apart");
        vm.run_for(Duration::from_millis(200));
        let again = vm.calls();
        assert_eq!(names(&again), ["cp-1-poll /apis"]);
        vm.respond(again[0].token, discovery(&again[0]));
        assert_eq!(verdict(vm, second), Some(0));
    });
}

#[test]
fn while_an_apiserver_is_left_in_peace_nobody_waits_for_it() {
    settled(|vm, root| {
        let held = missing_route(vm, root, NOBODY, "cp-0").stream;
        for call in questions(vm) {
            if call.upstream == "cp-2-poll" { vm.fail(call.token) } else { vm.respond(call.token, discovery(&call)) }
        }
        assert_eq!(verdict(vm, held), Some(503), "cp-2 did not answer");
        let at_once = missing_route(vm, root, NOBODY, "cp-0");
        assert_eq!(verdict(vm, at_once.stream), Some(503), "and is not asked again at once");
        let of_another = missing_route(vm, root, NEW, "cp-1").stream;
        assert_eq!(verdict(vm, of_another), None, "others can be asked");
        poll(vm);
        let later = missing_route(vm, root, NOBODY, "cp-0").stream;
        assert_eq!(verdict(vm, later), None, "it is back");
    });
}

#[test]
fn everyday_missing_objects_never_wait() {
    settled(|vm, root| {
        for (content_type, length) in [
            ("application/json", 188),
            ("application/json", 173),
            ("application/json", 175),
            ("application/json", 205),
            ("application/json", 207),
            ("application/vnd.kubernetes.protobuf", 109),
            ("application/vnd.kubernetes.protobuf", 115),
            ("application/yaml", 155),
            ("text/plain; charset=utf-8", 18),
            ("text/plain; charset=utf-8", 20),
        ] {
            let stream = get(vm, root, "/api/v1/namespaces/shop/pods/gone").stream;
            let outcome = vm.response(stream, answer(404, content_type, length), from_cluster("cp-0"));
            assert_eq!((outcome.action, outcome.local_reply), (Action::Continue, None), "{content_type} {length}");
        }
        for (content_type, length) in [
            ("application/json", 174),
            ("application/json", 206),
            ("application/vnd.kubernetes.protobuf", 116),
            ("application/yaml", 154),
            ("text/plain; charset=utf-8", 19),
        ] {
            let stream = get(vm, root, "/api/v1/namespaces/shop/pods/collision").stream;
            let outcome = vm.response(stream, answer(404, content_type, length), from_cluster("cp-0"));
            assert_eq!(outcome.action, Action::Pause, "{content_type} {length}: the same length, so it is asked");
        }
        for call in questions(vm) {
            vm.respond(call.token, discovery(&call));
        }
        assert!(vm.streams().iter().all(|stream| verdict(vm, *stream) == Some(0)), "and passes");
    });
}

#[test]
fn an_answer_that_envoy_gives_up_is_told_to_the_client() {
    settled(|vm, root| {
        let held = missing_route(vm, root, NEW, "cp-1").stream;
        let asked = questions(vm);
        // The route's idle timeout.
        let timeout = Headers::new().with(":status", "504").with("content-type", "text/plain");
        let outcome = vm.response(held, timeout, [("response.code_details", "stream_idle_timeout")]);
        assert_eq!(outcome.local_reply.unwrap().status, 503);
        vm.respond(asked[0].token, discovery(&asked[0]));
        vm.finish(held);
    });
}

#[test]
fn a_new_configuration_leaves_nobody_waiting() {
    settled(|vm, old| {
        let held = missing_route(vm, old, NEW, "cp-1").stream;
        let asked = questions(vm);
        let new = vm.configure(SIDECAR).unwrap();
        vm.run_for_with(Duration::from_millis(300), |call| (call.root == new).then(|| discovery(call)));
        assert_eq!(verdict(vm, held), None, "the new root's answers are not the old one's");
        vm.respond(asked[0].token, discovery(&asked[0]));
        assert_eq!(verdict(vm, held), Some(0));
        let of_new = missing_route(vm, new, NEW, "cp-1").stream;
        vm.run_for_with(Duration::from_millis(300), |call| Some(discovery(call)));
        assert_eq!(verdict(vm, of_new), Some(0));
    });
}

#[test]
fn dry_run_holds_nothing() {
    Host::new()
        .vm(|vm| {
            let root = vm.configure(SIDECAR.replacen('{', r#"{"peerProxying": "DryRun","#, 1)).unwrap();
            poll(vm);
            let outcome = missing_route(vm, root, NOBODY, "cp-0");
            assert_eq!((outcome.action, outcome.local_reply), (Action::Continue, None));
        })
        .unwrap();
}

#[test]
fn an_apiserver_that_is_silent_for_an_hour_is_still_doubt() {
    settled(|vm, root| {
        vm.run_for_with(Duration::from_secs(3600), |call| {
            Some(if call.upstream == "cp-1-poll" { Answer::local(503, "no healthy upstream") } else { discovery(call) })
        });
        let outcome = get(vm, root, NEW);
        assert_eq!(outcome.filter_state_text("mixed_version_proxy.cluster"), Some("cp-1"), "its last document counts");
        let local_404 = get(vm, root, "/apis/depot.k8s.io/v1/crates");
        let refused = vm.response(local_404.stream, answer(404, "text/plain", 19), from_cluster("cp-0"));
        assert_eq!(refused.local_reply.expect("a reply").status, 503);
        let held = missing_route(vm, root, NOBODY, "cp-0").stream;
        vm.run_for_with(Duration::from_secs(6), |call| {
            Some(if call.upstream == "cp-1-poll" { Answer::Failure } else { discovery(call) })
        });
        assert_eq!(verdict(vm, held), Some(503), "what nobody lists may be served by the silent one");

        // Only its removal says that it is gone.
        let without = r#"{"apiservers": [{"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
            {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll"}], "local": "cp-0"}"#;
        let root = vm.configure(without).unwrap();
        assert!(get(vm, root, NEW).filter_state.is_empty());
        let held = missing_route(vm, root, NEW, "cp-0").stream;
        vm.run_for_with(Duration::from_secs(6), |call| Some(discovery(call)));
        assert_eq!(verdict(vm, held), Some(0), "the others have confirmed it");
    });
}

#[test]
fn a_404_that_may_be_a_backends_is_not_offered_for_another_try() {
    for (method, ended, retry_after) in [("GET", true, Some("1")), ("POST", false, None), ("DELETE", true, None)] {
        Host::new()
            .vm(move |vm| {
                let root = vm.configure(SIDECAR).unwrap();
                let kinds = document_with_proxy();
                vm.run_for_with(Duration::from_secs(6), |call| {
                    if call.path() == "/api" { Some(aggregated(&kinds)) } else { Some(discovery(call)) }
                });
                for (path, expected) in [
                    (
                        "/api/v1/namespaces/n/services/s/proxy/transfer",
                        if method == "GET" { None } else { retry_after },
                    ),
                    ("/api/v1/namespaces/n/services/s", Some("1")),
                ] {
                    let headers = lifecycle::request(path);
                    let headers = headers.iter().fold(Headers::new(), |all, (name, value)| {
                        all.with(name, if name == ":method" { method.as_bytes() } else { value })
                    });
                    let stream = vm.request(root, headers, ended).stream;
                    vm.set_property(stream, "filter_state.mixed_version_proxy.method", method);
                    vm.response(stream, answer(404, "text/plain", 19), from_cluster("cp-0"));
                    vm.run_for_with(Duration::from_millis(300), |_| Some(Answer::Failure));
                    let reply = vm.stream(stream).local_reply.expect("a reply");
                    assert_eq!(reply.headers.text("retry-after"), expected, "{method} {path}");
                    vm.run_for_with(Duration::from_secs(6), |call| {
                        if call.path() == "/api" { Some(aggregated(&kinds)) } else { Some(discovery(call)) }
                    });
                }
            })
            .unwrap();
    }
}

/// A core group of services that hand requests on.
fn document_with_proxy() -> String {
    lifecycle::document("", "services")
        .replace(r#""verbs":["get"]"#, r#""verbs":["get"],"subresources":[{"subresource":"proxy","verbs":["get"]}]"#)
}

fn aggregated(body: &str) -> Answer {
    Answer::new(200, [("content-type", "application/json")], body)
}
