//! A macro for C structs: each field has its offset beside it, and the compiler checks all of them.
//!
//! Invariant: the structs are `repr(C)` and valid with all bytes zero, on which `zeroed` relies.

/// Defines `repr(C)` structs as `struct Name: size, align { offset field: type, ... }`.
macro_rules! layout {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident: $size:literal, $align:literal {
            $( $(#[doc = $doc:literal])* $offset:literal $field:ident: $type:ty ),+ $(,)?
        }
    )+) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct $name {
            $( $(#[doc = $doc])* #[doc = concat!("At byte ", stringify!($offset), ".")] pub $field: $type, )+
        }

        impl $name {
            /// All bytes zero: null pointers, empty slots, numbers 0.
            pub const fn zeroed() -> $name {
                // SAFETY: the fields are raw pointers, optional function pointers and numbers, or structs
                // and arrays of those: zero is a valid value of each.
                unsafe { std::mem::zeroed() }
            }
        }

        const _: () = {
            assert!(size_of::<$name>() == $size && align_of::<$name>() == $align);
            $( assert!(std::mem::offset_of!($name, $field) == $offset); )+
        };
    )+};
}
