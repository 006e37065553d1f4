//! ferrywire as NCCL's network: any program that uses NCCL moves its bytes over ferrywire's TCP connections,
//! with `NCCL_NET_PLUGIN=ferrywire` and nothing else.
//!
//! ```text
//!   NCCL's proxy thread                                                      NCCL's proxy thread
//!        | isend                                                                  ^ test
//!   +----v-----+  small: header and payload, at once    --- socket 0 --->    +------+-----+
//!   | SendComm |                                                           |  RecvComm  |
//!   +----+-----+                                                           +------^-----+
//!        | queue                                                                  | counts
//!   [ workers ]   bulk: pieces, pulled by whichever   --- socket 1.. -->     [ workers ]
//!                 socket has room
//! ```
//!
//! The shared object exports one table for each version of NCCL's interface; all share one implementation. A *comm* is
//! one direction between two ranks. Message k meets receive k. Each piece of a message has a header that names the
//! message and the part, so any socket can carry any piece, and payload is received directly into NCCL's buffer. NCCL's
//! own thread moves small messages over a socket of their own; workers, a few threads that all comms of the process
//! share, move bulk.
//!
//! # In reading order
//!
//! `tables` (the functions that NCCL calls), `properties` and `device` (NICs) and `merged` (several NICs as one
//! device), `channels` (the number of rings), `attempt` and `listener` (setting up a comm) with `pairs`,
//! `unreachable_paths`, `handle`, `proof`, `acceptor` and `sweeper` (threads during set-up), `comm` (requests), `sending` and
//! `receiving`, `header` (the wire format), `encryption`, `wire` (one socket) and `link` (its name in errors), `pool` and
//! `worker` (the threads that move bulk; `ranks` and `settings`: how many). `failure` and `log` report errors, `metrics`
//! counts.

mod acceptor;
mod affinity;
mod attempt;
mod channels;
mod comm;
mod device;
mod encryption;
mod failure;
mod handle;
mod header;
mod link;
mod listener;
mod log;
mod merged;
mod metrics;
mod pairs;
mod pool;
mod proof;
mod properties;
mod ranks;
mod receiving;
mod sending;
mod settings;
mod sweeper;
mod tables;
#[cfg(test)]
mod testing;
mod unreachable_paths;
mod wire;
mod worker;
