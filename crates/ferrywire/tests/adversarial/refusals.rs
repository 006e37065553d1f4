//! Each refused host is logged once, with the cause, at the listening and at the connecting end.

use crate::peers::{dialler, record, victim};
use crate::process::{alone, eventually, lines};
use crate::strangers::{HTTP, SSH, hear, refusal, say};
use crate::{LIMIT, LINES_MAX, SECRET};
use ferrywire::{ConnectError, Endpoint};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

#[test]
fn refused_hosts_are_logged_in_one_line_each_up_to_a_limit() {
    let _alone = alone();
    let victim = victim();
    let address = victim.listen_addresses()[0];
    let mut strangers = Vec::new();
    for _ in 0..LINES_MAX + 50 {
        let mut stream = TcpStream::connect(address).unwrap();
        strangers.push(stream.local_addr().unwrap());
        stream.write_all(HTTP).unwrap();
        assert_eq!(hear(&mut stream).unwrap(), b"");
    }
    let lines = lines().lock().unwrap().clone();
    for stranger in &strangers[..LINES_MAX - 1] {
        let about = |line: &&String| line.contains(&format!("from {stranger}: not ferrywire"));
        assert_eq!(lines.iter().filter(about).count(), 1, "lines about {stranger}");
    }
    let many = lines.iter().filter(|line| line.starts_with("many connections refused")).count();
    let all = lines.iter().filter(|line| line.contains("refused")).count();
    assert_eq!((many, all), (1, LINES_MAX), "{lines:?}");
    victim.close(LIMIT).unwrap();
}

#[test]
fn a_wrong_secret_is_named_at_the_end_that_connects() {
    let _alone = alone();
    let victim = victim();
    for secret in [Some("incorrect horse"), None] {
        let stranger = dialler(secret);
        let error = stranger.connect(victim.listen_addresses()[0], LIMIT).unwrap_err();
        assert!(
            matches!(&error, ConnectError::Refused { why, .. } if why.contains("wrong secret")),
            "{error:?}"
        );
        assert_eq!(stranger.peer_count(), 0);
    }
    let open = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).threads(1).build().unwrap();
    let stranger = dialler(Some(SECRET));
    let error = stranger.connect(open.listen_addresses()[0], LIMIT).unwrap_err();
    assert!(matches!(&error, ConnectError::Refused { why, .. } if why.contains("wrong secret")), "{error:?}");
    // The stranger hears of its refusal first, the log a moment later.
    let reported = || lines().lock().unwrap().iter().filter(|line| line.contains("wrong secret")).count();
    eventually("one line for each", || reported() >= 3);
    assert_eq!(reported(), 3, "one line for each");
    assert_eq!(victim.peer_count() + open.peer_count(), 0);
}

#[test]
fn a_wrong_version_is_named_at_both_ends() {
    let _alone = alone();
    let victim = victim();
    let (recordings, recorded) = record(&victim);
    let mut hello = recordings.control.clone();
    hello[8..10].copy_from_slice(&9u16.to_le_bytes());
    let heard = say(victim.listen_addresses()[0], &hello).unwrap();
    let (code, text) = refusal(&heard).expect("another version is told why");
    assert_eq!((code, &text[..]), (1, "the refused end speaks protocol version 9, the end that refuses 4"));
    let named = |line: &String| line.contains("the other end speaks protocol version 9, this end 4");
    let reported = || lines().lock().unwrap().iter().filter(|line| named(line)).count();
    eventually("it is told", || reported() > 0);
    assert_eq!(reported(), 1);

    let answers: [(&[u8], &str); 3] = [
        (b"\xff\xff\x01\x04\x00nine", "wrong protocol version: the other end says \"nine\""),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"),
        (SSH, "SSH"),
    ];
    for (answer, cause) in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
        });
        let error = recorded.endpoint.connect(address, LIMIT).unwrap_err();
        assert!(matches!(&error, ConnectError::Refused { why, .. } if why.contains(cause)), "{error:?}");
    }
    recorded.close();
}
