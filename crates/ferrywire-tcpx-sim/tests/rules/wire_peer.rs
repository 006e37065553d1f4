//! A peer made of plain sockets that speaks the plugin's wire format by hand and can stop anywhere.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};

use crate::driver::Handle;

/// The sockets of a connection.
pub struct Ends {
    pub control: TcpStream,
    pub data: Vec<TcpStream>,
}

/// A listener of the test, whose addresses replace the plugin's in a handle.
pub struct Acceptor {
    control: TcpListener,
    data: TcpListener,
}

impl Acceptor {
    /// Listens on loopback and rewrites the handle's addresses.
    pub fn listen(handle: &mut Handle) -> Acceptor {
        let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let acceptor = Acceptor { control: listen(), data: listen() };
        for (at, listener) in [(0, &acceptor.data), (48, &acceptor.control)] {
            let port = listener.local_addr().unwrap().port();
            handle.0[at + 2..at + 4].copy_from_slice(&port.to_be_bytes());
        }
        acceptor
    }

    /// The addresses on which it listens.
    pub fn addresses(&self) -> [SocketAddr; 2] {
        [&self.control, &self.data].map(|listener| listener.local_addr().unwrap())
    }

    /// Listens at known addresses.
    pub fn listen_at([control, data]: [SocketAddr; 2]) -> Acceptor {
        Acceptor { control: TcpListener::bind(control).unwrap(), data: TcpListener::bind(data).unwrap() }
    }

    /// The acceptor's half of the handshake, with every socket good.
    pub fn accept(&self, data_sockets: usize) -> Ends {
        let mut control = self.control.accept().unwrap().0;
        agree(&mut control, data_sockets);
        let mut data: Vec<TcpStream> = Vec::new();
        for index in (0..data_sockets).rev() {
            data.push(self.data.accept().unwrap().0);
            agree(&mut control, index);
        }
        data.reverse();
        Ends { control, data }
    }
}

fn agree(control: &mut TcpStream, index: usize) {
    put(control, 0);
    assert_eq!(get(control), 0, "the connector's state");
    assert_eq!(get(control), index as i32, "the connector names the socket");
}

/// Connects to the listener of a handle: the connector's half of the handshake.
pub fn connect(handle: &Handle) -> Ends {
    let address = |at: usize| {
        let ip: [u8; 4] = handle.0[at + 4..at + 8].try_into().unwrap();
        SocketAddrV4::new(ip.into(), u16::from_be_bytes([handle.0[at + 2], handle.0[at + 3]]))
    };
    let count = i32::from_ne_bytes(handle.0[36..40].try_into().unwrap()) as usize;
    let mut control = TcpStream::connect(address(48)).unwrap();
    let agree = |control: &mut TcpStream, index: usize| {
        assert_eq!(get(control), 0, "the acceptor's state");
        put(control, 0);
        put(control, index as i32);
    };
    agree(&mut control, count);
    let mut data: Vec<TcpStream> = Vec::new();
    for index in (0..count).rev() {
        data.push(TcpStream::connect(address(0)).unwrap());
        agree(&mut control, index);
    }
    data.reverse();
    Ends { control, data }
}

fn put(stream: &mut TcpStream, word: i32) {
    stream.write_all(&word.to_ne_bytes()).unwrap();
}

fn get(stream: &mut TcpStream) -> i32 {
    let mut word = [0; 4];
    stream.read_exact(&mut word).unwrap();
    i32::from_ne_bytes(word)
}

/// A control record.
pub fn record(kind: u16, index: u16, size: u32, offset: u32, total: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0..2].copy_from_slice(&kind.to_ne_bytes());
    bytes[2..4].copy_from_slice(&index.to_ne_bytes());
    bytes[4..8].copy_from_slice(&size.to_ne_bytes());
    bytes[8..12].copy_from_slice(&offset.to_ne_bytes());
    bytes[12..16].copy_from_slice(&total.to_ne_bytes());
    bytes
}

/// The record of a whole message in one chunk.
pub fn chunk(bytes: usize) -> [u8; 16] {
    record(0, 0, bytes as u32, 0, bytes as u32)
}
