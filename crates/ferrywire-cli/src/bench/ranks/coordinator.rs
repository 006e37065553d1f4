//! Rank 0's decisions: a table once all ranks are ready, a pass once all have arrived, the end of the run.
//!
//! Invariant: pure: no socket, no clock. The first failure ends the run, and nothing is sent to all ranks after the
//! end.
//! Read next: [`super::group`], which carries the messages.

use std::collections::BTreeMap;

use super::super::protocol::Run;
use super::messages::{Card, Entry, Fault, PairReport, Place, RankMessage, Table};
use super::pairs;

/// The state of a run at rank 0.
#[derive(Debug)]
pub struct Coordinator {
    own: Card,
    run_id: String,
    run: Run,
    pairs: Vec<(u32, u32)>,
    cards: Vec<Option<Card>>,
    places: Vec<Option<Place>>,
    done: Vec<bool>,
    arrived: usize,
    passed: u64,
    reports: BTreeMap<(usize, usize), PairReport>,
    /// The end of the run, once it is decided.
    over: Option<RankMessage>,
}

impl Coordinator {
    /// Creates the coordinator of a world, from rank 0's description of itself and its run.
    pub fn new(own: Card, run_id: String, run: Run) -> Coordinator {
        let world_size = own.world_size as usize;
        let pairs = pairs::pairs(run.pattern, own.world_size);
        Coordinator {
            own,
            run_id,
            run,
            pairs,
            cards: vec![None; world_size],
            places: vec![None; world_size],
            done: vec![false; world_size],
            arrived: 0,
            passed: 0,
            reports: BTreeMap::new(),
            over: None,
        }
    }

    /// Why a process is not admitted; the run continues without it.
    pub fn refuses(&self, card: &Card) -> Option<String> {
        let here = format!("rank 0 of a run of {} on {}", self.own.world_size, self.own.host);
        match self.cards.get(card.rank as usize) {
            None => Some(format!("this is {here}, which has no rank {}", card.rank)),
            _ if card.job != self.own.job => Some(format!(
                "this is {here}, which another launch has started: give each its own --rendezvous"
            )),
            Some(Some(known)) => Some(format!(
                "this is {here}, whose rank {} is connected already, on {}: two runs use one --rendezvous, or one --rank is given twice",
                card.rank, known.host
            )),
            Some(None) => None,
        }
    }

    /// Admits a rank; returns a message for all ranks.
    pub fn admit(&mut self, card: Card) -> Option<RankMessage> {
        if self.over.is_some() {
            return None;
        }
        let rank = card.rank;
        let wrong = self.differs(&card);
        self.cards[rank as usize] = Some(card);
        wrong.map(|why| self.fault(rank, why))
    }

    /// Takes a message of an admitted rank; returns a message for all ranks.
    pub fn take(&mut self, from: u32, word: RankMessage) -> Option<RankMessage> {
        if self.over.is_some() {
            return None;
        }
        match word {
            RankMessage::Here(place) => self.here(from, *place),
            RankMessage::Arrived => {
                self.arrived += 1;
                if self.arrived < pairs::serving(&self.pairs) {
                    return None;
                }
                self.arrived = 0;
                self.passed += 1;
                Some(RankMessage::Pass(self.passed))
            }
            RankMessage::Step(report) => {
                self.reports.insert((report.step, report.pair), *report);
                None
            }
            // Notes are printed by the caller.
            RankMessage::Note(_) => None,
            RankMessage::Done => {
                self.done[from as usize] = true;
                let all = self.done.iter().all(|done| *done);
                all.then(|| self.end(None))
            }
            RankMessage::Failed { blamed: Some(rank), why } if rank != from => {
                let why = format!("{why} (reported by {})", self.named(from));
                Some(self.fault(rank, why))
            }
            RankMessage::Failed { why, .. } => Some(self.fault(from, why)),
            RankMessage::Join(_) => {
                Some(self.fault(from, "joined twice: install one version on all hosts".to_owned()))
            }
            RankMessage::Table(_) | RankMessage::Pass(_) | RankMessage::Over(_) => Some(self.fault(
                from,
                "sent a message that only rank 0 sends: install one version on all hosts".to_owned(),
            )),
        }
    }

    /// Handles the loss of a rank. Returns a message for all ranks.
    pub fn lost(&mut self, rank: u32, why: &str) -> Option<RankMessage> {
        self.over.is_none().then(|| self.fault(rank, why.to_owned()))
    }

    /// Handles the end of the time for joining. The message for all ranks names the missing ranks and the
    /// number of processes with another secret.
    pub fn late(&mut self, waited_s: f64, strangers: u64) -> Option<RankMessage> {
        let missing = |of: &dyn Fn(usize) -> bool| (0..self.cards.len()).find(|at| !of(*at));
        let came = self.cards.iter().flatten().count();
        let absent = missing(&|at| self.cards[at].is_some());
        let unready = missing(&|at| self.places[at].is_some());
        let (rank, why) = match (absent, unready) {
            (Some(rank), _) => {
                let all = self.cards.len();
                let strangers = match strangers {
                    0 => String::new(),
                    1 => "; 1 connection had another secret".to_owned(),
                    many => format!("; {many} connections had another secret"),
                };
                let why = format!(
                    "not connected within {waited_s:.0} s (--timeout); {came} of {all} ranks are connected{strangers}"
                );
                (rank, why)
            }
            (None, Some(rank)) => (rank, format!("not ready within {waited_s:.0} s (--timeout)")),
            (None, None) => return None,
        };
        self.lost(rank as u32, &why)
    }

    /// Handles the end of the time for ending, after everything was measured. The message for all ranks names
    /// the ranks that have not ended.
    pub fn unended(&mut self, waited_s: f64) -> Option<RankMessage> {
        let rank = self.done.iter().position(|done| !done)?;
        let why = format!("not ended within {waited_s:.0} s (--timeout) after the last measurement");
        self.lost(rank as u32, &why)
    }

    /// The reports of all pairs on a size, once all have arrived.
    pub fn step(&mut self, step: usize) -> Option<Vec<PairReport>> {
        let all = self.pairs.len();
        if !(0..all).all(|pair| self.reports.contains_key(&(step, pair))) {
            return None;
        }
        (0..all).map(|pair| self.reports.remove(&(step, pair))).collect()
    }

    /// In what a rank's introduction contradicts rank 0's; `None` if they agree.
    fn differs(&self, card: &Card) -> Option<String> {
        let own = &self.own;
        if (card.protocol, &card.version) != (own.protocol, &own.version) {
            return Some(format!(
                "runs ferrywire {} (bench version {}), but rank 0 runs {} ({}): install one version on all hosts",
                card.version, card.protocol, own.version, own.protocol
            ));
        }
        if card.world_size != own.world_size {
            return Some(format!("--world-size is {}, but rank 0 has {}", card.world_size, own.world_size));
        }
        let names = own.options.keys().chain(card.options.keys());
        let shown = |value: Option<&String>| value.map_or_else(|| "not given".to_owned(), String::clone);
        let mut differing = names.filter(|name| own.options.get(*name) != card.options.get(*name));
        differing.next().map(|name| {
            let (theirs, ours) = (shown(card.options.get(name)), shown(own.options.get(name)));
            format!("--{name} is {theirs}, but rank 0 has {ours}: give all ranks the same options")
        })
    }

    fn here(&mut self, from: u32, place: Place) -> Option<RankMessage> {
        self.places[from as usize] = Some(place);
        if self.places.iter().any(Option::is_none) {
            return None;
        }
        if let Some((rank, why)) = self.unlike() {
            return Some(self.fault(rank, why));
        }
        let entry = |(card, place): (&Option<Card>, &Option<Place>)| {
            let (card, place) = (card.clone()?, place.clone()?);
            Some(Entry { host: card.host, boot_id: card.boot_id, local_rank: card.local_rank, place })
        };
        let ranks: Vec<Entry> = self.cards.iter().zip(&self.places).filter_map(entry).collect();
        let half = ranks.len() / 2;
        let run = Run {
            memory: ranks[0].place.memory,
            peer_memory: Some(ranks[half].place.memory),
            ..self.run.clone()
        };
        Some(RankMessage::Table(Box::new(Table { run_id: self.run_id.clone(), run, ranks })))
    }

    /// The first rank whose memory is of another kind than that of the first rank of its half.
    fn unlike(&self) -> Option<(u32, String)> {
        let half = self.places.len() / 2;
        let kind = |at: usize| self.places[at].as_ref().map(|place| place.memory.on(0));
        let found = (0..self.places.len()).find(|at| kind(*at) != kind(at / half * half))?;
        let first = found / half * half;
        let shown = |at: usize| kind(at).map_or_else(String::new, |memory| memory.kind().to_owned());
        let why = format!(
            "uses {} memory, but rank {first} uses {}: name one kind per half with --memory and --peer-memory",
            shown(found),
            shown(first)
        );
        Some((found as u32, why))
    }

    fn fault(&mut self, rank: u32, why: String) -> RankMessage {
        let host = self.cards.get(rank as usize).and_then(Option::as_ref).map(|card| card.host.clone());
        self.end(Some(Fault { rank, host, why }))
    }

    fn named(&self, rank: u32) -> String {
        match self.cards.get(rank as usize).and_then(Option::as_ref) {
            Some(card) => format!("rank {rank} on {}", card.host),
            None => format!("rank {rank}"),
        }
    }

    /// The message with which the run ends, once that is decided. It is for a rank that joins after the message was sent to
    /// the others.
    pub fn over(&self) -> Option<&RankMessage> {
        self.over.as_ref()
    }

    fn end(&mut self, fault: Option<Fault>) -> RankMessage {
        self.over.insert(RankMessage::Over(fault)).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::protocol;
    use super::*;
    use crate::args::{Op, Pattern, Verify};
    use crate::memory::Memory;

    fn card(rank: u32) -> Card {
        Card {
            rank,
            world_size: 4,
            local_rank: rank % 2,
            host: format!("h{}", rank / 2),
            boot_id: format!("b{}", rank / 2),
            protocol: protocol::VERSION,
            version: "1".to_owned(),
            job: Some("j".to_owned()),
            options: BTreeMap::from([("sizes".to_owned(), "4K".to_owned())]),
        }
    }

    fn place(memory: Memory) -> RankMessage {
        RankMessage::Here(Box::new(Place { addresses: Vec::new(), memory, gpu: 0 }))
    }

    fn run(pattern: Pattern) -> Run {
        Run {
            op: Op::Write,
            pattern,
            memory: Memory::Host,
            peer_memory: None,
            unpack: None,
            sizes: vec![8],
            depth: None,
            blocks: None,
            peers: 1,
            multi_gpu: false,
            iters: Some(1),
            seconds: None,
            warmup: None,
            verify: Verify::All,
            timeout_s: 1.0,
            seed: 1,
        }
    }

    /// A run of four ranks, of which `came` have joined.
    fn coordinator(pattern: Pattern, came: u32) -> Coordinator {
        let mut coordinator = Coordinator::new(card(0), "r".to_owned(), run(pattern));
        for rank in 0..came {
            assert!(coordinator.admit(card(rank)).is_none());
        }
        coordinator
    }

    fn fault(word: Option<RankMessage>) -> String {
        match word {
            Some(RankMessage::Over(Some(fault))) => fault.to_string(),
            other => panic!("{other:?} is no fault"),
        }
    }

    #[test]
    fn all_hear_the_table_when_the_last_is_ready() {
        let mut coordinator = coordinator(Pattern::Unidir, 4);
        for rank in 0..3 {
            let memory = if rank < 2 { Memory::Sim(rank) } else { Memory::Host };
            assert!(coordinator.take(rank, place(memory)).is_none());
        }
        let Some(RankMessage::Table(table)) = coordinator.take(3, place(Memory::Host)) else {
            panic!("no table")
        };
        assert_eq!((table.run.memory, table.run.peer_memory), (Memory::Sim(0), Some(Memory::Host)));
        let hosts: Vec<&str> = table.ranks.iter().map(|entry| entry.host.as_str()).collect();
        assert_eq!(hosts, ["h0", "h0", "h1", "h1"]);
    }

    #[test]
    fn all_pass_when_every_serving_rank_has_arrived() {
        let mut pairs = coordinator(Pattern::Unidir, 4);
        for turn in 1..3 {
            assert!(pairs.take(2, RankMessage::Arrived).is_none());
            assert!(
                matches!(pairs.take(3, RankMessage::Arrived), Some(RankMessage::Pass(passed)) if passed == turn)
            );
        }
        assert!(matches!(
            coordinator(Pattern::Incast, 4).take(2, RankMessage::Arrived),
            Some(RankMessage::Pass(1))
        ));
    }

    #[test]
    fn reports_are_given_when_those_of_all_pairs_are_there() {
        let mut coordinator = coordinator(Pattern::Unidir, 4);
        let report = |step, pair| {
            let (near, far) = Default::default();
            RankMessage::Step(Box::new(PairReport {
                step,
                pair,
                near,
                far,
                verified_iterations: Some(pair as u64),
            }))
        };
        for (rank, step, pair) in [(1, 0, 1), (1, 1, 1), (0, 0, 0)] {
            assert!(coordinator.take(rank, report(step, pair)).is_none());
        }
        let found = coordinator.step(0).expect("both pairs");
        assert_eq!(found.iter().map(|one| one.verified_iterations).collect::<Vec<_>>(), [Some(0), Some(1)]);
        assert!(coordinator.step(0).is_none() && coordinator.step(1).is_none());
    }

    #[test]
    fn the_run_is_over_when_all_are_done_or_one_has_failed() {
        let mut well = coordinator(Pattern::Unidir, 4);
        assert!((0..3).all(|rank| well.take(rank, RankMessage::Done).is_none()));
        assert!(matches!(well.take(3, RankMessage::Done), Some(RankMessage::Over(None))));
        assert!(well.lost(2, "it left").is_none(), "no message follows the end of the run");
        let failed = |blamed| RankMessage::Failed { blamed, why: "it broke".to_owned() };
        assert_eq!(fault(coordinator(Pattern::Unidir, 4).take(1, failed(None))), "rank 1 (h0): it broke");
        let blamed = fault(coordinator(Pattern::Unidir, 4).take(1, failed(Some(3))));
        assert_eq!(blamed, "rank 3 (h1): it broke (reported by rank 1 on h0)");
        let mut first = coordinator(Pattern::Unidir, 4);
        assert_eq!(fault(first.lost(2, "it is gone")), "rank 2 (h1): it is gone");
        assert!(first.take(1, failed(None)).is_none(), "the first failure is the one");
    }

    #[test]
    fn ranks_that_do_not_fit_are_named() {
        let join = |change: &dyn Fn(&mut Card)| {
            let mut odd = card(2);
            change(&mut odd);
            fault(coordinator(Pattern::Unidir, 2).admit(odd))
        };
        let said = join(&|card| drop(card.options.insert("sizes".to_owned(), "8K".to_owned())));
        assert_eq!(said, "rank 2 (h1): --sizes is 8K, but rank 0 has 4K: give all ranks the same options");
        let said = join(&|card| drop(card.options.insert("op".to_owned(), "read".to_owned())));
        assert!(said.contains("--op is read, but rank 0 has not given"), "{said}");
        let said = join(&|card| card.version = "2".to_owned());
        assert!(said.contains("runs ferrywire 2 ") && said.contains("install one version"), "{said}");
        assert!(join(&|card| card.world_size = 8).contains("--world-size is 8, but rank 0 has 4"));
        let mut unlike = coordinator(Pattern::Unidir, 4);
        let memory = |rank| if rank == 3 { Memory::Host } else { Memory::Cuda(rank) };
        let last = (0..4).filter_map(|rank| unlike.take(rank, place(memory(rank)))).last();
        assert!(fault(last).starts_with("rank 3 (h1): uses host memory, but rank 2 uses cuda"));
    }

    #[test]
    fn refused_processes_do_not_end_the_run() {
        let coordinator = coordinator(Pattern::Unidir, 2);
        assert_eq!(coordinator.refuses(&card(2)), None);
        let twice = coordinator.refuses(&card(1)).expect("it is there");
        assert!(twice.contains("rank 0 of a run of 4 on h0, whose rank 1 is connected already"), "{twice}");
        let beyond = coordinator.refuses(&Card { rank: 7, ..card(3) }).expect("no such rank");
        assert!(beyond.contains("has no rank 7"), "{beyond}");
        let other = coordinator.refuses(&Card { job: Some("k".to_owned()), ..card(3) }).expect("another run");
        assert!(other.contains("another launch"), "{other}");
    }

    #[test]
    fn a_rank_that_joins_twice_is_named() {
        for rank in [1, 2, 7] {
            let again = RankMessage::Join(Box::new(Card { rank, ..card(1) }));
            assert!(
                fault(coordinator(Pattern::Unidir, 2).take(1, again))
                    .starts_with("rank 1 (h0): joined twice")
            );
        }
    }

    #[test]
    fn a_rank_that_does_not_end_is_named() {
        let mut coordinator = coordinator(Pattern::Unidir, 4);
        assert!([0, 1, 3].iter().all(|rank| coordinator.take(*rank, RankMessage::Done).is_none()));
        assert!(
            fault(coordinator.unended(30.0))
                .starts_with("rank 2 (h1): not ended within 30 s (--timeout) after the last measurement")
        );
        assert!(coordinator.unended(31.0).is_none(), "the first failure is the one");
    }

    #[test]
    fn the_first_that_is_missing_is_named() {
        assert_eq!(
            fault(coordinator(Pattern::Unidir, 3).late(9.6, 1)),
            "rank 3: not connected within 10 s (--timeout); 3 of 4 ranks are connected; 1 connection had another secret"
        );
        assert!(fault(coordinator(Pattern::Unidir, 2).late(9.6, 0)).ends_with("2 of 4 ranks are connected"));
        let mut unready = coordinator(Pattern::Unidir, 4);
        assert!(unready.take(0, place(Memory::Host)).is_none());
        assert!(fault(unready.late(1.0, 0)).starts_with("rank 1 (h0): not ready within"));
    }
}
