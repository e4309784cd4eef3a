//! Who a client is: whose word for it reaches an apiserver, and over which cluster.

use host_emulator::{Headers, Host, Outcome, Progress, Properties, RootId, Vm};
use lifecycle::{COMMON, NEW, STATUSES, poll, request};

const HEADERS: &str =
    r#""headers": {"user": ["X-Remote-User", "X-User"], "extraPrefix": ["X-Remote-Extra-", "X-Extra-"]}"#;

fn configuration(mode: &str) -> String {
    let apiservers: Vec<_> = (0..3)
        .map(|n| {
            format!(
                r#"{{"name": "cp-{n}", "cluster": "cp-{n}", "discoveryCluster": "cp-{n}-poll", "frontProxyCluster": "cp-{n}-trusted"}}"#
            )
        })
        .collect();
    let rest = match mode {
        "sidecar" => format!(r#""local": "cp-0", "identity": {{"clientCertificates": "RequestHeader", {HEADERS}}}"#),
        "dry run" => format!(
            r#""local": "cp-0", "peerProxying": "DryRun", "identity": {{"clientCertificates": "RequestHeader", {HEADERS}}}"#
        ),
        "gateway" => format!(
            r#""identity": {{"clientCertificates": "RequestHeader", "frontProxyCluster": "all-trusted", {HEADERS}}}"#
        ),
        "ignored" => format!(r#""local": "cp-0", "identity": {{"clientCertificates": "Ignore", {HEADERS}}}"#),
        mode => panic!("{mode}: no such mode"),
    };
    format!(r#"{{"apiservers": [{}], {rest}}}"#, apiservers.join(","))
}

fn settled(mode: &'static str, test: impl FnOnce(&mut Vm, RootId) + Send + 'static) {
    Host::new()
        .vm(move |vm| {
            let root = vm.configure(configuration(mode)).unwrap();
            poll(vm);
            test(vm, root);
        })
        .unwrap();
}

/// A client whose certificate has this subject, as Envoy gives it.
fn certificate(subject: &str) -> Properties {
    Properties::new()
        .with("connection.subject_peer_certificate", subject)
        .with("connection.sha256_peer_certificate_digest", "ab12")
}

/// What a client sends that wants to be somebody else.
fn forged(path: &str) -> Headers {
    request(path)
        .with("x-remote-user", "root")
        .with("X-Remote-User", "root")
        .with("x_remote_user", "root")
        .with("x-user", "root")
        .with("x-remote-group", "system:masters")
        .with("X-REMOTE_GROUP", "system:masters")
        .with("x-remote-uid", "0")
        .with("x-remote-extra-scopes%2fall", "yes")
        .with("x_remote_extra_scopes", "yes")
        .with("x-extra-authentication.kubernetes.io%2fcredential-id", "X509SHA256=00")
        .with("authorization", "Bearer token")
        .with("impersonate-user", "somebody")
        .with("impersonate-group", "one")
        .with("impersonate-group", "two")
        .with("impersonate-extra-dept", b"\xc3\xa9")
}

fn cluster(outcome: &Outcome) -> Option<&str> {
    outcome.filter_state_text("mixed_version_proxy.cluster")
}

/// All headers that say who somebody is.
fn identity(outcome: &Outcome) -> Vec<String> {
    let is_one = |name: &str| {
        let name = name.replace('_', "-");
        name.starts_with("x-remote") || name.starts_with("x-user") || name.starts_with("x-extra-")
    };
    let headers = outcome.request_headers.iter().filter(|(name, _)| is_one(name));
    headers.map(|(name, value)| format!("{name}: {}", String::from_utf8_lossy(value))).collect()
}

const JANE: &str = "O=system:masters,O=dev,CN=jane";

const IS_JANE: [&str; 4] = [
    "x-remote-user: jane",
    "x-remote-group: dev",
    "x-remote-group: system:masters",
    "x-remote-extra-authentication.kubernetes.io%2fcredential-id: X509SHA256=ab12",
];

#[test]
fn a_certificate_becomes_headers_over_a_cluster_that_is_believed() {
    for (mode, path, expected) in [
        ("sidecar", COMMON, "cp-0-trusted"),
        ("sidecar", NEW, "cp-1-trusted"),
        ("sidecar", "/healthz", "cp-0-trusted"),
        ("sidecar", "//odd", "cp-0-trusted"),
        ("sidecar", "/api/v1/pods/%zz", "cp-0-trusted"),
        ("sidecar", "/apis", "cp-0-trusted"),
        ("gateway", COMMON, "all-trusted"),
        ("gateway", NEW, "cp-1-trusted"),
        ("gateway", "/version", "all-trusted"),
        ("dry run", NEW, "cp-0-trusted"),
    ] {
        settled(mode, move |vm, root| {
            let outcome = vm.request_with(root, forged(path), certificate(JANE), true);
            assert_eq!(identity(&outcome), IS_JANE, "{mode} {path}");
            assert_eq!(cluster(&outcome), Some(expected), "{mode} {path}");
        });
    }
}

#[test]
fn a_loop_header_changes_where_and_not_who() {
    settled("sidecar", |vm, root| {
        let looped = forged(NEW).with("x-kubernetes-peer-proxied", "true");
        let outcome = vm.request_with(root, looped, certificate(JANE), true);
        assert_eq!(
            (identity(&outcome), cluster(&outcome)),
            (IS_JANE.map(str::to_owned).to_vec(), Some("cp-0-trusted"))
        );
    });
}

#[test]
fn without_a_certificate_nothing_is_asserted_and_nothing_is_believed() {
    for (mode, path, expected) in [
        ("sidecar", COMMON, None),
        ("sidecar", NEW, Some("cp-1")),
        ("sidecar", "/healthz", None),
        ("gateway", COMMON, None),
        ("gateway", NEW, Some("cp-1")),
        ("dry run", NEW, None),
    ] {
        for subject in ["", "O=dev,OU=no user", "CN=,O=dev,CN=first"] {
            settled(mode, move |vm, root| {
                let outcome = vm.request_with(root, forged(path), certificate(subject), true);
                assert_eq!(identity(&outcome), Vec::<String>::new(), "{mode} {path} {subject}");
                assert_eq!(cluster(&outcome), expected, "{mode} {path} {subject}");
            });
        }
    }
    settled("ignored", |vm, root| {
        for (path, expected) in [(COMMON, None), (NEW, Some("cp-1"))] {
            let outcome = vm.request_with(root, forged(path), certificate(JANE), true);
            assert_eq!(cluster(&outcome), expected, "{path}: never a cluster that is believed");
        }
    });
}

#[test]
fn what_says_nothing_of_the_sender_passes_as_it_is() {
    for subject in [JANE, ""] {
        settled("sidecar", move |vm, root| {
            let outcome = vm.request_with(root, forged(NEW), certificate(subject), true);
            let headers = &outcome.request_headers;
            assert_eq!(headers.text("authorization"), Some("Bearer token"));
            assert_eq!(headers.text("impersonate-user"), Some("somebody"));
            let groups: Vec<_> = headers.all("impersonate-group").collect();
            assert_eq!(groups, [b"one", b"two"]);
            assert_eq!(headers.get("impersonate-extra-dept"), Some("é".as_bytes()));
        });
    }
}

#[test]
fn a_certificate_that_nobody_can_be_made_of_is_refused() {
    for subject in ["CN=jane\\0D\\0AX-Remote-Group: system:masters", "CN=jane,O=", "CN=#020101", "nonsense", "CN=a\\"] {
        settled("sidecar", move |vm, root| {
            let outcome = vm.request_with(root, forged(NEW), certificate(subject), true);
            let reply = outcome.local_reply.expect("an answer");
            assert_eq!(reply.status, 401, "{subject}");
            assert!(String::from_utf8_lossy(&reply.body).contains("\"reason\":\"Unauthorized\""), "{subject}");
            assert_eq!(outcome.request, Progress::Replied, "{subject}: it goes nowhere");
            assert!(outcome.filter_state.is_empty(), "{subject}");
        });
    }
}

/// Whatever the host does, no request is sent over a cluster that is believed with a word of the client's.
#[test]
fn no_fault_of_the_host_lends_anybody_a_name() {
    for function in [
        "proxy_get_header_map_pairs",
        "proxy_get_header_map_value",
        "proxy_remove_header_map_value",
        "proxy_replace_header_map_value",
        "proxy_add_header_map_value",
        "proxy_get_property",
        "proxy_set_property",
        "proxy_call_foreign_function",
    ] {
        for status in STATUSES {
            for times in 1..4 {
                for mode in ["sidecar", "gateway"] {
                    settled(mode, move |vm, root| {
                        vm.force_status_times(function, status, times);
                        let outcome = vm.request_with(root, forged(NEW), certificate(JANE), true);
                        let is_believed = cluster(&outcome).is_some_and(|cluster| cluster.ends_with("trusted"));
                        let goes_on = outcome.request == Progress::Passed;
                        let names = identity(&outcome);
                        if is_believed && goes_on {
                            // A host that loses the digest loses no more than that.
                            let expected: &[&str] = if names.len() == 3 { &IS_JANE[..3] } else { &IS_JANE };
                            assert_eq!(names, expected, "{function} answered {status}, {times} times, {mode}");
                        }
                    });
                }
            }
        }
    }
}
