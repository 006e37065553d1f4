//! The mutual proof by which each connection of a comm shows that it belongs to the comm, from the listener's
//! secret.
//!
//! ```text
//!   listener -> dialler   challenge   magic, version, whether it encrypts, nonce
//!   dialler -> listener   claim       comm, index of this socket, number of sockets, nonce, proof
//!   listener -> dialler   proof
//! ```
//!
//! Proofs are keyed hashes over the challenge and the claim, as those of the engine's data connections. The secret is
//! random, made for one listener, and carried by NCCL. No call waits for the other end.
//! Invariant: nothing of a claim is used before its proof is checked.

use std::io;

use blake3::Hash;
use ferrywire_net::{Conn, IoVec};
use ferrywire_sys::tcp_info::{self, TcpInfo};

use crate::encryption::{SharedKey, encrypt, shared_key};
use crate::failure::Fault;
use crate::handle::{Secret, array};
use crate::log;
use crate::settings::SOCKETS_MAX;

const MAGIC: [u8; 8] = *b"FWnccl\r\n";
/// Version of the bytes between two hosts' plugins and of their tuning of NCCL: both hosts must cut messages alike.
const VERSION: u32 = 2;
const CHALLENGE_BYTES: usize = 48;
/// Position of the byte of a challenge that says whether the connection is encrypted.
const ENCRYPTS_AT: usize = 12;
const CLAIM_BYTES: usize = 96;
const PROOF_BYTES: usize = 32;
/// Bytes of the part of a claim before its proof.
const CLAIMED_BYTES: usize = CLAIM_BYTES - PROOF_BYTES;

/// What to do about a wrong proof of an encrypted connection.
const ONE_SECRET: &str = "set the same FERRYWIRE_SECRET on all hosts";

/// The comm and the socket that a connection claims to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Random number of the comm, equal for all its sockets.
    pub comm: [u8; 16],
    /// Index of this socket in its comm; socket 0 carries small messages.
    pub index: u16,
    /// Number of sockets of the comm, socket 0 included.
    pub sockets: u16,
}

impl Claim {
    fn to_bytes(self, nonce: [u8; 32]) -> [u8; CLAIMED_BYTES] {
        let mut bytes = [0; CLAIMED_BYTES];
        bytes[..16].copy_from_slice(&self.comm);
        bytes[16..18].copy_from_slice(&self.index.to_le_bytes());
        bytes[18..20].copy_from_slice(&self.sockets.to_le_bytes());
        bytes[32..].copy_from_slice(&nonce);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Claim> {
        let short = |at| u16::from_le_bytes(array(bytes, at));
        let claim = Claim { comm: array(bytes, 0), index: short(16), sockets: short(18) };
        let possible = (2..=SOCKETS_MAX + 1).contains(&usize::from(claim.sockets));
        (possible && claim.index < claim.sockets).then_some(claim)
    }
}

/// Random bytes from the operating system.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: the kernel writes at most N bytes; it returns up to 256 bytes at once and completely.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if got == N as isize { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}

fn challenge(nonce: [u8; 32], encrypts: bool) -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; CHALLENGE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[ENCRYPTS_AT] = u8::from(encrypts);
    bytes[16..].copy_from_slice(&nonce);
    bytes
}

/// The proof of one side, as a keyed hash. Comparing hashes takes constant time.
fn prove(secret: &Secret, side: &[u8], challenge: &[u8], claimed: &[u8]) -> Hash {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    hasher.update(side).update(challenge).update(claimed);
    hasher.finalize()
}

const DIALLER: &[u8; 16] = b"ferrywire dials ";
const LISTENER: &[u8; 16] = b"ferrywire serves";

/// A message of fixed length of which a part has moved.
struct Moving<const N: usize> {
    bytes: [u8; N],
    moved: usize,
}

impl<const N: usize> Moving<N> {
    fn new(bytes: [u8; N]) -> Moving<N> {
        Moving { bytes, moved: 0 }
    }

    fn rest(&mut self) -> [IoVec; 1] {
        let rest = &mut self.bytes[self.moved..];
        [IoVec::new(rest.as_mut_ptr(), rest.len())]
    }

    /// Receives the message; returns it once it is complete, `None` before.
    fn receive(&mut self, conn: &mut dyn Conn) -> io::Result<Option<[u8; N]>> {
        while self.moved < N {
            // SAFETY: the piece is the rest of this message's array.
            match unsafe { conn.recv(&self.rest()) } {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Ok(bytes) => self.moved += bytes,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(Some(self.bytes))
    }

    /// Sends the message; returns whether all of it has been sent.
    fn send(&mut self, conn: &mut dyn Conn) -> io::Result<bool> {
        while self.moved < N {
            // SAFETY: the piece is the rest of this message's array.
            match unsafe { conn.send(&self.rest()) } {
                Ok(bytes) => self.moved += bytes,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }
}

/// The dialling end of one connection's proof.
pub struct Dialling {
    conn: Option<Box<dyn Conn>>,
    /// The key that encrypts the connection, if it is encrypted.
    key: Option<SharedKey>,
    claim: Claim,
    stage: DialStage,
    unreached: bool,
}

enum DialStage {
    Challenge(Moving<CHALLENGE_BYTES>),
    Claim(Moving<CLAIM_BYTES>, Expected),
    Proof(Moving<PROOF_BYTES>, Expected),
}

/// The listener's challenge, and the proof that the listener must return.
#[derive(Clone, Copy)]
struct Expected {
    asked: [u8; CHALLENGE_BYTES],
    claim: [u8; CLAIM_BYTES],
    proof: Hash,
}

impl Dialling {
    /// Begins the proof on a dialled connection, which is then encrypted if this process requires that.
    pub fn new(conn: Box<dyn Conn>, claim: Claim) -> Dialling {
        Dialling::with_key(conn, claim, shared_key().ok().flatten())
    }

    /// Like [`new`](Dialling::new), with the key that encrypts the connection, if it is encrypted.
    pub fn with_key(conn: Box<dyn Conn>, claim: Claim, key: Option<SharedKey>) -> Dialling {
        let stage = DialStage::Challenge(Moving::new([0; CHALLENGE_BYTES]));
        Dialling { conn: Some(conn), key, claim, stage, unreached: false }
    }

    /// Whether the peer's kernel has not answered yet.
    pub fn is_unanswered(&self) -> bool {
        let state = self.conn.as_ref().and_then(|conn| TcpInfo::read(conn.fd()?).ok());
        state.is_some_and(|info| info.state == tcp_info::SYN_SENT)
    }

    /// Whether the connection failed because the peer could not be reached; a peer that refuses was reached.
    pub fn is_unreached(&self) -> bool {
        self.unreached
    }

    /// Whether any byte of the peer has arrived, which shows that the peer was reached.
    pub fn has_heard(&self) -> bool {
        !matches!(&self.stage, DialStage::Challenge(message) if message.moved == 0)
    }

    /// Makes progress; returns the connection once both ends have proved themselves, `None` before and after that.
    pub fn poll(&mut self, secret: &Secret) -> Result<Option<Box<dyn Conn>>, Fault> {
        let Some(conn) = &mut self.conn else { return Ok(None) };
        let peer = conn.remote();
        let conn = conn.as_mut();
        let key = self.key;
        let secret = &key.map_or(*secret, |key| key.with_listener(secret));
        let unreached = &mut self.unreached;
        let mut broken = |e: io::Error| {
            *unreached = is_unreached(&e);
            Fault::connection(peer, &e)
        };
        loop {
            match &mut self.stage {
                DialStage::Challenge(message) => {
                    let Some(asked) = message.receive(conn).map_err(&mut broken)? else { return Ok(None) };
                    let expected = answer(secret, &asked, self.claim, key.is_some())
                        .map_err(|why| Fault::remote(format_args!("{peer}: {why}")))?;
                    self.stage = DialStage::Claim(Moving::new(expected.claim), expected);
                }
                DialStage::Claim(message, expected) => {
                    if !message.send(conn).map_err(&mut broken)? {
                        return Ok(None);
                    }
                    self.stage = DialStage::Proof(Moving::new([0; PROOF_BYTES]), *expected);
                }
                DialStage::Proof(message, expected) => {
                    let received = message.receive(conn).map_err(|e| match key {
                        Some(_) if e.kind() == io::ErrorKind::UnexpectedEof => Fault::remote(format_args!(
                            "{peer} refused this host's proof, or ended: {ONE_SECRET}"
                        )),
                        _ => broken(e),
                    })?;
                    let Some(proof) = received else { return Ok(None) };
                    if expected.proof != proof {
                        return Err(Fault::remote(format_args!(
                            "{peer} could not prove the listener's secret"
                        )));
                    }
                    let Expected { asked, claim, .. } = *expected;
                    return Ok(self.conn.take().map(|conn| match key {
                        Some(_) => encrypt(conn, secret, [&asked, &claim], true),
                        None => conn,
                    }));
                }
            }
        }
    }
}

/// Whether the kernel reports that the peer could not be reached.
fn is_unreached(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(error.kind(), HostUnreachable | NetworkUnreachable | TimedOut)
}

/// The claim with its proof, and the proof that the listener must return; the error says why the challenge is
/// refused.
fn answer(
    secret: &Secret,
    asked: &[u8; CHALLENGE_BYTES],
    claim: Claim,
    encrypts: bool,
) -> Result<Expected, String> {
    if asked[..8] != MAGIC {
        return Err("the listener is not a ferrywire plugin".into());
    }
    let version = u32::from_le_bytes(array(asked, 8));
    if version != VERSION {
        return Err(format!(
            "the peer's plugin has version {version}, this one {VERSION}: use one version on all hosts"
        ));
    }
    if (asked[ENCRYPTS_AT] != 0) != encrypts {
        let (with, without) = if encrypts { ("this host", "the peer") } else { ("the peer", "this host") };
        return Err(format!(
            "{with} requires encryption and {without} has it off: set FERRYWIRE_NCCL_ENCRYPT alike on all hosts"
        ));
    }
    let claimed = claim
        .to_bytes(random().map_err(|e| format!("cannot get random bytes from the operating system: {e}"))?);
    let mut message = [0; CLAIM_BYTES];
    message[..CLAIMED_BYTES].copy_from_slice(&claimed);
    message[CLAIMED_BYTES..].copy_from_slice(prove(secret, DIALLER, asked, &claimed).as_bytes());
    Ok(Expected { asked: *asked, claim: message, proof: prove(secret, LISTENER, asked, &claimed) })
}

/// The listening end of one connection's proof.
pub struct Serving {
    conn: Option<Box<dyn Conn>>,
    /// The key that encrypts the connection, if it is encrypted.
    key: Option<SharedKey>,
    asked: [u8; CHALLENGE_BYTES],
    stage: ServeStage,
}

enum ServeStage {
    Challenge(Moving<CHALLENGE_BYTES>),
    Claim(Moving<CLAIM_BYTES>),
    Proof(Moving<PROOF_BYTES>, Claim, [u8; CLAIM_BYTES]),
}

impl Serving {
    /// Begins the proof on an accepted connection, which is then encrypted if this process requires that.
    pub fn new(conn: Box<dyn Conn>) -> io::Result<Serving> {
        Serving::with_key(conn, shared_key().ok().flatten())
    }

    /// Like [`new`](Serving::new), with the key that encrypts the connection, if it is encrypted.
    pub fn with_key(conn: Box<dyn Conn>, key: Option<SharedKey>) -> io::Result<Serving> {
        let asked = challenge(random()?, key.is_some());
        Ok(Serving { conn: Some(conn), key, asked, stage: ServeStage::Challenge(Moving::new(asked)) })
    }

    /// Whether the whole claim has arrived.
    #[cfg(test)]
    pub fn has_claim(&self) -> bool {
        let fd = self.conn.as_ref().and_then(|conn| conn.fd()).unwrap();
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes one number into a variable.
        assert_eq!(unsafe { libc::ioctl(fd, libc::FIONREAD, &mut bytes) }, 0);
        bytes as usize >= CLAIM_BYTES
    }

    /// Makes progress; returns the connection and its claim once proved. An error concerns this connection alone.
    pub fn poll(&mut self, secret: &Secret) -> io::Result<Option<(Claim, Box<dyn Conn>)>> {
        let Some(conn) = &mut self.conn else { return Ok(None) };
        let conn = conn.as_mut();
        let key = self.key;
        let secret = &key.map_or(*secret, |key| key.with_listener(secret));
        loop {
            match &mut self.stage {
                ServeStage::Challenge(message) => {
                    if !message.send(conn)? {
                        return Ok(None);
                    }
                    self.stage = ServeStage::Claim(Moving::new([0; CLAIM_BYTES]));
                }
                ServeStage::Claim(message) => {
                    let Some(said) = message.receive(conn)? else { return Ok(None) };
                    let (claimed, proof) = said.split_at(CLAIMED_BYTES);
                    let proven =
                        prove(secret, DIALLER, &self.asked, claimed) == array::<PROOF_BYTES>(proof, 0);
                    if !proven && key.is_some() {
                        let peer = conn.remote().ip();
                        // One line in all: any host may connect.
                        log::warn_once_of(
                            "a wrong proof",
                            format_args!(
                                "refused a connection of {peer}, whose proof is wrong: {ONE_SECRET}"
                            ),
                        );
                    }
                    let claim = Claim::from_bytes(claimed).filter(|_| proven);
                    let claim = claim.ok_or_else(|| io::Error::from(io::ErrorKind::PermissionDenied))?;
                    let answer = *prove(secret, LISTENER, &self.asked, claimed).as_bytes();
                    self.stage = ServeStage::Proof(Moving::new(answer), claim, said);
                }
                ServeStage::Proof(message, claim, said) => {
                    let (claim, said) = (*claim, *said);
                    if !message.send(conn)? {
                        return Ok(None);
                    }
                    return Ok(self.conn.take().map(|conn| match key {
                        Some(_) => (claim, encrypt(conn, secret, [&self.asked, &said], false)),
                        None => (claim, conn),
                    }));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrywire_net::tcp::TcpTransport;
    use ferrywire_net::{ConnOptions, Transport};

    use super::*;

    const CLAIM: Claim = Claim { comm: [3; 16], index: 1, sockets: 3 };

    /// Both ends of a connection over loopback, driven in turn until one of them has a result.
    fn meet(theirs: Secret, ours: Secret) -> (Result<bool, Fault>, io::Result<Option<Claim>>) {
        let network = TcpTransport::default();
        let mut listener = network.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let conn = network.dial(None, listener.local(), &ConnOptions::default()).unwrap();
        let mut dialling = Dialling::new(conn, CLAIM);
        let mut serving = loop {
            if let Some(conn) = listener.accept().unwrap() {
                break Serving::new(conn).unwrap();
            }
        };
        let mut served = Ok(None);
        loop {
            match serving.poll(&ours) {
                Ok(None) => {}
                Ok(Some((claim, _))) => served = Ok(Some(claim)),
                Err(e) => {
                    served = Err(e);
                    serving.conn = None;
                }
            }
            match dialling.poll(&theirs) {
                Ok(None) => {}
                Ok(Some(_)) => return (Ok(true), served),
                Err(fault) => return (Err(fault), served),
            }
        }
    }

    #[test]
    fn ends_with_the_same_secret_meet() {
        let (dialled, served) = meet([1; 32], [1; 32]);
        assert_eq!((dialled, served.unwrap()), (Ok(true), Some(CLAIM)));
    }

    #[test]
    fn a_dialler_with_another_secret_is_refused() {
        let (dialled, served) = meet([1; 32], [2; 32]);
        assert!(dialled.is_err());
        assert_eq!(served.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn ends_that_differ_in_encryption_name_it() {
        for encrypts in [true, false] {
            let asked = challenge([0; 32], encrypts);
            let why = answer(&[0; 32], &asked, CLAIM, !encrypts).err().unwrap();
            assert!(why.contains("FERRYWIRE_NCCL_ENCRYPT alike on all hosts"), "{why}");
            assert!(answer(&[0; 32], &asked, CLAIM, encrypts).is_ok());
        }
    }

    #[test]
    fn a_listener_of_another_kind_or_version_is_named() {
        let refused = |asked: &_| answer(&[0; 32], asked, CLAIM, false).err().unwrap();
        assert!(refused(&[0; CHALLENGE_BYTES]).contains("not a ferrywire plugin"));
        let mut newer = challenge([0; 32], false);
        newer[8] = VERSION as u8 + 1;
        assert!(refused(&newer).contains("version 3"));
    }

    #[test]
    fn impossible_claims_are_refused() {
        for (index, sockets) in [(0, 0), (0, 1), (2, 2), (0, 66)] {
            let claim = Claim { index, sockets, ..CLAIM };
            assert_eq!(Claim::from_bytes(&claim.to_bytes([0; 32])), None, "{index} of {sockets}");
        }
    }
}
