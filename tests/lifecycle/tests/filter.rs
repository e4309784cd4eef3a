//! The filter's callbacks, one by one and in every order that Envoy may choose.

use std::time::Duration;

use host_emulator::{Action, Answer, FUNCTIONS, Headers, Host, HostCall, Level, RepeatedHeaders, Vm};
use lifecycle::{
    API_SERVICES, COMMON, GATEWAY_HEADER, NEW, NOBODY, SIDECAR, STATUSES, answer, discovery, document, from_cluster,
    get, poll, request,
};

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Runs a test in a VM of its own.
fn vm(test: impl FnOnce(&mut Vm) + Send + 'static) {
    Host::new().vm(test).unwrap();
}

/// What was copied from the host, as "function subject".
fn copied(calls: &[HostCall]) -> Vec<String> {
    let copies = calls.iter().filter(|call| call.copied.is_some());
    copies.map(|call| format!("{} {}", call.function.trim_start_matches("proxy_"), call.subject)).collect()
}

fn log_contains(vm: &Vm, level: Level, text: &str) -> bool {
    vm.logs().iter().any(|line| line.level == level && line.message.contains(text))
}

#[test]
fn a_bad_configuration_is_refused_and_named() {
    vm(|vm| {
        for (configuration, expected) in [
            ("", "apiservers: missing"),
            ("{", "broken JSON"),
            ("\u{0}\u{1}", "neither a JSON object nor"),
            (r#"{"apiservers": [], "local": "x"}"#, "apiservers"),
            (r#"{"apiservers": [{"name": "a", "cluster": "a", "color": 1}]}"#, "apiservers[0].color"),
        ] {
            assert!(vm.configure(configuration).is_none(), "{configuration}");
            assert!(log_contains(vm, Level::Error, "configuration refused: "), "{configuration}");
            assert!(log_contains(vm, Level::Error, expected), "{expected} in {:?}", vm.logs());
        }
        assert!(vm.configure(SIDECAR).is_some(), "a good one is accepted afterwards");
    });
}

#[test]
fn each_document_of_each_apiserver_is_polled_once_an_interval() {
    vm(|vm| {
        let _root = vm.configure(SIDECAR).unwrap();
        assert!(vm.calls().is_empty(), "nothing is sent before the first tick");
        vm.run_for(Duration::from_millis(200));
        let asked: Vec<_> = vm.calls().iter().map(|call| format!("{} {}", call.upstream, call.path())).collect();
        let expected = [
            "cp-0-poll /api",
            "cp-0-poll /apis",
            "cp-0-poll /openapi/v3",
            "cp-1-poll /api",
            "cp-1-poll /apis",
            "cp-1-poll /openapi/v3",
            "cp-2-poll /api",
            "cp-2-poll /apis",
            "cp-2-poll /openapi/v3",
            "cp-0-poll /apis/apiregistration.k8s.io/v1/apiservices",
        ];
        assert_eq!(asked, expected);
        for call in vm.calls() {
            assert_eq!(call.headers.text("x-kubernetes-peer-proxied"), Some("true"));
            assert_eq!(call.headers.text(":authority"), Some("kubernetes.default.svc"));
            assert_eq!(call.headers.get("if-none-match"), None, "nothing is known yet");
            assert_eq!(call.headers.get("accept-encoding"), None, "an encoded answer could not be read");
            let accept = call.headers.text("accept").unwrap();
            let expected = match call.path() {
                API_SERVICES => "as=PartialObjectMetadataList",
                "/openapi/v3" => "application/json",
                _ => "profile=nopeer,",
            };
            assert!(accept.contains(expected), "{accept}");
            assert_eq!(call.timeout, seconds(3));
        }
        let mut polls = 0;
        vm.run_for_with(seconds(25), |call| {
            polls += 1;
            if polls > 10 && call.path() != API_SERVICES {
                assert_eq!(call.headers.text("if-none-match"), Some("\"tag\""), "known: asked for changes only");
            }
            Some(discovery(call))
        });
        assert!((38..=45).contains(&polls), "{polls} polls in five intervals, schemas once");
    });
}

#[test]
fn a_request_that_stays_copies_two_strings() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        vm.take_host_calls();
        let outcome = get(vm, root, COMMON);
        assert_eq!((outcome.action, outcome.route_cache_cleared), (Action::Continue, 0));
        let asked = copied(&vm.take_host_calls());
        assert_eq!(asked, ["get_header_map_value :path"]);
        let outcome = vm.response(outcome.stream, answer(200, "application/json", 900), from_cluster("cp-0"));
        assert_eq!((outcome.action, outcome.local_reply), (Action::Continue, None));
        let calls = vm.take_host_calls();
        assert_eq!(copied(&calls), ["get_header_map_value :status"]);
        assert_eq!(calls.len(), 1, "and asks for nothing else: {calls:?}");
    });
}

#[test]
fn a_reroute_is_handed_to_envoy_in_the_way_that_was_configured() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        vm.take_host_calls();
        let outcome = get(vm, root, NEW);
        assert_eq!(outcome.filter_state_text("mixed_version_proxy.cluster"), Some("cp-1"));
        assert_eq!(outcome.request_headers.text("x-kubernetes-peer-proxied"), Some("true"));
        assert_eq!(vm.count("proxy_call_foreign_function"), 1, "the route is picked again");
        let outcome = vm.response(outcome.stream, answer(200, "application/json", 9), from_cluster("cp-1"));
        assert_eq!(outcome.local_reply, None);
    });
    vm(|vm| {
        let root = vm.configure(GATEWAY_HEADER).unwrap();
        poll(vm);
        let spoofed = request(NEW).with("X-Reroute", "cp-2").with("x-reroute", "cp-0");
        let outcome = vm.request(root, spoofed, true);
        let values: Vec<_> = outcome.request_headers.all("x-reroute").collect();
        assert_eq!(values, [b"cp-1"], "ours takes the place of the client's");
        for path in [COMMON, NOBODY, "/healthz", "/version", "//odd", "/api/v1/pods/%zz"] {
            let outcome = vm.request(root, request(path).with("x-reroute", "cp-2"), true);
            assert_eq!(outcome.request_headers.get("x-reroute"), None, "{path}");
            assert!(outcome.filter_state.is_empty(), "{path}");
        }
    });
}

#[test]
fn the_loop_header_ends_rerouting_whatever_its_value() {
    for repeated in [RepeatedHeaders::Joined, RepeatedHeaders::First] {
        let host = Host::new();
        host.set_repeated_headers(repeated);
        host.vm(|vm| {
            let root = vm.configure(SIDECAR).unwrap();
            poll(vm);
            for values in [&[&b"true"[..]][..], &[b"false"], &[b""], &[b"\xc0\xff"], &[b"false", b"true"]] {
                let headers =
                    values.iter().fold(request(NEW), |headers, value| headers.with("X-Kubernetes-Peer-Proxied", value));
                let outcome = vm.request(root, headers, true);
                assert!(outcome.filter_state.is_empty(), "{values:?}");
                let outcome = vm.response(outcome.stream, answer(404, "text/plain", 19), from_cluster("cp-0"));
                assert_eq!(outcome.local_reply.unwrap().status, 503, "{values:?}: cp-1 lists it");
            }
        })
        .unwrap();
    }
}

#[test]
fn an_apiserver_that_cannot_be_called_does_not_stop_the_polls_of_others() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        vm.know_clusters(["cp-0-poll", "cp-1-poll"]);
        vm.refuse_calls_to("cp-0-poll");
        poll(vm);
        assert!(log_contains(vm, Level::Warn, "discovery of cp-2 (/apis) fails: Envoy does not take calls"));
        assert!(log_contains(vm, Level::Warn, "discovery of cp-0 (/api) fails: Envoy does not take calls"));
        assert!(log_contains(vm, Level::Info, "discovery of cp-1 (/apis) is fresh"));
        // The cluster arrives by CDS, the host becomes healthy.
        vm.know_clusters(["cp-0-poll", "cp-1-poll", "cp-2-poll"]);
        vm.accept_calls_to("cp-0-poll");
        poll(vm);
        for name in ["cp-0", "cp-2"] {
            assert!(log_contains(vm, Level::Info, &format!("discovery of {name} (/apis) is fresh")), "{name}");
        }
        assert_eq!(get(vm, root, NEW).filter_state_text("mixed_version_proxy.cluster"), Some("cp-1"));
    });
}

#[test]
fn answers_of_any_shape_are_survived() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        let json = Headers::new().with("content-type", "application/json");
        let shapes = [
            (Headers::new(), b"".to_vec(), (0, 0, 0)),
            (Headers::new(), vec![], (3, 0, 0)),
            (json.clone().with(":status", "200"), vec![], (2, 0, 0)),
            (json.clone().with(":status", "200"), vec![], (2, 5_000_000, 7)),
            (json.clone().with(":status", "abc"), b"{}".to_vec(), (2, 2, 0)),
            (json.clone().with(":status", b"\xff\xfe"), b"{}".to_vec(), (2, 2, 0)),
            (json.clone().with(":status", "99999999999999999999"), b"{}".to_vec(), (2, 2, 0)),
            (json.clone(), b"{}".to_vec(), (1, 2, 0)),
            (json.clone().with(":status", "200").with("etag", b"\xff"), b"\xff\xfe".to_vec(), (3, 2, 0)),
            (Headers::new().with(":status", "200").with("content-type", b"\xff"), b"{}".to_vec(), (2, 2, 0)),
            (json.with(":status", "304"), vec![], (usize::MAX, usize::MAX, usize::MAX)),
        ];
        for (headers, body, counts) in shapes {
            vm.run_for(seconds(6));
            for call in vm.calls() {
                vm.answer_raw(call.token, headers.clone(), &body, (), counts);
            }
            let outcome = get(vm, root, NEW);
            let state = outcome.filter_state_text("mixed_version_proxy.cluster");
            assert_eq!(state, Some("cp-1"), "after {headers:?}: the last good document counts");
        }
    });
}

#[test]
fn polls_go_on_when_answers_get_lost_or_come_late() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        vm.advance(seconds(5));
        vm.tick(root);
        let late: Vec<_> = vm.calls();
        assert_eq!(late.len(), 7);
        // Not even a timeout comes back.
        vm.advance(seconds(6));
        vm.tick(root);
        vm.advance(seconds(1));
        vm.tick(root);
        let newer: Vec<_> =
            vm.calls().into_iter().filter(|call| !late.iter().any(|old| old.token == call.token)).collect();
        assert_eq!(newer.len(), 7, "polls go on");
        assert!(log_contains(vm, Level::Warn, "no answer and no timeout came back"));
        for call in newer {
            vm.respond(call.token, discovery(&call));
        }
        for call in late {
            vm.respond(call.token, Answer::new(200, [("content-type", "application/json")], document("apps", "older")));
        }
        let outcome = get(vm, root, NEW);
        assert_eq!(
            outcome.filter_state_text("mixed_version_proxy.cluster"),
            Some("cp-1"),
            "older never replaces newer"
        );
    });
}

#[test]
fn odd_bytes_in_headers_are_left_alone() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        for path in [&b"/api/v1/pods/\xe9"[..], b"\xff", b"", b"/", b"/api/v1/\x00", b"*", b"http://h/apis/\xff/v1/x"] {
            let headers = Headers::new().with(":method", b"\xff").with(":path", path).with("accept", b"\xff");
            let outcome = vm.request(root, headers, true);
            assert_eq!((outcome.action, outcome.local_reply), (Action::Continue, None), "{path:?}");
            let outcome = vm.response(outcome.stream, answer(200, "application/json", 1), from_cluster("cp-0"));
            assert_eq!(outcome.local_reply, None, "{path:?}");
        }
        // A request without a path at all, as CONNECT has none.
        let outcome = vm.request(root, [(":method", "CONNECT"), (":authority", "a:1")], false);
        assert_eq!(outcome.action, Action::Continue);
    });
}

#[test]
fn answers_that_nobody_asked_this_filter_about_pass() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        // Another filter answers before this one has seen the request.
        for (status, details) in
            [(401, "jwt_authn_access_denied"), (403, "rbac_access_denied"), (404, "direct_response")]
        {
            let stream = vm.open(root);
            let headers = [(":status", status.to_string())];
            let outcome = vm.response(stream, headers, [("response.code_details", details)]);
            assert_eq!(outcome.local_reply, None, "{details}");
        }
    });
}

#[test]
fn an_own_answer_is_made_once_and_left_alone_afterwards() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        let outcome = get(vm, root, NEW);
        let properties = [
            ("response.code_details", &b"upstream_reset_before_response_started{remote_connection_failure}"[..]),
            ("xds.cluster_name", b"cp-1"),
        ];
        let outcome = vm.response(outcome.stream, [(":status", "503"), ("content-type", "text/plain")], properties);
        let reply = outcome.local_reply.unwrap();
        assert_eq!(reply.status, 503);
        assert_eq!(reply.headers.text("content-type"), Some("application/json"));
        assert_eq!(reply.headers.text("retry-after"), Some("1"));
        assert!(reply.text().starts_with(r#"{"kind":"Status","apiVersion":"v1""#), "{}", reply.text());
        assert_eq!(vm.count("proxy_send_local_response"), 1);
        vm.finish(outcome.stream);
    });
}

#[test]
fn the_newest_configuration_counts_and_the_older_one_serves_until_it_is_drained() {
    vm(|vm| {
        let old = vm.configure(SIDECAR).unwrap();
        poll(vm);
        let in_flight = get(vm, old, NEW);
        let new = vm.configure(r#"{"apiservers": [{"name": "cp-0", "cluster": "cp-0"}], "local": "cp-0"}"#).unwrap();
        poll(vm);
        assert!(get(vm, new, NEW).filter_state.is_empty(), "cp-1 is not configured any more");
        let outcome = vm.response(in_flight.stream, answer(200, "application/json", 1), from_cluster("cp-1"));
        assert_eq!(outcome.local_reply, None);
        vm.shutdown(old);
        poll(vm);
        assert!(get(vm, new, COMMON).filter_state.is_empty());
    });
}

/// Host functions that the filter calls by itself. `proxy_http_call` and `proxy_set_effective_context` go through the
/// SDK, which gives up on statuses that Envoy does not have for them.
fn own_functions() -> Vec<&'static str> {
    let through_sdk = ["proxy_http_call", "proxy_set_effective_context"];
    FUNCTIONS.iter().copied().filter(|function| !through_sdk.contains(function)).collect()
}

#[test]
fn a_host_that_answers_oddly_never_brings_the_worker_down() {
    for function in own_functions() {
        for status in STATUSES {
            Host::new()
                .vm(move |vm| {
                    let root = vm.configure(SIDECAR).unwrap();
                    poll(vm);
                    vm.force_status(function, status);
                    for path in [COMMON, NEW, NOBODY, "/healthz", "/apis", "/apis/depot.k8s.io", "/openapi/v3"] {
                        for (code, details) in [
                            (200, "via_upstream"),
                            (301, "via_upstream"),
                            (404, "via_upstream"),
                            (503, "upstream_reset_before_response_started{connection_termination}"),
                        ] {
                            let outcome = get(vm, root, path);
                            let properties = [("response.code_details", details), ("xds.cluster_name", "cp-0")];
                            let outcome = vm.response(outcome.stream, answer(code, "text/plain", 19), properties);
                            vm.finish(outcome.stream);
                        }
                    }
                    vm.run_for_with(seconds(11), |call| Some(discovery(call)));
                    vm.clear_forced();
                    poll(vm);
                    let outcome = get(vm, root, NEW);
                    let state = outcome.filter_state_text("mixed_version_proxy.cluster");
                    assert_eq!(state, Some("cp-1"), "all is well again");
                })
                .unwrap_or_else(|trap| panic!("{function} answered {status}: {trap:?}"));
        }
    }
}

#[test]
fn a_reroute_that_the_host_refuses_ends_in_a_503_and_never_in_a_404() {
    for function in ["proxy_set_property", "proxy_call_foreign_function", "proxy_replace_header_map_value"] {
        for status in STATUSES {
            if (function, status) == ("proxy_call_foreign_function", 1) {
                continue; // An Envoy that does not know the function picks routes again by itself.
            }
            Host::new()
                .vm(move |vm| {
                    let root = vm.configure(SIDECAR).unwrap();
                    poll(vm);
                    vm.force_status(function, status);
                    let outcome = get(vm, root, NEW);
                    // The request went to the default cluster after all, whose apiserver does not know the type.
                    let outcome = vm.response(outcome.stream, answer(404, "text/plain", 19), from_cluster("cp-0"));
                    assert_eq!(outcome.local_reply.expect("a reply").status, 503);
                    assert!(log_contains(vm, Level::Error, "rerouting: Envoy answered with status"));
                })
                .unwrap_or_else(|trap| panic!("{function} answered {status}: {trap:?}"));
        }
    }
}

#[test]
fn a_configuration_that_the_host_does_not_hand_over_is_refused() {
    for status in STATUSES {
        Host::new()
            .vm(move |vm| {
                vm.force_status("proxy_get_buffer_bytes", status);
                assert!(vm.configure(SIDECAR).is_none());
            })
            .unwrap_or_else(|trap| panic!("{status}: {trap:?}"));
    }
}

#[test]
fn a_404_that_only_looks_like_an_apiservers_is_not_believed() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        for details in ["direct_response", "route_not_found", "ext_authz_denied", ""] {
            let stream = get(vm, root, COMMON).stream;
            let outcome =
                vm.response(stream, answer(404, "application/json", 188), [("response.code_details", details)]);
            assert_eq!(outcome.local_reply.expect("a reply").status, 503, "{details}, although it has an Audit-Id");
        }
    });
}

#[test]
fn a_missing_route_is_logged_once() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        for _ in 0..5 {
            let stream = get(vm, root, NEW).stream;
            vm.response(stream, answer(200, "application/json", 9), from_cluster("elsewhere"));
        }
        let told =
            vm.logs().iter().filter(|line| line.message.contains("was answered by cluster \"elsewhere\"")).count();
        assert_eq!(told, 1);
    });
}

#[test]
fn a_loop_header_that_cannot_be_read_counts_as_one() {
    vm(|vm| {
        let root = vm.configure(SIDECAR).unwrap();
        poll(vm);
        // The path is read first; the second read is the loop header's.
        let stream = get(vm, root, NEW);
        assert!(!stream.filter_state.is_empty());
        vm.force_status("proxy_get_header_map_value", 2);
        assert!(get(vm, root, NEW).filter_state.is_empty());
    });
}

#[test]
fn requests_are_spread_over_those_that_serve_them() {
    vm(|vm| {
        let gateway = r#"{"apiservers": [{"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
            {"name": "cp-1", "cluster": "cp-1", "discoveryCluster": "cp-1-poll"},
            {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll"}]}"#;
        let root = vm.configure(gateway).unwrap();
        poll(vm);
        let mut seen = std::collections::BTreeMap::<String, usize>::new();
        for _ in 0..300 {
            let outcome = get(vm, root, "/apis/apps/v1/deployments");
            let cluster = outcome.filter_state_text("mixed_version_proxy.cluster").unwrap().to_owned();
            *seen.entry(cluster).or_default() += 1;
        }
        assert_eq!(seen.keys().collect::<Vec<_>>(), ["cp-0", "cp-2"]);
        assert!(seen.values().all(|count| *count > 90), "{seen:?}");
    });
}
