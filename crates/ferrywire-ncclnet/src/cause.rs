//! Why a plugin failed, according to its own warnings.
//!
//! Plugins return a number, or end the process; only their log names the reason. The log is another program's
//! text, and no typed source of the reason exists: the text yields a hint for the user, and decides nothing
//! else. This file knows the texts of GPUDirect-TCPX 3.1.9, from its source. Only warnings are searched: the
//! start-up lines of every run mention the GPU and the manager's sockets.
//!
//! Invariant: an unknown warning has no cause and no fix; this file never guesses.
//! Read next: `ending.rs`, which reports how a plugin ended its process.

use super::log::{LogLevel, LogLine};

/// Environment variable with the folder of the manager's sockets.
const MANAGER_FOLDER: &str = "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX";

/// Why a plugin failed, as one of its warnings states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoggedCause {
    /// The receive-datapath manager, which owns receive pools and flow rules, does not listen in its folder.
    ManagerMissing,
    /// The manager answered and refused a request.
    ManagerRefused,
    /// Payload for a GPU was placed in host memory.
    LandedOnHost,
    /// A message arrived in more fragments than the plugin's table holds.
    TooManyFragments,
    /// A receive completed without payload.
    NoData,
    /// None of the configured interfaces exists.
    NoInterface,
    /// This host has no GPU.
    NoGpu,
}

impl LoggedCause {
    /// The cause that a line states; `None` unless the line is a warning with a known text.
    pub fn of(line: &LogLine) -> Option<LoggedCause> {
        if !matches!(line.level, LogLevel::Warn | LogLevel::Abort) {
            return None;
        }
        let says = |part: &str| line.text.contains(part);
        let of_manager = says("failed against receive-datapath-manager:")
            || says("register failed against receive_datapath_manager")
            || says("gpumem fd client connect failed")
            || says("gpumem metadata client connect failed");
        let of_pool = says("recv fd failed")
            || says("GPU fd not found")
            || says("recv metadata failed")
            || says("GPU metadata not found");
        let causes = [
            (of_manager && says("unix client connect() error: "), LoggedCause::ManagerMissing),
            (of_manager || of_pool, LoggedCause::ManagerRefused),
            (says(" data landed on host memory ") || says(" no cmsg"), LoggedCause::LandedOnHost),
            (says(" segs, failstop") || says("request too many pages "), LoggedCause::TooManyFragments),
            (says("fatal, ") && line.text.trim_end().ends_with(" no data"), LoggedCause::NoData),
            (says(" : no interface found"), LoggedCause::NoInterface),
            (says(" : no cuDevices found"), LoggedCause::NoGpu),
        ];
        causes.iter().find(|(fits, _)| *fits).map(|(_, cause)| *cause)
    }

    /// What the user should do about this cause.
    pub fn fix(self) -> String {
        let folder = std::env::var(MANAGER_FOLDER).ok().filter(|folder| !folder.is_empty());
        let folder = folder.unwrap_or_else(|| "/tmp".to_owned());
        match self {
            LoggedCause::ManagerMissing => format!(
                "start the receive data path manager (RxDM, tcpgpudmarxd) on this host; the plugin looks for its sockets in \
                 {folder} ({MANAGER_FOLDER})"
            ),
            LoggedCause::ManagerRefused => format!(
                "look at the log of the receive data path manager (RxDM, tcpgpudmarxd) on this host, whose sockets are in \
                 {folder} ({MANAGER_FOLDER}): it answered and refused a request"
            ),
            LoggedCause::LandedOnHost => {
                "header split is off on the receiving NIC (ethtool -g), a flow rule is missing, or the data never crossed a \
                 NIC: use two hosts, or memory of the host"
                    .to_owned()
            }
            LoggedCause::TooManyFragments => {
                "use smaller messages (--chunk, NCCL_DYNAMIC_CHUNK_SIZE), or a larger MTU, at both ends".to_owned()
            }
            LoggedCause::NoData => {
                "the kernel gave a receive without payload: check that kernel and NIC driver are those the plugin was built \
                 for"
                .to_owned()
            }
            LoggedCause::NoInterface => {
                "name interfaces that are up and have an IPv4 address: NCCL_GPUDIRECTTCPX_SOCKET_IFNAME".to_owned()
            }
            LoggedCause::NoGpu => "give this process a GPU: check the NVIDIA driver, the device files and CUDA_VISIBLE_DEVICES".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(level: LogLevel, text: &str) -> Option<LoggedCause> {
        LoggedCause::of(&LogLine::new(level, None, None, b"x.cc", 1, text.as_bytes()))
    }

    /// The texts are those of GPUDirect-TCPX 3.1.9.
    #[test]
    fn warnings_tell_their_cause() {
        let rule = "update flow steering rule: local 10.0.0.1<1> <- remote 10.0.0.2<2>, failed against \
                    receive-datapath-manager: ";
        let known = [
            (format!("{rule}unix client connect() error: 2"), LoggedCause::ManagerMissing),
            (format!("{rule}unix client connect() error: 111"), LoggedCause::ManagerMissing),
            (format!("{rule}Create FlowSteerRule Failed: proto {{}}, request was"), LoggedCause::ManagerRefused),
            (
                "unix client /run/tcpx/get_gpu_fd_0000:04:00.0, gpumem fd client connect failed unix client connect() error: 2"
                    .to_owned(),
                LoggedCause::ManagerMissing,
            ),
            (
                "unix client /tmp/get_gpu_fd_0000:04:00.0, GPU fd not found 0000:04:00.0".to_owned(),
                LoggedCause::ManagerRefused,
            ),
            ("fatal, 10.0.0.1->10.0.0.2 data landed on host memory 1 times".to_owned(), LoggedCause::LandedOnHost),
            ("received 2048/2048 segs, failstop, 10.0.0.1->10.0.0.2".to_owned(), LoggedCause::TooManyFragments),
            ("fatal, 10.0.0.1->10.0.0.2 no data".to_owned(), LoggedCause::NoData),
            ("NET/GPUDirectTCPX : no interface found".to_owned(), LoggedCause::NoInterface),
            ("NET/GPUDirectTCPX/CUDA : no cuDevices found".to_owned(), LoggedCause::NoGpu),
        ];
        for (text, expected) in known {
            assert_eq!(cause(LogLevel::Warn, &text), Some(expected), "{text}");
            assert_eq!(cause(LogLevel::Info, &text), None, "not a warning: {text}");
        }
    }

    /// Regression: each of these lines was once taken for a cause.
    #[test]
    fn a_line_that_every_log_has_is_no_cause() {
        let every_run = [
            "NET/GPUDirectTCPX : unix client prefix /run/tcpx",
            "NET/GPUDirectTCPX/CUDA : cuDevices count 8",
            "NET/GPUDirectTCPX failed accept socket",
            "NET/GPUDirectTCPX : no ctrl interface found",
            "NET/GPUDirectTCPX requested receive on host mem buffer",
        ];
        for text in every_run {
            assert_eq!(cause(LogLevel::Warn, text), None, "{text}");
        }
    }

    #[test]
    fn a_missing_manager_is_reported_with_its_folder() {
        let fix = LoggedCause::ManagerMissing.fix();
        assert!(fix.contains("tcpgpudmarxd") && fix.contains(" in /"), "{fix}");
    }
}
