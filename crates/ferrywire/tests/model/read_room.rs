//! A read request that is kept back against the ends of the short reads that it waits for.

use crate::check;
use crate::core::read_room::ReadRoom;
use loom::sync::Mutex;
use loom::thread;
use std::sync::Arc;

/// What the lock of the queue protects: one read may be outstanding, and others are kept back.
#[derive(Default)]
struct Requests {
    asked: usize,
    kept: usize,
    sent: usize,
}

#[derive(Default)]
struct Queue {
    requests: Mutex<Requests>,
    room: ReadRoom,
}

impl Queue {
    fn make_room(&self, requests: &mut Requests) {
        requests.asked -= self.room.take_ended();
        if requests.kept > 0 && requests.asked == 0 {
            (requests.kept, requests.asked) = (requests.kept - 1, 1);
            requests.sent += 1;
        }
    }

    fn ask(&self) {
        let mut requests = self.requests.lock().unwrap();
        requests.kept += 1;
        self.make_room(&mut requests);
        if requests.kept > 0 {
            self.room.keep_back();
            self.make_room(&mut requests);
        }
        self.room.set(requests.kept > 0);
    }

    fn end(&self) {
        if self.room.end_short() {
            let mut requests = self.requests.lock().unwrap();
            self.make_room(&mut requests);
            self.room.set(requests.kept > 0);
        }
    }
}

/// As many reads end as were sent, on threads of their own, while two more are asked for.
#[test]
fn a_request_that_is_kept_back_goes_out_when_the_read_before_it_ends() {
    check(|| {
        let queue = Arc::new(Queue::default());
        queue.ask();
        let ender = thread::spawn({
            let queue = queue.clone();
            move || queue.end()
        });
        queue.ask();
        ender.join().unwrap();
        let requests = queue.requests.lock().unwrap();
        assert_eq!((requests.sent, requests.kept), (2, 0), "a request waits for a read that has ended");
    });
}

#[test]
fn reads_that_end_at_once_each_leave_their_room() {
    check(|| {
        let queue = Arc::new(Queue::default());
        // Both were sent when there was more room.
        queue.requests.lock().unwrap().asked = 2;
        let enders = [(); 2].map(|()| {
            let queue = queue.clone();
            thread::spawn(move || queue.end())
        });
        queue.ask();
        enders.into_iter().for_each(|ender| ender.join().unwrap());
        let requests = queue.requests.lock().unwrap();
        assert_eq!((requests.sent, requests.kept), (1, 0), "a request waits for a read that has ended");
    });
}
