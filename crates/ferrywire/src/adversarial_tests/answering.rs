//! Adversarial acceptors: what a connecting endpoint must withstand from the end that answers.

use super::evil::{Evil, dial, goodbye, hear_frame};
use super::scene::{Scene, endpoint};
use super::{LIMIT, SECRET, eventually};
use crate::{ConnectError, Endpoint, Error};
use ferrywire_proto::handshake::testing::{Shared, hello};
use ferrywire_proto::handshake::{Established, Initiator, Outcome, Purpose, RefusalCode, Responder, Secure};
use ferrywire_proto::session::{ControlMessage, Frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

/// Answers the next connection. Returns the outcome of its handshake, or `None` if the connection was
/// refused.
pub(super) fn answer(listener: &TcpListener, desk: &Shared) -> (TcpStream, Option<Outcome>) {
    eventually("a connection", || is_readable(listener));
    answer_one(listener.accept().unwrap().0, desk)
}

/// Answers a connection. Returns the outcome of its handshake, or `None` if the connection was refused.
pub(super) fn answer_one(mut stream: TcpStream, desk: &Shared) -> (TcpStream, Option<Outcome>) {
    let mut responder = Responder::new(desk.clone());
    loop {
        stream.write_all(&responder.take_output()).unwrap();
        if let Some(outcome) = responder.finished() {
            return (stream, Some(outcome));
        }
        let mut bytes = vec![0; responder.want()];
        let Ok(count @ 1..) = stream.read(&mut bytes) else { return (stream, None) };
        if responder.feed(&bytes[..count]).is_err() {
            stream.write_all(&responder.take_output()).unwrap();
            return (stream, None);
        }
    }
}

/// Reads the announcement of the next data connection: channel, generation and source.
fn hear_dialling(control: &mut TcpStream, secure: &mut Secure) -> (u16, u32, SocketAddr) {
    loop {
        let numbered = hear_frame(control, secure).numbered;
        if let Some((_, ControlMessage::Dialling { channel, generation, source })) = numbered {
            return (channel, generation, source);
        }
    }
}

/// Sends an encrypted control message with this number.
pub(super) fn say_sealed(
    control: &mut TcpStream,
    secure: &mut Secure,
    number: u64,
    message: &ControlMessage,
) {
    let frame = Frame { received: 0, numbered: Some((number, message)) };
    control.write_all(&secure.seal(&frame.encode()).unwrap()).unwrap();
}

/// Answers one control connection and its channels, as an endpoint that gives every session the same number.
fn evil_acceptor(listener: &TcpListener, desk: &Shared) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    loop {
        let (stream, outcome) = answer(listener, desk);
        streams.push(stream);
        match outcome {
            Some(Outcome::Control(mut established)) => {
                desk.remember(&established);
                let control = streams.last_mut().expect("just pushed");
                for number in 1..=2 {
                    let (channel, generation, _) = hear_dialling(control, &mut established.secure);
                    let expected = ControlMessage::Expected { channel, generation };
                    say_sealed(control, &mut established.secure, number, &expected);
                }
            }
            Some(Outcome::Data { channel: 1, .. }) | None => return streams,
            Some(Outcome::Data { .. }) => {}
        }
    }
}

/// A listener for adversarial acceptors, with their state.
pub(super) fn evil_desk() -> (SocketAddr, TcpListener, Shared) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let desk = Shared::new(Some(SECRET));
    desk.desk().hello.addresses.clear();
    (address, listener, desk)
}

fn refuse(desk: &Shared, code: RefusalCode, text: &str) {
    desk.desk().refuse = Some(ferrywire_proto::handshake::Refusal::new(code, text));
}

#[test]
fn data_connections_are_announced_all_at_once_and_dialled_when_they_are_expected() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    let connecting = dialler.start_connect(address).unwrap();
    let (mut control, outcome) = answer(&listener, &desk);
    let Some(Outcome::Control(mut established)) = outcome else { panic!("{outcome:?}") };
    desk.remember(&established);
    // Both channels are announced before either announcement is answered.
    let announced: Vec<_> = (0..2).map(|_| hear_dialling(&mut control, &mut established.secure)).collect();
    assert!(!is_readable(&listener), "dialled before it was expected");
    let (mut said, mut streams) = (0, Vec::new());
    for (channel, generation, source) in announced {
        for generation in [generation + 1, generation] {
            said += 1;
            let answer = ControlMessage::Expected { channel, generation };
            say_sealed(&mut control, &mut established.secure, said, &answer);
        }
        let (stream, outcome) = answer(&listener, &desk);
        assert_eq!(stream.peer_addr().unwrap(), source);
        let dialled =
            matches!(outcome, Some(Outcome::Data { channel: it, generation: 0, .. }) if it == channel);
        assert!(dialled, "{outcome:?}");
        assert!(!is_readable(&listener), "dialled before it was expected");
        streams.push(stream);
    }
    connecting.wait(LIMIT).unwrap();
}

/// Only the end that opened a session dials its connections. Otherwise an address that leads back could
/// connect an endpoint to itself.
#[test]
fn the_accepting_end_does_not_dial_the_sessions_connections() {
    let dialler = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap());
    let dialler = dialler.secret(SECRET).threads(1).channels(1).build().unwrap();
    let (address, listener, desk) = evil_desk();
    let _connecting = dialler.start_connect(address).unwrap();
    let (mut control, outcome) = answer(&listener, &desk);
    let Some(Outcome::Control(mut established)) = outcome else { panic!("{outcome:?}") };
    let (channel, generation, _) = hear_dialling(&mut control, &mut established.secure);
    let (session, key) = (established.session, established.data_key.clone());
    let dialled = dial(dialler.listen_addresses()[0], Initiator::data(session, key, channel, generation));
    let refused = matches!(&dialled, Err(error) if error.refused_with() == Some(RefusalCode::Config));
    assert!(refused, "{dialled:?}");
}

#[test]
fn a_peer_that_expects_no_data_connection_is_named_for_it() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    let connecting = dialler.start_connect(address).unwrap();
    let (mut control, outcome) = answer(&listener, &desk);
    let Some(Outcome::Control(mut established)) = outcome else { panic!("{outcome:?}") };
    let mut end = None;
    eventually("the connect ends", || {
        // The peer sends heartbeats and nothing else.
        let alive = Frame { received: 0, numbered: None };
        let _ = control.write_all(&established.secure.seal(&alive.encode()).unwrap());
        thread::sleep(Duration::from_millis(50));
        end = connecting.poll();
        end.is_some()
    });
    let error = end.unwrap().unwrap_err();
    assert!(matches!(&error, ConnectError::PeerLost { .. }), "{error:?}");
    assert!(error.to_string().contains("did not answer on the control session"), "{error}");
}

#[test]
fn a_connect_that_times_out_says_goodbye_to_a_peer_that_has_answered() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    thread::scope(|scope| {
        let connect = scope.spawn(|| dialler.connect(address, Duration::from_secs(3)));
        let (mut control, outcome) = answer(&listener, &desk);
        let Some(Outcome::Control(mut established)) = outcome else { panic!("{outcome:?}") };
        // The adversarial end answers nothing from here on.
        let reason = loop {
            let numbered = hear_frame(&mut control, &mut established.secure).numbered;
            if let Some((_, ControlMessage::Goodbye { reason, .. })) = numbered {
                break reason;
            }
        };
        assert_eq!(reason, "the connect was given up before it had ended");
        let error = connect.join().unwrap().unwrap_err();
        assert!(matches!(error, ConnectError::Stalled { .. }), "{error:?}");
    });
    eventually("the dialler has no peer left", || dialler.peer_count() == 0);
    assert_eq!(dialler.close(LIMIT), Ok(()));
}

#[test]
fn a_data_connection_that_is_announced_is_expected() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let source = "10.1.2.3:4567".parse().unwrap();
    for channel in [9, 0] {
        evil.say(&ControlMessage::Dialling { channel, generation: 5, source });
    }
    let Evil { control, established, .. } = &mut evil;
    let answer = loop {
        if let Some((_, message)) = hear_frame(control, &mut established.secure).numbered {
            break message;
        }
    };
    assert_eq!(answer, ControlMessage::Expected { channel: 0, generation: 5 }, "of a channel that exists");
    scene.unharmed();
}

#[test]
fn only_the_code_of_a_refusal_ends_a_session() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    let acceptor = thread::spawn({
        let desk = desk.clone();
        move || (evil_acceptor(&listener, &desk), listener)
    });
    let peer = dialler.connect(address, LIMIT).unwrap();
    let (streams, listener) = acceptor.join().unwrap();
    // All paths are dialled at once, again and again, until one is answered.
    refuse(&desk, RefusalCode::Limit, "unknown session: the session is over");
    streams[0].shutdown(Shutdown::Both).unwrap();
    for _ in 0..4 {
        assert!(answer(&listener, &desk).1.is_none());
    }
    desk.desk().refuse = None;
    let resumed = answer(&listener, &desk);
    assert!(matches!(resumed.1, Some(Outcome::Control(_))), "{resumed:?}");
    assert_eq!(peer.error(), None);
    // The refusal's code decides, not its text.
    refuse(&desk, RefusalCode::UnknownSession, "never heard of it");
    resumed.0.shutdown(Shutdown::Both).unwrap();
    eventually("the peer is lost", || {
        if is_readable(&listener) {
            answer(&listener, &desk);
        }
        peer.error().is_some()
    });
    let error = peer.error().unwrap().to_string();
    assert!(
        error.contains("the peer restarted or gave the session up") && error.contains("never heard of it"),
        "{error}"
    );
    drop(streams);
}

/// Whether a connection waits to be accepted, or bytes wait to be read.
pub(super) fn is_readable(socket: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).unwrap() > 0
}

#[test]
fn one_path_to_another_host_does_not_end_a_session() {
    let dialler = endpoint();
    let (address, listener, desk) = evil_desk();
    let acceptor = thread::spawn({
        let desk = desk.clone();
        move || (evil_acceptor(&listener, &desk), listener)
    });
    let peer = dialler.connect(address, LIMIT).unwrap();
    let (mut streams, listener) = acceptor.join().unwrap();
    refuse(&desk, RefusalCode::UnknownSession, "that is somebody else");
    streams[0].shutdown(Shutdown::Both).unwrap();
    let (mut refused, outcome) = answer(&listener, &desk);
    assert!(outcome.is_none(), "{outcome:?}");
    // The other path answers after the dialling end has read the refusal; that end then closes the refused
    // connection.
    refused.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(refused.read_to_end(&mut Vec::new()).unwrap(), 0);
    desk.desk().refuse = None;
    let (stream, outcome) = answer(&listener, &desk);
    assert!(matches!(outcome, Some(Outcome::Control(_))), "{outcome:?}: {:?}", peer.error());
    assert_eq!(peer.error(), None);
    streams.push(stream);
}

#[test]
fn a_busy_end_is_dialled_again() {
    let (address, listener, desk) = evil_desk();
    let acceptor = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 64]).unwrap();
        stream.write_all(b"\xff\xff\x03\x04\x00full").unwrap();
        drop(stream);
        (evil_acceptor(&listener, &desk), listener)
    });
    let peer = endpoint().connect(address, LIMIT).unwrap();
    drop(acceptor.join().unwrap());
    drop(peer);
}

/// Resumes the session, claiming to have received `received` messages of it.
fn resume(scene: &Scene, evil: &Evil, received: u64) -> (TcpStream, Box<Established>) {
    let Established { session, data_key, .. } = &*evil.established;
    let purpose = Purpose::Resume { session: *session, received, data_key: data_key.clone() };
    let initiator = Initiator::control(Some(SECRET.as_bytes()), hello(1), purpose).unwrap();
    let (stream, outcome) = dial(scene.address(), initiator).unwrap();
    let Outcome::Control(established) = outcome else { panic!("{outcome:?}") };
    (stream, established)
}

#[test]
fn a_forged_resumption_does_not_end_a_session() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let (mut stream, mut established) = resume(&scene, &evil, 0);
    let mut forged = established.secure.seal(&[0; 9]).unwrap();
    forged[5] ^= 1;
    stream.write_all(&forged).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "the victim hangs up");
    (evil.control, evil.established) = resume(&scene, &evil, 0);
    evil.say(&goodbye());
    eventually("the victim has received the goodbye", || evil.here.error().is_some());
    assert!(matches!(evil.here.error(), Some(Error::PeerClosed { .. })), "{:?}", evil.here.error());
    scene.unharmed();
}

/// Later messages are sent without a connection, which must not be reported as the cause of the loss.
#[test]
fn a_resumption_that_claims_what_was_never_said_loses_the_peer_for_that() {
    let scene = Scene::new();
    for hangs_up in [false, true] {
        let evil = Evil::new(&scene);
        if hangs_up {
            evil.control.shutdown(Shutdown::Both).unwrap();
        }
        let (mut stream, mut established) = resume(&scene, &evil, 9999);
        let heartbeat = Frame { received: 0, numbered: None }.encode();
        stream.write_all(&established.secure.seal(&heartbeat).unwrap()).unwrap();
        evil.lost_for("the peer acknowledges 9999 control messages, but only ");
    }
    scene.unharmed();
}

#[test]
fn a_session_number_that_is_taken_does_not_replace_its_session() {
    let dialler = endpoint();
    let acceptor = || {
        let (address, listener, desk) = evil_desk();
        (address, thread::spawn(move || (evil_acceptor(&listener, &desk), listener)))
    };
    let (first_address, first_thread) = acceptor();
    let first = dialler.connect(first_address, LIMIT).unwrap();
    let streams = first_thread.join().unwrap();
    let (second_address, _second_thread) = acceptor();
    let error = dialler.connect(second_address, LIMIT).unwrap_err();
    assert!(matches!(&error, ConnectError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("session"), "{error}");
    assert_eq!(first.error(), None);
    assert_eq!(dialler.peer_count(), 1);
    drop(streams);
}
