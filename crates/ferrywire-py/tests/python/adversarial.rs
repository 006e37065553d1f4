//! A peer that claims more channels than were offered in the handshake of docs/protocol.md, which no ferrywire does.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;

const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const NO_SECRET: &str = "ferrywire control without a secret v1";
const PREAMBLE_BYTES: usize = 16;

/// Listens as long as the process lives, and answers every session with more channels than the peer proposed.
pub fn overreaching_peer() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    // A caller that gives up is ignored.
    thread::spawn(move || listener.incoming().for_each(|caller| drop(caller.map(answer))));
    address
}

fn answer(mut caller: TcpStream) -> io::Result<()> {
    let mut preamble = [0; PREAMBLE_BYTES];
    caller.read_exact(&mut preamble)?;
    let key = blake3::derive_key(NO_SECRET, b"");
    let noise = snow::Builder::new(NOISE.parse().expect("a pattern"));
    let noise = noise.psk(0, &key).and_then(|noise| noise.prologue(&preamble));
    let mut noise = noise.and_then(|noise| noise.build_responder()).expect("a responder");
    let mut room = [0; 1024];
    noise.read_message(&frame(&mut caller)?, &mut room).expect("the first message");
    let bytes = noise.write_message(&hello(), &mut room).expect("the second message");
    put(&mut caller, &room[..bytes])?;

    let mut sealed = noise.into_transport_mode().expect("a session");
    sealed.read_message(&frame(&mut caller)?, &mut room).expect("the request");
    let bytes = sealed.write_message(&welcome(), &mut room).expect("the welcome");
    put(&mut caller, &room[..bytes])?;
    // Until the caller closes the connection.
    caller.read_to_end(&mut Vec::new()).map(drop)
}

/// Identity, boot id, no label, peer timeout, no addresses.
fn hello() -> Vec<u8> {
    let mut hello = vec![7; 32];
    hello.push(0);
    hello.extend(15_000_u32.to_le_bytes());
    hello.push(0);
    hello
}

/// Session, nothing received, the responder's share, and a configuration: 256 channels.
fn welcome() -> Vec<u8> {
    let mut welcome = vec![0; 8 + 8 + 32];
    welcome.extend(256_u16.to_le_bytes());
    welcome.extend(1_u32.to_le_bytes());
    welcome.extend(1_u32.to_le_bytes());
    welcome.extend([0, 0, 0, 0]);
    welcome
}

fn frame(caller: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    caller.read_exact(&mut length)?;
    let mut frame = vec![0; usize::from(u16::from_le_bytes(length))];
    caller.read_exact(&mut frame)?;
    Ok(frame)
}

fn put(caller: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    caller.write_all(&(message.len() as u16).to_le_bytes())?;
    caller.write_all(message)
}
