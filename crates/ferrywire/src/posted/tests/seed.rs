//! A lane used as the original did.

use super::*;
use crate::posted::Manner;

impl Bench {
    fn as_seed(limit: Duration) -> Bench {
        let script = Arc::new(Mutex::new(Script { scatters: true, ..Script::default() }));
        let lane = Manner::Seed.of(Box::new(Fake(script.clone())), limit);
        let posted = Posted::new(lane, STALL, Arc::new(LaneCounters::default()));
        Bench { posted, script, now: Duration::ZERO }
    }
}

#[test]
fn twelve_sends_and_sixteen_receives_are_in_flight() {
    let (queue, _) = queue_of(20);
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::as_seed(STALL);
    assert_eq!(bench.take(&queue, &mut window()), 12);
    (0..20).for_each(|number| bench.expect(frame(number, &[(0, 10)], &memory)));
    bench.turn().unwrap();
    bench.script(|script| assert_eq!((script.sent.len(), script.posted_receives.len()), (12, 16)));
    assert_eq!(bench.posted.pause(), Some(Duration::from_micros(10)));
    assert_eq!(Bench::new().posted.pause(), None);
}

/// One after another, where ours are begun together.
#[test]
fn each_gather_is_waited_for_before_the_next() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::as_seed(STALL);
    (0..3).for_each(|number| bench.expect(frame(number, &[(0, 10)], &memory)));
    bench.turn().unwrap();
    bench.script(|script| script.receives.extend(vec![Step::Done; 3]));
    let script = bench.script.clone();
    let turned = std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut finished = 0;
            while finished < 3 {
                let mut script = script.lock().unwrap();
                let open = script.gathers.iter().filter(|(_, done)| !done).count();
                assert!(open <= 1, "{:?}", script.gathers);
                if let Some((_, done)) = script.gathers.iter_mut().find(|(_, done)| !*done) {
                    (*done, finished) = (true, finished + 1);
                }
                drop(script);
                std::thread::yield_now();
            }
        });
        bench.turn().unwrap()
    });
    assert_eq!(numbers(&turned), [0, 1, 2]);
}

#[test]
fn a_gather_that_never_ends_is_an_error() {
    let memory = Memory::private(CHUNK).unwrap();
    let mut bench = Bench::as_seed(Duration::ZERO);
    bench.expect(frame(0, &[(0, 10)], &memory));
    bench.turn().unwrap();
    bench.script(|script| script.receives.push_back(Step::Done));
    let why = bench.turn().map(drop).unwrap_err();
    assert!(why.contains("has not gathered message 0 within"), "{why}");
}
