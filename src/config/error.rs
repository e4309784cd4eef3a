//! What can be wrong with a configuration.

use thiserror::Error;

/// Paths are made of the writer's own keys; the deepest real one (`apiservers[63].discoveryCluster`) has 31 characters.
const MAX_PATH_CHARS: usize = 200;

/// Why a configuration was refused. The message always begins with the path of the key to look at.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The bytes are no configuration at all; the path is `configuration`.
    #[error("{path}: {reason}")]
    Malformed {
        /// Always `configuration`.
        path: String,
        /// What was expected and what stood in the way.
        reason: String,
    },
    /// A key that does not exist, most likely a typing error.
    #[error("{path}: unknown key, expected one of {expected}")]
    UnknownKey {
        /// The unknown key itself.
        path: String,
        /// The keys that exist at this place.
        expected: String,
    },
    /// A key that stands twice in one object.
    #[error("{path}: given twice")]
    DuplicateKey {
        /// The doubled key.
        path: String,
    },
    /// A required key without a value.
    #[error("{path}: missing")]
    Missing {
        /// The key that has to be added.
        path: String,
    },
    /// A string where a number is due, and the like.
    #[error("{path}: expected {expected}, found {found}")]
    WrongType {
        /// The key whose value has the wrong type.
        path: String,
        /// The type that is due.
        expected: String,
        /// The value that was found.
        found: String,
    },
    /// A value of the right type that makes no sense here.
    #[error("{path}: {problem}")]
    Invalid {
        /// The key whose value makes no sense.
        path: String,
        /// The value and the rule that it breaks.
        problem: String,
    },
    /// Two keys that contradict each other.
    #[error("{path}: {problem}")]
    Conflict {
        /// The key that came second.
        path: String,
        /// The value and the key that it contradicts.
        problem: String,
    },
    /// A valid value that this version cannot honour; to ignore it would be a lie.
    #[error("{path}: {value} is not supported by this version; leave the key out")]
    Unsupported {
        /// The key whose value is not supported.
        path: String,
        /// The value.
        value: String,
    },
}

impl ConfigError {
    /// The key to look at, for example `apiservers[2].name`; `configuration` if there is no telling keys apart.
    pub fn path(&self) -> &str {
        match self {
            Self::Malformed { path, .. }
            | Self::UnknownKey { path, .. }
            | Self::DuplicateKey { path }
            | Self::Missing { path }
            | Self::WrongType { path, .. }
            | Self::Invalid { path, .. }
            | Self::Conflict { path, .. }
            | Self::Unsupported { path, .. } => path,
        }
    }

    pub(super) fn malformed(reason: impl Into<String>) -> Self {
        Self::Malformed { path: "configuration".to_owned(), reason: reason.into() }
    }

    pub(super) fn invalid(path: &str, problem: impl Into<String>) -> Self {
        Self::Invalid { path: path.to_owned(), problem: problem.into() }
    }

    pub(super) fn conflict(path: &str, problem: impl Into<String>) -> Self {
        Self::Conflict { path: path.to_owned(), problem: problem.into() }
    }

    pub(super) fn unsupported(path: &str, value: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_owned(), value: value.into() }
    }
}

/// A path for a message: control characters escaped, clipped.
pub(super) fn printable_path(path: &str) -> String {
    crate::quote::clipped(path, MAX_PATH_CHARS).chars().flat_map(char::escape_debug).collect()
}
