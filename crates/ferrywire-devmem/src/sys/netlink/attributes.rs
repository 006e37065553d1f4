//! Netlink attributes, the parts of messages: a length, a kind, a value, padded to whole words.
//!
//! [`Attributes`] writes them, [`AttributeList`] reads those of the kernel.
//! Invariant: reading never leaves the given bytes, each step consumes at least a header, and a list ends at an
//! impossible length.
//! Read next: `answer.rs`, the messages around them.

const NESTED: u16 = 1 << 15;
/// Bits of an attribute's type that are its kind; the other bits describe the value's encoding.
const KIND_MASK: u16 = 0x3fff;
const HEAD_BYTES: usize = 4;
const ALIGNMENT: usize = 4;

/// Attributes of a request, in the order in which they are added.
#[derive(Clone, Debug, Default)]
pub struct Attributes {
    bytes: Vec<u8>,
    /// Whether an attribute is longer than its length field allows; such a request is never sent.
    oversized: bool,
}

impl Attributes {
    /// An empty list of attributes.
    pub fn new() -> Attributes {
        Attributes::default()
    }

    /// Adds an attribute with these bytes as its value.
    pub fn bytes_of(mut self, kind: u16, value: &[u8]) -> Attributes {
        match u16::try_from(HEAD_BYTES + value.len()) {
            Ok(len) => {
                self.bytes.extend(len.to_ne_bytes());
                self.bytes.extend(kind.to_ne_bytes());
                self.bytes.extend(value);
                self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
            }
            Err(_) => self.oversized = true,
        }
        self
    }

    /// Adds an attribute whose value is a number of one byte.
    pub fn u8(self, kind: u16, value: u8) -> Attributes {
        self.bytes_of(kind, &[value])
    }

    /// Adds an attribute whose value is a number of four bytes.
    pub fn u32(self, kind: u16, value: u32) -> Attributes {
        self.bytes_of(kind, &value.to_ne_bytes())
    }

    /// Adds an attribute whose value is text, with the zero that ends it.
    pub fn text(self, kind: u16, value: &str) -> Attributes {
        self.bytes_of(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds an attribute without a value.
    pub fn flag(self, kind: u16) -> Attributes {
        self.bytes_of(kind, &[])
    }

    /// Adds an attribute that contains others.
    pub fn nest(mut self, kind: u16, inner: Attributes) -> Attributes {
        self.oversized |= inner.oversized;
        self.bytes_of(kind | NESTED, &inner.bytes)
    }

    /// The encoded attributes; `None` if one of them is too long.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        (!self.oversized).then_some(&self.bytes)
    }
}

/// Attributes that the kernel wrote.
#[derive(Clone, Copy, Debug)]
pub struct AttributeList<'a>(&'a [u8]);

impl<'a> AttributeList<'a> {
    /// The list of attributes in these bytes.
    pub fn new(bytes: &'a [u8]) -> AttributeList<'a> {
        AttributeList(bytes)
    }

    /// The value of the first attribute of a kind.
    pub fn find(self, kind: u16) -> Option<&'a [u8]> {
        self.into_iter().find(|attribute| attribute.0 == kind).map(|attribute| attribute.1)
    }

    /// The first attribute of a kind as a one-byte number, if it has that size.
    pub fn u8(self, kind: u16) -> Option<u8> {
        self.find(kind)?.try_into().ok().map(u8::from_ne_bytes)
    }

    /// The first attribute of a kind as a two-byte number, if it has that size.
    pub fn u16(self, kind: u16) -> Option<u16> {
        self.find(kind)?.try_into().ok().map(u16::from_ne_bytes)
    }

    /// The first attribute of a kind as a four-byte number, if it has that size.
    pub fn u32(self, kind: u16) -> Option<u32> {
        self.find(kind)?.try_into().ok().map(u32::from_ne_bytes)
    }

    /// The first attribute of a kind as a number of one or two words in machine order, the kernel's encoding of numbers
    /// that may grow.
    pub fn number(self, kind: u16) -> Option<u64> {
        let value = self.find(kind)?;
        let long = || value.try_into().ok().map(u64::from_ne_bytes);
        value.try_into().ok().map(|short| u64::from(u32::from_ne_bytes(short))).or_else(long)
    }

    /// The first attribute of a kind as text, without the NUL.
    pub fn text(self, kind: u16) -> Option<&'a str> {
        let bytes = self.find(kind)?;
        std::str::from_utf8(bytes.split(|&byte| byte == 0).next()?).ok()
    }

    /// The attributes inside the first attribute of a kind.
    pub fn nest(self, kind: u16) -> Option<AttributeList<'a>> {
        self.find(kind).map(AttributeList)
    }
}

impl<'a> IntoIterator for AttributeList<'a> {
    type Item = (u16, &'a [u8]);
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        Iter(self.0)
    }
}

/// Iterator over the kinds and values of attributes.
#[derive(Clone, Debug)]
pub struct Iter<'a>(&'a [u8]);

impl<'a> Iterator for Iter<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<(u16, &'a [u8])> {
        let rest = std::mem::take(&mut self.0);
        let &[len_low, len_high, kind_low, kind_high, ..] = rest else { return None };
        let len = usize::from(u16::from_ne_bytes([len_low, len_high]));
        let value = rest.get(HEAD_BYTES..len)?;
        self.0 = rest.get(len.next_multiple_of(ALIGNMENT)..).unwrap_or(&[]);
        Some((u16::from_ne_bytes([kind_low, kind_high]) & KIND_MASK, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_as_they_are_written() {
        let inner = Attributes::new().u8(7, 9).flag(8);
        let written =
            Attributes::new().text(2, "ethtool").nest(1, inner).u32(3, 77).bytes_of(4, &5_u64.to_ne_bytes());
        let list = AttributeList::new(written.bytes().expect("short ones"));
        assert_eq!(list.text(2), Some("ethtool"));
        assert_eq!(list.nest(1).and_then(|nest| nest.u8(7)), Some(9));
        assert_eq!(list.nest(1).and_then(|nest| nest.find(8)), Some(&[][..]));
        assert_eq!((list.u32(3), list.u16(3), list.u8(3)), (Some(77), None, None));
        assert_eq!((list.number(3), list.number(4), list.number(1)), (Some(77), Some(5), None));
        assert_eq!(list.find(5), None);
        assert_eq!(list.into_iter().count(), 4);
    }

    #[test]
    fn broken_lists_end_the_search() {
        for broken in [&[][..], &[4, 0, 9], &[0, 0, 1, 0, 5, 5], &[200, 0, 1, 0, 1], &[3, 0, 1, 0]] {
            assert_eq!(AttributeList::new(broken).find(1), None, "{broken:?}");
        }
    }

    #[test]
    fn an_attribute_longer_than_its_length_can_say_spoils_the_request() {
        let longest = Attributes::new().bytes_of(1, &vec![0; usize::from(u16::MAX) - HEAD_BYTES]);
        assert!(longest.bytes().is_some());
        assert!(Attributes::new().nest(1, longest).bytes().is_none());
        let inner = Attributes::new().bytes_of(1, &vec![0; 1 << 16]);
        assert!(Attributes::new().nest(1, inner).u32(2, 0).bytes().is_none());
    }
}
