//! Resources that take time to make: a thread of their own makes each, while a lane polls for it.
//!
//! Binding memory to a NIC and mapping memory for a GPU take as long as kernel and driver need: milliseconds for a
//! lane's resources, longer for large regions.
//!
//! Invariant: every background initialization ends, with the resource or a reason. Read next: `sources.rs` and
//! `bounce_buffers.rs`, which use it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::thread;

/// A resource that a thread is making.
pub(super) struct BackgroundInit<T> {
    made: Mutex<Option<Result<T, String>>>,
}

/// The thread's end of a background initialization. If it is dropped without a result, it reports a failure.
struct Maker<T>(Arc<BackgroundInit<T>>);

impl<T: Send + 'static> BackgroundInit<T> {
    /// Starts the thread that makes the resource. `what` names the resource in errors.
    pub fn start(
        what: &'static str,
        make: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Arc<BackgroundInit<T>> {
        let init = Arc::new(BackgroundInit { made: Mutex::new(None) });
        let maker = Maker(init.clone());
        let thread = thread::Builder::new().name("ferrywire-make".into()).spawn(move || {
            let made = make().map_err(|why| format!("{what}: {why}"));
            *maker.0.made() = Some(made);
        });
        if let Err(error) = thread {
            *init.made() = Some(Err(format!("{what}: cannot start a thread: {error}")));
        }
        init
    }

    /// Takes the resource out, once it is made; the error says why it cannot be made.
    pub fn take(&self) -> Poll<Result<T, String>> {
        let mut made = self.made();
        match made.take() {
            None => Poll::Pending,
            Some(Ok(thing)) => {
                *made = Some(Err("internal error: the resource was taken twice".into()));
                Poll::Ready(Ok(thing))
            }
            Some(Err(why)) => {
                *made = Some(Err(why.clone()));
                Poll::Ready(Err(why))
            }
        }
    }

    /// The resource, or the reason why there is none.
    pub fn get(&self) -> Poll<Result<T, String>>
    where
        T: Clone,
    {
        self.made().clone().map_or(Poll::Pending, Poll::Ready)
    }

    fn made(&self) -> MutexGuard<'_, Option<Result<T, String>>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for Maker<T> {
    fn drop(&mut self) {
        let mut made = self.0.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.get_or_insert_with(|| Err("internal error: the thread that makes the resource panicked".into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn ended<T: Send + 'static>(making: &BackgroundInit<T>) -> Result<T, String> {
        loop {
            match making.take() {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::yield_now(),
            }
        }
    }

    #[test]
    fn get_does_not_wait_for_an_unfinished_initialization() {
        let (go, goes) = mpsc::channel();
        let making = BackgroundInit::start("a thing", move || goes.recv().map_err(|error| error.to_string()));
        assert!(making.get().is_pending() && making.take().is_pending());
        go.send(7).unwrap();
        assert_eq!(ended(&making), Ok(7));
        assert!(ended(&making).is_err(), "once");
    }

    #[test]
    fn a_failed_initialization_has_a_reason() {
        let refused = BackgroundInit::<u8>::start("a thing", || Err("the kernel refuses".into()));
        assert_eq!(ended(&refused), Err("a thing: the kernel refuses".into()));
        assert_eq!(refused.get(), Poll::Ready(Err("a thing: the kernel refuses".into())), "and keeps it");
        let broken = BackgroundInit::<u8>::start("a thing", || panic!("on purpose"));
        assert_eq!(ended(&broken), Err("internal error: the thread that makes the resource panicked".into()));
    }
}
