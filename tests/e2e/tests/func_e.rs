//! The shipped sidecar, run as the README says: `func-e run -c envoy/sidecar.yaml`, after a user's edits.

use std::fs;

use e2e::{PATIENCE, Pki};
use lab::{Client, StubApiserver, envoy::FuncE, eventually, repository, wasm_path};

/// Only 1.37 serves it.
const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";

#[tokio::test]
async fn func_e_runs_the_shipped_sidecar() {
    let pki = Pki::new().unwrap();
    let mut apiservers = Vec::new();
    for (name, version) in [("cp-1", "1.34.4"), ("cp-2", "1.37.2"), ("cp-3", "1.34.4")] {
        let apiserver = StubApiserver::builder(name, version).tls(pki.server().unwrap()).start();
        apiservers.push(apiserver.await.unwrap());
    }
    // What a user edits: ports, addresses, paths. The text stays YAML, comments and all.
    let shipped = fs::read_to_string(repository().join("envoy/sidecar.yaml")).unwrap();
    let mut text = shipped.replace("address: 0.0.0.0, port_value: 6443", "address: 127.0.0.1, port_value: 0");
    text = text.replace("port_value: 9901", "port_value: 0");
    for (placeholder, apiserver) in ["127.0.0.1", "192.0.2.12", "192.0.2.13"].iter().zip(&apiservers) {
        let address = format!("address: 127.0.0.1, port_value: {}", apiserver.addr().port());
        text = text.replace(&format!("address: {placeholder}, port_value: 6444"), &address);
    }
    let directory = pki.directory.path();
    let files = directory.to_str().unwrap();
    text = text.replace("/etc/mixed-version-proxy/mixed-version-proxy.wasm", wasm_path().unwrap().to_str().unwrap());
    text = text.replace("/etc/mixed-version-proxy", files).replace("/etc/kubernetes/pki", files);
    assert!(!text.contains("/etc/") && !text.contains("192.0.2."), "an edit is missing:\n{text}");
    fs::create_dir(directory.join("envoy")).unwrap();
    fs::write(directory.join("envoy/sidecar.yaml"), text).unwrap();

    let func_e = FuncE::run("envoy/sidecar.yaml".as_ref(), directory).await.unwrap();
    let listeners = Client::plain(func_e.admin()).get("/listeners?format=json").send().await.unwrap().json().unwrap();
    let port = &listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"];
    let address = format!("127.0.0.1:{port}").parse().unwrap();
    let client = Client::tls(address, pki.client().unwrap());
    let answer = eventually(PATIENCE, "a rerouted answer", async || {
        let answer = client.get(NEW_GROUP).send().await.map_err(|error| format!("{error:#}"))?;
        if answer.status == 200 { Ok(answer) } else { Err(answer.text()) }
    });
    let answer = answer.await.unwrap_or_else(|error| panic!("{error:#}\n{}", func_e.output()));
    assert_eq!(answer.header("x-served-by").as_deref(), Some("cp-2"));
    func_e.stop().await.unwrap();
}
