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
//! The shared object exports one table for each version of NCCL's interface; they share one implementation. A
//! *comm* is one direction between two ranks. Message number k meets receive number k. Each piece of a message
//! carries a header that says which message and which part of it follows, so any socket can carry any piece, and
//! payload is received straight into NCCL's buffer. Small messages go and come on NCCL's own thread over a socket
//! of their own; bulk is moved by the workers, a few threads that all comms of the process share.
//!
//! # In reading order
//!
//! `tables` (what NCCL calls), `properties` and `device` (which NICs) and `merged` (several as one), `channels` (how many rings), `attempt` and
//! `listener` (how a comm comes about) with `pairs`, `unreachable_paths`, `handle` and `proof`, `comm` (requests), `sending` and `receiving`, `header`
//! (what travels), `wire` (one socket) and `link` (what it is called), `pool` and `worker` (who moves bulk; `ranks` and `settings`: how many). `failure` and `log` say what went wrong.

mod affinity;
mod attempt;
mod channels;
mod comm;
mod device;
mod failure;
mod handle;
mod header;
mod link;
mod listener;
mod log;
mod merged;
mod pairs;
mod pool;
mod proof;
mod properties;
mod ranks;
mod receiving;
mod sending;
mod settings;
mod tables;
#[cfg(test)]
mod testing;
mod unreachable_paths;
mod wire;
mod worker;
