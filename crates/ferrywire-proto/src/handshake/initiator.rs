//! The end that dials: opens or resumes a control session, or adds a data connection to one.
//!
//! States: control `Answer -> Welcome -> Over`, data `Challenge -> Accept -> Over`.
//! Invariant: a session counts as open only after the other end has proven the secret, and as resumed
//! only after it has proven the session's key; what it settled lies within what was proposed.
//! Read next: `responder.rs`, the other half of each step.

use snow::HandshakeState;

use super::codec::{
    HELLO_BYTES_MAX, OPENING_BYTES_MAX, Opening, Reader, Request, WELCOME_BYTES_MAX, Welcome,
};
use super::intake::{Expect, Incoming, Intake};
use super::{
    CHALLENGE_BYTES, Config, DataKey, DataOpening, Established, HandshakeError, Hello, Kind, NOISE_BYTES,
    Outcome, PROOF_BYTES, Preamble, Secure, TAG_BYTES, handshake_hash, noise, noise_read, noise_write,
};
use crate::identity::Identity;

/// What a control connection is opened for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A new session with this configuration.
    New {
        /// What we propose.
        config: Config,
    },
    /// To go on with a session whose connection is gone.
    Resume {
        /// The session.
        session: u64,
        /// Numbered messages of the peer that we have received.
        received: u64,
        /// The session's key.
        data_key: DataKey,
    },
}

/// The dialling end of one connection's handshake.
///
/// Write [`Initiator::take_output`], read at most [`Initiator::want`] bytes, [`Initiator::feed`] them,
/// until [`Initiator::finished`] gives the outcome or `feed` an error.
#[derive(Debug)]
pub struct Initiator {
    intake: Intake,
    output: Vec<u8>,
    stage: Stage,
    outcome: Option<Outcome>,
    /// Nobody else is asked for a session.
    wanted: Option<Identity>,
}

#[derive(Debug)]
enum Stage {
    Answer { noise: Box<HandshakeState>, hello: Hello, purpose: Purpose },
    Welcome { secure: Secure, peer_hello: Hello, handshake: [u8; 32], asked: Asked },
    Challenge { opening: DataOpening, key: DataKey },
    Accept { opening: DataOpening, proof: blake3::Hash },
    Over,
}

/// What the welcome has to answer.
#[derive(Debug)]
enum Asked {
    New { share: [u8; 32], proposed: Config },
    Resume { session: u64, data_key: DataKey },
}

impl Initiator {
    /// Opens a control connection, as `hello`, for `purpose`.
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

    /// Opens the data connection of a channel; `generation` counts its connections.
    ///
    /// Never the same generation twice in a session: a recorded acceptance would fit again.
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

    /// Asks for a session only if the other end is this one: any other is to have no session that ends at once.
    pub fn of_one_end(self, wanted: Option<Identity>) -> Initiator {
        Initiator { wanted, ..self }
    }

    /// Bytes to read next, exactly; never more than the handshake. 0 when it is over.
    pub fn want(&self) -> usize {
        if matches!(self.stage, Stage::Over) { 0 } else { self.intake.want() }
    }

    /// Takes what was read, at most [`Initiator::want`] bytes. After an error the connection is useless;
    /// write what is left in the output, then close it.
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

    /// Bytes to write, in order; empty when there is nothing to say.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// The outcome, once.
    pub fn finished(&mut self) -> Option<Outcome> {
        self.outcome.take()
    }

    /// What it means that the other end closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        self.intake.closed(&self.expect())
    }

    /// What it means that the handshake's deadline passed now.
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
            Some(Incoming::Refusal(refusal)) => Err(HandshakeError::Refused(refusal)),
            Some(Incoming::Message(message)) => self.message(&message),
            Some(Incoming::Preamble(_)) => Err(HandshakeError::Misuse),
        }
    }

    fn message(&mut self, message: &[u8]) -> Result<(), HandshakeError> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Answer { noise, hello, purpose } => self.on_answer(noise, hello, purpose, message),
            Stage::Welcome { secure, peer_hello, handshake, asked } => {
                self.on_welcome(secure, peer_hello, handshake, asked, message)
            }
            Stage::Challenge { opening, key } => self.on_challenge(opening, &key, message),
            Stage::Accept { opening, proof } => self.on_accept(opening, proof, message),
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
        let (data_key, resumed) = match asked {
            Asked::New { share, proposed } => {
                let overreach = config.overreach(&proposed).or((received > 0).then(never_said));
                overreach.map_or(Ok(()), |what| Err(HandshakeError::Overreach(what)))?;
                (DataKey::derive(&handshake, &share, &token), false)
            }
            Asked::Resume { session: asked, data_key } => {
                if session != asked || data_key.prove_resumed(&handshake) != token {
                    return Err(HandshakeError::Unproven("the session's key"));
                }
                (data_key, true)
            }
        };
        let established = Established { secure, peer_hello, session, received, data_key, config, resumed };
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
        self.stage = Stage::Accept { opening, proof: key.prove_accept(&opening, challenge) };
        Ok(())
    }

    fn on_accept(
        &mut self,
        opening: DataOpening,
        proof: blake3::Hash,
        message: &[u8],
    ) -> Result<(), HandshakeError> {
        if proof != *message {
            return Err(HandshakeError::Unproven("the session's key"));
        }
        let DataOpening { session, channel, generation } = opening;
        self.outcome = Some(Outcome::Data { session, channel, generation });
        Ok(())
    }

    fn put_frame(&mut self, message: &[u8]) {
        self.output.extend_from_slice(&(message.len() as u16).to_le_bytes());
        self.output.extend_from_slice(message);
    }
}

fn never_said() -> String {
    String::from("it has received messages of a session that is new")
}

/// The request for a purpose, and what its welcome has to answer.
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
