//! Makes text from peers, hosts and plugins safe to show, because terminals interpret some characters.
//!
//! Invariant: the output has no character that moves the cursor, changes colours or hides others, and its length is
//! bounded. A peer's text is sanitized when it is received ([`crate::bench::protocol`]), so that table, log and JSON
//! agree; printed errors are sanitized again ([`crate::exit`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

/// Longest line, in characters: a name, or a sentence with a few names.
const LINE_CHARS_MAX: usize = 2000;
/// Most lines of a text: what happened, why and what to try.
const LINES_MAX: usize = 20;
/// Most lines of a list.
const LIST_MAX: usize = 256;
/// The text that stands for omitted text.
const MORE: &str = "...";

/// Sanitizes one line.
pub fn line(text: &str) -> String {
    let shown = |c: char| match c {
        '\t' => ' ',
        c if steers(c) => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    let mut line: String = text.chars().take(LINE_CHARS_MAX).map(shown).collect();
    if text.chars().nth(LINE_CHARS_MAX).is_some() {
        line += MORE;
    }
    line
}

/// Sanitizes a few lines.
pub fn text(text: &str) -> String {
    let mut lines: Vec<String> = text.split('\n').take(LINES_MAX).map(line).collect();
    if text.split('\n').nth(LINES_MAX).is_some() {
        lines.push(MORE.to_owned());
    }
    lines.join("\n")
}

/// Whether a character is a control character or a Unicode line end, changes the direction of writing, or is invisible.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Deserializes a field of one line, and sanitizes it.
pub fn one_line<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(|said| line(&said))
}

/// Deserializes a field of several lines, and sanitizes it.
pub fn some_lines<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(|said| text(&said))
}

/// Deserializes an optional field of one line, and sanitizes it.
pub fn line_if_any<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Option::<String>::deserialize(from).map(|said| said.map(|said| line(&said)))
}

/// Deserializes a list of lines, and sanitizes them.
pub fn list<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Vec::<String>::deserialize(from).map(|said| said.iter().take(LIST_MAX).map(|said| line(said)).collect())
}

/// Deserializes an optional name with a number, and sanitizes the name.
pub fn named_if_any<'de, D: Deserializer<'de>>(from: D) -> Result<Option<(String, f64)>, D::Error> {
    Option::<(String, f64)>::deserialize(from).map(|said| said.map(|(name, number)| (line(&name), number)))
}

/// Deserializes a map whose keys are names, and sanitizes the keys.
pub fn names<'de, V: Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, V>, D::Error> {
    let said = BTreeMap::<String, V>::deserialize(from)?;
    Ok(said.into_iter().map(|(name, value)| (line(&name), value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_steers_a_terminal_is_left() {
        assert_eq!(
            line("a\u{1b}[2Jb\r\n\u{9b}c\u{202e}d\u{7f}"),
            "a\u{fffd}[2Jb\u{fffd}\u{fffd}\u{fffd}c\u{fffd}d\u{fffd}"
        );
        assert_eq!(line("größer als 4 µs"), "größer als 4 µs");
        assert_eq!(text("one\ntwo\r\n\tthree"), "one\ntwo\u{fffd}\n three");
    }

    #[test]
    fn what_is_shown_is_bounded() {
        assert_eq!(line(&"x".repeat(LINE_CHARS_MAX)).len(), LINE_CHARS_MAX);
        assert_eq!(line(&"x".repeat(LINE_CHARS_MAX + 1)).len(), LINE_CHARS_MAX + MORE.len());
        assert_eq!(text(&"x\n".repeat(1000)).lines().count(), LINES_MAX + 1);
    }

    #[test]
    fn names_that_a_peer_gives_its_figures_are_plain() {
        #[derive(Deserialize)]
        struct Report {
            #[serde(deserialize_with = "names")]
            extra: BTreeMap<String, u64>,
        }
        let said = r#"{"extra":{"flush\u001b[2J":7}}"#;
        let Report { extra } = serde_json::from_str(said).expect("it is JSON");
        let (name, value) = extra.into_iter().next().expect("one name");
        assert!(name.contains("flush") && !name.contains('\u{1b}'), "{name:?}");
        assert_eq!(value, 7);
    }
}
