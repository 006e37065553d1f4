//! The lines between a program and `soak.py`, which drives it.
//!
//! | order on stdin | answer | |
//! |---|---|---|
//! | `secret NOW [ALSO]` | `ok secret` | the secret, and one that is also accepted; the first order of all |
//! | `sample` | `sample NAME=N ...` | what only a server knows of itself |
//! | `leave`, `come` | `ok leave`, none | a client closes its connection, and waits until it may connect again |
//! | `end` | none | finish, close in an orderly way, exit with 0 |
//!
//! Programs say on their own: `up` (connected, or listening), `moved OPERATIONS BYTES CANCELLED` since the last such line,
//! and what went wrong: `wrong`, `unended`, `failed`, `lost`, `closed`, `retried`, each with a text.

use std::io::{BufRead, Write};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

/// An order of the driver.
pub enum Order {
    Secret { current: String, also: Option<String> },
    Sample,
    Leave,
    Come,
    End,
}

/// The orders of the driver. The channel is closed when the driver is gone.
pub fn orders() -> Receiver<Order> {
    let (send, orders) = channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let mut words = line.split_whitespace().map(str::to_owned);
            let order = match (words.next().as_deref(), words.next(), words.next()) {
                (Some("secret"), Some(current), also) => Order::Secret { current, also },
                (Some("sample"), ..) => Order::Sample,
                (Some("leave"), ..) => Order::Leave,
                (Some("come"), ..) => Order::Come,
                (Some("end"), ..) => Order::End,
                _ => continue,
            };
            if send.send(order).is_err() {
                return;
            }
        }
    });
    orders
}

/// Says one line. A driver that is gone hears nothing.
pub fn say(kind: &str, text: &str) {
    let line = format!("{kind} {}", text.replace('\n', " "));
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", line.trim_end()).and_then(|()| out.flush());
}
