//! A simulated GPUDirect-TCPX plugin: a real shared object with the real interface and every quirk of the real plugin,
//! over ordinary sockets and the simulated GPU. For tests only. It also accepts memory of real GPUs if the host has
//! loaded the CUDA driver; the bytes then go through host memory.
//!
//! It exports one data object, `ncclNetPlugin_v7`, and is loaded with `dlopen` like any NCCL net plugin. It reads the
//! `NCCL_*` and `NCCL_GPUDIRECTTCPX_*` variables of the real plugin, once, in `init`, with the real defaults: without
//! `NCCL_DYNAMIC_CHUNK_SIZE` nothing ever moves, and without `NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS` an
//! accept takes five seconds.
//!
//! A package with this crate among its `dev-dependencies` finds `libferrywire_tcpx_sim.so` beside its own test
//! programs, in `target/<profile>/deps`.
//!
//! Where the real plugin would use freed memory (a call after the end of an attempt, a request or a registration of a
//! closed comm, deregistering memory of a pending request, two threads in one comm), this plugin ends the process by
//! SIGABRT and names the broken rule.
//!
//! # Switches
//!
//! `FERRYWIRE_TCPX_SIM=name=value,name=value` switches each oddity on and off. The defaults are the real
//! plugin's behaviour; where they are not, the table says so.
//!
//! | switch | default | else | the oddity |
//! |---|---|---|---|
//! | `head_only` | on | off | `test` of any but the oldest request in transmission gives 3 |
//! | `one_step` | on | off | a `test` admits at most one request and schedules at most one |
//! | `slots` | 16 | 1 to 32 | requests per comm; a finished receive counts until `irecvConsumed` |
//! | `full` | error | null | a request too many gives 3; with `null`, success and a NULL request |
//! | `sizes` | keep | write | `test` never writes sizes |
//! | `overrun` | on | off | a message larger than its receive is written beyond it; off: result 2 |
//! | `consume_order` | on | off | `irecvConsumed` of a receive that is not the oldest gives 3 |
//! | `one_thread` | on | off | two threads inside one comm at once are misuse; off: they take turns |
//! | `null_first` | on | off | connect and accept give NULL until they are ready; off: they wait |
//! | `attempt_once` | on | off | a connect or accept after its end is misuse; off: it gives 3 |
//! | `setup_ms` | 1 | 0, 2, ... | time per socket while connecting; the real plugin takes 100 |
//! | `dp_manager` | on | off, refuse, gone, hang | off: there is none, refuse: it refuses each rule: accept and connect give 3; gone: it ends before the pool is imported, `exit(1)` in the last accept; hang: the last accept never returns |
//! | `need_device_handle` | on | off | the first receive on a comm accepted without device handle is SIGSEGV |
//! | `second_init` | 3 | ok | what a second `init` gives |
//! | `need_gpu` | off | on | `init` without a GPU gives 3; the real plugin's is on |
//! | `pci_path` | on | off | a NIC without PCI path gets one; off, as really: `regMr` of GPU memory is SIGSEGV |
//! | `chunk_env` | on | off | without `NCCL_DYNAMIC_CHUNK_SIZE` chunks have no bytes; off: 512 KiB |
//! | `alignment` | on | off | GPU memory is registered in whole, aligned pages only, else result 1 |
//! | `push_left` | on | off | a `regMr` of memory of a real GPU that fails leaves a context pushed |
//! | `comm_gpu` | on | off | a send comm takes memory of the GPU alone that was current at its first connect |
//! | `scatter` | on | off | fragments lie in shuffled pages, now and then at odd offsets with odd lengths |
//! | `fragment_bytes` | 4096 | 1 to 4096 | longest fragment; 2048 in one chunk, or more in one request, are `exit(1)` |
//! | `pool_pages` | 16384 | up to 524288 | pages of a GPU's receive pool; an empty pool stalls |
//! | `import_race` | on | off | the last `accept` imports its GPU's pool without a lock: calls that overlap each import it, and each later import takes the mapping of comms away that have the earlier one |
//! | `import_ms` | 3 | 0, 1, ... | how long an import of the pool takes, which asks the dp-manager twice |
//! | `poison` | on | off | pages given back are filled with 0xDE |
//! | `leak` | on | off | queueing a second chunk of a request on one socket loses the pages of the first |
//! | `same_host` | die | allow | GPU payload from an address of this host lands in host memory, `exit(1)` |
//! | `early_payload` | allow | die | bytes on a data socket before the steering wait is over are `exit(1)`, as really for GPU memory |
//! | `host_warning` | on | off | one warning per receive call into host memory |
//! | `close_error` | on | off, always | control bytes read together with the peer's close give one 2; always: see below |
//! | `silent_death` | on | off | a fatal socket error ends a worker without a word; off: `test` gives 2 |
//! | `sigpipe` | on | off | writing to a dead peer raises SIGPIPE |
//! | `half_control_spin` | on | off | half a control message is waited for without end |
//! | `rate` | 0 | bytes/s | limit of each NIC and direction, 0 for none |
//! | `seed` | 1 | number | seed of everything drawn by lot |
//! | `stats` | off | on | lines with counts: of a comm at its close, with the memory handles of the process; of listeners at each; at level INFO |
//!
//! `close_error=always` gives that one 2 on every receive comm whose peer closes while a request is tested.
//!
//! Faults, for the comms that `fault_side` and `fault_nic` name (`rate` too); N counts per comm:
//!
//! | switch | default | else | the fault |
//! |---|---|---|---|
//! | `fault_side` | both | send, recv | which comms |
//! | `fault_nic` | all | name | comms on which NIC |
//! | `fault_call` | none | init, test, ... | a call of the table is faulty, whatever the comm: see `call_fault` |
//! | `call_fault` | no | exit, crash, sigpipe, hang, error, panic | what that call does; error: 2, panic: 3 |
//! | `call_fault_after` | 0 | N | so many of those calls, in the whole process, are good before |
//! | `die_after` | never | N | `exit(1)` when a request is posted after N others |
//! | `crash_after` | never | N | SIGSEGV when a request is posted after N others |
//! | `test_hang_after` | never | N | `test` never returns once N requests are done |
//! | `test_error_after` | never | N | `test` gives 2 once, when N requests are done |
//! | `stall_head_after` | never | N | the oldest request never completes once N are done |
//! | `drop_data_socket_after` | never | N | data socket 0 is shut down when a request is posted after N others |
//! | `half_control_after` | never | N | a send comm writes half a control message after N, and nothing more |
//! | `no_cmsg_after` | never | N | the receive number N (from 0) into GPU memory is `exit(1)` |
//! | `lie_handle` | off | on | the handle that `listen` fills has a pointer where a fresh one has none |
//! | `lie_fragment` | no | range, dst, len | fragments outside the pool, outside the message, of wrong length |
//! | `lie_after` | 0 | N | they lie from receive number N (from 0) on |
//! | `partial_io` | off | on | socket calls move a random part of what they could |
//! | `delay_us` | 0-0 | LOW-HIGH | random pause before each socket call |
//!
//! # What is not simulated
//!
//! Core bindings, telemetry, the dp-manager's protocol, IPv6, and the copies that
//! `NCCL_MIN_ZCOPY_SIZE` and GPU sends spare: sends end when the kernel has the bytes. Without a GPU the
//! device's words lie in host memory.
//!
//! # Reading order
//!
//! `table.rs` (the calls), `listener.rs`, `attempt.rs` and `handshake.rs` (how comms are set up), `cell.rs`
//! and `comm.rs` (what the calls do), `progress.rs` (progress), `worker.rs` and `transfer.rs` (what moves
//! bytes). Pure and small: `ring.rs`, `control.rs`, `pool.rs`, `handle.rs`, `switches.rs`, `settings.rs`.

mod attempt;
mod cell;
mod comm;
mod control;
mod cuda;
mod devices;
mod faults;
mod gpu;
mod handle;
mod handshake;
mod lane;
mod listener;
mod log;
mod metadata;
mod plugin;
mod pool;
mod progress;
mod random;
mod rate;
mod registration;
mod ring;
mod settings;
mod switches;
mod sync;
mod table;
mod transfer;
mod unpack;
mod worker;
