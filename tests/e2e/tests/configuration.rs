//! Good and bad configurations, on a real Envoy: what is bad is refused with the key and the reason in the log, and
//! nothing that runs suffers from it.

use std::fs;

use e2e::{ControlPlane, GATEWAY, PATIENCE, Pki, SIDECAR, merge, plugin_configuration};
use lab::{
    Envoy,
    client::{Answer, Opened},
    envoy::{Config, EnvoyBuilder, Pushed},
    eventually, repository, wasm_path,
};
use serde_json::{Value, json};

/// Only 1.37.2 serves it, so a sidecar before 1.34.4 has to reroute it.
const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";

/// Makes the plugin's `configuration` out of its value.
type Form = fn(&Value) -> Value;

/// Both forms in which a configuration can be given.
const FORMS: [(&str, Form); 2] = [
    ("Struct", |value| json!({"@type": "type.googleapis.com/google.protobuf.Struct", "value": value})),
    ("StringValue", |value| string_value(&value.to_string())),
];

fn string_value(text: &str) -> Value {
    json!({"@type": "type.googleapis.com/google.protobuf.StringValue", "value": text})
}

/// The filter among a file's listeners.
fn filter(listeners: &mut Value) -> &mut Value {
    let filters = listeners.pointer_mut("/0/filter_chains/0/filters/0/typed_config/http_filters");
    let filters = filters.and_then(Value::as_array_mut).expect("HTTP filters");
    filters.iter_mut().find(|filter| filter["name"] == "mixed_version_proxy").expect("the filter")
}

/// The plugin's `configuration`, form and all, among a file's listeners.
fn configuration(listeners: &mut Value) -> &mut Value {
    &mut filter(listeners)["typed_config"]["config"]["configuration"]
}

/// A sidecar whose listeners can be replaced.
async fn sidecar() -> ControlPlane {
    ControlPlane::builder(SIDECAR).envoy(EnvoyBuilder::listeners_by_lds).settled().await.unwrap()
}

/// The plugin's configuration as it runs.
fn running(plane: &ControlPlane) -> Value {
    plugin_configuration(plane.config.clone().value_mut()).clone()
}

/// Replaces the running listeners by ones that differ in the plugin's `configuration` only.
async fn push(plane: &ControlPlane, changed: Value) -> Pushed {
    let mut listeners = plane.config.value()["static_resources"]["listeners"].clone();
    *configuration(&mut listeners) = changed;
    plane.envoy.push_listeners(listeners.as_array().expect("listeners")).await.unwrap()
}

/// `good` with one thing wrong with it, and how the log tells that: the key's path and the reason.
fn bad(good: &Value) -> Vec<(Value, &'static str)> {
    let but = |changes: Value| {
        let mut value = good.clone();
        merge(&mut value, &changes);
        value
    };
    let apiservers = |count: usize| -> Vec<Value> {
        (1..=count).map(|index| json!({"name": format!("cp-{index}"), "cluster": format!("cp-{index}")})).collect()
    };
    vec![
        (json!({}), "apiservers: missing"),
        (but(json!({"peerproxying": "Disabled"})), "peerproxying: unknown key, expected one of apiservers, local, "),
        (
            but(json!({"apiservers": [{"name": "cp-1", "cluster": "cp-1", "discoverycluster": "cp-1-poll"}]})),
            "apiservers[0].discoverycluster: unknown key, expected one of name, cluster, discoveryCluster, ",
        ),
        (but(json!({"apiservers": null})), "apiservers: missing"),
        (but(json!({"apiservers": []})), "apiservers: 0 apiservers, expected 1 to 64"),
        (but(json!({"apiservers": apiservers(65)})), "apiservers: 65 apiservers, expected 1 to 64"),
        (
            but(json!({"apiservers": [{"name": "cp-1", "cluster": "cp-1"}, {"name": "cp-2"}]})),
            "apiservers[1].cluster: missing",
        ),
        (
            but(json!({"apiservers": [{"name": "cp-1", "cluster": "cp-1"}, {"name": "cp-1", "cluster": "cp-2"}]})),
            r#"apiservers[1].name: "cp-1" is already the name of apiservers[0]"#,
        ),
        (
            but(json!({"apiservers": [{"name": "cp-1", "cluster": "cp-1"}, {"name": "cp-2", "cluster": "cp-1"}]})),
            r#"apiservers[1].cluster: "cp-1" is already apiservers[0].cluster; "#,
        ),
        (but(json!({"local": "cp-4"})), r#"local: "cp-4" is not among the apiservers: "cp-1", "cp-2", "cp-3""#),
        (but(json!({"local": true})), "local: expected a string, found the boolean true"),
        (but(json!({"peerProxying": "enabled"})), r#"peerProxying: "enabled" is not one of Enabled, Disabled, DryRun"#),
        (but(json!({"discovery": {"refreshInterval": "5 s"}})), r#"discovery.refreshInterval: "5 s" "#),
        (
            but(json!({"discovery": {"timeout": 3}})),
            r#"discovery.timeout: expected a duration such as "500ms", "5s" or "1h30m", found the number 3"#,
        ),
        (
            but(json!({"exclusions": {"groupVersions": ["v1"]}})),
            r#"exclusions.groupVersions[0]: "v1" reads as a group, "#,
        ),
        (
            but(json!({"reroute": {"by": "Header", "key": "authorization"}})),
            r#"reroute.key: "authorization" already has a meaning; "#,
        ),
        (
            but(json!({"identity": {"clientCertificates": "RequestHeader", "frontProxyCluster": "trusted"}})),
            "identity.frontProxyCluster: a sidecar's here is the local apiserver, whose frontProxyCluster counts",
        ),
        (
            but(json!({"status": {"path": "/mixed-version-proxy"}})),
            r#"status.path: "/mixed-version-proxy" is not supported by this version; leave the key out"#,
        ),
    ]
}

/// Texts that hold no configuration.
const BAD_TEXTS: [(&str, &str); 4] = [
    ("", "apiservers: missing"),
    (r#"{"apiservers": ["#, "configuration: broken JSON: "),
    (
        "apiservers:\n- {name: cp-1, cluster: cp-1}\n",
        "configuration: neither a JSON object nor a google.protobuf.Struct",
    ),
    (r#"{"local": "cp-1", "local": "cp-2"}"#, "local: given twice"),
];

#[tokio::test]
async fn a_bad_configuration_is_refused_with_its_key_and_the_old_one_keeps_serving() {
    let plane = sidecar().await;
    let mut rows = Vec::new();
    for (value, expected) in bad(&running(&plane)) {
        for (form, make) in FORMS {
            rows.push((format!("{form} {value}"), make(&value), expected));
        }
    }
    rows.extend(BAD_TEXTS.map(|(text, expected)| (format!("text {text:?}"), string_value(text), expected)));

    for (what, changed, expected) in rows {
        let before = plane.envoy.log().len();
        assert_eq!(push(&plane, changed).await, Pushed::Rejected, "{what}");
        let expected = format!("configuration refused: {expected}");
        eventually(PATIENCE, &format!("the log to say {expected:?} of {what}"), async || {
            let log = plane.envoy.log().split_off(before);
            if log.lines().any(|line| line.contains(&expected)) { Ok(()) } else { Err(log) }
        })
        .await
        .unwrap();
        let answer = plane.get(NEW_GROUP).await.unwrap();
        let server = answer.header("x-served-by");
        assert_eq!((answer.status, server.as_deref()), (200, Some("cp-2")), "after {what}: {}", answer.text());
    }
    assert_eq!(push(&plane, FORMS[1].1(&running(&plane))).await, Pushed::Accepted, "the same without a mistake");
}

/// Reads one event of a watch that the test has just sent.
async fn assert_receives(watch: &mut Opened, event: &Value, why: &str) {
    let chunk = tokio::time::timeout(PATIENCE, watch.next_chunk()).await.unwrap_or_else(|_| panic!("{why}: silence"));
    let chunk = chunk.unwrap_or_else(|error| panic!("{why}: {error:#}"));
    let chunk = chunk.unwrap_or_else(|| panic!("{why}: the watch has ended"));
    assert_eq!(serde_json::from_slice::<Value>(&chunk).unwrap(), *event, "{why}");
}

/// Waits until `expected` holds of a new request, and then asserts it of some more: one connection each, so that all
/// workers are asked.
async fn assert_all_become(plane: &ControlPlane, awaited: &str, expected: fn(&Answer) -> bool) {
    eventually(PATIENCE, awaited, async || {
        for _ in 0..16 {
            let answer = plane.get(NEW_GROUP).await.map_err(|error| format!("{error:#}"))?;
            if !expected(&answer) {
                return Err(format!("{} {:?} {}", answer.status, answer.headers, answer.text()));
            }
        }
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_good_change_holds_for_new_requests_and_cuts_no_watch() {
    let plane = sidecar().await;
    let watch = |path: &str| plane.client.get(format!("{path}?watch=true")).header("accept", "application/json");
    let mut local = watch("/api/v1/namespaces/shop/configmaps").open().await.unwrap();
    let mut rerouted = watch(NEW_GROUP).open().await.unwrap();
    assert_eq!((local.status, rerouted.status), (200, 200));
    assert_eq!(local.header("x-served-by").as_deref(), Some("cp-1"));
    assert_eq!(rerouted.header("x-served-by").as_deref(), Some("cp-2"));

    let mut changed = running(&plane);
    merge(&mut changed, &json!({"peerProxying": "Disabled", "retryAfterSeconds": 7}));
    type IsExpected = fn(&Answer) -> bool;
    let steps: [(&str, Value, IsExpected); 2] = [
        ("requests to be answered by the new configuration", changed, |answer| {
            answer.status == 503 && answer.header("retry-after").as_deref() == Some("7")
        }),
        ("requests to be rerouted as before", running(&plane), |answer| {
            answer.status == 200 && answer.header("x-served-by").as_deref() == Some("cp-2")
        }),
    ];
    for (form, make) in FORMS {
        for (step, value, expected) in &steps {
            let what = format!("{form}: {step}");
            assert_eq!(push(&plane, make(value)).await, Pushed::Accepted, "{what}");
            assert_all_become(&plane, &what, *expected).await;
            let event = json!({"type": "BOOKMARK", "object": {"metadata": {"name": what}}});
            plane.apiservers[0].push_event(&event);
            plane.apiservers[1].push_event(&event);
            assert_receives(&mut local, &event, "a watch at the local apiserver").await;
            assert_receives(&mut rerouted, &event, "a rerouted watch").await;
        }
    }
    assert_eq!((plane.apiservers[0].watches(), plane.apiservers[1].watches()), (1, 1), "no watch was opened anew");
}

/// The fenced blocks of `docs/configuration.md` in a language.
fn documented(language: &str) -> Vec<String> {
    let text = fs::read_to_string(repository().join("docs/configuration.md")).unwrap();
    let fence = format!("\n```{language}\n");
    let blocks = text.split(&fence).skip(1);
    blocks.map(|rest| rest.split_once("\n```").expect("the end of a block").0.to_owned()).collect()
}

/// A shipped file, filled in, with an edit of its listeners.
fn filled_in(pki: &Pki, file: &str, edit: impl FnOnce(&mut Value)) -> Config {
    let address = "127.0.0.1:6443".parse().unwrap();
    let config = pki.fill_in(file, &[address, address, address]).unwrap();
    config.edit(|config| edit(&mut config["static_resources"]["listeners"]))
}

/// Whether Envoy takes a configuration.
async fn validate(pki: &Pki, config: &Config) -> Result<(), String> {
    let path = config.write(&pki.directory.path().join("envoy.json")).unwrap();
    Envoy::validate(&path).await.map(|_| ()).map_err(|error| format!("{error:#}"))
}

#[tokio::test]
async fn the_examples_of_the_documentation_are_good() {
    let pki = Pki::new().unwrap();
    let wasm = wasm_path().unwrap().to_str().unwrap().to_owned();
    let examples = documented("yaml");
    assert_eq!(examples.len(), 2, "a sidecar and a gateway");
    for (file, example) in [SIDECAR, GATEWAY].into_iter().zip(examples) {
        let example =
            Config::from_yaml(&example).unwrap().replace("/etc/mixed-version-proxy/mixed-version-proxy.wasm", &wasm);
        let local = example.value().pointer("/typed_config/config/configuration/value/local");
        assert_eq!(local.is_some(), file == SIDECAR, "{file}: {local:?}");
        let config = filled_in(&pki, file, |listeners| *filter(listeners) = example.value().clone());
        assert_eq!(validate(&pki, &config).await, Ok(()), "{file}");
    }
    let texts = documented("json");
    assert_eq!(texts.len(), 1, "a sidecar");
    for text in texts {
        let config = filled_in(&pki, SIDECAR, |listeners| *configuration(listeners) = string_value(&text));
        assert_eq!(validate(&pki, &config).await, Ok(()), "{text}");
    }
}

#[tokio::test]
async fn envoy_does_not_start_with_a_bad_configuration_and_says_why() {
    const REFUSED: &str = "configuration refused: discovery.refreshIntervall: unknown key, expected one of ";
    let pki = Pki::new().unwrap();
    for file in [SIDECAR, GATEWAY] {
        for (form, make) in FORMS {
            let config = filled_in(&pki, file, |listeners| {
                let configuration = configuration(listeners);
                merge(&mut configuration["value"], &json!({"discovery": {"refreshIntervall": "5s"}}));
                *configuration = make(&configuration["value"]);
            });
            let error = validate(&pki, &config).await.expect_err("a bad configuration");
            assert!(error.contains(REFUSED), "{file}, {form}: {error}");
            let error = Envoy::builder(config).start().await.err().expect("a bad configuration");
            let error = format!("{error:#}");
            assert!(error.contains("has ended") && error.contains(REFUSED), "{file}, {form}: {error}");
        }
    }
}
