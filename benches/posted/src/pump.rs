//! The measured loops: one connection, one thread, one direction.
//!
//! Message n has slot n of the connection's memory, modulo the number of slots, on both ends. So after one
//! cycle the target's memory equals the source's.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::flags::Flags;
use crate::table::{Net, Opaque};

/// One connection with its memory.
pub struct Pump<'a> {
    net: &'a Net,
    comm: Opaque,
    memory: &'static mut [u8],
    registered: Opaque,
    pub flags: &'a Flags,
    /// Number of messages that the plugin has finished.
    pub done: &'a AtomicU64,
}

impl<'a> Pump<'a> {
    pub fn new(
        net: &'a Net,
        comm: Opaque,
        memory: &'static mut [u8],
        flags: &'a Flags,
        done: &'a AtomicU64,
    ) -> io::Result<Pump<'a>> {
        let registered = net.register(comm, memory)?;
        Ok(Pump { net, comm, memory, registered, flags, done })
    }

    fn place(&mut self, message: u64) -> *mut u8 {
        let places = (self.memory.len() / self.flags.chunk) as u64;
        self.memory[(message % places) as usize * self.flags.chunk..].as_mut_ptr()
    }

    /// Sends messages. Returns when the plugin has finished the last one.
    pub fn send(&mut self, messages: u64) -> io::Result<()> {
        let (mut posted, mut requests) = (0, VecDeque::with_capacity(self.flags.window));
        while posted < messages || !requests.is_empty() {
            let mut worked = false;
            while posted < messages && requests.len() < self.flags.window {
                let data = self.place(posted);
                // SAFETY: the slot lies in registered memory, and nothing writes to it.
                match unsafe { self.net.isend(self.comm, data, self.flags.chunk, self.registered) }? {
                    Some(request) => requests.push_back(request),
                    None => break,
                }
                (posted, worked) = (posted + 1, true);
            }
            if self.test(&mut requests)?.is_some() {
                self.done.fetch_add(1, Ordering::Relaxed);
                worked = true;
            }
            if !worked {
                thread::yield_now();
            }
        }
        Ok(())
    }

    /// Receives messages. Returns when the last one has been returned to the plugin.
    pub fn receive(&mut self, messages: u64) -> io::Result<()> {
        let (mut posted, mut requests) = (0, VecDeque::with_capacity(self.flags.window));
        while posted < messages || !requests.is_empty() {
            let mut worked = false;
            while posted < messages && requests.len() < self.flags.window {
                let data = self.place(posted);
                // SAFETY: the slot lies in registered memory, and a window is shorter than the memory, so no
                // other request uses the slot.
                match unsafe { self.net.irecv(self.comm, data, self.flags.chunk, self.registered) }? {
                    Some(request) => requests.push_back(request),
                    None => break,
                }
                (posted, worked) = (posted + 1, true);
            }
            if let Some(request) = self.test(&mut requests)? {
                // SAFETY: the request is done, and earlier ones were returned.
                unsafe { self.net.consumed(self.comm, request) }?;
                worked = true;
            }
            if !worked {
                thread::yield_now();
            }
        }
        Ok(())
    }

    /// Tests the oldest request, and removes it if it is done.
    fn test(&self, requests: &mut VecDeque<Opaque>) -> io::Result<Option<Opaque>> {
        match requests.front() {
            // SAFETY: the request is the oldest one, and not done yet.
            Some(&request) if unsafe { self.net.test(request) }? => Ok(requests.pop_front()),
            _ => Ok(None),
        }
    }

    /// Fills the memory with a pattern that the other end can compute too.
    pub fn fill(&mut self, index: usize) {
        for (at, word) in self.memory.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&word_at(index, at).to_le_bytes());
        }
    }

    /// Whether the memory holds what the other end's [`Pump::fill`] wrote.
    pub fn holds(&self, index: usize) -> bool {
        let mut words = self.memory.chunks_exact(8).enumerate();
        words.all(|(at, word)| word == word_at(index, at).to_le_bytes())
    }
}

fn word_at(index: usize, at: usize) -> u64 {
    ((index as u64) << 48 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
