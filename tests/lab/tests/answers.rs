//! The stub apiserver gives the answers that real kube-apiservers gave, byte for byte.

use anyhow::Result;
use lab::{
    Client, StubApiserver,
    apiserver::{self, ApiServiceOrigin},
    client::Answer,
    discovery::{self, Resource},
    fixtures::{self, Recording},
};

const V2: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

async fn stub(version: &str) -> (StubApiserver, Client) {
    let builder =
        StubApiserver::builder("cp-1", version).token("a", "admin").token("d", "dev").token("p", "mvp-poller");
    let stub = builder.without_rights("dev").without_rights("mvp-poller").start().await.unwrap();
    let client = Client::plain(stub.addr());
    (stub, client)
}

/// What the stub does not know: the validity of bodies, whether an object `x` exists, versions of a store.
const NOT_REPLAYED: [&str; 6] =
    ["200.trailing-slash", "400.bad-json", "415.post-xml", "422.invalid", "404.subresource-of-missing-object", "inm."];

/// Headers that differ from answer to answer, or that only the stub has.
fn comparable(headers: impl Iterator<Item = (String, String)>) -> Vec<(String, String)> {
    let own = ["audit-id", "date", "x-served-by"];
    let shown = headers.filter(|(name, _)| !own.contains(&name.to_lowercase().as_str()));
    shown
        .map(|(name, value)| {
            let uid = name.starts_with("X-Kubernetes-Pf-") && !value.is_empty();
            (name, if uid { "UID".to_owned() } else { value })
        })
        .collect()
}

fn headers_of(answer: &Answer) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    comparable(answer.headers.iter().map(|(name, value)| (text(name), text(value))))
}

#[tokio::test]
async fn recorded_questions_get_the_recorded_answers() {
    let mut compared = 0;
    for version in ["1.34.4", "1.37.2"] {
        let (_stub, client) = stub(version).await;
        for name in fixtures::recordings(&format!("answers/{version}")).unwrap() {
            let file = name.rsplit('/').next().unwrap().to_owned();
            if NOT_REPLAYED.iter().any(|skipped| file.starts_with(skipped)) {
                continue;
            }
            let recording = Recording::load(&format!("{name}.headers")).unwrap();
            let (method, target) = recording.request.clone().unwrap();
            let mut request = client.request(&method, &target);
            for (name, value) in &recording.request_headers {
                request = request.header(name, value);
            }
            let token = match recording.caller.split(' ').next().unwrap() {
                "admin" => Some("a"),
                "dev" => Some("d"),
                "mvp-poller" => Some("p"),
                "a" => Some("nobody issued this"),
                _ => None,
            };
            if let Some(token) = token {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status, recording.status, "{name}");
            assert_eq!(headers_of(&answer), comparable(recording.headers.iter().cloned()), "{name}");
            for extension in ["json", "txt", "bin"] {
                if let Ok(want) = fixtures::answer(version, &format!("{file}.{extension}")) {
                    assert_eq!(answer.text(), String::from_utf8_lossy(&want), "{name}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 120, "only {compared} bodies were compared");
}

#[tokio::test]
async fn recorded_documents_are_replayed() {
    for version in fixtures::VERSIONS.into_iter().chain(fixtures::MIXED_PAIR).chain(fixtures::UPSTREAM_PROXY_PAIR) {
        let (_stub, client) = stub(version).await;
        for name in fixtures::recordings(&format!("discovery/{version}")).unwrap() {
            let file = name.rsplit('/').next().unwrap().to_owned();
            if ["protobuf", "openapi-v2", "openapi-v3-apps"].iter().any(|skipped| file.contains(skipped)) {
                continue;
            }
            let recording = Recording::load(&format!("{name}.headers")).unwrap();
            let (method, target) = recording.request.clone().unwrap();
            let mut request = client.request(&method, &target).header("Authorization", "Bearer a");
            for (name, value) in &recording.request_headers {
                request = request.header(name, value);
            }
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status, recording.status, "{name}");
            for header in ["etag", "vary", "cache-control", "content-type"] {
                assert_eq!(answer.header(header).as_deref(), recording.header(header), "{name} {header}");
            }
            if file.starts_with("apiservices") {
                let want = fixtures::discovery_json(version, &format!("{file}.json")).unwrap();
                assert_eq!(answer.json().unwrap(), want, "{name}");
                continue;
            }
            if let Ok(want) = fixtures::discovery(version, &format!("{file}.json")) {
                assert_eq!(answer.text(), String::from_utf8_lossy(&want), "{name}");
            }
        }
    }
}

#[tokio::test]
async fn an_apiserver_that_asks_its_peers_tells_of_itself_only_when_asked_to() {
    let (stub, client) = stub(fixtures::UPSTREAM_PROXY_PAIR[1]).await;
    let client = client.with_token("a");
    let groups = async |accept: String| {
        let answer = client.get("/apis").header("accept", accept).send().await.unwrap();
        let told = answer.json().unwrap()["items"].as_array().unwrap().len();
        (told, answer.header("etag").unwrap())
    };
    let (own, of_all) = (groups(format!("{V2};profile=nopeer")).await, groups(V2.to_owned()).await);
    assert_eq!(own, (21, stub.apis_etag()));
    assert_eq!(of_all.0, 22, "internal.apiserver.k8s.io of the older one");
    assert_ne!(of_all.1, own.1);
    let accept = || client.get("/apis").header("accept", V2);
    assert_eq!(accept().header("if-none-match", &of_all.1).send().await.unwrap().status, 304);
    assert_eq!(accept().header("if-none-match", &own.1).send().await.unwrap().status, 200);
    // What it serves, and what it says once it is edited, is its own.
    let internal = "/apis/internal.apiserver.k8s.io/v1alpha1/storageversions";
    assert_eq!(client.get(internal).send().await.unwrap().status, 404);
    stub.edit_apis(|apis| discovery::add_resource(apis, "apps", "v1", Resource::new("things", "Thing")));
    assert_eq!(groups(V2.to_owned()).await, (21, stub.apis_etag()));
}

#[tokio::test]
async fn only_the_exact_quoted_etag_gives_a_304() {
    let (stub, client) = stub("1.37.2").await;
    let client = client.with_token("a");
    let etag = stub.apis_etag();
    let rows = [
        (etag.clone(), 304),
        (format!("W/{etag}"), 200),
        (format!("\"x\", {etag}"), 200),
        ("*".to_owned(), 200),
        (etag.trim_matches('"').to_owned(), 200),
    ];
    for (value, want) in rows {
        let answer = client.get("/apis").header("accept", V2).header("if-none-match", &value).send().await.unwrap();
        assert_eq!(answer.status, want, "{value}");
        assert_eq!(answer.header("etag"), Some(etag.clone()), "{value}");
        assert_eq!(answer.header("content-type").is_none(), want == 304, "{value}");
        assert!(answer.header("audit-id").is_some() && answer.header("vary").is_some());
    }
}

#[tokio::test]
async fn documents_from_128_kib_on_are_gzipped_for_those_who_accept_it() {
    let (stub, client) = stub("1.37.2").await;
    let client = client.with_token("a");
    let ask = async || client.get("/apis").header("accept", V2).header("accept-encoding", "gzip").send().await.unwrap();
    assert_eq!(ask().await.header("content-encoding"), None);
    stub.edit_apis(|apis| {
        for number in 0..400 {
            let resource = Resource::new(&format!("planes{number}"), "Plane").subresource("status");
            discovery::add_resource(apis, "hangar.example.com", "v1", resource);
        }
    });
    let answer = ask().await;
    assert_eq!(answer.header("content-encoding").as_deref(), Some("gzip"));
    assert_eq!(answer.header_values("vary"), ["Accept", "Accept-Encoding"]);
    assert_eq!(answer.gunzipped().unwrap(), stub.apis_text());
    assert_eq!(answer.header("etag"), Some(apiserver::etag(&stub.apis_text())));
}

#[tokio::test]
async fn what_a_stub_serves_is_what_its_document_lists() {
    let (stub, client) = stub("1.34.4").await;
    let client = client.with_token("a");
    let status = async |target: &str| client.get(target).send().await.unwrap().status;
    let bundles = "/apis/certificates.k8s.io/v1/clustertrustbundles";
    let migrations = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";
    let planes = "/apis/hangar.example.com/v1/namespaces/default/planes/a380";
    for target in [bundles, migrations, planes] {
        assert_eq!(status(target).await, 404, "{target}");
    }
    stub.set_version("1.37.2").unwrap();
    stub.add_api("hangar.example.com", "v1", Resource::new("planes", "Plane"), ApiServiceOrigin::CustomResource);
    for target in [bundles, migrations, planes] {
        assert_eq!(status(target).await, 200, "{target}");
    }
    assert_eq!(status("/apis/hangar.example.com/v1").await, 200);
    assert_eq!(client.get("/apis/hangar.example.com/v1/trains").send().await.unwrap().text(), "404 page not found\n");
    assert_eq!(client.get(format!("{planes}/status")).send().await.unwrap().json().unwrap()["details"]["name"], "a380");
    stub.edit_apis(|apis| discovery::remove_subresource(apis, "storage.k8s.io", "v1", "csinodes", "status"));
    assert_eq!(client.get("/apis/storage.k8s.io/v1/csinodes/x/status").send().await.unwrap().body.len(), 174);
}

#[tokio::test]
async fn openapi_documents_are_served_under_the_hash_of_the_root() {
    let (stub, client) = stub("1.37.2").await;
    let client = client.with_token("a");
    let get = async |target: &str| client.get(target).send().await.unwrap();
    let url = async |key: &str| {
        let root = get("/openapi/v3").await.json().unwrap();
        root["paths"][key]["serverRelativeURL"].as_str().unwrap().to_owned()
    };
    let recorded = url("apis/apps/v1").await;
    let answer = get(&recorded).await;
    let etag = answer.header("etag").unwrap();
    assert_eq!((answer.status, recorded.split_once("?hash=").unwrap().1), (200, etag.trim_matches('"')));
    assert_eq!(answer.header("content-type").as_deref(), Some("application/json"));
    let schemas = &answer.json().unwrap()["components"]["schemas"];
    let kind = &schemas["io.lab.apps.v1.Deployment"]["x-kubernetes-group-version-kind"][0];
    assert_eq!((kind["group"].as_str(), kind["kind"].as_str()), (Some("apps"), Some("Deployment")));
    for condition in [etag.clone(), format!("\"x\", W/{etag}"), "*".to_owned()] {
        let answer = client.get(&recorded).header("if-none-match", &condition).send().await.unwrap();
        assert_eq!((answer.status, answer.body.len()), (304, 0), "{condition}");
    }
    stub.edit_apis(|apis| discovery::add_resource(apis, "apps", "v1", Resource::new("things", "Thing")));
    let moved = get(&recorded).await;
    assert_eq!((moved.status, moved.header("location")), (301, Some(url("apis/apps/v1").await)));
    assert!(get(&url("apis/apps/v1").await).await.text().contains("io.lab.apps.v1.Thing"));
    let unknown = get("/openapi/v3/apis/nosuch.example.k8s.io/v1").await;
    assert_eq!((unknown.status, unknown.body.len(), unknown.header("content-type")), (404, 0, None));
}

#[tokio::test]
async fn who_accepts_a_table_gets_one() {
    let (_stub, client) = stub("1.37.2").await;
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    for (target, row) in [("/api/v1/pods", "lab"), ("/api/v1/namespaces/shop/pods/p", "p")] {
        let answer =
            client.get(target).header("accept", table).header("authorization", "Bearer a").send().await.unwrap();
        let answer = answer.json().unwrap();
        assert_eq!((answer["kind"].as_str(), answer["rows"][0]["cells"][0].as_str()), (Some("Table"), Some(row)));
    }
}

#[tokio::test]
async fn answers_tell_who_served_and_what_came() -> Result<()> {
    let (stub, client) = stub("1.37.2").await;
    let client = client.with_token("a");
    let body = vec![b'z'; 300_000];
    let answer = client.post("/api/v1/namespaces/default/configmaps", body).chunked().send().await?;
    let json = answer.json()?;
    assert_eq!((answer.status, json["servedBy"].as_str()), (201, Some("cp-1")));
    assert_eq!((json["receivedBytes"].as_u64(), json["user"].as_str()), (Some(300_000), Some("admin")));
    assert_eq!(stub.requests()[0].body_length, Some(300_000));
    assert_eq!(stub.requests()[0].body.len(), 65536);

    let big = client.get("/api/v1/pods?labelSelector=lab-bytes%3D62914560").open().await?;
    assert_eq!(big.count().await?, 62_914_560);
    Ok(())
}

#[tokio::test]
async fn a_starting_apiserver_answers_as_recorded() {
    let (stub, client) = stub("1.34.4").await;
    let client = client.with_token("a");
    stub.set_starting(true);
    for (file, target) in [
        ("503.starting", "/apis/storagemigration.k8s.io/v1/storageversionmigrations"),
        ("404.starting", "/apis/certificates.k8s.io/v1/clustertrustbundles"),
    ] {
        let recording = Recording::load(&format!("answers/special/{file}.headers")).unwrap();
        let answer = client.get(target).header("accept", "application/json").send().await.unwrap();
        assert_eq!(answer.status, recording.status, "{file}");
        assert_eq!(headers_of(&answer), comparable(recording.headers.into_iter()), "{file}");
        assert_eq!(answer.body, fixtures::answer("special", &format!("{file}.json")).unwrap(), "{file}");
    }
    assert_eq!(client.get("/readyz").send().await.unwrap().status, 500);
}
