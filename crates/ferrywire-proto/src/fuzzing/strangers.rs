//! Attackers without the secret, at either end or on the wire between two ends.

use super::ends::{Gate, Wire, dial, feed, join, known, resume, shake_hands};
use super::{Input, KNOWN, PREAMBLE_BYTES, SECRET};
use crate::handshake::{DataKey, Initiator, KnownSession, Outcome, Responder};
use crate::limits;

pub(super) fn dials(input: &mut Input<'_>) {
    let choices = input.u8();
    let mut gate = Gate::new((choices & 1 == 0).then_some(SECRET));
    gate.needed = choices & 2 != 0;
    gate.known = (choices & 4 != 0).then(known);
    let decided = gate.decided.clone();
    let mut responder = Responder::new(gate);
    let wrong = foreign_key();
    let mut opening = match (choices >> 3) % 4 {
        0 => Vec::new(),
        1 => dial().take_output()[..PREAMBLE_BYTES].to_vec(),
        2 => dial().take_output(),
        _ => Initiator::data(KNOWN, wrong, 0, input.u32()).take_output(),
    };
    let fragments = input.take(16);
    opening.extend_from_slice(input.take(usize::MAX));
    let _ = feed(&mut responder, &opening, &mut Input(fragments));
    assert!(responder.finished().is_none(), "the handshake succeeds only with a proof of the secret");
    assert_eq!(decided.get(), 0, "the admission decides only after a proof of the secret");
    assert!(responder.take_output().len() <= limits::HANDSHAKE_BYTES_MAX);
}

/// The key of a session that the responders do not know; one per thread.
fn foreign_key() -> DataKey {
    thread_local!(static KEY: DataKey = shake_hands().0.data_key);
    KEY.with(Clone::clone)
}

pub(super) fn answers(input: &mut Input<'_>) {
    let KnownSession { data_key, received, .. } = known();
    let (session, purpose) = (KNOWN, input.u8() % 3);
    let mut initiator = match purpose {
        0 => dial(),
        1 => Initiator::data(session, data_key, 0, 0),
        _ => resume(session, received, data_key),
    };
    let fragments = input.take(16);
    let _ = feed(&mut initiator, input.take(usize::MAX), &mut Input(fragments));
    assert!(initiator.finished().is_none(), "nothing is open without a proof");
    assert!(initiator.take_output().len() <= limits::HANDSHAKE_BYTES_MAX);
}

pub(super) fn alter(input: &mut Input<'_>) {
    let KnownSession { data_key, received, .. } = known();
    let mut one = match input.u8() % 3 {
        0 => dial(),
        1 => Initiator::data(KNOWN, data_key, input.u16(), input.u32()),
        _ => resume(KNOWN, received, data_key),
    };
    let mut gate = Gate::new(Some(SECRET));
    gate.known = Some(known());
    let mut two = Responder::new(gate);
    let mut wire = Wire::default();
    for _ in 0..input.u8() % 4 {
        let at = usize::from(input.u16());
        wire.alterations.push((at & 1 == 1, (at >> 1) % 512, input.u8()));
    }
    if input.u8() & 1 == 1 {
        let at = usize::from(input.u16());
        wire.cut = Some((at & 1 == 1, (at >> 1) % 512));
    }
    let (first, second) = join(&mut one, &mut two, &mut wire, input);
    let [forth, back] = wire.disturbed;
    assert!(second.is_err() || !forth, "the responder accepted altered bytes");
    assert!(first.is_err() || !back && !forth, "the initiator accepted altered bytes");
    if !forth && !back {
        match (first, second) {
            (Ok(Outcome::Control(one)), Ok(Outcome::Control(two))) => {
                assert_eq!((one.session, one.data_key), (two.session, two.data_key));
            }
            (Ok(Outcome::Data { .. }), Ok(Outcome::Data { .. })) => {}
            other => panic!("an undisturbed handshake failed: {other:?}"),
        }
    }
}
