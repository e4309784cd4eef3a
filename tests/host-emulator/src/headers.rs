//! Header maps and property lists.

/// A header map: names in lower case, repeated names allowed, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(Vec<(String, Vec<u8>)>);

impl Headers {
    /// An empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// The map with one more header.
    #[must_use]
    pub fn with(mut self, name: impl AsRef<str>, value: impl AsRef<[u8]>) -> Self {
        self.add(name.as_ref(), value.as_ref());
        self
    }

    /// Appends a header, beside those of the same name.
    pub fn add(&mut self, name: &str, value: &[u8]) {
        self.0.push((name.to_ascii_lowercase(), value.to_vec()));
    }

    /// Replaces the first header of that name and drops the others; appends it when there is none.
    pub fn set(&mut self, name: &str, value: &[u8]) {
        let name = name.to_ascii_lowercase();
        match self.0.iter().position(|(known, _)| *known == name) {
            Some(first) => {
                let mut index = 0;
                self.0.retain(|(known, _)| {
                    index += 1;
                    index - 1 == first || *known != name
                });
                self.0[first].1 = value.to_vec();
            }
            None => self.0.push((name, value.to_vec())),
        }
    }

    /// Removes all headers of that name.
    pub fn remove(&mut self, name: &str) {
        self.0.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
    }

    /// The first value of that name.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_slice())
    }

    /// The first value of that name, if it is text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(|value| std::str::from_utf8(value).ok())
    }

    /// The values of that name.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.0.iter().filter(move |(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_slice())
    }

    /// All headers in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_slice()))
    }

    /// The number of headers, repeated ones counted each.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All values of a name joined with a comma.
    pub(crate) fn joined(&self, name: &str) -> Option<Vec<u8>> {
        let values: Vec<&[u8]> = self.all(name).collect();
        if values.is_empty() { None } else { Some(values.join(&b',')) }
    }

    /// The map in the form of the ABI: count, sizes, then NUL-ended names and values. An empty map has no bytes.
    pub(crate) fn serialize(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.0.is_empty() {
            return bytes;
        }
        bytes.extend((self.0.len() as u32).to_le_bytes());
        for (name, value) in &self.0 {
            bytes.extend((name.len() as u32).to_le_bytes());
            bytes.extend((value.len() as u32).to_le_bytes());
        }
        for (name, value) in &self.0 {
            bytes.extend(name.as_bytes());
            bytes.push(0);
            bytes.extend(value);
            bytes.push(0);
        }
        bytes
    }

    /// The reverse of [`Headers::serialize`]; anything malformed gives an empty map, as in Envoy.
    pub(crate) fn deserialize(bytes: &[u8]) -> Self {
        fn number(bytes: &mut &[u8]) -> Option<usize> {
            let (head, rest) = bytes.split_first_chunk::<4>()?;
            *bytes = rest;
            Some(u32::from_le_bytes(*head) as usize)
        }
        fn string<'a>(bytes: &mut &'a [u8], size: usize) -> Option<&'a [u8]> {
            let (head, rest) = bytes.split_at_checked(size)?;
            *bytes = rest.strip_prefix(&[0])?;
            Some(head)
        }
        fn parse(mut bytes: &[u8]) -> Option<Headers> {
            let count = number(&mut bytes)?;
            let mut sizes = Vec::new();
            for _ in 0..count {
                sizes.push((number(&mut bytes)?, number(&mut bytes)?));
            }
            let mut headers = Headers::new();
            for (name, value) in sizes {
                let name = string(&mut bytes, name)?;
                let value = string(&mut bytes, value)?;
                headers.add(&String::from_utf8_lossy(name), value);
            }
            bytes.is_empty().then_some(headers)
        }
        parse(bytes).unwrap_or_default()
    }
}

/// Properties of a stream: dotted path (`response.code_details`) and value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties(Vec<(String, Vec<u8>)>);

impl Properties {
    /// No properties.
    pub fn new() -> Self {
        Self::default()
    }

    /// The list with one more property; later ones win. Numbers are little-endian: `32i64.to_le_bytes()`.
    #[must_use]
    pub fn with(mut self, path: impl AsRef<str>, value: impl AsRef<[u8]>) -> Self {
        self.0.push((path.as_ref().to_owned(), value.as_ref().to_vec()));
        self
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(path, value)| (path.as_str(), value.as_slice()))
    }
}

impl<N: AsRef<str>, V: AsRef<[u8]>> FromIterator<(N, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(items: I) -> Self {
        items.into_iter().fold(Self::new(), |list, (name, value)| list.with(name, value))
    }
}

impl<N: AsRef<str>, V: AsRef<[u8]>> FromIterator<(N, V)> for Properties {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(items: I) -> Self {
        items.into_iter().fold(Self::new(), |list, (name, value)| list.with(name, value))
    }
}

macro_rules! conversions {
    ($($list:ident)*) => {$(
        impl<N: AsRef<str>, V: AsRef<[u8]>, const COUNT: usize> From<[(N, V); COUNT]> for $list {
            fn from(items: [(N, V); COUNT]) -> Self {
                items.into_iter().collect()
            }
        }

        impl<N: AsRef<str>, V: AsRef<[u8]>, const COUNT: usize> From<&[(N, V); COUNT]> for $list {
            fn from(items: &[(N, V); COUNT]) -> Self {
                items.iter().map(|(name, value)| (name, value)).collect()
            }
        }

        impl<N: AsRef<str>, V: AsRef<[u8]>> From<&[(N, V)]> for $list {
            fn from(items: &[(N, V)]) -> Self {
                items.iter().map(|(name, value)| (name, value)).collect()
            }
        }

        impl<N: AsRef<str>, V: AsRef<[u8]>> From<Vec<(N, V)>> for $list {
            fn from(items: Vec<(N, V)>) -> Self {
                items.into_iter().collect()
            }
        }

        impl From<&$list> for $list {
            fn from(list: &$list) -> Self {
                list.clone()
            }
        }

        /// Nothing.
        impl From<()> for $list {
            fn from((): ()) -> Self {
                Self::new()
            }
        }
    )*};
}

conversions!(Headers Properties);
