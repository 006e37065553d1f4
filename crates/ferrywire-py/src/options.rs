//! What callers may write: an address as text or pair, bytes in any buffer, a number that must not be negative.
//!
//! Invariant: what is refused is refused by the argument's name.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ferrywire::{Error, Result, UnreachableCause};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

use crate::errors::usage;
use crate::region::{Region, RemoteRegion};

/// `"host:port"` or `(host, port)`, before anybody has looked the host up.
pub struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// Reads one; nothing where it is another kind of thing.
    pub fn of(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<Address>> {
        let refused = |why: String| usage(object.py(), what, why);
        if let Ok(text) = object.cast::<PyString>() {
            let text: String = text.extract()?;
            let parsed = parse(&text);
            let wrong = || refused(format!("{text:?} is no address: write it as 'host:port'"));
            return parsed.ok_or_else(wrong).map(Some);
        }
        let Ok(pair) = object.cast::<PyTuple>() else { return Ok(None) };
        let wrong = || refused("it is no address: write it as ('host', port)".into());
        let (host, port): (String, Bound<'_, PyAny>) = pair.extract().map_err(|_| wrong())?;
        let number = whole(&port).map_err(|_| wrong())?;
        let port =
            u16::try_from(number).map_err(|_| refused(format!("{port} is no port: use 0 to 65535")))?;
        match host.is_empty() || host.contains('\0') {
            true => Err(wrong()),
            false => Ok(Some(Address { host, port })),
        }
    }

    /// All addresses of a peer, the likeliest first. A name service that takes longer than the limit is left behind.
    pub fn resolve(self, limit: Duration) -> Result<Vec<SocketAddr>> {
        if let Ok(ip) = self.host.parse() {
            return Ok(vec![SocketAddr::new(ip, self.port)]);
        }
        let text = self.text();
        let (tell, told) = mpsc::channel();
        let look_up = move || drop(tell.send(self.look_up()));
        thread::Builder::new()
            .name("ferrywire-name".into())
            .spawn(look_up)
            .map_err(|error| Error::io("start a thread", &error))?;
        let timeout = |_| Error::Stalled { what: format!("looking up {text}"), peer: None, waited: limit };
        let found = told.recv_timeout(limit).map_err(timeout)?;
        found.map_err(|error| Error::Unreachable {
            address: text,
            cause: UnreachableCause::NameNotResolved,
            why: error.to_string(),
        })
    }

    /// Looks one of this host up.
    pub fn resolve_here(&self) -> Result<SocketAddr> {
        let found = self.look_up().map(|all| all[0]);
        found.map_err(|error| Error::io(format!("look up {}", self.text()), &error))
    }

    /// One at least.
    fn look_up(&self) -> io::Result<Vec<SocketAddr>> {
        let mut all: Vec<SocketAddr> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        // IPv4 addresses first: what listens on "0.0.0.0" does not hear the other kind.
        all.sort_by_key(|each| !each.is_ipv4());
        match all.is_empty() {
            true => Err(io::Error::other("the name has no address")),
            false => Ok(all),
        }
    }

    fn text(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

fn parse(text: &str) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    // Without brackets nobody can tell where an IPv6 address ends.
    let host = bare.or_else(|| (!host.contains(':')).then_some(host))?;
    let fits = !host.is_empty() && !host.contains('\0') && port.bytes().all(|digit| digit.is_ascii_digit());
    let port = port.parse().ok().filter(|_| fits)?;
    Some(Address { host: host.to_owned(), port })
}

/// The bytes of `bytes`, or of any other buffer of bytes; nothing where it is another kind of thing.
pub fn bytes(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u8>>> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Some(bytes.as_bytes().to_vec()));
    }
    PyBuffer::<u8>::get(object).ok().map(|buffer| buffer.to_vec(object.py())).transpose()
}

/// A notification's.
pub fn message(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    bytes(object)?.ok_or_else(|| is_no("message", object, "bytes"))
}

/// A peer's memory.
pub fn remote<'a, 'py>(what: &str, object: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, RemoteRegion>> {
    object.cast::<RemoteRegion>().map_err(|_| match object.cast::<Region>() {
        Ok(_) => {
            let why = "it is a Region, and peers' memory is named by a RemoteRegion: try region.remote()";
            usage(object.py(), what, why)
        }
        Err(_) => is_no(what, object, "a RemoteRegion"),
    })
}

/// Something of another kind.
pub fn is_no(what: &str, object: &Bound<'_, PyAny>, kind: &str) -> PyErr {
    let its = object.get_type().qualname().map_or_else(|_| "it".into(), |name| name.to_string());
    usage(object.py(), what, format!("{its} is not {kind}"))
}

/// A number as Python has it, for [`unsigned`]; what is far beyond all that fits becomes the greatest, or the least.
pub fn whole(number: &Bound<'_, PyAny>) -> PyResult<i128> {
    // Most are small, and found out faster so.
    if let Ok(small) = number.extract::<i64>() {
        return Ok(small.into());
    }
    number.extract::<i128>().or_else(|error| match error.is_instance_of::<PyOverflowError>(number.py()) {
        true => Ok(if number.lt(0)? { i128::MIN } else { i128::MAX }),
        false => Err(error),
    })
}

/// The same of one that may be left out.
pub fn perhaps(number: &Bound<'_, PyAny>) -> PyResult<Option<i128>> {
    if number.is_none() { Ok(None) } else { whole(number).map(Some) }
}

/// A number of bytes, or an offset, or a tag.
pub fn unsigned(py: Python<'_>, what: &str, value: impl Into<i128>) -> PyResult<u64> {
    let value = value.into();
    u64::try_from(value).map_err(|_| {
        let why = match value {
            i128::MIN => "it is negative".into(),
            i128::MAX => "it has more than 64 bits".into(),
            _ if value < 0 => format!("{value} is negative"),
            _ => format!("{value} has more than 64 bits"),
        };
        usage(py, what, why)
    })
}

/// A number of things.
pub fn count(py: Python<'_>, what: &str, value: Option<i128>) -> PyResult<Option<usize>> {
    value.map(|value| unsigned(py, what, value).map(|value| value as usize)).transpose()
}
