//! An attacker with the secret: an independent implementation of the handshake that then sends anything.

use super::ends::{Gate, check_outcome, config, dial, feed, known, resume};
use super::{Input, KNOWN, OPENED, PREAMBLE_BYTES, SECRET};
use crate::handshake::{Established, Outcome, PROTOCOL_VERSION, Responder};
use crate::limits;

/// Name of the Noise handshake; repeated here, so that the attacker shares no code with the code under
/// attack.
const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const SECRET_CONTEXT: &str = "ferrywire control secret v1";
const _: () = assert!(PROTOCOL_VERSION == 4, "the insider speaks version 4");

fn noise(initiator: bool) -> snow::HandshakeState {
    let key = blake3::derive_key(SECRET_CONTEXT, SECRET);
    let preamble = &dial().take_output()[..PREAMBLE_BYTES];
    let builder = snow::Builder::new(NOISE.parse().expect("the name of a Noise handshake"));
    let builder = builder.psk(0, &key).and_then(|builder| builder.prologue(preamble));
    let state = builder
        .and_then(|builder| if initiator { builder.build_initiator() } else { builder.build_responder() });
    state.expect("these parameters are complete")
}

fn say(noise: &mut snow::HandshakeState, plain: &[u8]) -> Vec<u8> {
    let mut message = vec![0; plain.len() + 48];
    let len = noise.write_message(plain, &mut message).expect("the insider writes the next message");
    message.truncate(len);
    message
}

fn seal(noise: &mut snow::TransportState, plain: &[u8]) -> Vec<u8> {
    let mut message = vec![0; plain.len() + 16];
    noise.write_message(plain, &mut message).expect("the message is short");
    message
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = (message.len() as u16).to_le_bytes().to_vec();
    bytes.extend_from_slice(message);
    bytes
}

/// An encoded hello, written independently of the code under attack.
fn plain_hello(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = vec![7; 32];
    bytes.extend_from_slice(b"\x03gpu");
    bytes.extend_from_slice(&input.u32().to_le_bytes());
    let addresses = usize::from(input.u8()) % (limits::ADDRESSES_MAX + 2);
    bytes.push(addresses as u8);
    for index in 0..addresses {
        match index % 2 {
            0 => bytes.extend_from_slice(&[4, 10, 0, 0, 1]),
            _ => bytes.extend_from_slice(&[6, 0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        }
        bytes.extend_from_slice(b"\x2f\x1d\x04eth1");
    }
    bytes
}

fn plain_config(input: &mut Input<'_>, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&input.u16().to_le_bytes());
    bytes.extend_from_slice(&input.u32().to_le_bytes());
    bytes.extend_from_slice(&input.u32().to_le_bytes());
    bytes.push(input.u8() % 3);
    bytes.push(input.u8() % 17);
    let extra = input.u16() % 260;
    bytes.extend_from_slice(&extra.to_le_bytes());
    bytes.extend(std::iter::repeat_n(5, usize::from(extra)));
}

/// A configuration that asks for at most what [`dial`] proposes.
fn settled_config(input: &mut Input<'_>, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&(1 + u16::from(input.u8() % 16)).to_le_bytes());
    bytes.extend_from_slice(&(1u32 << 20).to_le_bytes());
    bytes.extend_from_slice(&64u32.to_le_bytes());
    bytes.extend_from_slice(&[1, input.u8() % 16, 3, 0, 1, 2, 3]);
}

pub(super) fn dials(input: &mut Input<'_>) {
    let mut plain = plain_hello(input);
    let kind = input.u8() % 4;
    plain.push(kind);
    match kind {
        1 => {
            plain.extend_from_slice(&[8; 32]);
            plain_config(input, &mut plain);
        }
        _ => {
            plain.extend_from_slice(&(u64::from(input.u8() & 1) + KNOWN).to_le_bytes());
            plain.extend_from_slice(&input.u64().to_le_bytes());
            plain.extend_from_slice(&[8; 32]);
        }
    }
    input.spoil(&mut plain);
    plain.truncate(limits::HANDSHAKE_BYTES_MAX);
    let mut gate = Gate::new(Some(SECRET));
    gate.known = Some(known());
    let decided = gate.decided.clone();
    let mut responder = Responder::new(gate);
    let mut noise = noise(true);
    let knock = [&dial().take_output()[..PREAMBLE_BYTES], &framed(&say(&mut noise, &[]))].concat();
    feed(&mut responder, &knock, input).expect("the insider holds the secret");
    let answer = responder.take_output();
    noise.read_message(&answer[2..], &mut vec![0; answer.len()]).expect("an authentic answer");
    let mut noise = noise.into_transport_mode().expect("two messages are all");
    let result = feed(&mut responder, &framed(&seal(&mut noise, &plain)), input);
    let outcome = responder.finished();
    assert_eq!(outcome.is_some(), result.is_ok() && responder.want() == 0);
    assert!(decided.get() <= 1 && (outcome.is_none() || decided.get() == 1));
    if let Some(outcome) = outcome {
        check_outcome(&outcome);
        let Outcome::Control(established) = outcome else {
            panic!("a data connection on a control connection");
        };
        assert!(
            established.session == OPENED && !established.resumed,
            "the key of a foreign session cannot be proven"
        );
        let welcome = responder.take_output();
        let opened = noise.read_message(&welcome[2..], &mut vec![0; welcome.len()]);
        opened.expect("an authentic welcome");
    }
}

pub(super) fn answers(input: &mut Input<'_>) {
    let mut plain = plain_hello(input);
    input.spoil(&mut plain);
    let mut welcome = Vec::new();
    let session = input.u64();
    welcome.extend_from_slice(&session.to_le_bytes());
    welcome.extend_from_slice(&input.u64().to_le_bytes());
    welcome.extend_from_slice(&[8; 32]);
    match input.u8() & 1 {
        0 => plain_config(input, &mut welcome),
        _ => settled_config(input, &mut welcome),
    }
    input.spoil(&mut welcome);
    let resuming = input.u8() & 1 == 1;
    let mut initiator = if resuming { resume(KNOWN, 0, known().data_key) } else { dial() };
    let mut noise = noise(false);
    let knock = initiator.take_output();
    noise.read_message(&knock[PREAMBLE_BYTES + 2..], &mut vec![0; knock.len()]).expect("an authentic knock");
    if feed(&mut initiator, &framed(&say(&mut noise, &plain)), input).is_err() || initiator.want() != 2 {
        return;
    }
    let opening = initiator.take_output();
    if opening.is_empty() {
        return;
    }
    let mut noise = noise.into_transport_mode().expect("two messages are all");
    let opened = noise.read_message(&opening[2..], &mut vec![0; opening.len()]);
    opened.expect("an authentic opening");
    let result = feed(&mut initiator, &framed(&seal(&mut noise, &welcome)), input);
    let outcome = initiator.finished();
    assert_eq!(outcome.is_some(), result.is_ok() && initiator.want() == 0);
    if let Some(outcome) = outcome {
        check_outcome(&outcome);
        assert!(!resuming, "the key of a foreign session cannot be proven");
        check_settled(&outcome);
    }
}

/// Checks that the settled configuration stays within the proposal of [`dial`].
fn check_settled(outcome: &Outcome) {
    let (Outcome::Control(established), proposed) = (outcome, config()) else { return };
    let Established { config, received, protection, .. } = &**established;
    assert!(config.channels <= proposed.channels && config.chunk_bytes <= proposed.chunk_bytes);
    assert!(config.window <= proposed.window && config.crc == proposed.crc && *received == 0);
    assert!(protection.is_some_and(|protection| protection.encrypted), "encryption was required");
}
