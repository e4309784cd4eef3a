//! Certificate authorities, server and client certificates: as PEM files for Envoy, as TLS configurations for the lab.
//!
//! ```
//! use lab::certs::{Authority, ClientTls, ServerTls};
//! let directory = tempfile::tempdir().unwrap();
//! let ca = Authority::new("cluster").unwrap();
//! let server = ca.server(&["kubernetes.default.svc", "localhost", "127.0.0.1"]).unwrap();
//! let admin = ca.client("admin", &["system:masters", "dev"]).unwrap();
//! ca.write(directory.path(), "ca.crt").unwrap();
//! admin.write(directory.path(), "admin.crt", "admin.key").unwrap();
//! let stub_tls = ServerTls::new(&server).unwrap().optional_clients(&ca).unwrap();
//! let client_tls = ClientTls::new(&ca, "localhost").unwrap().identity(&admin).unwrap();
//! ```

use std::{fs, path::Path, sync::Arc};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose,
    SigningKey,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use tokio_rustls::rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    server::WebPkiClientVerifier,
};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::apiserver::Subject;

mod der;

/// The names that the stub apiservers' certificates usually carry.
pub const SERVER_NAMES: [&str; 3] = ["kubernetes.default.svc", "localhost", "127.0.0.1"];

/// A certificate authority.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate with its key.
#[derive(Clone)]
pub struct Identity {
    certificate: CertificateDer<'static>,
    certificate_pem: String,
    key: Vec<u8>,
    key_pem: String,
}

impl Authority {
    /// A new authority with this common name.
    ///
    /// # Errors
    /// The cryptographic library refuses; not seen yet.
    pub fn new(common_name: &str) -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        Ok(Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate()?)? })
    }

    /// Its certificate.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Writes its certificate to a file of a directory.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, directory: &Path, file: &str) -> Result<()> {
        write(directory, file, &self.pem())
    }

    /// A server certificate for DNS names and addresses.
    ///
    /// # Errors
    /// A name is neither.
    pub fn server(&self, names: &[&str]) -> Result<Identity> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "server");
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Identity::new(certificate.der().clone(), certificate.pem(), &key))
    }

    /// A client certificate: user and groups, as kube-apiserver reads it.
    ///
    /// # Errors
    /// The cryptographic library refuses; not seen yet.
    pub fn client(&self, common_name: &str, organizations: &[&str]) -> Result<Identity> {
        let attributes = organizations.iter().map(|name| (&[2, 5, 4, 10][..], *name));
        let attributes: Vec<_> = attributes.chain([(&[2, 5, 4, 3][..], common_name)]).collect();
        self.client_with_subject(&der::name(&attributes))
    }

    /// A client certificate with a subject of any kind, given as the DER of an X.501 `Name`.
    ///
    /// # Errors
    /// The cryptographic library refuses; not seen yet.
    pub fn client_with_subject(&self, subject: &[u8]) -> Result<Identity> {
        let (_, issuer) = X509Certificate::from_der(self.issuer.der()).context("the authority's own certificate")?;
        let key = KeyPair::generate()?;
        let body = der::client_certificate(issuer.tbs_certificate.subject.as_raw(), subject, &key);
        let signature = self.issuer.key().sign(&body)?;
        let certificate = CertificateDer::from(der::signed(&body, &signature));
        let pem = pem("CERTIFICATE", &certificate);
        Ok(Identity::new(certificate, pem, &key))
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone())?;
        Ok(roots)
    }
}

impl Identity {
    fn new(certificate: CertificateDer<'static>, certificate_pem: String, key: &KeyPair) -> Self {
        Self { certificate, certificate_pem, key: key.serialize_der(), key_pem: key.serialize_pem() }
    }

    /// Writes certificate and key to two files of a directory.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, directory: &Path, certificate_file: &str, key_file: &str) -> Result<()> {
        write(directory, certificate_file, &self.certificate_pem)?;
        write(directory, key_file, &self.key_pem)
    }

    /// The certificate in DER.
    pub fn der(&self) -> &[u8] {
        &self.certificate
    }

    /// The certificate in PEM.
    pub fn pem(&self) -> &str {
        &self.certificate_pem
    }

    /// The key in PEM.
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.clone()))
    }
}

/// How a stub apiserver speaks TLS.
#[derive(Clone)]
pub struct ServerTls {
    identity: Identity,
    pub(crate) config: Arc<ServerConfig>,
}

impl ServerTls {
    /// With this certificate; clients show none. HTTP/2 and HTTP/1.1 by ALPN.
    ///
    /// # Errors
    /// The key does not fit the certificate.
    pub fn new(identity: &Identity) -> Result<Self> {
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        Self::with(identity, builder.with_no_client_auth())
    }

    /// Asks for a client certificate of this authority; who has none may come in, who has a wrong one may not.
    ///
    /// # Errors
    /// The authority cannot be used.
    pub fn optional_clients(&self, authority: &Authority) -> Result<Self> {
        self.verified(authority, false)
    }

    /// Demands a client certificate of this authority.
    ///
    /// # Errors
    /// The authority cannot be used.
    pub fn required_clients(&self, authority: &Authority) -> Result<Self> {
        self.verified(authority, true)
    }

    fn verified(&self, authority: &Authority, required: bool) -> Result<Self> {
        let verifier = WebPkiClientVerifier::builder_with_provider(authority.roots()?.into(), provider());
        let verifier = if required { verifier } else { verifier.allow_unauthenticated() }.build()?;
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        Self::with(&self.identity, builder.with_client_cert_verifier(verifier))
    }

    fn with(
        identity: &Identity,
        builder: tokio_rustls::rustls::ConfigBuilder<ServerConfig, tokio_rustls::rustls::server::WantsServerCert>,
    ) -> Result<Self> {
        let mut config = builder.with_single_cert(vec![identity.certificate.clone()], identity.key())?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { identity: identity.clone(), config: config.into() })
    }
}

/// How a client speaks TLS.
#[derive(Clone)]
pub struct ClientTls {
    roots: RootCertStore,
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) server_name: ServerName<'static>,
}

impl ClientTls {
    /// Trusts this authority and expects this server name; shows no certificate.
    ///
    /// # Errors
    /// The name is none.
    pub fn new(authority: &Authority, server_name: &str) -> Result<Self> {
        let roots = authority.roots()?;
        let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        let config = builder.with_root_certificates(roots.clone()).with_no_client_auth();
        Ok(Self { roots, config: config.into(), server_name: ServerName::try_from(server_name.to_owned())? })
    }

    /// Shows this certificate.
    ///
    /// # Errors
    /// The key does not fit the certificate.
    pub fn identity(self, identity: &Identity) -> Result<Self> {
        let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        let builder = builder.with_root_certificates(self.roots.clone());
        let config = builder.with_client_auth_cert(vec![identity.certificate.clone()], identity.key())?;
        Ok(Self { config: config.into(), ..self })
    }

    /// With these protocols in ALPN.
    pub(crate) fn alpn(&self, protocols: &[&[u8]]) -> Arc<ClientConfig> {
        let mut config = ClientConfig::clone(&self.config);
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        config.into()
    }
}

/// What a certificate says about its bearer; `None`: it cannot be read.
pub(crate) fn subject(certificate: &CertificateDer<'_>) -> Option<Subject> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let name = certificate.subject();
    let text =
        |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| attribute.as_str().unwrap_or_default().to_owned();
    Some(Subject {
        common_name: name.iter_common_name().last().map(text).unwrap_or_default(),
        organizations: name.iter_organization().map(text).collect(),
    })
}

/// Named, so that features of other crates in the same build cannot change it.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn write(directory: &Path, file: &str, text: &str) -> Result<()> {
    let path = directory.join(file);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = der::base64(der);
    let lines: Vec<_> = text.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_certificates_carry_all_their_groups() {
        let ca = Authority::new("ca").unwrap();
        let identity = ca.client("jörg", &["a", "b", "a"]).unwrap();
        let subject = subject(&identity.certificate).unwrap();
        assert_eq!(subject.common_name, "jörg");
        assert_eq!(subject.organizations, ["a", "b", "a"]);
    }
}
