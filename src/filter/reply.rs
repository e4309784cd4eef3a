//! A 503 in an answer's place, or a 401 in a request's.

use super::host;
use crate::guard::WhyRefused;
use crate::local_reply::{Effect, UpstreamFailure, service_unavailable, unauthorized};

/// What the client gets.
pub(super) struct Reply {
    code: Code,
    /// For the client.
    message: &'static str,
    /// For the access log.
    pub(super) details: String,
    retry: Retry,
    /// Of the apiserver's answer that is replaced, so that its audit log can be found.
    audit_id: Option<Vec<u8>>,
}

#[derive(Clone, Copy)]
enum Code {
    Unauthorized,
    Unavailable,
}

/// Whether the client may be told to try again.
#[derive(Clone, Copy)]
pub(super) enum Retry {
    Yes,
    No,
}

impl Retry {
    /// Not where the request may have been executed.
    pub(super) const fn unless(may_be_executed: bool) -> Self {
        if may_be_executed { Self::No } else { Self::Yes }
    }
}

impl Reply {
    const fn unavailable(message: &'static str, details: String, retry: Retry) -> Self {
        Self { code: Code::Unavailable, message, details, retry, audit_id: None }
    }

    /// In place of a 404 that is not believed.
    pub(super) fn guarded(why: WhyRefused, audit_id: Option<Vec<u8>>, retry: Retry) -> Self {
        let message = match why {
            WhyRefused::NotByApiserver => "the 404 was not made by an apiserver",
            WhyRefused::ListedByAnother => "the apiserver that answered does not serve this resource, another one does",
            WhyRefused::Unconfirmed => "it cannot be told whether some apiserver serves this resource",
            WhyRefused::Vanished => "no apiserver serves this resource any more, but one did until a moment ago",
        };
        let details = format!("mixed_version_proxy_guarded_404{{{}}}", why.word());
        Self { audit_id, ..Self::unavailable(message, details, retry) }
    }

    /// In place of discovery, before each apiserver has been tried.
    pub(super) fn discovery_not_yet() -> Self {
        Self::unavailable(
            "the proxy has not asked all apiservers yet what they serve",
            "mixed_version_proxy_discovery{not_yet}".to_owned(),
            Retry::Yes,
        )
    }

    /// In place of a document that nobody can tell of just now.
    pub(super) fn discovery_in_doubt(retry: Retry) -> Self {
        Self::unavailable(
            "it cannot be told just now what all apiservers serve of it",
            "mixed_version_proxy_discovery{in_doubt}".to_owned(),
            retry,
        )
    }

    /// To who shows a certificate that nobody can be made of.
    pub(super) fn unauthorized() -> Self {
        Self {
            code: Code::Unauthorized,
            message: "Unauthorized",
            details: "mixed_version_proxy_certificate_refused".to_owned(),
            retry: Retry::No,
            audit_id: None,
        }
    }

    /// In place of a rerouted request's redirect.
    pub(super) fn redirect() -> Self {
        Self::unavailable(
            "the apiserver that serves this resource answered with a redirect, which would lead past the proxy",
            "mixed_version_proxy_redirect".to_owned(),
            Retry::No,
        )
    }

    /// In place of Envoy's own answer for an apiserver that could not be reached.
    pub(super) fn failure(failure: UpstreamFailure, effect: Effect) -> Self {
        let (message, word) = match failure {
            UpstreamFailure::NotSent => ("the apiserver cannot be reached", "not_sent"),
            UpstreamFailure::MaybeSent => ("the connection to the apiserver broke before its answer", "maybe_sent"),
        };
        let retry = Retry::unless(!failure.allows_retry(effect));
        let details = format!("mixed_version_proxy_upstream_failure{{{word}}}");
        Self::unavailable(message, details, retry)
    }

    /// Sends it.
    pub(super) fn send(&self, retry_after_seconds: u32) {
        let retry_after = match self.retry {
            Retry::Yes => Some(retry_after_seconds),
            Retry::No => None,
        };
        let (code, body) = match self.code {
            Code::Unauthorized => (401, unauthorized(self.message)),
            Code::Unavailable => (503, service_unavailable(self.message, retry_after)),
        };
        let retry_after = retry_after.map(|seconds| seconds.to_string());
        let mut headers: Vec<(&str, &[u8])> =
            vec![("content-type", b"application/json"), ("cache-control", b"no-cache, private")];
        headers.extend(retry_after.iter().map(|seconds| ("retry-after", seconds.as_bytes())));
        headers.extend(self.audit_id.iter().map(|id| ("audit-id", id.as_slice())));
        let sent = host::send_local_response(code, &self.details, &headers, &body);
        host::log_failure("answering in an apiserver's place", sent);
    }
}
