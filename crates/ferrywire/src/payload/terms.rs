//! The terms that both ends of a session must match if payload goes over lanes.
//!
//! The connecting end sends its terms with the session's configuration. The accepting end compares them with
//! its own, and refuses with a description of the first difference.
//!
//! Invariant: pure. Read next: `payload_backend.rs`.

use super::payload_backend::Incompatible;
use ferrywire_proto::handshake::{EXTRA_BYTES_MAX, WITHOUT, clean, clip};

/// The name for the kernel's devmem TCP, in place of a plugin's name.
pub const DEVMEM: &str = "devmem";

/// One end's terms: names with values, in a fixed order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms(Vec<(String, String)>);

/// Longest plugin name in characters; the rest is cut off.
const NAME_BYTES_MAX: usize = 64;

/// The term that states whether an end moves GPU memory; the ends may differ in it.
const GPU: &str = "gpu";
/// The term by which the connecting end states that its backend is optional.
const OPTIONAL: &str = "optional";

/// The bytes that an end without a backend sends in place of terms, with the reason.
pub fn without(why: &str) -> Vec<u8> {
    let mut why = clean(why);
    clip(&mut why, EXTRA_BYTES_MAX - WITHOUT.len());
    [WITHOUT, why.as_bytes()].concat()
}

/// The reason, if the bytes are from [`without`].
pub(crate) fn reason_without(bytes: &[u8]) -> Option<String> {
    bytes.strip_prefix(WITHOUT).map(|why| clean(&String::from_utf8_lossy(why)))
}

impl Terms {
    /// Creates the terms of a backend. `list` has the further terms that must match; `gpu` is whether this
    /// end moves GPU memory.
    pub fn new(plugin: &str, list: &[(&str, String)], gpu: bool) -> Terms {
        let name: String = plugin.chars().take(NAME_BYTES_MAX).collect();
        let mut all = vec![("plugin".to_owned(), name)];
        all.extend(list.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        all.push((GPU.to_owned(), u8::from(gpu).to_string()));
        Terms(all)
    }

    /// Adds that the backend is optional.
    pub fn optional(mut self) -> Terms {
        self.0.push((OPTIONAL.to_owned(), "1".to_owned()));
        self
    }

    /// Whether the backend is optional.
    pub fn is_optional(&self) -> bool {
        self.value(OPTIONAL) == Some("1")
    }

    /// Encodes the terms for the handshake.
    pub fn encode(&self) -> Vec<u8> {
        let lines: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        lines.join("\n").into_bytes()
    }

    /// Decodes terms. Accepts any bytes, as they come from a peer.
    pub fn decode(bytes: &[u8]) -> Terms {
        let text = String::from_utf8_lossy(bytes);
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        Terms(pairs.map(|(name, value)| (clean(name), clean(value))).collect())
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(each, _)| each == name).map(|(_, value)| value.as_str())
    }

    /// Name of the plugin or other backend that the terms are for.
    pub fn plugin(&self) -> &str {
        self.value("plugin").unwrap_or("an unknown plugin")
    }

    /// Whether the end that offers these terms moves GPU memory.
    pub fn gpu(&self) -> bool {
        self.value(GPU) == Some("1")
    }

    /// Compares these terms with the other end's.
    ///
    /// # Errors
    /// [`Incompatible::Mismatch`] where the two differ.
    pub fn agree(&self, theirs: &Terms) -> Result<(), Incompatible> {
        self.difference(theirs).map_or(Ok(()), |why| Err(Incompatible::Mismatch(why)))
    }

    /// Describes the first difference, for a person at the other end; `None` if there is none.
    pub fn difference(&self, theirs: &Terms) -> Option<String> {
        let names = self.0.iter().chain(&theirs.0).map(|(name, _)| name.as_str());
        for name in names.filter(|name| ![GPU, OPTIONAL].contains(name)) {
            let (here, there) = (self.value(name), theirs.value(name));
            if here != there {
                let say = |value: Option<&str>| value.unwrap_or("missing").to_owned();
                let versions = match (here, there) {
                    (Some(_), Some(_)) => "",
                    _ => ", and the same version of ferrywire: one of them does not know this term",
                };
                return Some(format!(
                    "{name} is {} at the end that accepts and {} at the end that connects; both need the same{versions}",
                    say(here),
                    say(there)
                ));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(plugin: &str, chunk: &str, gpu: bool) -> Terms {
        Terms::new(plugin, &[("version", "v7".into()), ("NCCL_DYNAMIC_CHUNK_SIZE", chunk.into())], gpu)
    }

    #[test]
    fn terms_survive_the_wire() {
        let ours = terms("GPUDirectTCPX_v7", "524288", true);
        assert_eq!(Terms::decode(&ours.encode()), ours);
        assert!(ours.encode().len() <= 256);
        assert!(ours.gpu() && !terms("x", "1", false).gpu());
    }

    #[test]
    fn a_difference_is_named_with_both_values() {
        let (ours, theirs) = (terms("A", "524288", true), terms("A", "1048576", false));
        let said = ours.difference(&theirs).unwrap();
        assert!(said.starts_with(
            "NCCL_DYNAMIC_CHUNK_SIZE is 524288 at the end that accepts and 1048576 at the end that connects"
        ));
        assert!(ours.difference(&terms("B", "524288", true)).unwrap().starts_with("plugin is A"));
        assert_eq!(ours.difference(&terms("A", "524288", false)), None);
    }

    #[test]
    fn an_end_without_backend_sends_its_reason_instead_of_terms() {
        assert_eq!(reason_without(&without("no\nqueues")), Some("no?queues".to_owned()));
        let long = without(&"é".repeat(200));
        assert!(long.len() <= EXTRA_BYTES_MAX && reason_without(&long).is_some_and(|why| why.ends_with('é')));
        assert_eq!(reason_without(&terms("A", "1", true).encode()), None);
        assert_eq!(reason_without(b""), None);
    }

    #[test]
    fn a_term_that_one_end_lacks_is_a_difference() {
        let said = terms("A", "1", false).difference(&Terms::decode(b"\xff\xfe nonsense")).unwrap();
        assert!(
            said.contains("plugin is A") && said.contains("missing") && said.contains("same version"),
            "{said}"
        );
    }
}
