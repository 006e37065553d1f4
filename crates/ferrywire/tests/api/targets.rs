//! Connecting to an endpoint that has a secret of its own.

use super::LIMIT;
use ferrywire::{ConnectError, ConnectTarget, Endpoint, Identity, Peer};
use std::process::Command;

const SECRETS: [&[u8]; 2] = [b"of the near end", b"of the far end"];

fn ends() -> [Endpoint; 2] {
    SECRETS.map(|secret| {
        Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).secret(secret).channels(2).build().unwrap()
    })
}

fn target(end: &Endpoint) -> ConnectTarget {
    ConnectTarget::new(end.listen_addresses()[0])
}

fn connect(from: &Endpoint, to: ConnectTarget) -> Result<Peer, ConnectError> {
    from.start_connect_to(to)?.wait(LIMIT)
}

#[test]
fn each_end_is_reached_with_its_own_secret() {
    let [near, far] = ends();
    for (from, to, secret) in [(&near, &far, SECRETS[1]), (&far, &near, SECRETS[0])] {
        connect(from, target(to).secret(secret).identity(to.identity())).unwrap();
        to.accept(LIMIT).unwrap();
    }
    let refused = [
        connect(&near, target(&far)),
        connect(&near, target(&far).secret(SECRETS[0])),
        connect(&near, target(&far).secret(SECRETS[1]).identity(Identity([1; 16]))),
    ];
    for refused in refused {
        assert!(matches!(refused, Err(ConnectError::Refused { .. })), "{refused:?}");
    }
    let short = connect(&near, target(&far).secret(*b"short"));
    assert!(matches!(&short, Err(ConnectError::Invalid { what, .. }) if what == "secret"), "{short:?}");
}

#[test]
fn a_session_is_resumed_with_the_secret_that_it_was_opened_with() {
    let [near, far] = ends();
    let there = connect(&near, target(&far).secret(SECRETS[1])).unwrap();
    let _here = far.accept(LIMIT).unwrap();
    let (source, target) = (near.register(vec![7; 1 << 20]).unwrap(), far.alloc_host(1 << 20).unwrap());
    for _ in 0..3 {
        let port = format!(":{}", far.listen_addresses()[0].port());
        let cut =
            Command::new("ss").args(["-K", "-H", "-t", "state", "established", "dport", "=", &port]).output();
        if !cut.is_ok_and(|out| out.status.success()) {
            return println!("SKIPPED: needs root, ss, and a kernel with INET_DIAG_DESTROY");
        }
        let written = there.write(&source, 0, &target.descriptor(), 0, 1 << 20).unwrap().wait(LIMIT);
        assert_eq!(written, Ok(1 << 20));
    }
}
