//! Fuzz target for the records of a protected connection, which an attacker on the path changes.

use super::Input;
use crate::protection::{Algorithm, Protection};
use crate::record::{RECORD_HEADER_BYTES, RECORD_OVERHEAD, RECORD_TAG_BYTES, RecordSecret, Records};

/// Seals some records, lets the input change the stream, and opens it: what opens is a prefix of what was sealed.
pub(super) fn changed(input: &mut Input<'_>) {
    let algorithm = if input.u8() & 1 == 0 { Algorithm::Aes256Gcm } else { Algorithm::ChaCha20Poly1305 };
    let protection = Protection { encrypted: input.u8() & 1 == 0, algorithm };
    let payloads: Vec<_> =
        (0..1 + input.u8() % 5).map(|number| vec![number; 1 + usize::from(input.u8())]).collect();
    // Other records have another key. The fuzzer learns tags from comparisons, and with one key for all runs it inserted
    // a record of an earlier run, which opened.
    let run = format!("{protection:?} {payloads:?}");
    let records = || Records::new(protection, RecordSecret::new(*blake3::hash(run.as_bytes()).as_bytes()));
    let (mut sealer, mut opener) = (records(), records());
    let mut stream = Vec::new();
    for payload in &payloads {
        let mut record = vec![0; payload.len() + RECORD_OVERHEAD];
        sealer.seal_from(payload, &mut record).expect("the length is possible");
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

#[cfg(test)]
mod tests {
    /// Found by 20 minutes of fuzzing, while all runs had one key: a record of 3 bytes from an earlier run.
    #[test]
    fn a_record_of_another_run_does_not_open() {
        let input =
            b"\x04\x11\xd7\x0b\x0a\x00\x00\x00\x7a\x41\x01\x03\x00\x00\x00\x00\x00\x00\x05\x86\x35\x73\
          \x92\xe8\x00\x4c\x3e\xfd\x48\x7a\xd2\x04\xa5\xaf\x7a\x00\x00\x00\x01\x01\x01\x01\x01\x01\
          \x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\
          \x01\x01\x01\x01\x01\x01\x01\x01\x01";
        crate::fuzzing::records(input);
    }
}
