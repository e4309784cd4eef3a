//! The same module on older releases of Envoy. Some pick the route again whenever a header changes, some only when they
//! are told to; a reroute must have its effect on all.

use e2e::{ControlPlane, GATEWAY_HEADER, SIDECAR};
use lab::apiserver::{Fault, Scope};
use lab::envoy::EnvoyBuilder;

/// Only `cp-2` serves it.
const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";

#[tokio::test]
async fn reroute_and_guard_work_on_older_envoys() {
    for file in [SIDECAR, GATEWAY_HEADER] {
        let releases: [fn(EnvoyBuilder) -> EnvoyBuilder; 2] =
            [|envoy| envoy.version("1.36.2"), |envoy| envoy.version("1.39.3")];
        for envoy in releases {
            let plane = ControlPlane::builder(file).envoy(envoy).settled().await.unwrap();
            let version = plane.envoy.admin_get("/server_info").await.unwrap().json().unwrap()["version"].to_string();
            let why = format!("{file} on {version}");
            for _ in 0..e2e::EVERY_WORKER {
                let answer = plane.get(NEW_GROUP).await.unwrap();
                assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (200, Some("cp-2")), "{why}");
            }
            let new = &plane.apiservers[1];
            new.fail(Scope::path(NEW_GROUP), Fault::Reset);
            for (method, retry_after) in [("GET", Some("1")), ("POST", None)] {
                let answer = plane.client.request(method, NEW_GROUP).send().await.unwrap();
                assert_eq!((answer.status, answer.header("retry-after").as_deref()), (503, retry_after), "{why}");
            }
        }
    }
}
