//! Handles: the values that C code keeps in place of pointers.
//!
//! A handle names a slot of a table, the slot's generation and the kind of object. It is never dereferenced.
//! Invariant: a freed handle is not taken for a live one (until its slot was reused 16 million times), nor a handle of
//! one kind for another. An object that a running call uses lives until the call returns, even if another thread frees
//! its handle.

use std::any::Any;
use std::ffi::c_int;
use std::sync::{Arc, PoisonError, RwLock};

use crate::forks::install_fork_handlers;
use crate::status::{FERRYWIRE_OK, Failure, Out, call};

/// A type to whose objects C code has handles.
pub(crate) trait Object: Sized + 'static {
    /// The type's name in the header.
    const NAME: &'static str;

    fn handles() -> &'static Handles<Self>;

    /// Called when the handle is freed while running calls use the object.
    fn freed_in_use(&self) {}
}

/// The table of all live objects of one kind.
pub(crate) struct Handles<T> {
    kind: u8,
    slots: RwLock<Slots<T>>,
}

struct Slots<T> {
    list: Vec<Slot<T>>,
    free: Vec<u32>,
}

struct Slot<T> {
    generation: u32,
    value: Option<Arc<T>>,
}

const GENERATIONS: u32 = 1 << 24;

const _: () = assert!(size_of::<usize>() == 8, "a handle has room for kind, generation and slot");

impl<T: Object> Handles<T> {
    pub const fn new(kind: u8) -> Handles<T> {
        Handles { kind, slots: RwLock::new(Slots { list: Vec::new(), free: Vec::new() }) }
    }

    fn handle(&self, generation: u32, slot: u32) -> *mut T {
        let bits = usize::from(self.kind) << 56 | (generation as usize) << 32 | slot as usize;
        std::ptr::without_provenance_mut(bits)
    }

    /// Slot and generation of a handle; `None` if the handle is of another kind.
    fn parse(&self, handle: *const T) -> Option<(usize, u32)> {
        let bits = handle.addr();
        (bits >> 56 == usize::from(self.kind))
            .then_some(((bits & 0xffff_ffff), (bits >> 32) as u32 & (GENERATIONS - 1)))
    }

    fn add(&self, value: T) -> Result<*mut T, Failure> {
        install_fork_handlers();
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let slot = match slots.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = u32::try_from(slots.list.len());
                slots.list.push(Slot { generation: 0, value: None });
                slot.map_err(|_| Failure::usage(format!("too many objects of type {}: free some", T::NAME)))?
            }
        };
        let place = &mut slots.list[slot as usize];
        place.value = Some(Arc::new(value));
        Ok(self.handle(place.generation, slot))
    }

    fn get(&self, handle: *const T) -> Option<Arc<T>> {
        let (slot, generation) = self.parse(handle)?;
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.list.get(slot).filter(|slot| slot.generation == generation)?.value.clone()
    }

    fn take(&self, handle: *const T) -> Option<Arc<T>> {
        let (slot, generation) = self.parse(handle)?;
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let place = slots.list.get_mut(slot).filter(|slot| slot.generation == generation)?;
        let value = place.value.take()?;
        place.generation = (place.generation + 1) % GENERATIONS;
        slots.free.push(slot as u32);
        Some(value)
    }
}

/// Locks the handle table of a kind until the returned guard is dropped.
pub(crate) fn hold<T: Object>() -> Box<dyn Any> {
    Box::new(T::handles().slots.write().unwrap_or_else(PoisonError::into_inner))
}

/// Stores `value` and returns its new handle.
///
/// # Errors
/// A usage error if the table is full.
pub(crate) fn new<T: Object>(value: T) -> Result<*mut T, Failure> {
    T::handles().add(value)
}

/// Checks an output argument for a handle and sets it to null.
///
/// # Safety
/// `place` is null or valid for writing a handle.
pub(crate) unsafe fn place<T: Object>(place: *mut *mut T) -> Result<Out<*mut T>, Failure> {
    // SAFETY: the caller promises null, or room for a handle.
    let out = unsafe { Out::new(&format!("the output pointer for a {}", T::NAME), place) }?;
    out.put(std::ptr::null_mut());
    Ok(out)
}

/// The object to which a handle refers.
///
/// # Errors
/// A usage error if the handle is null, freed or of another kind.
pub(crate) fn get<T: Object>(handle: *const T) -> Result<Arc<T>, Failure> {
    T::handles().get(handle).ok_or_else(|| not_one::<T>(handle))
}

/// Frees a handle; null is allowed.
pub(crate) fn free<T: Object>(handle: *mut T) -> c_int {
    call(|| {
        if handle.is_null() {
            return Ok(FERRYWIRE_OK);
        }
        let value = T::handles().take(handle).ok_or_else(|| not_one::<T>(handle))?;
        if Arc::strong_count(&value) > 1 {
            value.freed_in_use();
        }
        drop(value);
        Ok(FERRYWIRE_OK)
    })
}

fn not_one<T: Object>(handle: *const T) -> Failure {
    if handle.is_null() {
        Failure::usage(format!("the {} is NULL", T::NAME))
    } else {
        Failure::usage(format!("{handle:p} is not a {}, or was freed", T::NAME))
    }
}

/// Implements [`Object`] for a type: its name in the header, the number of its kind, and what ends the calls that use an
/// object whose handle is freed.
macro_rules! object {
    ($type:ty, $name:literal, $kind:literal $(, $freed_in_use:expr)?) => {
        impl $crate::handles::Object for $type {
            const NAME: &'static str = $name;

            fn handles() -> &'static $crate::handles::Handles<$type> {
                static HANDLES: $crate::handles::Handles<$type> = $crate::handles::Handles::new($kind);
                &HANDLES
            }

            $(
                fn freed_in_use(&self) {
                    $freed_in_use(self);
                }
            )?
        }
    };
}
pub(crate) use object;
