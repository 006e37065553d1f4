//! The dialling end of a handshake: opens or resumes a control session, or adds a data connection to one.
//!
//! States: control `Answer -> Welcome -> Over`, data `Challenge -> Accept -> Over`.
//! Invariants: a session counts as open only after the other end has proven the secret, and as resumed only
//! after it has proven the session's key; the settled configuration lies within the proposal.
//! Read next: `responder.rs`, the other half of each step.

use snow::HandshakeState;

use super::codec::{
    HELLO_BYTES_MAX, OPENING_BYTES_MAX, Opening, Reader, Request, WELCOME_BYTES_MAX, Welcome,
};
use super::intake::{Expect, Incoming, Intake};
use super::{
    CHALLENGE_BYTES, Config, DataKey, DataOpening, Established, HandshakeError, Hello, Kind, NOISE_BYTES,
    Outcome, PROOF_BYTES, Preamble, Refusal, RefusalCode, Secure, TAG_BYTES, handshake_hash, noise,
    noise_read, noise_write,
};
use crate::identity::Identity;
use crate::protection::ProtectionWish;
use crate::record::RecordSecrets;

/// Why a control connection is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Open a new session.
    New {
        /// The proposed configuration.
        config: Config,
    },
    /// Resume a session whose connection is lost.
    Resume {
        /// Id of the session.
        session: u64,
        /// Number of the peer's numbered messages that this end has received.
        received: u64,
        /// The session's key.
        data_key: DataKey,
    },
}

/// The dialling end of one connection's handshake.
///
/// Write [`Initiator::take_output`], read at most [`Initiator::want`] bytes and [`Initiator::feed`] them.
/// Repeat until [`Initiator::finished`] returns the outcome or `feed` an error.
#[derive(Debug)]
pub struct Initiator {
    intake: Intake,
    output: Vec<u8>,
    stage: Stage,
    outcome: Option<Outcome>,
    /// Only an endpoint with this identity is asked for a session.
    wanted: Option<Identity>,
}

#[derive(Debug)]
enum Stage {
    Answer { noise: Box<HandshakeState>, hello: Hello, purpose: Purpose },
    Welcome { secure: Secure, peer_hello: Hello, handshake: [u8; 32], asked: Asked },
    Challenge { opening: DataOpening, key: DataKey },
    Accept { opening: DataOpening, proof: blake3::Hash, secrets: RecordSecrets },
    Over,
}

/// The values against which the welcome is checked.
enum Asked {
    New { share: [u8; 32], proposed: Config },
    Resume { session: u64, data_key: DataKey },
}

impl std::fmt::Debug for Asked {
    /// Formats the values without this end's share, since the session's key can be derived from it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Asked::New { .. } => "New",
            Asked::Resume { .. } => "Resume",
        })
    }
}

impl Initiator {
    /// Opens a control connection for `purpose`; `hello` introduces this end.
    pub fn control(
        secret: Option<&[u8]>,
        hello: Hello,
        purpose: Purpose,
    ) -> Result<Initiator, HandshakeError> {
        hello.check()?;
        if let Purpose::New { config } = &purpose {
            config.check()?;
        }
        let mut noise = noise(secret, true)?;
        let first = noise_write(&mut noise, &[])?;
        let mut initiator = Initiator::new(Kind::Control, Stage::Answer { noise, hello, purpose });
        initiator.put_frame(&first);
        Ok(initiator)
    }

    /// Opens the data connection of a channel; `generation` counts the channel's connections.
    ///
    /// A generation must never repeat within a session; otherwise a recorded acceptance would be valid again.
    pub fn data(session: u64, key: DataKey, channel: u16, generation: u32) -> Initiator {
        let opening = DataOpening { session, channel, generation };
        let mut initiator = Initiator::new(Kind::Data, Stage::Challenge { opening, key });
        initiator.put_frame(&opening.encode());
        initiator
    }

    fn new(kind: Kind, stage: Stage) -> Initiator {
        let output = Preamble::encode(kind).to_vec();
        Initiator { intake: Intake::of_initiator(), output, stage, outcome: None, wanted: None }
    }

    /// Restricts the handshake to the endpoint `wanted`. Another endpoint never gets a request, so it opens
    /// no session that would end at once.
    pub fn of_one_end(self, wanted: Option<Identity>) -> Initiator {
        Initiator { wanted, ..self }
    }

    /// Changes the proposed number of channels, as long as the proposal is not sent: the other end has not answered.
    pub fn propose_channels(&mut self, channels: u16) {
        if let Stage::Answer { purpose: Purpose::New { config }, .. } = &mut self.stage {
            config.channels = channels;
        }
    }

    /// Number of bytes to read next; never beyond the handshake, and 0 when it is over.
    pub fn want(&self) -> usize {
        if matches!(self.stage, Stage::Over) { 0 } else { self.intake.want() }
    }

    /// Takes bytes that were read, at most [`Initiator::want`]. After an error, write the remaining output,
    /// then close the connection.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        if bytes.len() > self.want() {
            return Err(HandshakeError::Misuse);
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let result = self.advance(bytes);
        if result.is_err() {
            self.stage = Stage::Over;
        }
        result
    }

    /// Takes the bytes to write, in order; empty when there is nothing to send.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Takes the handshake's outcome once the handshake has succeeded; returns it only once.
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

    fn expect(&self) -> Expect {
        let (what, bytes) = match self.stage {
            Stage::Answer { .. } => ("the answer", NOISE_BYTES..=NOISE_BYTES + HELLO_BYTES_MAX),
            Stage::Welcome { .. } => ("the welcome", TAG_BYTES..=TAG_BYTES + WELCOME_BYTES_MAX),
            Stage::Challenge { .. } => ("the challenge", CHALLENGE_BYTES..=CHALLENGE_BYTES),
            Stage::Accept { .. } => ("the acceptance", PROOF_BYTES..=PROOF_BYTES),
            Stage::Over => ("nothing", 0..=0),
        };
        Expect { what, bytes }
    }

    fn advance(&mut self, mut bytes: &[u8]) -> Result<(), HandshakeError> {
        match self.intake.take(&mut bytes, &self.expect())? {
            None => Ok(()),
            Some(Incoming::Refusal(refusal)) => Err(self.refused(refusal)),
            Some(Incoming::Message(message)) => self.message(&message),
            Some(Incoming::Preamble(_)) => Err(HandshakeError::Misuse),
        }
    }

    /// The error of a refusal. It is not authenticated. A responder learns which session is resumed only after it has
    /// proven the secret, so an end that has not proven it cannot say that it does not know the session.
    fn refused(&self, refusal: Refusal) -> HandshakeError {
        if refusal.code == RefusalCode::UnknownSession && matches!(self.stage, Stage::Answer { .. }) {
            return HandshakeError::malformed("a refusal", "of a session that was not yet named");
        }
        HandshakeError::Refused(refusal)
    }

    fn message(&mut self, message: &[u8]) -> Result<(), HandshakeError> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Answer { noise, hello, purpose } => self.on_answer(noise, hello, purpose, message),
            Stage::Welcome { secure, peer_hello, handshake, asked } => {
                self.on_welcome(secure, peer_hello, handshake, asked, message)
            }
            Stage::Challenge { opening, key } => self.on_challenge(opening, &key, message),
            Stage::Accept { opening, proof, secrets } => self.on_accept(opening, proof, secrets, message),
            Stage::Over => Err(HandshakeError::Misuse),
        }
    }

    fn on_answer(
        &mut self,
        mut noise: Box<HandshakeState>,
        hello: Hello,
        purpose: Purpose,
        message: &[u8],
    ) -> Result<(), HandshakeError> {
        let payload = noise_read(&mut noise, message).ok_or(HandshakeError::SecretUnproven)?;
        let mut reader = Reader::new(&payload, "the answer");
        let peer_hello = Hello::decode(&mut reader)?;
        reader.end()?;
        let found = Identity(peer_hello.identity);
        if self.wanted.is_some_and(|wanted| wanted != found) {
            return Err(HandshakeError::Another(found));
        }
        let handshake = handshake_hash(&noise)?;
        let (request, asked) = ask(purpose, &handshake)?;
        let mut secure = Secure::new(*noise).map_err(|_| HandshakeError::Noise)?;
        let opening = Opening { hello, request }.encode();
        debug_assert!(opening.len() <= OPENING_BYTES_MAX);
        self.output.extend(secure.seal(&opening).map_err(|_| HandshakeError::Noise)?);
        self.stage = Stage::Welcome { secure, peer_hello, handshake, asked };
        Ok(())
    }

    fn on_welcome(
        &mut self,
        mut secure: Secure,
        peer_hello: Hello,
        handshake: [u8; 32],
        asked: Asked,
        message: &[u8],
    ) -> Result<(), HandshakeError> {
        let opened = secure.open_message(message);
        let Welcome { session, received, token, config } =
            Welcome::decode(&opened.map_err(|_| HandshakeError::Unproven("the welcome"))?)?;
        let (data_key, protection, resumed) = match asked {
            Asked::New { share, proposed } => {
                let overreach = config.overreach(&proposed).or((received > 0).then(never_said));
                overreach.map_or(Ok(()), |what| Err(HandshakeError::Overreach(what)))?;
                let protection = ProtectionWish::settle(proposed.wish, config.wish);
                let protection = protection.map_err(|why| HandshakeError::Overreach(why.to_string()))?;
                (DataKey::derive(&handshake, &share, &token), protection, false)
            }
            Asked::Resume { session: asked, data_key } => {
                if session != asked || data_key.prove_resumed(&handshake) != token {
                    return Err(HandshakeError::Unproven("the session's key"));
                }
                (data_key, None, true)
            }
        };
        let established =
            Established { secure, peer_hello, session, received, data_key, config, protection, resumed };
        self.outcome = Some(Outcome::Control(Box::new(established)));
        Ok(())
    }

    fn on_challenge(
        &mut self,
        opening: DataOpening,
        key: &DataKey,
        challenge: &[u8],
    ) -> Result<(), HandshakeError> {
        self.put_frame(key.prove_data(&opening, challenge).as_bytes());
        let (proof, secrets) =
            (key.prove_accept(&opening, challenge), key.record_secrets(&opening, challenge));
        self.stage = Stage::Accept { opening, proof, secrets };
        Ok(())
    }

    fn on_accept(
        &mut self,
        opening: DataOpening,
        proof: blake3::Hash,
        secrets: RecordSecrets,
        message: &[u8],
    ) -> Result<(), HandshakeError> {
        if proof != *message {
            return Err(HandshakeError::Unproven("the session's key"));
        }
        let DataOpening { session, channel, generation } = opening;
        self.outcome = Some(Outcome::Data { session, channel, generation, secrets });
        Ok(())
    }

    fn put_frame(&mut self, message: &[u8]) {
        self.output.extend_from_slice(&(message.len() as u16).to_le_bytes());
        self.output.extend_from_slice(message);
    }
}

fn never_said() -> String {
    String::from("the responder has received messages of a session that is new")
}

/// The request for a purpose, and the values against which its welcome is checked.
fn ask(purpose: Purpose, handshake: &[u8; 32]) -> Result<(Request, Asked), HandshakeError> {
    match purpose {
        Purpose::New { config } => {
            let share = super::random_bytes()?;
            Ok((Request::New { share, config: config.clone() }, Asked::New { share, proposed: config }))
        }
        Purpose::Resume { session, received, data_key } => {
            let proof = *data_key.prove_resume(handshake).as_bytes();
            Ok((Request::Resume { session, received, proof }, Asked::Resume { session, data_key }))
        }
    }
}
