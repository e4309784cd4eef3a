//! Requests of clients, and what comes back for them.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use mixed_version_proxy::discovery::document::Half;

use crate::catalogue::TypeId;
use crate::root::Sent;
use crate::world::Uid;

/// What Envoy says of an answer that came from upstream.
pub const VIA_UPSTREAM: &str = "via_upstream";

/// The headers of an answer, as they reach the filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Status code.
    pub status: u16,
    /// Envoy's `response.code_details`.
    pub details: &'static str,
    /// Header `audit-id` is there.
    pub has_audit_id: bool,
    /// Header `content-type`.
    pub content_type: Option<&'static str>,
    /// Header `content-length`.
    pub content_length: Option<u32>,
    /// Header `content-encoding`.
    pub content_encoding: Option<&'static str>,
    /// Header `retry-after`.
    pub retry_after: bool,
    /// Header `etag`.
    pub etag: Option<String>,
    /// How it came to be; the filter cannot see this.
    pub origin: Origin,
    /// The types that its body lists, if it is a discovery document. The filter reads no bodies.
    pub says: Option<Rc<BTreeSet<TypeId>>>,
}

/// How an answer came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The apiserver has done what was asked.
    Done,
    /// The apiserver serves the type and has no such object.
    MissingObject,
    /// The apiserver does not serve the type.
    MissingRoute,
    /// A backend behind the apiserver has answered.
    Backend,
    /// The apiserver has refused without looking.
    Refused,
    /// Envoy, or something else between it and the apiserver.
    Between,
}

impl Reply {
    /// An apiserver's answer.
    pub fn by_apiserver(status: u16, length: u32, origin: Origin) -> Self {
        Self {
            status,
            details: VIA_UPSTREAM,
            has_audit_id: true,
            content_type: Some("application/json"),
            content_length: Some(length),
            content_encoding: None,
            retry_after: false,
            etag: None,
            origin,
            says: None,
        }
    }

    /// Envoy's own answer.
    pub fn by_envoy(status: u16, details: &'static str) -> Self {
        let reply = Self::by_apiserver(status, 91, Origin::Between);
        Self { details, has_audit_id: false, content_type: Some("text/plain"), ..reply }
    }
}

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// GET of a discovery document.
    Discover(Half),
    /// GET of an object.
    Get,
    /// GET of a collection.
    List,
    /// POST to a collection; the apiserver finds a name (`generateName`).
    Create,
    /// DELETE of an object.
    Delete,
    /// DELETE of a collection.
    DeleteAll,
    /// PUT of an object or a subresource, POST where it reaches a backend.
    Update,
}

/// Why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Purpose {
    /// A person's or a program's own business.
    Own,
    /// The garbage collector wants to know whether an owner lives, and whose dependent is at stake.
    Owner {
        /// Identity of the owner.
        uid: Uid,
        /// The dependent.
        dependent: (TypeId, String, Uid),
    },
    /// The garbage collector removes a dependent whose owner it takes for gone.
    Collect {
        /// Type, name and identity of the owner.
        owner: (TypeId, String, Uid),
        /// Somebody whom the reader's Envoy knows had the owner's type all along when the owner was read.
        was_served: bool,
    },
    /// The namespace controller empties a namespace.
    Empty {
        /// Its number.
        namespace: u64,
    },
    /// The faults are over: this must be answered as if there had never been any.
    Probe,
}

/// Something that a client wants done, through one or several requests.
#[derive(Debug, Clone)]
pub struct Operation {
    /// What.
    pub verb: Verb,
    /// Of which type; of no meaning for discovery.
    pub kind: TypeId,
    /// Of which name.
    pub name: String,
    /// Why.
    pub purpose: Purpose,
    /// Protobuf, as Go programs ask for; else JSON.
    pub wants_protobuf: bool,
    /// The client sends the loop header, as anybody may.
    pub has_loop_header: bool,
    /// Through which Envoy.
    pub envoy: usize,
    /// Requests sent so far.
    pub tries: u32,
    /// How often an apiserver has executed it.
    pub executed: u32,
}

/// One request.
#[derive(Debug)]
pub struct Stream {
    /// Its operation.
    pub operation: u64,
    /// Envoy process.
    pub envoy: usize,
    /// Root that saw it.
    pub root: u64,
    /// What the filter keeps of it.
    pub sent: Sent,
    /// Its `if-none-match`, as the filter has set it.
    pub if_none_match: Option<String>,
    /// When the filter saw it.
    pub sent_at: Duration,
    /// Apiserver of the world that it was sent to.
    pub apiserver: usize,
    /// Cluster that it was sent to.
    pub cluster: String,
    /// Its answer, while the filter holds it, and since when.
    pub held: Option<(Reply, Duration)>,
}
