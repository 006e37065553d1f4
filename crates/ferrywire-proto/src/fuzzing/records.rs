//! Fuzz target for the records of a protected connection, which an attacker on the path changes.

use super::Input;
use crate::protection::{Algorithm, Protection};
use crate::record::{RECORD_HEADER_BYTES, RECORD_OVERHEAD, RECORD_TAG_BYTES, RecordSecret, Records};

/// Seals some records, lets the input change the stream, and opens it: what opens is a prefix of what was sealed.
pub(super) fn changed(input: &mut Input<'_>) {
    let algorithm = if input.u8() & 1 == 0 { Algorithm::Aes256Gcm } else { Algorithm::ChaCha20Poly1305 };
    let protection = Protection { encrypted: input.u8() & 1 == 0, algorithm };
    let records = || Records::new(protection, RecordSecret::new([7; 32]));
    let (mut sealer, mut opener) = (records(), records());
    let (mut payloads, mut stream) = (Vec::new(), Vec::new());
    for number in 0..1 + input.u8() % 5 {
        let payload = vec![number; 1 + usize::from(input.u8())];
        let mut record = vec![0; payload.len() + RECORD_OVERHEAD];
        sealer.seal_from(&payload, &mut record).expect("the length is possible");
        payloads.push(payload);
        stream.extend_from_slice(&record);
    }
    let sealed = stream.clone();
    input.spoil(&mut stream);
    let (mut rest, mut opened) = (&stream[..], 0);
    while let Some(header) = rest.first_chunk::<RECORD_HEADER_BYTES>() {
        let Ok(bytes) = Records::record_bytes(*header) else { break };
        let Some((record, after)) = rest.split_at_checked(bytes) else { break };
        let mut record = record.to_vec();
        if opener.open(&mut record).is_err() {
            break;
        }
        let payload = &record[RECORD_HEADER_BYTES..bytes - RECORD_TAG_BYTES];
        assert!(payloads.get(opened).is_some_and(|sealed| sealed == payload), "a record that was not sealed");
        opened += 1;
        rest = after;
    }
    assert!(opened == payloads.len() || stream != sealed, "an unchanged stream does not open");
}
