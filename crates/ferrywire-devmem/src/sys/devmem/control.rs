//! The kernel's control messages of one receive, checked and converted to fragments.
//!
//! Invariant: a [`Control`] holds only messages that were checked against the call's result. Callers have nothing left
//! to check but that the pool is theirs.
//! Read next: `tokens.rs`.

use std::mem;

use super::{DmabufCmsg, SCM_DEVMEM_DMABUF, SCM_DEVMEM_LINEAR};
use ferrywire_sys::cmsg::{ControlMessage, ControlMessages, HEADER_BYTES};

/// Words of one fragment's control message.
const FRAGMENT_WORDS: usize = (HEADER_BYTES + size_of::<DmabufCmsg>()).div_ceil(size_of::<usize>());
/// Number of fragments at which a receive stops, without losing any.
const FRAGMENTS_MAX: usize = 4096;

/// A piece of the bytes of one receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// A piece that is in the pool until its token is returned.
    Pool {
        /// The kernel's id of the binding.
        dmabuf: u32,
        /// Offset of the piece's first byte in the dma-buf.
        offset: u64,
        /// Number of bytes of the piece.
        bytes: u32,
        /// The token that returns the fragment, on the socket that received it.
        token: u32,
    },
    /// A piece that is in the buffer of the call.
    Linear {
        /// Offset of the piece's first byte in the buffer.
        at: usize,
        /// Number of bytes of the piece.
        bytes: u32,
    },
}

impl Fragment {
    /// Number of bytes of the stream that the piece has.
    pub fn bytes(self) -> u32 {
        match self {
            Fragment::Pool { bytes, .. } | Fragment::Linear { bytes, .. } => bytes,
        }
    }
}

/// Why a control message of a receive is impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlFault {
    /// The fragments do not add up to the call's result.
    #[error("the fragments have {fragments} bytes, and the call returned {received}")]
    Sum {
        /// Bytes of all fragments together.
        fragments: u64,
        /// Number of bytes that the call returned.
        received: usize,
    },
    /// The buffer has no room for the bytes that are reported in it.
    #[error("the kernel reported {linear} bytes in a buffer of {buffer} bytes")]
    Linear {
        /// Bytes of the fragments in the buffer.
        linear: u64,
        /// Size of the buffer in bytes.
        buffer: usize,
    },
    /// A control message is too short for a fragment.
    #[error("a control message of {bytes} bytes is too short for a fragment")]
    Short {
        /// Bytes of the message's payload.
        bytes: usize,
    },
}

/// The buffer for the control messages of a receive, reusable.
#[derive(Debug)]
pub struct Control {
    room: Box<[usize]>,
    /// Number of bytes of control messages that were written and checked.
    written: usize,
}

impl Control {
    /// Makes room for the control messages of this many fragments, at least one. 256 to 512 suit a call; with
    /// fewer, calls return less.
    pub fn new(fragments: usize) -> Control {
        let room = vec![0; fragments.clamp(1, FRAGMENTS_MAX) * FRAGMENT_WORDS].into_boxed_slice();
        Control { room, written: 0 }
    }

    /// The fragments of the last call, in the order of the stream; empty if the call was plain or failed.
    pub fn fragments(&self) -> Fragments<'_> {
        Fragments { messages: ControlMessages::new(&self.bytes()[..self.written]), linear: 0 }
    }

    /// The buffer for control messages, emptied for the next call.
    pub(super) fn room(&mut self) -> &mut [usize] {
        self.written = 0;
        &mut self.room
    }

    /// Checks and keeps the bytes that a call wrote; returns whether all received bytes are plain.
    pub(super) fn accept(
        &mut self,
        written: usize,
        received: usize,
        buffer: usize,
    ) -> Result<bool, ControlFault> {
        self.written = 0;
        let written = written.min(mem::size_of_val(&*self.room));
        let plain = check(&self.bytes()[..written], received, buffer)?;
        self.written = written;
        Ok(plain)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes are those of `room`, initialised and under the same borrow; bytes need no alignment.
        unsafe { std::slice::from_raw_parts(self.room.as_ptr().cast(), mem::size_of_val(&*self.room)) }
    }

    /// A control with these bytes, as if a call had written them. For tests.
    pub fn holding(control: &[u8], received: usize, buffer: usize) -> Result<Control, ControlFault> {
        let words = control.len().div_ceil(size_of::<usize>());
        let mut held = Control { room: vec![0; words].into_boxed_slice(), written: 0 };
        for (word, bytes) in held.room.iter_mut().zip(control.chunks(size_of::<usize>())) {
            let mut whole = [0; size_of::<usize>()];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = usize::from_ne_bytes(whole);
        }
        held.accept(control.len(), received, buffer)?;
        Ok(held)
    }
}

/// Checks control messages; returns whether all `received` bytes are plain.
///
/// # Errors
/// The fragments do not add up to `received`, or leave the buffer.
pub fn check(control: &[u8], received: usize, buffer: usize) -> Result<bool, ControlFault> {
    let (mut fragments, mut linear, mut plain) = (0_u64, 0_u64, true);
    for message in ControlMessages::new(control).filter(is_fragment) {
        let payload = message.payload;
        let cmsg = decoded(payload).ok_or(ControlFault::Short { bytes: payload.len() })?;
        fragments = fragments.saturating_add(cmsg.frag_size.into());
        if message.kind == SCM_DEVMEM_LINEAR {
            linear = linear.saturating_add(cmsg.frag_size.into());
        }
        plain = false;
    }
    if linear > buffer as u64 {
        return Err(ControlFault::Linear { linear, buffer });
    }
    if !plain && fragments != received as u64 {
        return Err(ControlFault::Sum { fragments, received });
    }
    Ok(plain)
}

/// Bytes of all readable fragments. For tests.
pub fn sum(control: &[u8]) -> Option<usize> {
    let sizes = ControlMessages::new(control).filter(is_fragment).map(|message| decoded(message.payload));
    let sizes: Option<Vec<_>> = sizes.collect();
    let sizes = sizes.filter(|sizes| !sizes.is_empty())?;
    Some(sizes.iter().map(|cmsg| cmsg.frag_size as usize).sum())
}

fn is_fragment(message: &ControlMessage<'_>) -> bool {
    message.level == libc::SOL_SOCKET && matches!(message.kind, SCM_DEVMEM_LINEAR | SCM_DEVMEM_DMABUF)
}

fn decoded(payload: &[u8]) -> Option<DmabufCmsg> {
    let (offset, rest) = payload.split_first_chunk()?;
    let (size, rest) = rest.split_first_chunk()?;
    let (token, rest) = rest.split_first_chunk()?;
    let (dmabuf, rest) = rest.split_first_chunk()?;
    Some(DmabufCmsg {
        frag_offset: u64::from_ne_bytes(*offset),
        frag_size: u32::from_ne_bytes(*size),
        frag_token: u32::from_ne_bytes(*token),
        dmabuf_id: u32::from_ne_bytes(*dmabuf),
        flags: u32::from_ne_bytes(*rest.first_chunk()?),
    })
}

/// Iterates over the fragments of a [`Control`].
#[derive(Clone, Debug)]
pub struct Fragments<'a> {
    messages: ControlMessages<'a>,
    /// Number of bytes of the buffer that the iterator has returned so far.
    linear: usize,
}

impl Iterator for Fragments<'_> {
    type Item = Fragment;

    fn next(&mut self) -> Option<Fragment> {
        let message = self.messages.find(is_fragment)?;
        let cmsg = decoded(message.payload)?;
        let bytes = cmsg.frag_size;
        if message.kind == SCM_DEVMEM_LINEAR {
            let at = self.linear;
            self.linear = at.saturating_add(bytes as usize);
            return Some(Fragment::Linear { at, bytes });
        }
        let (dmabuf, offset, token) = (cmsg.dmabuf_id, cmsg.frag_offset, cmsg.frag_token);
        Some(Fragment::Pool { dmabuf, offset, bytes, token })
    }
}
