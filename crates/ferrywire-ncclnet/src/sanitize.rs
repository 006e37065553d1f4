//! Sanitizing strings from plugins: bounded, without control characters, always valid UTF-8.

use std::ffi::c_char;

/// Reads the C string at `text`, at most `limit_bytes`; `None` for a null pointer.
///
/// # Safety
/// `text` is null, or readable up to its terminating 0 or for `limit_bytes`, whichever comes first.
pub unsafe fn read(text: *const c_char, limit_bytes: usize) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise is strnlen's.
    let bytes = unsafe { libc::strnlen(text, limit_bytes) };
    // SAFETY: the bytes before the terminating 0 are readable.
    Some(plain(unsafe { std::slice::from_raw_parts(text.cast(), bytes) }))
}

/// Sanitizes text: no line breaks and no terminal controls. The result is at most as long as `bytes`.
pub fn plain(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.extend(chunk.valid().chars().map(|c| if c.is_control() { ' ' } else { c }));
        text.extend((!chunk.invalid().is_empty()).then_some('?'));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_plugin_becomes_printable() {
        assert_eq!(plain(b"eth\n1\x1b[0m\xff\xfe\xc3\xa9\xc2\x9b"), "eth 1 [0m??\u{e9} ");
        // SAFETY: a null pointer and literals.
        unsafe {
            assert_eq!(read(std::ptr::null(), 9), None);
            assert_eq!(read(c"abc".as_ptr(), 9).as_deref(), Some("abc"));
            assert_eq!(read(c"abc".as_ptr(), 2).as_deref(), Some("ab"));
        }
    }
}
