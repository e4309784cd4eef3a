//! JSON by its own text: objects and lists are taken apart only as far as needed, and their parts stay as they were
//! written, so that what nobody here knows survives.

use std::borrow::Cow;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::discovery::document::MAX_REASON_CHARS;
use crate::quote::clipped;

/// A document is not of the shape that it should have. Good documents are.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not of the expected shape: {reason}")]
pub struct ShapeError {
    /// Where and why, clipped.
    reason: String,
}

impl From<serde_json::Error> for ShapeError {
    fn from(error: serde_json::Error) -> Self {
        Self { reason: clipped(&format!("{error}"), MAX_REASON_CHARS) }
    }
}

/// A text with its name: a member of an object, or an element of a list and what it is called.
#[derive(Debug)]
pub(super) struct Named<'d> {
    pub(super) name: Cow<'d, str>,
    pub(super) text: &'d str,
}

/// One mention of a name in several lists. Who lists it twice has two.
#[derive(Debug)]
pub(super) struct Mention<'l, 'd> {
    /// The place of the list.
    pub(super) list: usize,
    pub(super) named: &'l Named<'d>,
}

/// The members of an object in their order.
#[derive(Debug, Default)]
pub(super) struct Members<'d>(pub(super) Vec<Named<'d>>);

/// Borrows from the document unless something in it is escaped.
#[derive(serde::Deserialize)]
pub(super) struct Text<'d>(#[serde(borrow)] pub(super) Cow<'d, str>);

impl<'de: 'd, 'd> Deserialize<'de> for Members<'d> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some((Text(name), value)) = map.next_entry::<Text<'de>, &'de RawValue>()? {
                    members.push(Named { name, text: value.get() });
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

impl<'d> Text<'d> {
    pub(super) fn parse(text: &'d str) -> Result<Self, ShapeError> {
        Ok(serde_json::from_str(text)?)
    }
}

/// A text as JSON.
pub(super) fn quoted(text: &str) -> String {
    // Text can always be written.
    serde_json::to_string(text).unwrap_or_default()
}

impl<'d> Members<'d> {
    pub(super) fn parse(text: &'d str) -> Result<Self, ShapeError> {
        Ok(serde_json::from_str(text)?)
    }

    /// The objects in a list.
    pub(super) fn parse_list(list: &'d str) -> Result<Vec<Self>, ShapeError> {
        Self::parse_all(&elements(list)?)
    }

    /// Several objects.
    pub(super) fn parse_all(texts: &[&'d str]) -> Result<Vec<Self>, ShapeError> {
        let mut all = Vec::with_capacity(texts.len());
        for text in texts {
            all.push(Self::parse(text)?);
        }
        Ok(all)
    }

    /// Text of a member; `None` also where it is null. Of doubles the last counts, as for Go.
    pub(super) fn get(&self, name: &str) -> Option<&'d str> {
        let found = self.0.iter().rev().find(|member| member.name == name);
        found.map(|member| member.text).filter(|text| *text != "null")
    }

    /// The elements of the list in a member. `name` is the path to the member of an element that names it; those without
    /// one are called `unnamed`, or left out.
    pub(super) fn list(
        &self,
        member: &str,
        name: &[&str],
        unnamed: Option<&'d str>,
    ) -> Result<Vec<Named<'d>>, ShapeError> {
        let Some(list) = self.get(member) else { return Ok(Vec::new()) };
        let elements = elements(list)?;
        let mut named = Vec::with_capacity(elements.len());
        for element in elements {
            let mut found = Some(element);
            for step in name {
                found = match found {
                    Some(text) => Self::parse(text)?.get(step),
                    None => None,
                };
            }
            let name = match found {
                Some(text) => Some(Text::parse(text)?.0),
                None => unnamed.map(Cow::Borrowed),
            };
            named.extend(name.map(|name| Named { name, text: element }));
        }
        Ok(named)
    }
}

/// The texts of a list's elements.
fn elements(list: &str) -> Result<Vec<&str>, ShapeError> {
    let elements: Vec<&RawValue> = serde_json::from_str(list)?;
    Ok(elements.into_iter().map(RawValue::get).collect())
}

/// The names of a list, each at the place where it stands first.
pub(super) fn unique_names<'n>(list: &'n [Named<'_>]) -> Vec<&'n str> {
    let mut seen: HashSet<&str> = HashSet::new();
    list.iter().map(|named| &*named.name).filter(|name| seen.insert(name)).collect()
}

/// All mentions of each name, in the order of the lists.
pub(super) fn mentions_by_name<'l, 'd>(lists: &'l [Vec<Named<'d>>]) -> HashMap<&'l str, Vec<Mention<'l, 'd>>> {
    let mut mentions: HashMap<&str, Vec<_>> = HashMap::new();
    for (list, elements) in lists.iter().enumerate() {
        for named in elements {
            mentions.entry(&*named.name).or_default().push(Mention { list, named });
        }
    }
    mentions
}

/// All names of all lists, each once, by their bytes.
pub(super) fn sorted_names<'n>(names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    // A heap's code is a tenth of a sort's, and the module's size is limited.
    let mut sorted = names.collect::<BinaryHeap<_>>().into_sorted_vec();
    sorted.dedup();
    sorted
}

/// The first of several texts that are the same. Apiservers write JSON alike, so the same things have the same text.
pub(super) fn all_alike<'d>(texts: &[&'d str]) -> Option<&'d str> {
    let (first, others) = texts.split_first()?;
    others.iter().all(|other| other == first).then_some(first)
}
