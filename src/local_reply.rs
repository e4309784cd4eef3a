//! The 503 answers that the filter makes itself: when, with which body, and when a client may try again at once.

use serde::Serialize;

/// What Envoy could not do, told from `%RESPONSE_CODE_DETAILS%` of its own answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamFailure {
    /// The request has certainly not reached an apiserver.
    NotSent,
    /// It may have, and may have been executed.
    MaybeSent,
}

impl UpstreamFailure {
    /// Reads the details of an answer that Envoy made itself (anything but `via_upstream`). `None`: the answer is not
    /// about an upstream that could not be reached (an authorization filter's 403, a refused upgrade, a header too
    /// large), and passes.
    ///
    /// The words are Envoy's `ResponseCodeDetails` and the reset reasons inside
    /// `upstream_reset_before_response_started{reason}`; measured on Envoy 1.40.
    pub fn from_details(details: &[u8]) -> Option<Self> {
        match details {
            b"cluster_not_found" | b"maintenance_mode" => return Some(Self::NotSent),
            // Some releases add which hosts there were.
            details if details.starts_with(b"no_healthy_upstream") => return Some(Self::NotSent),
            b"response_timeout"
            | b"upstream_response_timeout"
            | b"upstream_per_try_timeout"
            | b"upstream_per_try_idle_timeout"
            | b"upstream_max_stream_duration_reached"
            | b"max_duration_timeout"
            | b"stream_idle_timeout"
            | b"route_idle_timeout" => return Some(Self::MaybeSent),
            _ => {}
        }
        let reason = details.strip_prefix(b"upstream_reset_before_response_started{".as_slice())?;
        let is_not_sent = [
            "remote_connection_failure",
            "local_connection_failure",
            "connection_failure",
            "connection_timeout",
            "overflow",
            "remote_refused_stream_reset",
            "local_refused_stream_reset",
        ]
        .iter()
        .any(|word| reason.starts_with(word.as_bytes()));
        Some(if is_not_sent { Self::NotSent } else { Self::MaybeSent })
    }

    /// Whether the client may be told to try again. client-go repeats *any* verb on `Retry-After`, so what may have been
    /// executed must not carry it: one create would become two objects.
    pub const fn allows_retry(self, effect: Effect) -> bool {
        matches!((self, effect), (Self::NotSent, _) | (_, Effect::None))
    }
}

/// What a request may have changed once an apiserver has seen it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: a plain read.
    None,
    /// Something, for all that is known.
    Possible,
}

impl Effect {
    /// Tells a plain read: GET, HEAD or OPTIONS, without a body or an upgrade (a websocket `exec` is a GET that runs a
    /// command), and of nothing that an apiserver hands on to a pod, a node or a service.
    pub fn of_request(method: &[u8], ended_with_headers: bool, reaches_backend: bool) -> Self {
        let is_read = matches!(method, b"GET" | b"HEAD" | b"OPTIONS");
        if is_read && ended_with_headers && !reaches_backend { Self::None } else { Self::Possible }
    }
}

/// Body of a 503: a `v1` `Status` in JSON, which Kubernetes clients read whatever they had asked for.
/// `retry_after_seconds` repeats the `Retry-After` header, as apiservers do.
pub fn service_unavailable(message: &str, retry_after_seconds: Option<u32>) -> Vec<u8> {
    status(503, "ServiceUnavailable", message, retry_after_seconds)
}

/// Body of a 401, as kube-apiserver answers who cannot be told.
pub fn unauthorized(message: &str) -> Vec<u8> {
    status(401, "Unauthorized", message, None)
}

fn status(code: u16, reason: &'static str, message: &str, retry_after_seconds: Option<u32>) -> Vec<u8> {
    let status = Status {
        kind: "Status",
        api_version: "v1",
        metadata: Empty {},
        status: "Failure",
        message,
        reason,
        details: retry_after_seconds.map(|retry_after_seconds| Details { retry_after_seconds }),
        code,
    };
    // Strings and numbers alone: this cannot fail, and an empty body under an error would still be no 404.
    serde_json::to_vec(&status).unwrap_or_default()
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status<'m> {
    kind: &'static str,
    api_version: &'static str,
    metadata: Empty,
    status: &'static str,
    message: &'m str,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
    code: u16,
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Details {
    retry_after_seconds: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn failures_are_told_from_envoys_own_words() {
        use UpstreamFailure::{MaybeSent, NotSent};
        for (details, expected, why) in [
            (
                "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_Connection_refused}",
                Some(NotSent),
                "connection refused",
            ),
            (
                "upstream_reset_before_response_started{remote_connection_failure|TLS_error:|268435703:TLS_error_end}",
                Some(NotSent),
                "the apiserver's certificate is not trusted",
            ),
            ("no_healthy_upstream", Some(NotSent), "no host"),
            ("no_healthy_upstream{3_hosts}", Some(NotSent), "no host, and how many there are"),
            ("cluster_not_found", Some(NotSent), "no cluster"),
            ("upstream_reset_before_response_started{overflow}", Some(NotSent), "circuit breaker"),
            ("upstream_reset_before_response_started{remote_refused_stream_reset}", Some(NotSent), "refused stream"),
            ("upstream_reset_before_response_started{connection_termination}", Some(MaybeSent), "cut"),
            ("upstream_reset_before_response_started{remote_reset}", Some(MaybeSent), "reset"),
            ("upstream_reset_before_response_started{protocol_error}", Some(MaybeSent), "nonsense instead of HTTP"),
            ("upstream_reset_before_response_started{}", Some(MaybeSent), "a reason that is not told"),
            ("response_timeout", Some(MaybeSent), "timed out"),
            ("stream_idle_timeout", Some(MaybeSent), "silent for too long"),
            ("via_upstream", None, "the apiserver's own 503"),
            ("upgrade_failed", None, "an upgrade that Envoy does not know"),
            ("ext_authz_denied", None, "another filter's answer"),
            ("", None, "our own answer"),
        ] {
            assert_eq!(UpstreamFailure::from_details(details.as_bytes()), expected, "{details}: {why}");
        }
    }

    #[test]
    fn what_may_have_been_executed_is_not_repeated() {
        use UpstreamFailure::{MaybeSent, NotSent};
        for (failure, method, ended, backend, expected, why) in [
            (NotSent, "POST", false, false, true, "a write that was not sent"),
            (NotSent, "GET", false, true, true, "an exec that was not sent"),
            (MaybeSent, "GET", true, false, true, "a read"),
            (MaybeSent, "HEAD", true, false, true, "a read"),
            (MaybeSent, "OPTIONS", true, false, true, "a read"),
            (MaybeSent, "GET", false, false, false, "an upgrade"),
            (MaybeSent, "GET", true, true, false, "a backend behind a service"),
            (MaybeSent, "POST", true, false, false, "a write"),
            (MaybeSent, "PUT", false, false, false, "a write"),
            (MaybeSent, "PATCH", false, false, false, "a write"),
            (MaybeSent, "DELETE", true, false, false, "a write"),
            (MaybeSent, "get", true, false, false, "another method"),
            (MaybeSent, "", true, false, false, "nobody knows"),
        ] {
            let effect = Effect::of_request(method.as_bytes(), ended, backend);
            assert_eq!(failure.allows_retry(effect), expected, "{failure:?} {method}: {why}");
        }
    }

    #[test]
    fn bodies_are_what_clients_of_kubernetes_read() {
        let body = String::from_utf8(service_unavailable("no \"answer\"", Some(1))).unwrap();
        assert_eq!(
            body,
            r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"no \"answer\"","reason":"ServiceUnavailable","details":{"retryAfterSeconds":1},"code":503}"#
        );
        assert!(!String::from_utf8(service_unavailable("cut", None)).unwrap().contains("etails"));
    }
}
