//! Parses arguments: an address as text or pair, bytes in any buffer, a number that must not be negative.
//!
//! Invariant: an error names the argument that is wrong.

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

/// `"host:port"` or `(host, port)`, with the host name not resolved yet.
pub struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// Parses an address; `None` if the object is neither text nor a pair.
    ///
    /// # Errors
    /// `UsageError` for text or a pair that is no address.
    pub fn of(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<Address>> {
        let refused = |why: String| usage(object.py(), what, why);
        if let Ok(text) = object.cast::<PyString>() {
            let text: String = text.extract()?;
            let parsed = parse(&text);
            let wrong = || refused(format!("{text:?} is not an address: write it as 'host:port'"));
            return parsed.ok_or_else(wrong).map(Some);
        }
        let Ok(pair) = object.cast::<PyTuple>() else { return Ok(None) };
        let wrong = || refused("the value is not an address: pass ('host', port)".into());
        let (host, port): (String, Bound<'_, PyAny>) = pair.extract().map_err(|_| wrong())?;
        let number = whole(&port).map_err(|_| wrong())?;
        let port =
            u16::try_from(number).map_err(|_| refused(format!("{port} is not a port: use 0 to 65535")))?;
        if host.is_empty() || host.contains('\0') { Err(wrong()) } else { Ok(Some(Address { host, port })) }
    }

    /// Resolves a peer's host name to all its addresses, IPv4 first. A name service that takes longer than `limit` is
    /// abandoned.
    ///
    /// # Errors
    /// `Stalled` after `limit`; `Unreachable` if the name has no address.
    pub fn resolve(self, limit: Duration) -> Result<Vec<SocketAddr>> {
        if let Ok(ip) = self.host.parse() {
            return Ok(vec![SocketAddr::new(ip, self.port)]);
        }
        let text = self.text();
        let (tell, reported) = mpsc::channel();
        let look_up = move || drop(tell.send(self.look_up()));
        thread::Builder::new()
            .name("ferrywire-name".into())
            .spawn(look_up)
            .map_err(|error| Error::io("start a thread", &error))?;
        let timeout = |_| Error::Stalled { what: format!("looking up {text}"), peer: None, waited: limit };
        let found = reported.recv_timeout(limit).map_err(timeout)?;
        found.map_err(|error| Error::Unreachable {
            address: text,
            cause: UnreachableCause::NameNotResolved,
            why: error.to_string(),
        })
    }

    /// Resolves an address of this host.
    pub fn resolve_here(&self) -> Result<SocketAddr> {
        let found = self.look_up().map(|all| all[0]);
        found.map_err(|error| Error::io(format!("look up {}", self.text()), &error))
    }

    /// Resolves the name to at least one address.
    fn look_up(&self) -> io::Result<Vec<SocketAddr>> {
        let mut all: Vec<SocketAddr> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        // IPv4 addresses first: a listener on "0.0.0.0" does not accept IPv6 connections.
        all.sort_by_key(|each| !each.is_ipv4());
        if all.is_empty() { Err(io::Error::other("the name has no address")) } else { Ok(all) }
    }

    fn text(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

fn parse(text: &str) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    // Without brackets the end of an IPv6 address is ambiguous.
    let host = bare.or_else(|| (!host.contains(':')).then_some(host))?;
    let fits = !host.is_empty() && !host.contains('\0') && port.bytes().all(|digit| digit.is_ascii_digit());
    let port = port.parse().ok().filter(|_| fits)?;
    Some(Address { host: host.to_owned(), port })
}

/// The bytes of a bytes object or another buffer of bytes; `None` for other objects.
pub fn bytes(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u8>>> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Some(bytes.as_bytes().to_vec()));
    }
    PyBuffer::<u8>::get(object).ok().map(|buffer| buffer.to_vec(object.py())).transpose()
}

/// The bytes of a notification.
pub fn message(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    bytes(object)?.ok_or_else(|| is_no("message", object, "bytes"))
}

/// The remote region in an argument; the error explains a local region.
pub fn remote<'a, 'py>(what: &str, object: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, RemoteRegion>> {
    object.cast::<RemoteRegion>().map_err(|_| match object.cast::<Region>() {
        Ok(_) => {
            let why = "a Region names memory of this process, and a RemoteRegion that of a peer: pass region.remote()";
            usage(object.py(), what, why)
        }
        Err(_) => is_no(what, object, "a RemoteRegion"),
    })
}

/// The error for an argument of a wrong type.
pub fn is_no(what: &str, object: &Bound<'_, PyAny>, kind: &str) -> PyErr {
    let its = object.get_type().qualname().map_or_else(|_| "it".into(), |name| name.to_string());
    usage(object.py(), what, format!("{its} is not {kind}"))
}

/// A Python integer for [`unsigned`]; a value far outside of the range becomes the largest or smallest one.
pub fn whole(number: &Bound<'_, PyAny>) -> PyResult<i128> {
    // Most numbers fit into 64 bits, and this path is faster.
    if let Ok(small) = number.extract::<i64>() {
        return Ok(small.into());
    }
    number.extract::<i128>().or_else(|error| {
        if error.is_instance_of::<PyOverflowError>(number.py()) {
            Ok(if number.lt(0)? { i128::MIN } else { i128::MAX })
        } else {
            Err(error)
        }
    })
}

/// Like [`whole`], for an argument that may be None.
pub fn perhaps(number: &Bound<'_, PyAny>) -> PyResult<Option<i128>> {
    if number.is_none() { Ok(None) } else { whole(number).map(Some) }
}

/// A number of bytes, an offset or a tag.
///
/// # Errors
/// `UsageError` for a negative or too large number.
pub fn unsigned(py: Python<'_>, what: &str, value: impl Into<i128>) -> PyResult<u64> {
    let value = value.into();
    u64::try_from(value).map_err(|_| {
        let why = match value {
            i128::MIN => "the number is negative".into(),
            i128::MAX => "the number has more than 64 bits".into(),
            _ if value < 0 => format!("{value} is negative"),
            _ => format!("{value} has more than 64 bits"),
        };
        usage(py, what, why)
    })
}

/// Parses an optional count.
pub fn count(py: Python<'_>, what: &str, value: Option<i128>) -> PyResult<Option<usize>> {
    value.map(|value| unsigned(py, what, value).map(|value| value as usize)).transpose()
}
