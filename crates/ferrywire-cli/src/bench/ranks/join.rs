//! How a rank reaches rank 0.
//!
//! Read next: [`super::group`].

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::{ConnectError, Endpoint, Error, Peer, RefusalReason};

use super::super::connect;
use super::messages::Card;
use crate::exit::{Failure, Outcome};
use crate::plan::RanksPlan;
use crate::sys;

/// Pause between attempts to reach rank 0, which may start later.
const DIAL_INTERVAL: Duration = Duration::from_millis(100);
/// How often a pending connection is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Builds the endpoint for the messages of the group, which are few.
pub fn endpoint(plan: &RanksPlan, card: &Card, listens: bool) -> Outcome<Endpoint> {
    let mut builder = Endpoint::builder().label(format!("rank {}", card.rank)).threads(1).channels(1);
    if let Some(secret) = &plan.bench.engine.secret {
        builder = builder.secret(secret.clone());
    }
    if listens {
        builder = builder.listen(plan.listen);
    }
    builder.build().map_err(|error| match error {
        Error::Invalid { .. } => Failure::Usage(error.to_string()),
        Error::Io { .. } if listens => Failure::failed(format!(
            "cannot wait for the other ranks at {}: {error}\nlikely: another run waits there; try: another port with --rendezvous \
             ADDR:PORT, the same for all ranks",
            plan.listen
        )),
        other => other.into(),
    })
}

/// Connects to rank 0, which may start later.
pub fn dial(endpoint: &Endpoint, plan: &RanksPlan) -> Outcome<Peer> {
    let since = Instant::now();
    let mut last = None;
    loop {
        for address in &plan.group {
            match dial_once(endpoint, *address, since, plan.bench.timeout)? {
                Ok(peer) => return Ok(peer),
                Err(error) if is_final(&error) => return Err(connect::explain(&error)),
                // The last attempt may be cut short, and says nothing of its own.
                Err(ConnectError::Stalled { .. }) if last.is_some() => {}
                Err(error) => last = Some(error),
            }
        }
        if since.elapsed() >= plan.bench.timeout {
            let waited_s = plan.bench.timeout.as_secs_f64();
            if let Some(refused @ ConnectError::Refused { .. }) = last {
                return Err(Failure::failed(format!(
                    "rank 0 still refuses after {waited_s:.0} s (--timeout): {refused}"
                )));
            }
            let why = last.map_or_else(|| "no address".to_owned(), |error| error.to_string());
            return Err(Failure::failed(format!(
                "rank 0 was not reached within {waited_s:.0} s (--timeout): {why}\nlikely: rank 0 has not started or has \
                 ended, a firewall drops the port, or it waits elsewhere (--rendezvous, the same for all ranks)"
            )));
        }
        pause(DIAL_INTERVAL)?;
    }
}

/// Whether another attempt would fail for the same reason.
fn is_final(error: &ConnectError) -> bool {
    match error {
        ConnectError::Refused { reason, .. } => !matches!(reason, RefusalReason::Busy | RefusalReason::Limit),
        ConnectError::Invalid { .. } | ConnectError::NoUsableNic { .. } => true,
        _ => false,
    }
}

fn dial_once(
    endpoint: &Endpoint,
    address: SocketAddr,
    since: Instant,
    timeout: Duration,
) -> Outcome<Result<Peer, ConnectError>> {
    let connecting = match endpoint.start_connect(address) {
        Ok(connecting) => connecting,
        Err(error) => return Ok(Err(error)),
    };
    loop {
        if let Some(result) = connecting.poll() {
            return Ok(result);
        }
        if since.elapsed() >= timeout {
            let (what, peer) = (format!("connecting to {address}"), Some(address.to_string()));
            return Ok(Err(ConnectError::Stalled { what, peer, waited: timeout }));
        }
        pause(POLL_INTERVAL)?;
    }
}

fn pause(time: Duration) -> Outcome {
    thread::sleep(time);
    if sys::interrupted() { Err(Failure::Interrupted) } else { Ok(()) }
}
