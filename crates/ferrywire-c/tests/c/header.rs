//! The committed header must be what cbindgen generates from the source today.
//!
//! `FERRYWIRE_WRITE=1 cargo test -p ferrywire-c --test c header` writes it.

use std::path::Path;

use cbindgen::{Builder, Config, Language, Style};

const SOURCES: [&str; 8] =
    ["status", "options", "endpoint", "peer", "memory", "blocks", "transfer", "wakeup"];

const HEAD: &str = "\
/* ferrywire moves GPU and host memory between machines over ordinary TCP NICs.
 *
 * Generated from the source of ferrywire-c; do not edit.
 *
 * Every function that returns int returns FERRYWIRE_OK, FERRYWIRE_PENDING where its comment names it, or a negative
 * number: the kind of error (FERRYWIRE_ERROR_...). ferrywire_last_error() returns the message of the calling thread's
 * last error.
 *
 * A handle is not a pointer. A function that is given a handle that is NULL, freed or of another kind returns
 * FERRYWIRE_ERROR_USAGE. Handles may be freed in any order; an object lives as long as an operation uses it. Every
 * function may be called from every thread. In a forked child, calls on the parent's endpoints fail.
 *
 * The library cannot check three things and relies on them: strings are NUL-terminated, buffers and arrays have the
 * stated size, and registered memory stays valid as long as ferrywire_register requires. */
";

fn config() -> Config {
    let mut config = Config {
        language: Language::C,
        cpp_compat: true,
        header: Some(HEAD.into()),
        include_guard: Some("FERRYWIRE_H".into()),
        no_includes: true,
        sys_includes: ["stdbool.h", "stddef.h", "stdint.h"].map(String::from).into(),
        style: Style::Type,
        usize_is_size_t: true,
        line_length: 100,
        tab_width: 4,
        ..Config::default()
    };
    for name in ["Options", "Endpoint", "Peer", "Region", "Remote", "Blocks", "Transfer", "Wakeup"] {
        config.export.rename.insert(name.into(), format!("ferrywire_{}", name.to_lowercase()));
    }
    config
}

#[test]
fn the_committed_header_is_what_the_source_says() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut builder = Builder::new().with_config(config());
    for source in SOURCES {
        builder = builder.with_src(here.join(format!("src/{source}.rs")));
    }
    let mut generated = Vec::new();
    builder.generate().expect("the source can be read").write(&mut generated);
    let generated = String::from_utf8(generated).expect("text");
    let path = here.join("include/ferrywire.h");
    if std::env::var_os("FERRYWIRE_WRITE").is_some() {
        std::fs::write(&path, &generated).expect("the header is written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == generated, "the header is old: run with FERRYWIRE_WRITE=1");
    assert!(committed.matches("\nint ferrywire_").count() > 40, "functions are missing");
}
