//! The accepting end of a handshake: identifies a new connection, and admits or refuses it.
//!
//! States: `Preamble`, then control `FirstMessage -> Opening -> Over`, data `Claim -> Proof -> Over`.
//! Invariant: the [`Admission`] decides only about an end that has proven the secret or the session's key;
//! before that it is only queried.
//! Read next: `session/mod.rs`, for the traffic of a control connection.

use snow::HandshakeState;
use zeroize::Zeroizing;

use crate::protection::{Protection, ProtectionWish};

use super::codec::{HELLO_BYTES_MAX, OPENING_BYTES_MAX, Opening, Request, WELCOME_BYTES_MAX, Welcome};
use super::intake::{Expect, Incoming, Intake};
use super::{
    CHALLENGE_BYTES, Config, DataKey, DataOpening, Established, HandshakeError, Hello, Kind, Mismatch,
    NOISE_BYTES, Outcome, PROOF_BYTES, Preamble, Refusal, RefusalCode, Secure, TAG_BYTES, handshake_hash,
    noise, noise_read, noise_write,
};

/// A session that this endpoint knows.
#[derive(Clone, Debug)]
pub struct KnownSession {
    /// The session's key.
    pub data_key: DataKey,
    /// Identity of the session's peer.
    pub identity: [u8; 16],
    /// Number of the peer's numbered messages that this end has received.
    pub received: u64,
    /// The settled configuration.
    pub config: Config,
}

/// The endpoint's decisions and facts for a responder.
pub trait Admission {
    /// How this endpoint introduces itself.
    fn hello(&self) -> Hello;
    /// The shared secrets. If there are any, only peers that hold one of them are admitted.
    fn secrets(&self) -> Vec<Zeroizing<Vec<u8>>>;
    /// How this endpoint wants data connections to be protected.
    fn wish(&self) -> ProtectionWish {
        ProtectionWish::default()
    }
    /// Whether this endpoint refuses all peers as long as it has no secret.
    fn secret_needed(&self) -> bool;
    /// Looks up a session. The peer may not be authenticated yet.
    fn lookup(&self, session: u64) -> Option<KnownSession>;
    /// Opens a session for a peer that has proven the secret; returns its id and the accepted configuration.
    fn decide_new(&mut self, peer: &Hello, config: &Config) -> Result<(u64, Config), Refusal>;
    /// Admits a peer that has proven the session's key and is about to resume it.
    fn decide_resume(&mut self, _session: u64, _peer: &Hello) -> Result<(), Refusal> {
        Ok(())
    }
    /// Admits a data connection that has proven the session's key.
    fn decide_data(&mut self, session: u64, channel: u16, generation: u32) -> Result<(), Refusal>;
}

/// The accepting end of one connection's handshake; drive it like [`super::Initiator`].
#[derive(Debug)]
pub struct Responder<A> {
    admission: A,
    intake: Intake,
    output: Vec<u8>,
    stage: Stage,
    outcome: Option<Outcome>,
}

#[derive(Debug)]
enum Stage {
    Preamble,
    FirstMessage,
    Opening { secure: Secure, handshake: [u8; 32] },
    Claim,
    Proof { opening: DataOpening, key: DataKey, challenge: [u8; CHALLENGE_BYTES] },
    Over,
}

impl<A: Admission> Responder<A> {
    /// The accepting end of a new connection.
    pub fn new(admission: A) -> Responder<A> {
        let (intake, stage) = (Intake::of_responder(), Stage::Preamble);
        Responder { admission, intake, output: Vec::new(), stage, outcome: None }
    }

    /// Number of bytes to read next; never beyond the handshake, and 0 when it is over.
    pub fn want(&self) -> usize {
        if matches!(self.stage, Stage::Over) { 0 } else { self.intake.want() }
    }

    /// Takes bytes that were read, at most [`Responder::want`]. After an error the output may hold a refusal:
    /// write it, then close the connection.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        if bytes.len() > self.want() {
            return Err(HandshakeError::Misuse);
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let result = self.advance(bytes);
        if let Err(error) = &result {
            self.stage = Stage::Over;
            self.output.extend(error.refusal().map(|refusal| refusal.encode()).unwrap_or_default());
        }
        result
    }

    /// Takes the bytes to write, in order; empty when there is nothing to send.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Takes the handshake's outcome once the handshake has succeeded; returns it only once. Write the output
    /// too.
    pub fn finished(&mut self) -> Option<Outcome> {
        self.outcome.take()
    }

    /// The error to report when the other end closes the connection now.
    pub fn closed(&self) -> HandshakeError {
        self.intake.closed(&self.expect())
    }

    /// The error to report when the handshake times out now.
    pub fn late(&self) -> HandshakeError {
        match self.closed() {
            HandshakeError::Closed(what) => HandshakeError::Late(what),
            known => known,
        }
    }

    /// Ends the handshake from this end, for example because too many are pending. The output is then the
    /// refusal, unless the connection has shown that it speaks another protocol. A connection without any
    /// bytes yet gets the refusal too: this end may have been too busy to read it, and the peer should know
    /// that it can retry.
    pub fn refuse(&mut self, refusal: Refusal) -> HandshakeError {
        let foreign = matches!(self.closed(), HandshakeError::NotFerrywire { .. });
        if !foreign && !matches!(self.stage, Stage::Over) {
            self.output.extend(refusal.encode());
        }
        self.stage = Stage::Over;
        HandshakeError::Declined(refusal)
    }

    fn expect(&self) -> Expect {
        let (what, bytes) = match self.stage {
            Stage::Preamble => ("the preamble", 0..=0),
            Stage::FirstMessage => ("the first message", NOISE_BYTES..=NOISE_BYTES),
            Stage::Opening { .. } => ("the opening", TAG_BYTES..=TAG_BYTES + OPENING_BYTES_MAX),
            Stage::Claim => ("the data opening", DataOpening::BYTES..=DataOpening::BYTES),
            Stage::Proof { .. } => ("the proof", PROOF_BYTES..=PROOF_BYTES),
            Stage::Over => ("nothing", 0..=0),
        };
        Expect { what, bytes }
    }

    fn advance(&mut self, mut bytes: &[u8]) -> Result<(), HandshakeError> {
        match self.intake.take(&mut bytes, &self.expect())? {
            None => Ok(()),
            Some(Incoming::Preamble(preamble)) => self.on_preamble(&preamble),
            Some(Incoming::Refusal(refusal)) => Err(HandshakeError::Refused(refusal)),
            Some(Incoming::Message(message)) => self.message(&message),
        }
    }

    fn message(&mut self, message: &[u8]) -> Result<(), HandshakeError> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::FirstMessage => self.on_first_message(message),
            Stage::Opening { secure, handshake } => self.on_opening(secure, handshake, message),
            Stage::Claim => self.on_claim(message),
            Stage::Proof { opening, key, challenge } => self.on_proof(opening, &key, &challenge, message),
            Stage::Preamble | Stage::Over => Err(HandshakeError::Misuse),
        }
    }

    fn on_preamble(&mut self, preamble: &[u8]) -> Result<(), HandshakeError> {
        self.stage = match Preamble::decode(preamble)? {
            Kind::Control if self.admission.secret_needed() && self.admission.secrets().is_empty() => {
                return Err(HandshakeError::WrongSecret(Mismatch::NeededHere));
            }
            Kind::Control => Stage::FirstMessage,
            Kind::Data => Stage::Claim,
        };
        Ok(())
    }

    fn on_first_message(&mut self, message: &[u8]) -> Result<(), HandshakeError> {
        let secrets = self.admission.secrets();
        let mut noise = fitting(&secrets, message)?
            .ok_or_else(|| HandshakeError::WrongSecret(mismatch(!secrets.is_empty(), message)))?;
        let hello = self.admission.hello();
        hello.check()?;
        let mut payload = Vec::new();
        hello.encode(&mut payload);
        debug_assert!(payload.len() <= HELLO_BYTES_MAX);
        let answer = noise_write(&mut noise, &payload)?;
        self.put_frame(&answer);
        self.stage = opening_stage(noise)?;
        Ok(())
    }

    fn on_opening(
        &mut self,
        mut secure: Secure,
        handshake: [u8; 32],
        message: &[u8],
    ) -> Result<(), HandshakeError> {
        let opened = secure.open_message(message);
        let Opening { hello, request } =
            Opening::decode(&opened.map_err(|_| HandshakeError::Unproven("this connection's key"))?)?;
        let resumed = matches!(request, Request::Resume { .. });
        let (welcome, data_key, peer_received, protection) = match request {
            Request::New { share, config } => {
                let (welcome, data_key, protection) =
                    self.open_session(&hello, &config, &handshake, &share)?;
                (welcome, data_key, 0, protection)
            }
            Request::Resume { session, received, proof } => {
                let (welcome, data_key) = self.resume_session(&hello, session, &handshake, proof)?;
                (welcome, data_key, received, None)
            }
        };
        let encoded = welcome.encode();
        debug_assert!(encoded.len() <= WELCOME_BYTES_MAX);
        self.output.extend(secure.seal(&encoded).map_err(|_| HandshakeError::Noise)?);
        let Welcome { session, config, .. } = welcome;
        let (peer_hello, received) = (hello, peer_received);
        let established =
            Established { secure, peer_hello, session, received, data_key, config, protection, resumed };
        self.outcome = Some(Outcome::Control(Box::new(established)));
        Ok(())
    }

    fn open_session(
        &mut self,
        peer: &Hello,
        config: &Config,
        handshake: &[u8; 32],
        share: &[u8; 32],
    ) -> Result<(Welcome, DataKey, Option<Protection>), HandshakeError> {
        let declined = |why| HandshakeError::Declined(Refusal::new(RefusalCode::Config, why));
        if let Some(fault) = config.fault() {
            return Err(declined(fault));
        }
        let wish = self.admission.wish();
        let protection = ProtectionWish::settle(config.wish, wish);
        let protection = protection.map_err(|conflict| declined(conflict.to_string()))?;
        let token = super::random_bytes()?;
        let (session, config) = self.admission.decide_new(peer, config).map_err(HandshakeError::Declined)?;
        let config = Config { wish, ..config };
        config.check()?;
        let data_key = DataKey::derive(handshake, share, &token);
        Ok((Welcome { session, received: 0, token, config }, data_key, protection))
    }

    fn resume_session(
        &mut self,
        peer: &Hello,
        session: u64,
        handshake: &[u8; 32],
        proof: [u8; 32],
    ) -> Result<(Welcome, DataKey), HandshakeError> {
        let known = self.known(session)?;
        if known.data_key.prove_resume(handshake) != proof || known.identity != peer.identity {
            return Err(HandshakeError::Unproven("the session's key"));
        }
        self.admission.decide_resume(session, peer).map_err(HandshakeError::Declined)?;
        let KnownSession { data_key, received, config, .. } = self.known(session)?;
        let token = *data_key.prove_resumed(handshake).as_bytes();
        Ok((Welcome { session, received, token, config }, data_key))
    }

    fn on_claim(&mut self, message: &[u8]) -> Result<(), HandshakeError> {
        let opening = DataOpening::decode(message)?;
        let key = self.known(opening.session)?.data_key;
        let challenge = super::random_bytes()?;
        self.put_frame(&challenge);
        self.stage = Stage::Proof { opening, key, challenge };
        Ok(())
    }

    fn on_proof(
        &mut self,
        opening: DataOpening,
        key: &DataKey,
        challenge: &[u8],
        message: &[u8],
    ) -> Result<(), HandshakeError> {
        if key.prove_data(&opening, challenge) != *message {
            return Err(HandshakeError::Unproven("the session's key"));
        }
        let DataOpening { session, channel, generation } = opening;
        self.admission.decide_data(session, channel, generation).map_err(HandshakeError::Declined)?;
        self.put_frame(key.prove_accept(&opening, challenge).as_bytes());
        let secrets = key.record_secrets(&opening, challenge);
        self.outcome = Some(Outcome::Data { session, channel, generation, secrets });
        Ok(())
    }

    fn known(&self, session: u64) -> Result<KnownSession, HandshakeError> {
        let unknown =
            || Refusal::new(RefusalCode::UnknownSession, format!("there is no session {session:#x}"));
        self.admission.lookup(session).ok_or_else(|| HandshakeError::Declined(unknown()))
    }

    fn put_frame(&mut self, message: &[u8]) {
        self.output.extend_from_slice(&(message.len() as u16).to_le_bytes());
        self.output.extend_from_slice(message);
    }
}

fn opening_stage(noise: Box<HandshakeState>) -> Result<Stage, HandshakeError> {
    let handshake = handshake_hash(&noise)?;
    let secure = Secure::new(*noise).map_err(|_| HandshakeError::Noise)?;
    Ok(Stage::Opening { secure, handshake })
}

/// The state of the handshake after its first message, with the secret that the message was made with; `None`
/// if no secret of this end fits.
fn fitting(
    secrets: &[Zeroizing<Vec<u8>>],
    message: &[u8],
) -> Result<Option<Box<HandshakeState>>, HandshakeError> {
    let held = secrets.iter().map(|secret| Some(secret.as_slice()));
    let none = secrets.is_empty().then_some(None);
    for secret in held.chain(none) {
        let mut noise = noise(secret, false)?;
        if noise_read(&mut noise, message).is_some() {
            return Ok(Some(noise));
        }
    }
    Ok(None)
}

/// Why a first message does not fit this end's secret; tests whether it was made without a secret.
fn mismatch(have_secret: bool, message: &[u8]) -> Mismatch {
    if !have_secret {
        return Mismatch::WeHaveNone;
    }
    let without = noise(None, false).ok().and_then(|mut noise| noise_read(&mut noise, message));
    if without.is_some() { Mismatch::TheyHaveNone } else { Mismatch::Different }
}
