//! The main job on one screen: a control plane in the middle of an upgrade, with the filter and without it.
//!
//! Three stub apiservers replay what real ones of two versions say; two Envoys stand in front of the older one, started
//! from the shipped `envoy/sidecar.yaml`, one of them without the filter. Every line printed was asked for just now, and
//! a line that does not come out as told makes the demo fail.

use anyhow::{Context, Result, ensure};
use e2e::{ControlPlane, SIDECAR};
use lab::{Client, client::Answer};
use tokio::signal::unix::{SignalKind, signal};

/// One line: a request, what is expected without the filter and with it, and why.
struct Row {
    method: &'static str,
    path: &'static str,
    without: &'static str,
    with: &'static str,
    why: &'static str,
}

const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";

/// While all apiservers are up.
const MIXED: [Row; 7] = [
    Row {
        method: "GET",
        path: "/api/v1/namespaces/shop/pods",
        without: "200 cp-1",
        with: "200 cp-1",
        why: "served here: stays here",
    },
    Row { method: "GET", path: NEW_GROUP, without: "404 cp-1", with: "200 cp-2", why: "only 1.37 knows this group" },
    Row {
        method: "GET",
        path: "/apis/storagemigration.k8s.io/v1",
        without: "404 cp-1",
        with: "200",
        why: "discovery: Envoy tells of the whole cluster",
    },
    Row {
        method: "POST",
        path: "/apis/certificates.k8s.io/v1/clustertrustbundles",
        without: "404 cp-1",
        with: "201 cp-2",
        why: "1.34 knows the group, not the type",
    },
    Row {
        method: "GET",
        path: "/apis/storage.k8s.io/v1/csinodes/n1/status",
        without: "404 cp-1",
        with: "200 cp-2",
        why: "1.34 lacks only the subresource",
    },
    Row {
        method: "GET",
        path: "/api/v1/namespaces/shop/configmaps/nope",
        without: "404 cp-1",
        with: "404 cp-1",
        why: "no such object: an honest 404",
    },
    Row {
        method: "GET",
        path: "/apis/apps/v1/nosuchtype",
        without: "404 cp-1",
        with: "404 cp-1",
        why: "no apiserver lists it: believed",
    },
];

/// While the upgraded apiserver restarts.
const PEER_DOWN: [Row; 3] = [
    Row {
        method: "GET",
        path: NEW_GROUP,
        without: "404 cp-1",
        with: "503",
        why: "cp-2 is down, its objects are not gone",
    },
    Row {
        method: "GET",
        path: "/apis/apps/v1/nosuchtype",
        without: "404 cp-1",
        with: "503",
        why: "cp-2 cannot be asked: nobody knows",
    },
    Row {
        method: "GET",
        path: "/api/v1/namespaces/shop/pods",
        without: "200 cp-1",
        with: "200 cp-1",
        why: "the rest goes on as ever",
    },
];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let keep = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--keep"] => true,
        _ => {
            eprintln!("usage: scripts/demo [--keep]");
            std::process::exit(2);
        }
    };
    // Whatever ends the demo early must end its Envoys, too: they end when they are dropped.
    tokio::select! {
        outcome = run(keep) => outcome,
        _ = ended(SignalKind::interrupt()) => Ok(()),
        _ = ended(SignalKind::terminate()) => Ok(()),
        _ = ended(SignalKind::hangup()) => Ok(()),
    }
}

async fn ended(by: SignalKind) -> Result<()> {
    signal(by)?.recv().await;
    Ok(())
}

async fn run(keep: bool) -> Result<()> {
    eprintln!("==> starting three apiservers, and Envoy with the filter and without it");
    let versions = ["1.34.4", "1.37.2", "1.34.4"];
    let plane = ControlPlane::builder(SIDECAR).versions(versions).settled().await?;
    let bare = e2e::without_filter(&plane).await?;
    let without = plane.client_of(&bare).await?;

    println!("\ncp-1 (local) and cp-3 replay kube-apiserver 1.34.4, cp-2 replays 1.37.2: an upgrade is under way.\n");
    print_header();
    for row in &MIXED {
        show(row, &without, &plane.client).await?;
    }
    plane.apiservers.get(1).context("cp-2")?.stop().await;
    await_doubt(&plane).await?;
    println!(
        "\ncp-2 stops, as in every upgrade. A garbage collector that reads 404 now deletes what depends on its objects.\n"
    );
    for row in &PEER_DOWN {
        show(row, &without, &plane.client).await?;
    }
    plane.apiservers.get(1).context("cp-2")?.restart().await?;
    plane.settled().await?;

    if keep {
        let address = plane.envoy.listener_addr("apiserver").await?;
        let bare = bare.listener_addr("apiserver").await?;
        println!("\ncp-2 is back. Try it, Ctrl-C ends it:\n");
        println!("  curl -sk https://{address}{NEW_GROUP}    # with the filter");
        println!("  curl -sk https://{bare}{NEW_GROUP}    # without it\n");
        std::future::pending::<()>().await;
    } else {
        println!("\nTo try it by hand: scripts/demo --keep");
    }
    Ok(())
}

/// Waits until the filter has noticed on every worker that one apiserver is silent.
async fn await_doubt(plane: &ControlPlane) -> Result<()> {
    lab::eventually(e2e::PATIENCE, "the filter to notice that cp-2 is silent", async || {
        for _ in 0..e2e::EVERY_WORKER {
            match plane.get("/apis/apps/v1/nosuchtype").await {
                Ok(answer) if answer.status == 503 => {}
                _ => return false,
            }
        }
        true
    })
    .await
}

fn print_header() {
    print_line("REQUEST", "WITHOUT", "WITH", "WHY");
}

fn print_line(request: &str, without: &str, with: &str, why: &str) {
    println!("{request:<62} {without:<8} {with:<8} {why}");
}

async fn show(row: &Row, without: &Client, with: &Client) -> Result<()> {
    let ask = async |client: &Client| -> Result<String> {
        let body = if row.method == "POST" { "{}" } else { "" };
        let request = client.request(row.method, row.path).header("accept", "application/json").body(body);
        Ok(outcome(&request.send().await?))
    };
    let (seen_without, seen_with) = (ask(without).await?, ask(with).await?);
    let request = format!("{} {}", row.method, row.path);
    print_line(&request, &seen_without, &seen_with, row.why);
    ensure!(
        seen_without == row.without && seen_with == row.with,
        "{request}: expected {:?} and {:?}, saw {seen_without:?} and {seen_with:?}",
        row.without,
        row.with
    );
    Ok(())
}

/// Status, and who answered if an apiserver did.
fn outcome(answer: &Answer) -> String {
    let server = answer.header("x-served-by").map(|server| format!(" {server}"));
    format!("{}{}", answer.status, server.unwrap_or_default())
}
