//! Parses control messages (`struct cmsghdr`) out of a buffer that the kernel filled.
//!
//! Every access is bounds-checked, so a truncated or hostile buffer ends the iteration.
//! Invariant: each step advances by at least one header, so the iteration always ends.

/// Bytes of a `struct cmsghdr`: a length that counts this header, a level and a type.
pub const HEADER_BYTES: usize = size_of::<libc::cmsghdr>();
/// Control messages begin at multiples of this many bytes.
const ALIGNMENT: usize = size_of::<usize>();

const _: () = assert!(HEADER_BYTES == size_of::<usize>() + 2 * size_of::<libc::c_int>());
const _: () = assert!(HEADER_BYTES.is_multiple_of(ALIGNMENT));

/// One control message of a socket call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlMessage<'a> {
    /// Protocol level of the message: `cmsg_level`, for example `SOL_IP`.
    pub level: libc::c_int,
    /// `cmsg_type`, whose meaning depends on the level.
    pub kind: libc::c_int,
    /// The payload, without header and padding.
    pub payload: &'a [u8],
}

/// Iterator over the control messages in a buffer.
#[derive(Clone, Debug)]
pub struct ControlMessages<'a> {
    rest: &'a [u8],
}

impl<'a> ControlMessages<'a> {
    /// Iterates over `control`, which must be cut to the length that the kernel reported.
    pub fn new(control: &'a [u8]) -> ControlMessages<'a> {
        ControlMessages { rest: control }
    }
}

impl<'a> Iterator for ControlMessages<'a> {
    type Item = ControlMessage<'a>;

    fn next(&mut self) -> Option<ControlMessage<'a>> {
        let rest = std::mem::take(&mut self.rest);
        let (len, after) = rest.split_first_chunk()?;
        let (level, after) = after.split_first_chunk()?;
        let (kind, _) = after.split_first_chunk()?;
        let len = usize::from_ne_bytes(*len);
        let payload = rest.get(HEADER_BYTES..len)?;
        self.rest = len.checked_next_multiple_of(ALIGNMENT).and_then(|next| rest.get(next..)).unwrap_or(&[]);
        Some(ControlMessage {
            level: libc::c_int::from_ne_bytes(*level),
            kind: libc::c_int::from_ne_bytes(*kind),
            payload,
        })
    }
}

/// Appends a control message to `control`; for tests of parsers.
pub fn append(control: &mut Vec<u8>, level: libc::c_int, kind: libc::c_int, payload: &[u8]) {
    control.extend((HEADER_BYTES + payload.len()).to_ne_bytes());
    control.extend(level.to_ne_bytes());
    control.extend(kind.to_ne_bytes());
    control.extend(payload);
    control.resize(control.len().next_multiple_of(ALIGNMENT), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_messages() -> Vec<u8> {
        let mut control = Vec::new();
        append(&mut control, 1, 2, b"odd");
        append(&mut control, 3, 4, b"sixteen bytes ok");
        control
    }

    #[test]
    fn each_message_is_found() {
        let control = two_messages();
        let found: Vec<_> = ControlMessages::new(&control).collect();
        assert_eq!(found[0], ControlMessage { level: 1, kind: 2, payload: b"odd" });
        assert_eq!(found[1], ControlMessage { level: 3, kind: 4, payload: b"sixteen bytes ok" });
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn every_truncation_ends_quietly() {
        let control = two_messages();
        for len in 0..control.len() {
            let whole = ControlMessages::new(&control[..len]).count();
            assert_eq!(whole, usize::from(len >= HEADER_BYTES + 3), "cut to {len}");
        }
    }

    #[test]
    fn lengths_that_lie_end_the_iteration() {
        for lie in [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 100, usize::MAX - 6, usize::MAX] {
            let mut control = two_messages();
            control[..size_of::<usize>()].copy_from_slice(&lie.to_ne_bytes());
            assert_eq!(ControlMessages::new(&control).count(), 0, "length {lie}");
        }
    }

    #[test]
    fn an_empty_message_advances() {
        let mut control = Vec::new();
        append(&mut control, 1, 1, b"");
        append(&mut control, 2, 2, b"");
        assert_eq!(ControlMessages::new(&control).count(), 2);
    }
}
