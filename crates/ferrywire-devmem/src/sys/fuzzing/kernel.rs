//! Fuzzes the readers of control messages and netlink answers, and the tokens that are returned to the kernel.
//!
//! The kernel is trusted, but its bytes are read at raw offsets, and its modules may come from anywhere.

use super::{Input, check_text};
use crate::sys::devmem::control::{self, Control};
use crate::sys::devmem::tokens::{FRAGMENTS_PER_CALL_MAX, RANGES_PER_CALL_MAX};
use crate::sys::devmem::{Fragment, SCM_DEVMEM_DMABUF, SCM_DEVMEM_LINEAR, Tokens};
use crate::sys::netdev;
use crate::sys::netlink::AttributeList;
use crate::sys::netlink::answer::{Answer, Wanted};
use ferrywire_sys::cmsg::{self, ControlMessages, HEADER_BYTES};
use ferrywire_sys::zerocopy;
use std::collections::BTreeMap;

/// Answers of Linux 7.3 as they were read: the id of a binding with an acknowledgement, a refusal with text, a list of
/// queues of which one has memory bound, and the description of a family, with nested nests.
const ANSWERS: [&[u8]; 4] = [
    include_bytes!("kernel/bound.bin"),
    include_bytes!("kernel/refused.bin"),
    include_bytes!("kernel/queues.bin"),
    include_bytes!("kernel/family.bin"),
];
/// Control messages of a real receive, from a NIC that leaves 100 bytes of each packet outside of the pool: 22 pieces
/// in the buffer, 22 fragments, 31856 bytes.
const FRAGMENTS: &[u8] = include_bytes!("kernel/fragments.bin");
/// Most tokens that a run has at once, about.
const TOKENS_MAX: usize = 8000;
/// Deepest nesting of attributes that is followed.
const DEPTH: usize = 6;

pub(super) fn control_messages(input: &mut Input<'_>) {
    let (received, buffer) = (usize::from(input.u16()), usize::from(input.u16()));
    let mut bytes = match input.u8() % 3 {
        0 => FRAGMENTS.to_vec(),
        1 => made_up(input),
        _ => input.take(usize::MAX).to_vec(),
    };
    input.spoil(&mut bytes);
    assert!(ControlMessages::new(&bytes).count() <= bytes.len() / HEADER_BYTES);
    let completions = ControlMessages::new(&bytes).filter_map(zerocopy::parse);
    assert!(completions.count() <= bytes.len() / HEADER_BYTES);
    let sum = control::sum(&bytes);
    // Sometimes the received length matches the control messages.
    let received = sum.filter(|_| input.u8() & 1 == 0).unwrap_or(received);
    match Control::holding(&bytes, received, buffer) {
        Err(fault) => check_text(&fault.to_string()),
        Ok(held) => {
            check_fragments(&held, received, buffer, control::check(&bytes, received, buffer) == Ok(true))
        }
    }
}

fn check_fragments(held: &Control, received: usize, buffer: usize, plain: bool) {
    let (mut total, mut linear) = (0, 0);
    for fragment in held.fragments() {
        total += fragment.bytes() as usize;
        if let Fragment::Linear { at, bytes } = fragment {
            assert_eq!(at, linear);
            linear = at + bytes as usize;
            assert!(linear <= buffer);
        }
    }
    assert_eq!(held.fragments().count() == 0, plain);
    assert!(plain || total == received, "{total} of {received}");
}

/// Makes messages with valid headers and arbitrary contents.
fn made_up(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..input.u8() % 40 {
        let kind = [SCM_DEVMEM_LINEAR, SCM_DEVMEM_DMABUF, libc::SCM_TIMESTAMP][usize::from(input.u8() % 3)];
        let level = if input.u8().is_multiple_of(8) { libc::SOL_IP } else { libc::SOL_SOCKET };
        let len = if input.u8().is_multiple_of(8) { usize::from(input.u8()) % 40 } else { 24 };
        let mut payload = input.take(len).to_vec();
        // Sizes below 64 KiB are the plausible ones, so the upper half of the size is cleared.
        if let Some(size) = payload.get_mut(10..12) {
            size.fill(0);
        }
        cmsg::append(&mut bytes, level, kind, &payload);
    }
    bytes
}

pub(super) fn netlink_answers(input: &mut Input<'_>) {
    let sample = ANSWERS[usize::from(input.u8()) % ANSWERS.len()];
    let word = |at: usize| sample.get(at..at + 4).and_then(|word| word.try_into().ok());
    let family = sample.get(4..6).and_then(|kind| kind.try_into().ok()).map_or(0, u16::from_ne_bytes);
    let sequence = word(8).map_or(0, u32::from_ne_bytes);
    let mut answer = Answer::default();
    for _ in 0..1 + input.u8() % 3 {
        let mut datagram = match input.u8() % 4 {
            0 => input.take(usize::MAX).to_vec(),
            _ => sample.to_vec(),
        };
        input.spoil(&mut datagram);
        let before = answer.replies.len();
        let heard = answer.take(Wanted { family, sequence }, &datagram);
        assert!(answer.replies.len() - before <= datagram.len() / 16);
        if let Err(refusal) = heard {
            check_text(&refusal.of("fuzz").to_string());
            break;
        }
    }
    for reply in &answer.replies {
        let list = reply.attributes();
        assert!(netdev::rx_queue(list).is_none_or(|(_, state)| state == netdev::state_of(list)));
        walk(list, DEPTH);
    }
}

fn walk(list: AttributeList<'_>, depth: usize) {
    for (kind, value) in list {
        assert_eq!(list.u8(kind).is_some(), list.find(kind).is_some_and(|value| value.len() == 1));
        assert!(
            list.number(kind)
                .is_none_or(|number| list.u32(kind).is_none_or(|word| number == u64::from(word)))
        );
        assert!(list.text(kind).is_none_or(|text| !text.contains('\0')));
        if depth > 0 {
            walk(AttributeList::new(value), depth - 1);
        }
    }
}

pub(super) fn tokens(input: &mut Input<'_>) {
    let mut tokens = Tokens::new();
    let mut held: BTreeMap<u32, usize> = BTreeMap::new();
    while !input.is_empty() && held.len() < TOKENS_MAX {
        let (first, run) = match input.u8() % 8 {
            0 => (input.u32(), input.u16() % 3000),
            1 => (u32::MAX - u32::from(input.u8()), input.u16() % 300),
            2..4 => (input.u16().into(), 1),
            _ => (u32::from(input.u8()) * 8, 8),
        };
        for token in (0..run).map(|at| first.wrapping_add(at.into())) {
            tokens.push(token);
            *held.entry(token).or_default() += 1;
        }
        if input.u8().is_multiple_of(4) {
            release(&mut tokens, &mut held);
        }
    }
    release(&mut tokens, &mut held);
    assert!(tokens.is_empty() && held.is_empty());
}

/// Releases tokens to a model of the kernel that counts.
fn release(tokens: &mut Tokens, held: &mut BTreeMap<u32, usize>) {
    tokens.merge();
    while let Some((ranges, fragments)) = tokens.batch() {
        assert!(ranges.len() <= RANGES_PER_CALL_MAX && fragments <= FRAGMENTS_PER_CALL_MAX);
        assert_eq!(ranges.iter().map(|range| range.token_count).sum::<u32>(), fragments);
        for range in ranges {
            for token in range.token_start..=range.token_start + (range.token_count - 1) {
                let left = held.get_mut(&token).expect("a token that was given");
                *left -= 1;
                if *left == 0 {
                    held.remove(&token);
                }
            }
        }
        let reported = (ranges.len(), fragments as usize);
        tokens.forget(reported.0, reported.1);
    }
    assert_eq!(tokens.fragments(), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_answers_of_a_kernel_are_parsed() {
        let held = Control::holding(FRAGMENTS, 31_856, 4400).expect("it is what a kernel wrote");
        let linear = |fragment: &Fragment| matches!(fragment, Fragment::Linear { .. });
        assert_eq!(held.fragments().filter(linear).count(), 22);
        assert_eq!(held.fragments().count(), 44);
        let read = |bytes: &[u8], sequence| {
            let mut answer = Answer::default();
            answer.take(Wanted { family: 21, sequence }, bytes).map(|()| answer.replies)
        };
        let refusal = read(ANSWERS[1], 4).expect_err("it is one");
        assert_eq!(refusal.text.as_deref(), Some("designated queue already memory provider bound"));
        let queues = read(ANSWERS[2], 3).expect("a list");
        let bound = queues.iter().filter_map(|reply| netdev::rx_queue(reply.attributes()));
        let bound: Vec<_> = bound.filter(|(_, state)| !state.is_free()).map(|(queue, _)| queue).collect();
        assert_eq!(bound, [1]);
        assert_eq!(read(ANSWERS[0], 2).expect("a binding").len(), 1);
    }

    #[test]
    fn inputs_of_any_kind_end_well() {
        let mut state = 7_u64;
        let mut bytes = vec![0; 600];
        for round in 0..3000 {
            for byte in &mut bytes {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *byte = (state >> 56) as u8;
            }
            bytes[0] = round as u8;
            crate::sys::fuzzing::kernel(&bytes[..1 + round % 600]);
        }
    }
}
