//! The messages that carry a NIXL notification: one message that names its sender, or several parts for a long one.
//!
//! ```text
//!   0 │ sender: length 2, bytes │ message
//!   1 │ sender: length 2, bytes │ message number 8 │ total bytes 4 │ part
//! ```
//!
//! Invariant: the parts of a message follow each other on their connection, in order.

use ferrywire::limits::NOTIFY_BYTES_MAX;

/// Longest name of an agent, in bytes.
pub const NAME_BYTES_MAX: usize = 1024;
/// Longest notification, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

const WHOLE: u8 = 0;
const PART: u8 = 1;
const PART_HEADER_BYTES: usize = 1 + 2 + 8 + 4;

/// A delivered notification: the sender's name and the message.
pub type Delivered = (Vec<u8>, Vec<u8>);

/// Encodes a notification as the messages that carry it. Only a notification of one message can go with a write.
pub fn encode(sender: &[u8], message: &[u8], number: u64) -> Vec<Vec<u8>> {
    let begin = |kind: u8, capacity: usize| {
        let mut out = Vec::with_capacity(capacity);
        out.push(kind);
        out.extend_from_slice(&(sender.len() as u16).to_le_bytes());
        out.extend_from_slice(sender);
        out
    };
    if is_short(sender, message) {
        let mut whole = begin(WHOLE, 3 + sender.len() + message.len());
        whole.extend_from_slice(message);
        return vec![whole];
    }
    let room = NOTIFY_BYTES_MAX - PART_HEADER_BYTES - sender.len();
    let part = |bytes: &[u8]| {
        let mut part = begin(PART, NOTIFY_BYTES_MAX);
        part.extend_from_slice(&number.to_le_bytes());
        part.extend_from_slice(&(message.len() as u32).to_le_bytes());
        part.extend_from_slice(bytes);
        part
    };
    message.chunks(room).map(part).collect()
}

/// Whether the notification fits into one message.
pub fn is_short(sender: &[u8], message: &[u8]) -> bool {
    3 + sender.len() + message.len() <= NOTIFY_BYTES_MAX
}

/// Assembles the notifications of one peer.
#[derive(Default)]
pub struct Assembly {
    number: u64,
    bytes: Vec<u8>,
}

impl Assembly {
    /// Takes a message of the peer; returns the notification that it completes.
    ///
    /// # Errors
    /// A text that says what is wrong with the message, for bytes that no ferrywire of this version sends.
    pub fn take(&mut self, message: Vec<u8>) -> Result<Option<Delivered>, &'static str> {
        let (kind, sender, rest) = split(&message).ok_or("the message names no sender")?;
        match kind {
            WHOLE => Ok(Some((sender.to_vec(), rest.to_vec()))),
            PART => {
                let (number, rest) = rest.split_first_chunk::<8>().ok_or("a part is truncated")?;
                let (total, part) = rest.split_first_chunk::<4>().ok_or("a part is truncated")?;
                let (number, total) = (u64::from_le_bytes(*number), u32::from_le_bytes(*total) as usize);
                if total > MESSAGE_BYTES_MAX {
                    return Err("the message is longer than a notification may be");
                }
                if number != self.number {
                    *self = Assembly { number, bytes: Vec::new() };
                }
                self.bytes.extend_from_slice(part);
                if self.bytes.len() > total {
                    return Err("the parts are longer than the announced length");
                }
                let whole = self.bytes.len() == total;
                Ok(whole.then(|| (sender.to_vec(), std::mem::take(&mut self.bytes))))
            }
            _ => Err("the message has an unknown kind: use the same ferrywire on both ends"),
        }
    }
}

fn split(message: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (kind, rest) = message.split_first()?;
    let (count, rest) = rest.split_first_chunk::<2>()?;
    let (sender, rest) = rest.split_at_checked(u16::from_le_bytes(*count).into())?;
    Some((*kind, sender, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_every_length_come_out_as_they_went_in() {
        let mut assembly = Assembly::default();
        for (number, length) in [0, 1, 8000, 8188, 8189, 8192, 8193, 100_000].into_iter().enumerate() {
            let message: Vec<u8> = (0..length).map(|at| (at * 7 + number) as u8).collect();
            let mut parts = encode(b"agent", &message, 1 + number as u64);
            assert!(parts.iter().all(|part| part.len() <= NOTIFY_BYTES_MAX), "{length}");
            assert_eq!(parts.len() == 1, is_short(b"agent", &message), "{length}");
            let last = parts.pop().unwrap();
            for part in parts {
                assert_eq!(assembly.take(part), Ok(None), "{length}");
            }
            assert_eq!(assembly.take(last), Ok(Some((b"agent".to_vec(), message))), "{length}");
        }
    }

    #[test]
    fn malformed_notifications_are_errors() {
        let mut assembly = Assembly::default();
        let parts = encode(b"agent", &[1; 20_000], 5);
        let mut long = parts[0].clone();
        long[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        for wrong in [&b""[..], b"\0", b"\0\xff\xffa", b"\x07\x01\0a", &parts[0][..12], &long] {
            assert!(assembly.take(wrong.to_vec()).is_err(), "{wrong:?}");
        }
        let mut more = parts[0].clone();
        more[16..20].copy_from_slice(&10u32.to_le_bytes());
        assert!(assembly.take(more).is_err());
    }
}
