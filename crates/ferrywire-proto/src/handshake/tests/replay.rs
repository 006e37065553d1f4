//! Handshakes by an attacker who recorded others, or who holds the secret but not the session's key.

use super::adversarial::Kinds;
use super::*;

const SECRET: Option<&str> = Some("correct horse");

/// Feeds recorded bytes to a new responder, as far as it wants them.
fn replay(desk: &Shared, mut recorded: &[u8]) -> (Option<Outcome>, Result<(), HandshakeError>) {
    let mut responder = Responder::new(desk.clone());
    while responder.want() > 0 && !recorded.is_empty() {
        let (now, later) = recorded.split_at(responder.want().min(recorded.len()));
        if let Err(error) = responder.feed(now) {
            return (responder.finished(), Err(error));
        }
        recorded = later;
    }
    (responder.finished(), Ok(()))
}

#[test]
fn a_replayed_opening_does_not_complete() {
    let kinds = Kinds::new();
    let unproven = ["this connection's key", "this connection's key", "the session's key"];
    for (kind, what) in unproven.into_iter().enumerate() {
        let course = kinds.join(kind, &Wire::default());
        assert!(course.responder.is_ok());
        let decided = kinds.desk.desk().decided.len();
        let (outcome, result) = replay(&kinds.desk, &course.to_responder);
        assert_eq!(result, Err(HandshakeError::Unproven(what)));
        assert!(outcome.is_none());
        assert_eq!(kinds.desk.desk().decided.len(), decided, "a replay was decided upon");
    }
}

#[test]
fn a_recorded_answer_played_again_does_not_complete() {
    let kinds = Kinds::new();
    let unproven = HandshakeError::Unproven("the session's key");
    let errors = [HandshakeError::SecretUnproven, HandshakeError::SecretUnproven, unproven];
    for (kind, error) in errors.into_iter().enumerate() {
        let recorded = kinds.join(kind, &Wire::default()).to_initiator;
        let mut initiator = kinds.dials().into_iter().nth(kind).unwrap();
        // A repeated challenge makes a recorded acceptance valid again. Without the session's key an attacker
        // still cannot make one for another channel or generation.
        if kind == 2 {
            initiator = Initiator::data(77, kinds.data_key.clone(), 4, 6);
        }
        let mut rest = &recorded[..];
        let mut result = Ok(());
        while result.is_ok() {
            let (now, later) = rest.split_at(initiator.want().min(rest.len()));
            result = initiator.feed(now);
            rest = later;
        }
        assert_eq!(result, Err(error));
        assert!(initiator.finished().is_none());
    }
}

#[test]
fn a_resumption_with_another_key_or_identity_is_refused() {
    let (desk, initiator, _) = session(SECRET);
    let stolen = redial(SECRET, 77, 0, &DataKey::from_bytes([3; 32]));
    let (dialled, answered) = join(stolen, Responder::new(desk.clone()), &Wire::default()).errors();
    let refusal = Refusal::new(RefusalCode::Malformed, "the refused end could not prove the session's key");
    assert_eq!(answered, HandshakeError::Unproven("the session's key"));
    assert_eq!(dialled, HandshakeError::Refused(refusal));

    desk.desk().sessions.get_mut(&77).unwrap().identity = [8; 16];
    let other = redial(SECRET, 77, 0, &initiator.data_key);
    let (_, answered) = join(other, Responder::new(desk.clone()), &Wire::default()).errors();
    assert_eq!(answered, HandshakeError::Unproven("the session's key"));
    assert_eq!(desk.desk().decided, ["new gpu1"]);
}

/// An admission that resumes any session without holding its key.
struct Impostor(Shared);

impl Admission for Impostor {
    fn hello(&self) -> Hello {
        self.0.hello()
    }
    fn secrets(&self) -> Vec<zeroize::Zeroizing<Vec<u8>>> {
        self.0.secrets()
    }
    fn secret_needed(&self) -> bool {
        false
    }
    fn lookup(&self, session: u64) -> Option<KnownSession> {
        self.0.lookup(session)
    }
    fn decide_new(&mut self, _: &Hello, config: &Config) -> Result<(u64, Config), Refusal> {
        Ok((1, config.clone()))
    }
    fn decide_resume(&mut self, session: u64, _: &Hello) -> Result<(), Refusal> {
        self.0.desk().sessions.get_mut(&session).unwrap().data_key = DataKey::from_bytes([4; 32]);
        Ok(())
    }
    fn decide_data(&mut self, _: u64, _: u16, _: u32) -> Result<(), Refusal> {
        Ok(())
    }
}

#[test]
fn a_welcome_without_the_sessions_key_is_not_believed() {
    let (desk, initiator, _) = session(SECRET);
    let dialled = redial(SECRET, 77, 0, &initiator.data_key);
    let course = join(dialled, Responder::new(Impostor(desk)), &Wire::default());
    assert_eq!(course.initiator.unwrap_err(), HandshakeError::Unproven("the session's key"));
}
