//! Files of the engine's `core` as they are, beside loom's `sync`.

#[path = "../../../src/core/hold.rs"]
pub mod hold;
#[path = "../../../src/core/read_room.rs"]
pub mod read_room;
#[path = "../../../src/core/sleeper.rs"]
pub mod sleeper;
pub mod sync;
#[path = "../../../src/core/waiting.rs"]
pub mod waiting;
