//! One tree for both forms in which Envoy hands a configuration over: JSON text and `google.protobuf.Struct`.
//!
//! The tree keeps what `serde_json::Value` loses (keys that stand twice, numbers that are not finite), so that the
//! typed shapes refuse it with the path of the key. It never folds a list into a struct, nor null into an absent key:
//! `local:` with nothing behind it would otherwise silently mean gateway mode.

use std::fmt;

use prost::Message;
use prost_types::value::Kind;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{
    self, Deserialize, Deserializer, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;

use super::error::{ConfigError, printable_path};
use crate::quote::quoted;

/// 64 apiservers with every key at its longest, and thousands of exclusions, stay far below this; the tree of a hostile
/// text of this size still fits a small VM.
const MAX_CONFIGURATION_BYTES: usize = 1 << 20;

/// Every integer up to this one has exactly one double, which is how a Struct carries it (2^53).
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

/// A configuration before its shape is known. As deep as the recursion limit of its parser at most (serde_json: 128,
/// prost: 100), so that walking and dropping it needs little stack.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    List(Vec<Node>),
    /// In the order of the source; a key may stand twice.
    Object(Vec<(String, Node)>),
}

/// What serde has to say about a shape, still without the path.
#[derive(Debug)]
pub(super) enum ShapeError {
    UnknownKey { expected: &'static [&'static str] },
    DuplicateKey(&'static str),
    WrongType { expected: String, found: String },
    Other(String),
}

impl Node {
    /// Tells the two forms apart by content, for 0x0a begins nearly every Struct and is a newline too: text that begins
    /// with a brace and parses is JSON; everything else has to be a Struct.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, ConfigError> {
        if bytes.is_empty() {
            return Ok(Self::Object(Vec::new()));
        }
        if bytes.len() > MAX_CONFIGURATION_BYTES {
            let size = bytes.len();
            let reason = format!("{size} bytes long, more than the {MAX_CONFIGURATION_BYTES} that are read");
            return Err(ConfigError::malformed(reason));
        }
        let json = json_object(bytes).map(serde_json::from_str::<Self>);
        if let Some(Ok(node)) = json {
            return Ok(node);
        }
        match (prost_types::Struct::decode(bytes), json) {
            // Unknown fields are skipped: a message without any known field is some other message.
            (Ok(message), _) if !message.fields.is_empty() => Ok(message.into()),
            (_, Some(Err(error))) => Err(ConfigError::malformed(format!("broken JSON: {error}"))),
            (Err(error), _) if bytes.starts_with(b"\x0a") => {
                Err(ConfigError::malformed(format!("neither a JSON object nor a google.protobuf.Struct ({error})")))
            }
            _ => Err(ConfigError::malformed("neither a JSON object nor a google.protobuf.Struct")),
        }
    }

    /// Gives the tree a typed shape; an error names the full path of the key.
    pub(super) fn shape<T: for<'de> Deserialize<'de>>(self) -> Result<T, ConfigError> {
        serde_path_to_error::deserialize(self).map_err(|error| {
            let path = match format!("{}", error.path()) {
                root if root == "." => String::new(),
                path => printable_path(&path),
            };
            error.into_inner().at(path)
        })
    }

    fn unexpected(&self) -> Unexpected<'_> {
        match self {
            Self::Null => Unexpected::Unit,
            Self::Bool(value) => Unexpected::Bool(*value),
            Self::Number(value) => Unexpected::Float(*value),
            Self::Text(text) => Unexpected::Str(text),
            Self::List(_) => Unexpected::Seq,
            Self::Object(_) => Unexpected::Map,
        }
    }
}

/// The text, if it can be a JSON object.
fn json_object(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    text.trim_start_matches([' ', '\t', '\n', '\r']).starts_with('{').then_some(text)
}

/// The integer that a double stands for. Doubles are the only numbers of a Struct.
fn whole(number: f64) -> Option<u64> {
    // NaN fails the range, infinity too.
    let is_whole = (0.0..=MAX_EXACT_INTEGER).contains(&number) && number.fract() == 0.0;
    is_whole.then_some(number as u64)
}

impl ShapeError {
    fn at(self, path: String) -> ConfigError {
        let named = |path: String| {
            if path.is_empty() { "configuration".to_owned() } else { path }
        };
        match self {
            Self::UnknownKey { expected } => {
                ConfigError::UnknownKey { path: named(path), expected: expected.join(", ") }
            }
            // Noticed by the object around the key, whose path this is.
            Self::DuplicateKey(key) if path.is_empty() => ConfigError::DuplicateKey { path: key.to_owned() },
            Self::DuplicateKey(key) => ConfigError::DuplicateKey { path: format!("{path}.{key}") },
            Self::WrongType { expected, found } => ConfigError::WrongType { path: named(path), expected, found },
            Self::Other(problem) => ConfigError::Invalid { path: named(path), problem },
        }
    }
}

impl fmt::Display for ShapeError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self:?}")
    }
}

impl std::error::Error for ShapeError {}

impl de::Error for ShapeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::Other(format!("{message}"))
    }

    fn invalid_type(unexpected: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match unexpected {
            Unexpected::Unit => "null".to_owned(),
            Unexpected::Bool(value) => format!("the boolean {value}"),
            Unexpected::Float(number) => {
                // Debug, for it writes 1e300 in five characters; but 5.0 is 5 to everyone else.
                let number = format!("{number:?}");
                format!("the number {}", number.strip_suffix(".0").unwrap_or(&number))
            }
            Unexpected::Str(text) => format!("the string {}", quoted(text)),
            Unexpected::Seq => "a list".to_owned(),
            Unexpected::Map => "an object".to_owned(),
            other => format!("{other}"),
        };
        Self::WrongType { expected: format!("{expected}"), found }
    }

    fn unknown_field(_: &str, expected: &'static [&'static str]) -> Self {
        Self::UnknownKey { expected }
    }

    fn duplicate_field(key: &'static str) -> Self {
        Self::DuplicateKey(key)
    }
}

impl From<prost_types::Struct> for Node {
    fn from(message: prost_types::Struct) -> Self {
        Self::Object(message.fields.into_iter().map(|(key, value)| (key, value.into())).collect())
    }
}

impl From<prost_types::Value> for Node {
    fn from(value: prost_types::Value) -> Self {
        match value.kind {
            None | Some(Kind::NullValue(_)) => Self::Null,
            Some(Kind::BoolValue(value)) => Self::Bool(value),
            Some(Kind::NumberValue(number)) => Self::Number(number),
            Some(Kind::StringValue(text)) => Self::Text(text),
            Some(Kind::ListValue(list)) => Self::List(list.values.into_iter().map(Self::from).collect()),
            Some(Kind::StructValue(message)) => message.into(),
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NodeVisitor;

        impl<'de> Visitor<'de> for NodeVisitor {
            type Value = Node;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Node, E> {
                Ok(Node::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
                Ok(Node::Bool(value))
            }

            // Every integer of the schema is far below 2^53, and what is rounded up there stays too large.
            fn visit_i64<E>(self, number: i64) -> Result<Node, E> {
                Ok(Node::Number(number as f64))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Node, E> {
                Ok(Node::Number(number as f64))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Node, E> {
                Ok(Node::Number(number))
            }

            fn visit_str<E>(self, text: &str) -> Result<Node, E> {
                Ok(Node::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = items.next_element()? {
                    list.push(item);
                }
                Ok(Node::List(list))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Node, A::Error> {
                let mut object = Vec::new();
                while let Some(entry) = entries.next_entry()? {
                    object.push(entry);
                }
                Ok(Node::Object(object))
            }
        }

        deserializer.deserialize_any(NodeVisitor)
    }
}

impl IntoDeserializer<'_, ShapeError> for Node {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Node {
    type Error = ShapeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ShapeError> {
        match self {
            Self::Null => visitor.visit_unit(),
            Self::Bool(value) => visitor.visit_bool(value),
            Self::Number(number) => visitor.visit_f64(number),
            Self::Text(text) => visitor.visit_string(text),
            Self::List(items) => visitor.visit_seq(SeqDeserializer::new(items.into_iter())),
            Self::Object(entries) => visitor.visit_map(MapDeserializer::new(entries.into_iter())),
        }
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ShapeError> {
        match self {
            Self::Number(number) if let Some(integer) = whole(number) => visitor.visit_u64(integer),
            other => Err(de::Error::invalid_type(other.unexpected(), &"a whole, non-negative number")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ShapeError> {
        visitor.visit_some(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ShapeError> {
        match self {
            Self::Object(_) => self.deserialize_any(visitor),
            other => Err(de::Error::invalid_type(other.unexpected(), &visitor)),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}
