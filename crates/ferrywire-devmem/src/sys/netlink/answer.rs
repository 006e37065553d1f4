//! Parses the kernel's answers: the messages that belong to a request, and their contents.
//!
//! Invariant: pure conversion of bytes to replies or a refusal; nothing outside of the given bytes is read, and
//! messages for other requests are skipped.
//! Read next: `attributes.rs`, the contents of a reply.

use super::attributes::AttributeList;
use super::{HEAD_BYTES, HEADS_BYTES, NetlinkError};

const NLMSG_NOOP: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSG_OVERRUN: u16 = 4;
const NLM_F_DUMP_INTR: u16 = 0x10;
/// Flag: the error repeats only the header of the request.
const NLM_F_CAPPED: u16 = 0x100;
/// Flag: attributes follow in an error or an end message.
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;
const CODE_BYTES: usize = 4;
const ALIGNMENT: usize = 4;

/// Most replies to one request, and most bytes of the kernel's text; more is refused.
const REPLIES_MAX: usize = 64 << 10;
const TEXT_BYTES_MAX: usize = 1024;

/// The numbers by which the messages of an answer are recognized.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub family: u16,
    pub sequence: u32,
}

/// One reply of the kernel, with its attributes.
#[derive(Clone, Debug)]
pub struct Reply(Vec<u8>);

impl Reply {
    /// The attributes of the reply.
    pub fn attributes(&self) -> AttributeList<'_> {
        AttributeList::new(&self.0)
    }
}

/// The part of an answer that has been read so far.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub replies: Vec<Reply>,
    /// Whether the kernel has ended the answer.
    pub complete: bool,
    /// Whether the list changed while it was read, so that items may be missing.
    pub interrupted: bool,
}

/// A refusal by the kernel, with its number and text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub errno: i32,
    pub text: Option<String>,
}

impl Refusal {
    const NONSENSE: Refusal = Refusal { errno: libc::EPROTO, text: None };

    pub fn of(self, call: &'static str) -> NetlinkError {
        NetlinkError { errno: self.errno, text: self.text, call, known: None }
    }
}

impl Answer {
    /// Adds the bytes of one read to the answer.
    pub fn take(&mut self, wanted: Wanted, mut datagram: &[u8]) -> Result<(), Refusal> {
        while !datagram.is_empty() {
            let message = Message::first(datagram).ok_or(Refusal::NONSENSE)?;
            datagram = datagram.get(message.whole_bytes.next_multiple_of(ALIGNMENT)..).unwrap_or(&[]);
            if message.sequence == wanted.sequence && !self.complete {
                self.hear(wanted, &message)?;
            }
        }
        Ok(())
    }

    fn hear(&mut self, wanted: Wanted, message: &Message<'_>) -> Result<(), Refusal> {
        self.interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
        match message.kind {
            NLMSG_NOOP => {}
            NLMSG_ERROR => self.end(message, message.words_of_error())?,
            NLMSG_DONE => self.end(message, message.words_at(CODE_BYTES))?,
            NLMSG_OVERRUN => return Err(Refusal { errno: libc::ENOBUFS, text: None }),
            kind if kind == wanted.family && self.replies.len() < REPLIES_MAX => {
                let attributes = message.body.get(HEADS_BYTES - HEAD_BYTES..).ok_or(Refusal::NONSENSE)?;
                self.replies.push(Reply(attributes.to_vec()));
            }
            _ => return Err(Refusal::NONSENSE),
        }
        Ok(())
    }

    /// Handles the end message of an answer: a number, 0 for success.
    fn end(&mut self, message: &Message<'_>, text: Option<String>) -> Result<(), Refusal> {
        let code = message.body.first_chunk().map(|code| i32::from_ne_bytes(*code));
        match code.ok_or(Refusal::NONSENSE)? {
            // A list ends with the number of remaining items, or with nothing.
            0.. => self.complete = true,
            code => return Err(Refusal { errno: code.saturating_neg(), text }),
        }
        Ok(())
    }
}

struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
    whole_bytes: usize,
}

impl<'a> Message<'a> {
    fn first(datagram: &'a [u8]) -> Option<Message<'a>> {
        let &[l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, _, _, _, _] = datagram.first_chunk()?;
        let whole_bytes = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).ok()?;
        Some(Message {
            kind: u16::from_ne_bytes([k0, k1]),
            flags: u16::from_ne_bytes([f0, f1]),
            sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
            body: datagram.get(HEAD_BYTES..whole_bytes)?,
            whole_bytes,
        })
    }

    /// The kernel's text in an error, behind the repeated request or its header.
    fn words_of_error(&self) -> Option<String> {
        let repeated = self.body.get(CODE_BYTES..)?;
        let bytes = match self.flags & NLM_F_CAPPED {
            0 => usize::try_from(u32::from_ne_bytes(*repeated.first_chunk()?)).ok()?,
            _ => HEAD_BYTES,
        };
        self.words_at(CODE_BYTES.checked_add(bytes.checked_next_multiple_of(ALIGNMENT)?)?)
    }

    fn words_at(&self, offset: usize) -> Option<String> {
        if self.flags & NLM_F_ACK_TLVS == 0 {
            return None;
        }
        let words = AttributeList::new(self.body.get(offset..)?).find(NLMSGERR_ATTR_MSG)?;
        let words = words.split(|&byte| byte == 0).next()?;
        let text = String::from_utf8_lossy(&words[..words.len().min(TEXT_BYTES_MAX)]);
        let text: String = text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
        (!text.is_empty()).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Attributes;
    use super::*;

    const WANTED: Wanted = Wanted { family: 0x20, sequence: 5 };

    fn message(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
        let mut message = ((HEAD_BYTES + body.len()) as u32).to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(sequence.to_ne_bytes());
        message.extend([0; 4]);
        message.extend(body);
        message.resize(message.len().next_multiple_of(ALIGNMENT), 0);
        message
    }

    fn reply(value: u32) -> Vec<u8> {
        let attributes = Attributes::new().u32(4, value);
        message(
            WANTED.family,
            2,
            WANTED.sequence,
            &[&[13, 1, 0, 0], attributes.bytes().expect("short")].concat(),
        )
    }

    /// An error message: number, header of the request or the whole request, then text.
    fn error(code: i32, capped: bool, words: Option<&str>) -> Vec<u8> {
        let request = message(WANTED.family, 5, WANTED.sequence, &[1, 2, 3, 4, 5, 6, 7]);
        let mut body = code.to_ne_bytes().to_vec();
        body.extend(if capped { &request[..HEAD_BYTES] } else { &request });
        let mut flags = if capped { NLM_F_CAPPED } else { 0 };
        if let Some(words) = words {
            flags |= NLM_F_ACK_TLVS;
            let attributes = Attributes::new().u32(2, 16).text(NLMSGERR_ATTR_MSG, words);
            body.extend(attributes.bytes().expect("short"));
        }
        message(NLMSG_ERROR, flags, WANTED.sequence, &body)
    }

    fn hear(datagrams: &[Vec<u8>]) -> Result<Answer, Refusal> {
        let mut answer = Answer::default();
        datagrams.iter().try_for_each(|datagram| answer.take(WANTED, datagram))?;
        Ok(answer)
    }

    fn values(answer: &Answer) -> Vec<u32> {
        answer.replies.iter().filter_map(|reply| reply.attributes().u32(4)).collect()
    }

    #[test]
    fn a_reply_and_an_acknowledgement_are_complete() {
        let answer = hear(&[reply(77)]).expect("no refusal");
        assert_eq!((values(&answer), answer.complete), (vec![77], false));
        for datagrams in
            [vec![reply(77), error(0, true, None)], vec![[reply(77), error(0, true, None)].concat()]]
        {
            let answer = hear(&datagrams).expect("no refusal");
            assert_eq!((values(&answer), answer.complete), (vec![77], true));
        }
    }

    #[test]
    fn a_refusal_has_the_kernels_words() {
        let words = "tcp-data-split is disabled";
        for capped in [true, false] {
            let refusal = hear(&[error(-libc::EINVAL, capped, Some(words))]).expect_err("refused");
            assert_eq!(refusal, Refusal { errno: libc::EINVAL, text: Some(words.into()) }, "{capped}");
            let refusal = hear(&[error(-libc::EOPNOTSUPP, capped, None)]).expect_err("refused");
            assert_eq!(refusal, Refusal { errno: libc::EOPNOTSUPP, text: None });
        }
        let refusal = hear(&[error(-libc::EINVAL, true, Some("a\nb\u{1b}c"))]).expect_err("refused");
        assert_eq!(refusal.text.as_deref(), Some("a b c"));
        let refusal = hear(&[error(i32::MIN, true, None)]).expect_err("refused");
        assert_eq!(refusal.errno, i32::MAX);
    }

    #[test]
    fn a_list_comes_in_parts_and_its_end_may_refuse() {
        let done = |code: i32, flags| message(NLMSG_DONE, flags, WANTED.sequence, &code.to_ne_bytes());
        let parts = [[reply(1), reply(2)].concat(), reply(3)];
        let answer = hear(&[&parts[..], &[done(0, 0)]].concat()).expect("a list");
        assert_eq!((values(&answer), answer.complete, answer.interrupted), (vec![1, 2, 3], true, false));
        let answer = hear(&[&parts[..], &[done(0, NLM_F_DUMP_INTR)]].concat()).expect("a list");
        assert!(answer.interrupted);
        let refusal = hear(&[&parts[..], &[done(-libc::EPERM, 0)]].concat()).expect_err("refused");
        assert_eq!(refusal.errno, libc::EPERM);
        let words = Attributes::new().text(NLMSGERR_ATTR_MSG, "no such device");
        let body = [&(-libc::ENODEV).to_ne_bytes()[..], words.bytes().expect("short")].concat();
        let refused = message(NLMSG_DONE, NLM_F_ACK_TLVS, WANTED.sequence, &body);
        assert_eq!(hear(&[refused]).expect_err("refused").text.as_deref(), Some("no such device"));
    }

    #[test]
    fn answers_to_other_requests_are_passed_over() {
        let mut late = error(-libc::EPERM, true, None);
        late[8..12].copy_from_slice(&4_u32.to_ne_bytes());
        let answer = hear(&[late.clone(), [late, reply(7)].concat(), error(0, true, None)]).expect("ours");
        assert_eq!((values(&answer), answer.complete), (vec![7], true));
    }

    #[test]
    fn what_makes_no_sense_is_an_error() {
        let whole = [reply(7), error(-libc::EINVAL, true, Some("words"))].concat();
        for len in 1..whole.len() {
            let heard = hear(&[whole[..len].to_vec()]);
            assert!(len == reply(7).len() || heard.is_err(), "cut to {len}: {heard:?}");
        }
        for lie in [0, 15, 1000, u32::MAX] {
            let mut broken = reply(7);
            broken[..4].copy_from_slice(&lie.to_ne_bytes());
            assert_eq!(hear(&[broken]).err(), Some(Refusal::NONSENSE), "length {lie}");
        }
        let foreign = message(0x21, 0, WANTED.sequence, &[0; 8]);
        assert_eq!(hear(&[foreign]).err(), Some(Refusal::NONSENSE));
        let lost = message(NLMSG_OVERRUN, 0, WANTED.sequence, &[]);
        assert_eq!(hear(&[lost]).expect_err("lost").errno, libc::ENOBUFS);
    }
}
