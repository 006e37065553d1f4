//! `TCP_INFO`: the kernel's counters of a TCP connection.
//!
//! Invariant: fields that an older kernel does not fill read as zero.
//! Read next: `ferrywire-net/src/tcp/health.rs`, which decides from them whether a path is dead.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use super::socket;

/// `tcpi_state` while a connection attempt is unanswered.
pub const SYN_SENT: u8 = 2;

/// Bytes of the kernel's `struct tcp_info` that are read.
const TCP_INFO_BYTES: usize = 168;

/// The fields of `struct tcp_info` that the engine uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// State of the connection, for example [`SYN_SENT`].
    pub state: u8,
    /// Retransmission timeouts in a row without an answer.
    pub retransmits: u8,
    /// Window or keepalive probes in a row without an answer.
    pub probes: u8,
    /// How often the retransmission or probe timer was doubled. An answered window probe does not reset it.
    pub backoff: u8,
    /// Most payload bytes of one packet (MSS), as far as the path's MTU is known.
    pub send_mss: u32,
    /// Packets sent and not acknowledged by the peer's kernel.
    pub unacked: u32,
    /// Time since the last acknowledgement from the peer's kernel.
    pub last_ack_recv: Duration,
    /// Smoothed round-trip time of the connection.
    pub rtt: Duration,
    /// Shortest round-trip time of the last minutes; zero before the first sample.
    pub min_rtt: Duration,
    /// Congestion window of the connection in packets.
    pub congestion_window: u32,
    /// Packets retransmitted since the connection began.
    pub total_retrans: u32,
    /// Bytes that the peer's kernel has acknowledged since the connection began.
    pub acked_bytes: u64,
    /// Bytes written to the socket and never sent.
    pub notsent_bytes: u32,
    /// Latest estimate of the delivery rate, in bytes per second.
    pub delivery_rate: u64,
}

impl TcpInfo {
    /// Reads `TCP_INFO` of a TCP socket.
    pub fn read(fd: RawFd) -> io::Result<TcpInfo> {
        let mut bytes = [0; TCP_INFO_BYTES];
        socket::get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
        Ok(TcpInfo::parse(&bytes))
    }

    /// Picks the fields by their offsets, which the kernel's ABI fixes.
    fn parse(bytes: &[u8; TCP_INFO_BYTES]) -> TcpInfo {
        let word = |at: usize| u32::from_ne_bytes(array(bytes, at));
        let micros = |at: usize| Duration::from_micros(u64::from(word(at)));
        let millis = |at: usize| Duration::from_millis(u64::from(word(at)));
        TcpInfo {
            state: bytes[0],
            retransmits: bytes[2],
            probes: bytes[3],
            backoff: bytes[4],
            send_mss: word(16),
            unacked: word(24),
            last_ack_recv: millis(56),
            rtt: micros(68),
            min_rtt: if word(148) == u32::MAX { Duration::ZERO } else { micros(148) },
            congestion_window: word(80),
            total_retrans: word(100),
            acked_bytes: u64::from_ne_bytes(array(bytes, 120)),
            notsent_bytes: word(144),
            delivery_rate: u64::from_ne_bytes(array(bytes, 160)),
        }
    }

    /// Whether the peer's kernel has anything to acknowledge or answer.
    pub fn waiting(&self) -> bool {
        self.unacked > 0 || self.notsent_bytes > 0 || self.probes > 0
    }

    /// Retransmissions or window probes in a row without an answer.
    ///
    /// `backoff` is no evidence: a peer with a closed window answers every probe, and the backoff grows
    /// nevertheless.
    pub fn unanswered(&self) -> u32 {
        u32::from(self.retransmits.max(self.probes))
    }
}

/// The `N` bytes at offset `at`. The offsets are constants that lie within the structure.
fn array<const N: usize>(bytes: &[u8; TCP_INFO_BYTES], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes were cut")
}

#[cfg(test)]
mod tests {
    use std::mem;

    use super::*;

    #[test]
    fn offsets_are_those_of_the_c_library() {
        assert_eq!(16, mem::offset_of!(libc::tcp_info, tcpi_snd_mss));
        assert_eq!(24, mem::offset_of!(libc::tcp_info, tcpi_unacked));
        assert_eq!(56, mem::offset_of!(libc::tcp_info, tcpi_last_ack_recv));
        assert_eq!(68, mem::offset_of!(libc::tcp_info, tcpi_rtt));
        assert_eq!(80, mem::offset_of!(libc::tcp_info, tcpi_snd_cwnd));
        assert_eq!(100, mem::offset_of!(libc::tcp_info, tcpi_total_retrans));
    }

    #[test]
    fn no_round_trip_yet_reads_as_zero() {
        let mut bytes = [0; TCP_INFO_BYTES];
        bytes[148..152].fill(0xff);
        assert_eq!(TcpInfo::parse(&bytes).min_rtt, Duration::ZERO);
        bytes[148..152].copy_from_slice(&70_u32.to_ne_bytes());
        assert_eq!(TcpInfo::parse(&bytes).min_rtt, Duration::from_micros(70));
    }

    #[test]
    fn a_short_structure_reads_as_zero() {
        assert_eq!(TcpInfo::parse(&[0; TCP_INFO_BYTES]), TcpInfo::default());
    }

    #[test]
    fn backoff_alone_is_not_an_unanswered_probe() {
        let shut_window = TcpInfo { backoff: 7, notsent_bytes: 1, ..TcpInfo::default() };
        assert!(shut_window.waiting());
        assert_eq!(shut_window.unanswered(), 0);
    }
}
