//! A model operation for tests: a few numbers, and a count of its handles.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use super::{Operation, Verb};
use crate::operation::{Piece, Pieces};
use crate::outbox::Epoch;

/// The properties that a test gives an operation, and its recorded events.
pub(crate) struct Facts {
    pub id: u64,
    pub verb: Verb,
    pub key: u64,
    pub number: u64,
    pub pieces: Pieces,
    pub message: Vec<u8>,
    pub parent: Option<Rc<Facts>>,
    pub is_parent: bool,
    pub total: u64,
    pub on_gpu: bool,
    pub cancelled: Cell<bool>,
    /// Reason of the operation's failure; the first reason stays.
    pub failure: RefCell<Option<String>>,
    pub epoch: RefCell<Option<Arc<Epoch>>>,
    pub sink: Cell<u64>,
    pub uncut: Cell<bool>,
    /// Whether the receive's memory is revoked before a short message arrives.
    pub is_unplaceable: bool,
    pub children: RefCell<Vec<Rc<Facts>>>,
    pub moved: Cell<u64>,
    pub has_ended: Cell<bool>,
    /// Number of handles that are not dropped.
    pub tokens: Cell<usize>,
}

impl fmt::Debug for Facts {
    /// Formats the facts without parent and children, which refer to each other.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts { id, verb, key, number, total, pieces, message, .. } = self;
        write!(
            f,
            "{verb} {id} to {key}, number {number}, of {total} bytes, {pieces:?}, message {message:?}: "
        )?;
        let (moved, tokens) = (self.moved.get(), self.tokens.get());
        let children = self.children.borrow().len();
        write!(f, "{moved} bytes moved, {tokens} tokens, {children} children, ")?;
        let (cancelled, ended) = (self.cancelled.get(), self.has_ended.get());
        write!(f, "cancelled {cancelled}, failed {:?}, ended {ended}", self.failure.borrow())
    }
}

impl Facts {
    pub fn fail(&self, why: &str) {
        if let Some(parent) = &self.parent {
            parent.fail(why);
        }
        self.failure.borrow_mut().get_or_insert_with(|| why.into());
    }

    pub fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    pub fn is_failing(&self) -> bool {
        self.has_failed()
            || self.cancelled.get()
            || self.parent.as_ref().is_some_and(|parent| parent.is_failing())
    }

    pub fn count(&self, bytes: u64) {
        self.moved.set(self.moved.get() + bytes);
        self.parent.iter().for_each(|parent| parent.count(bytes));
    }
}

/// A handle to a model operation, with one token.
#[derive(Debug)]
pub(crate) struct Model(pub Rc<Facts>);

impl Model {
    /// The first handle of an operation over one piece, at offset 0 of both ends.
    pub fn new(id: u64, verb: Verb, key: u64, len: u64) -> Model {
        Model::over(id, verb, key, Pieces::One(Piece { local: 0, remote: 0, len }))
    }

    pub fn over(id: u64, verb: Verb, key: u64, pieces: Pieces) -> Model {
        Model(Rc::new(Facts {
            id,
            verb,
            key,
            number: 0,
            total: pieces.total(),
            pieces,
            message: Vec::new(),
            parent: None,
            is_parent: false,
            on_gpu: false,
            cancelled: Cell::new(false),
            failure: RefCell::new(None),
            epoch: RefCell::new(None),
            sink: Cell::new(0),
            uncut: Cell::new(false),
            is_unplaceable: false,
            children: RefCell::default(),
            moved: Cell::new(0),
            has_ended: Cell::new(false),
            tokens: Cell::new(1),
        }))
    }

    pub fn receive(id: u64, tag: u64, len: u64) -> Model {
        Model::new(id, Verb::Recv, tag, len)
    }

    /// Changes the operation before it is posted.
    pub fn with(mut self, change: impl FnOnce(&mut Facts)) -> Model {
        change(Rc::get_mut(&mut self.0).expect("the only handle"));
        self
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.0.tokens.set(self.0.tokens.get().checked_sub(1).expect("each token comes back once"));
    }
}

impl Operation for Model {
    fn id(&self) -> u64 {
        self.0.id
    }

    fn verb(&self) -> Verb {
        self.0.verb
    }

    fn key(&self) -> u64 {
        self.0.key
    }

    fn number(&self) -> u64 {
        self.0.number
    }

    fn total(&self) -> u64 {
        self.0.total
    }

    fn bytes_to_cut(&self) -> u64 {
        if self.0.is_parent { 0 } else { self.0.total }
    }

    fn pieces(&self) -> &[Piece] {
        self.0.pieces.as_slice()
    }

    fn message_bytes(&self) -> usize {
        self.0.message.len()
    }

    fn is_counted(&self) -> bool {
        !self.0.message.is_empty() || self.0.parent.as_ref().is_some_and(|parent| !parent.message.is_empty())
    }

    fn is_child(&self) -> bool {
        self.0.parent.is_some()
    }

    fn on_gpu(&self) -> bool {
        self.0.on_gpu
    }

    fn is_failing(&self) -> bool {
        self.0.is_failing()
    }

    fn is_unsendable(&self) -> bool {
        self.0.is_failing()
    }

    fn forbids_resend(&self) -> bool {
        if self.0.has_failed() {
            return true;
        }
        let cancelled = self.0.verb == Verb::Write && self.0.is_failing();
        if cancelled {
            self.0.fail("cancelled");
        }
        cancelled
    }

    fn set_epoch(&self, epoch: Arc<Epoch>) {
        assert!(self.0.epoch.replace(Some(epoch)).is_none(), "it joins one epoch");
    }

    fn set_sink(&self, sink: u64) {
        self.0.sink.set(sink);
    }

    fn set_uncut(&self) {
        self.0.uncut.set(true);
    }

    fn retain(&self) -> Model {
        self.0.tokens.set(self.0.tokens.get() + 1);
        Model(self.0.clone())
    }
}
