//! The identity in a client's certificate, handed on in request headers.
//!
//! Envoy ends the client's TLS, so the apiserver sees Envoy's certificate and not the client's. It believes identity
//! headers from whoever shows the front-proxy certificate; only requests whose headers were set here go over clusters that
//! have it. All others go over clusters without one, where nothing of that kind is believed: a filter that crashes, or is
//! skipped, leaves a request anonymous.

use super::host::{self, HostStatus};
use super::reply::Reply;
use super::state::Shared;
use crate::config::ClientCertificates;
use crate::identity::{Identity, IdentityError};

/// Name of the extra that kube-apiserver's own certificate authentication adds, as a part of a header name.
const CREDENTIAL_ID: &str = "authentication.kubernetes.io%2fcredential-id";

impl Shared {
    /// Hands on who the client's certificate is for. Whether the request now carries an identity that was set here; `Err`:
    /// it must be answered with this.
    pub(super) fn assert_identity(&self) -> Result<bool, Reply> {
        if self.config.identity.client_certificates == ClientCertificates::Ignore {
            return Ok(false);
        }
        // A second look, for what is said to be removed must be gone.
        match self.strip_identity().and_then(|had_any| if had_any { self.strip_identity() } else { Ok(false) }) {
            Ok(false) => {}
            // Nobody can vouch for such headers; over an ordinary cluster they mean nothing.
            Ok(true) => {
                log::error!("a client's identity headers cannot be removed");
                return Ok(false);
            }
            Err(status) => {
                log::error!("removing a client's identity headers: {status}");
                return Ok(false);
            }
        }
        let identity = match peer_identity() {
            Ok(Some(identity)) => identity,
            Ok(None) => return Ok(false),
            Err(error) => {
                log::warn!("a client certificate is refused: {error}");
                return Err(Reply::unauthorized());
            }
        };
        match self.set_identity(&identity) {
            Ok(()) => Ok(true),
            Err(status) => {
                log::error!("setting identity headers: {status}");
                Err(Reply::unauthorized())
            }
        }
    }

    /// Removes whatever a client has sent that could be taken for an identity; whether there was any.
    fn strip_identity(&self) -> Result<bool, HostStatus> {
        let mut had_any = false;
        for name in host::request_header_names()? {
            // Envoy takes no names but ASCII ones.
            if let Ok(name) = str::from_utf8(&name)
                && self.config.identity.headers.may_hold(name)
            {
                host::remove_request_header(name)?;
                had_any = true;
            }
        }
        Ok(had_any)
    }

    fn set_identity(&self, identity: &Identity) -> Result<(), HostStatus> {
        let headers = &self.config.identity.headers;
        host::set_request_header(first(&headers.user), &identity.user)?;
        for group in &identity.groups {
            host::add_request_header(first(&headers.group), group)?;
        }
        if let Some(uid) = &identity.uid {
            host::set_request_header(first(&headers.uid), uid)?;
        }
        if let Some(digest) = text("connection\0sha256_peer_certificate_digest") {
            let name = first(&headers.extra_prefix).to_owned() + CREDENTIAL_ID;
            host::set_request_header(&name, &format!("X509SHA256={digest}"))?;
        }
        Ok(())
    }
}

/// The name that is set; the others are only removed.
fn first(names: &[String]) -> &str {
    names.first().map(String::as_str).unwrap_or_default()
}

/// Who the certificate that Envoy has verified is for; `None` without one, or if it names no user.
fn peer_identity() -> Result<Option<Identity>, IdentityError> {
    let subject = host::property("connection\0subject_peer_certificate").ok().flatten().unwrap_or_default();
    let subject = str::from_utf8(&subject).map_err(|_| IdentityError::NoText)?;
    Identity::of_subject(subject)
}

fn text(property: &str) -> Option<String> {
    let value = host::property(property).ok().flatten().filter(|value| !value.is_empty())?;
    String::from_utf8(value).ok()
}
