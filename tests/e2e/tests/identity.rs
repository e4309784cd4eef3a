//! Who a client is, on the real Envoy: what its certificate says reaches an apiserver, what it says itself does not.

use base64::{Engine, prelude::BASE64_STANDARD};
use e2e::{
    ControlPlane, GATEWAY, GATEWAY_HEADER, PATIENCE, SIDECAR,
    sender::{forged, identity, is_believed, subject},
};
use lab::{apiserver::Request, client::Answer, eventually, fixtures};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Served by all.
const COMMON: &str = "/api/v1/namespaces/shop/pods";
/// Only `cp-2` serves it.
const NEW: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";

const CREDENTIAL_ID: &str = "x-remote-extra-authentication.kubernetes.io%2fcredential-id";

/// What apiservers have received of clients since it was cleared.
fn received(plane: &ControlPlane) -> Vec<Request> {
    plane.apiservers.iter().flat_map(|apiserver| apiserver.client_requests()).collect()
}

fn clear(plane: &ControlPlane) {
    plane.apiservers.iter().for_each(|apiserver| apiserver.clear_requests());
}

/// What an apiserver should be told; `None`: nothing, the client is anonymous.
enum Expected {
    Told(Vec<(String, String)>),
    Anonymous,
    /// 401, or no connection at all: BoringSSL refuses some that Go refuses too.
    Refused,
}

fn expected(vector: &Value, digest: &str) -> Expected {
    let note = vector["note"].as_str().unwrap();
    let Some(user) = vector["user"].as_str() else {
        // The subject's text does not tell a UniversalString from others: see src/identity.rs.
        if note == "UniversalString" {
            return told("j", &["dev".into()], "", digest);
        }
        return if vector["error"].is_null() { Expected::Anonymous } else { Expected::Refused };
    };
    if user.contains(|c: char| c.is_ascii_control()) {
        return Expected::Refused; // It cannot travel in a header as it is.
    }
    let groups: Vec<_> =
        vector["groups"].as_array().unwrap().iter().map(|group| group.as_str().unwrap().to_owned()).collect();
    told(user, &groups, vector["uid"].as_str().unwrap_or_default(), digest)
}

fn told(user: &str, groups: &[String], uid: &str, digest: &str) -> Expected {
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let mut headers = vec![header("x-remote-user", user)];
    headers.extend(groups.iter().map(|group| header("x-remote-group", group)));
    headers.extend((!uid.is_empty()).then(|| header("x-remote-uid", uid)));
    headers.push(header(CREDENTIAL_ID, &format!("X509SHA256={digest}")));
    Expected::Told(headers)
}

#[tokio::test]
async fn every_certificate_means_what_it_means_to_kubernetes() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    for vector in fixtures::vectors("identity.jsonl").unwrap() {
        let note = vector["note"].as_str().unwrap();
        let der = BASE64_STANDARD.decode(vector["subject_der_b64"].as_str().unwrap()).unwrap();
        let (client, certificate) = plane.client_with_certificate(&der).await.unwrap();
        let digest: String = Sha256::digest(certificate.der()).iter().map(|byte| format!("{byte:02x}")).collect();
        for path in [COMMON, NEW] {
            clear(&plane);
            let answer = client.get(path).header("accept", "application/json").send().await;
            let seen = received(&plane);
            match (expected(&vector, &digest), answer) {
                (Expected::Told(headers), Ok(answer)) => {
                    assert_eq!(answer.status, 200, "{note} {path}: {}", answer.text());
                    assert!(is_believed(&seen[0]), "{note} {path}");
                    assert_eq!(identity(&seen[0]), headers, "{note} {path}");
                }
                (Expected::Anonymous, Ok(_)) => {
                    assert!(!is_believed(&seen[0]) && identity(&seen[0]).is_empty(), "{note} {path}");
                }
                (Expected::Refused, Ok(answer)) => {
                    assert_eq!((answer.status, seen.len()), (401, 0), "{note} {path}: {}", answer.text());
                    assert_eq!(answer.json().unwrap()["reason"], "Unauthorized", "{note} {path}");
                }
                (Expected::Refused, Err(_)) => assert!(seen.is_empty(), "{note} {path}"),
                (_, Err(error)) => panic!("{note} {path}: {error:#}"),
            }
        }
    }
}

#[tokio::test]
async fn a_gateway_hands_on_those_that_stay_too() {
    let plane = ControlPlane::builder(GATEWAY).settled().await.unwrap();
    let (client, _) = plane.client_with_certificate(&subject("kubeadm's admin")).await.unwrap();
    for path in [COMMON, NEW, "/version", "/apis", "/openapi/v3"] {
        clear(&plane);
        let answer = client.get(path).header("accept", "application/json").send().await.unwrap();
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        for request in received(&plane) {
            assert!(is_believed(&request), "{path}");
            assert_eq!(request.header("x-remote-user").as_deref(), Some("kubernetes-admin"), "{path}");
            assert_eq!(request.header_values("x-remote-group"), ["kubeadm:cluster-admins"], "{path}");
        }
    }
}

#[tokio::test]
async fn a_token_beside_a_certificate_passes_and_means_nothing() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let (client, _) = plane.client_with_certificate(&subject("kubeadm's admin")).await.unwrap();
    clear(&plane);
    client.get(COMMON).header("authorization", "Bearer somebody-else").send().await.unwrap();
    let request = &received(&plane)[0];
    // The apiserver asks for front-proxy headers before it looks at a token, as it does for certificates.
    assert!(is_believed(request));
    assert_eq!(request.header("x-remote-user").as_deref(), Some("kubernetes-admin"));
    assert_eq!(request.header("authorization").as_deref(), Some("Bearer somebody-else"));
}

#[tokio::test]
async fn impersonation_passes_as_it_was_sent() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    for path in [COMMON, NEW] {
        clear(&plane);
        let request = plane.client.get(path).header("impersonate-user", "jane").header("impersonate-group", "b");
        let request = request.header("impersonate-group", "a").header("impersonate-uid", "7");
        request.header("impersonate-extra-dept", b"caf\xc3\xa9").send().await.unwrap();
        let request = &received(&plane)[0];
        assert_eq!(request.header_values("impersonate-group"), ["b", "a"], "{path}");
        assert_eq!(request.header("impersonate-user").as_deref(), Some("jane"), "{path}");
        assert_eq!(request.header("impersonate-uid").as_deref(), Some("7"), "{path}");
        assert_eq!(request.header("impersonate-extra-dept").as_deref(), Some("café"), "{path}");
    }
}

#[tokio::test]
async fn nobody_becomes_somebody_else_by_ten_thousand_headers() {
    const HEADERS: usize = 10_000;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut sent = 0;
    for file in [SIDECAR, GATEWAY, GATEWAY_HEADER] {
        let plane = ControlPlane::builder(file).settled().await.unwrap();
        // A gateway's balancer sends nothing before its first health check.
        eventually(PATIENCE, "an answer to what stays", async || {
            plane.get(COMMON).await.is_ok_and(|it| it.status == 200)
        })
        .await
        .unwrap();
        clear(&plane);
        let mut connection = plane.client.connect().await.unwrap();
        let mut requests = 0;
        let paths =
            [COMMON, NEW, "/healthz", "/version", "/apis", "/apis/apps/v1", "/openapi/v3", "//odd", "/api/v1/nosuch"];
        let enough = sent + HEADERS.div_ceil(3);
        while sent < enough {
            let path = paths[random.usize(..paths.len())];
            let method = ["GET", "HEAD", "DELETE", "OPTIONS"][random.usize(..4)];
            let mut request = plane.client.request(method, path).header("accept", "application/json");
            for _ in 0..random.usize(1..30) {
                let (name, value) = forged(&mut random);
                request = request.header(name, value);
                sent += 1;
            }
            if random.u8(..4) == 0 {
                request = request.header("x-kubernetes-peer-proxied", "true");
            }
            for (name, value) in [
                ("x-mixed-version-proxy-cluster", "cp-1-trusted"),
                ("wasm.mixed_version_proxy.cluster", "cp-1-trusted"),
            ] {
                if random.bool() {
                    request = request.header(name, value);
                }
            }
            requests += 1;
            let answer: Answer = request.send_on(&mut connection).await.unwrap();
            assert_ne!(answer.status, 400, "{method} {path}: it was to get through");
        }
        let all = received(&plane);
        // Some of those for discovery look like the filter's polls.
        assert!(all.len() > requests / 2, "only {} of {requests} requests have reached an apiserver", all.len());
        for request in all {
            let leaked = identity(&request);
            assert!(leaked.is_empty() && !is_believed(&request), "seed {seed}: {leaked:?} in {request:?}");
        }
    }
}

#[tokio::test]
async fn a_certificate_does_not_lend_its_authority_to_other_names() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let (client, _) = plane.client_with_certificate(&subject("a kubelet")).await.unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let mut connection = client.connect().await.unwrap();
    for round in 0..500 {
        clear(&plane);
        let path = [COMMON, NEW, "/healthz", "/apis"][round % 4];
        let mut request = client.get(path).header("accept", "application/json");
        for _ in 0..3 {
            let (name, value) = forged(&mut random);
            request = request.header(name, value);
        }
        request.send_on(&mut connection).await.unwrap();
        for request in received(&plane) {
            let names: Vec<_> = identity(&request).into_iter().filter(|(name, _)| name != CREDENTIAL_ID).collect();
            let expected = [("x-remote-user", "system:node:cp-1"), ("x-remote-group", "system:nodes")];
            assert_eq!(names, expected.map(|(name, value)| (name.to_owned(), value.to_owned())), "{path}");
        }
    }
}

#[tokio::test]
async fn a_new_front_proxy_certificate_is_taken_up_and_the_old_one_ends() {
    let plane = ControlPlane::builder(SIDECAR)
        .edit(|config| {
            let clusters = config.pointer_mut("/static_resources/clusters").and_then(Value::as_array_mut).unwrap();
            for cluster in clusters.iter_mut().filter(|cluster| cluster["name"].as_str().unwrap().ends_with("trusted"))
            {
                let http = "/typed_extension_protocol_options/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
                cluster.pointer_mut(http).unwrap()["common_http_protocol_options"]["max_connection_duration"] =
                    json!("1s");
            }
        })
        .settled()
        .await
        .unwrap();
    let (client, _) = plane.client_with_certificate(&subject("kubeadm's admin")).await.unwrap();
    let mut watch = client.get(format!("{COMMON}?watch=true")).open().await.unwrap();
    assert_eq!(watch.status, 200);
    let taken_up = "cluster.cp-1-trusted.client_ssl_socket_factory.ssl_context_update_by_sds";
    let before = plane.envoy.stat(taken_up).await.unwrap().unwrap_or_default();
    // A connection made with the old certificate, idle from now on.
    assert_eq!(client.get(COMMON).send().await.unwrap().status, 200);
    let old = plane.apiservers[0].connections();
    plane.renew_front_proxy().unwrap();
    eventually(PATIENCE, "Envoy to take up the new certificate", async || {
        plane.envoy.stat(taken_up).await.unwrap().unwrap_or_default() > before
    })
    .await
    .unwrap();
    eventually(PATIENCE, "a connection with the new certificate", async || {
        assert_eq!(client.get(COMMON).send().await.unwrap().status, 200, "no request fails");
        plane.apiservers[0].connections() > old
    })
    .await
    .unwrap();
    plane.apiservers[0].push_event(&json!({"type": "BOOKMARK", "object": {"kind": "Pod"}}));
    assert!(watch.next_chunk().await.unwrap().is_some(), "the watch goes on");
}
