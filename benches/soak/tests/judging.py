"""What the soak counts as wrong, and when it rests, without processes: time passes by `tick` alone."""

import os
import shutil
import sys
import types
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import soak

# Virtual seconds of a tick and of a rest, and most ticks of a run.
TICK_S, REST_S, TICKS_MAX = 1, 8, 100_000


class Still(soak.Soak):
    """A soak of no processes, whose faults succeed and whose rests have these samples."""

    def __init__(self, has_samples=True, bytes_of_a_tick=0, **options):
        none = {name: 0 for name in soak.PER_MINUTE}
        super().__init__(types.SimpleNamespace(**{"bin": "", "seed": 1, "minutes": None, "bytes": None, "rests": None, **none, **options}))
        self.has_samples, self.bytes_of_a_tick, self.ticks, self.rested_at = has_samples, bytes_of_a_tick, 0, []
        self.kill = lambda: True

    def make(self):
        self.clients, self.servers, self.members = [], {}, []
        self.anchor = types.SimpleNamespace(start=lambda: None)

    def tick(self):
        self.ticks += 1
        if self.ticks > TICKS_MAX:
            raise soak.Stopped("the soak does not end")
        soak.time.now += TICK_S
        self.totals["bytes"] += self.bytes_of_a_tick

    def rest(self):
        self.rested_at.append(self.elapsed())
        soak.time.now += REST_S
        if self.has_samples:
            self.rests.append({})


class Judging(unittest.TestCase):
    def setUp(self):
        clock = types.SimpleNamespace(now=100.0)
        clock.monotonic = lambda: clock.now
        self.real, soak.time = soak.time, clock
        self.real_say, soak.say = soak.say, lambda line: None

    def tearDown(self):
        soak.time, soak.say = self.real, self.real_say

    def still(self, **options):
        still = Still(**options)
        self.addCleanup(shutil.rmtree, still.folder)
        return still

    def ran(self, **options):
        still = self.still(**options)
        still.run()
        still.judge_goals()
        return still

    def test_rests_come_by_time(self):
        still = self.ran(minutes=10, rests=7)
        self.assertEqual([round(at, -2) for at in still.rested_at], [0, 100, 200, 300, 400, 500, 600])
        self.assertEqual(still.failures, [])

    def test_rests_come_by_bytes(self):
        still = self.ran(bytes=1000, bytes_of_a_tick=1, rests=6)
        self.assertEqual(len(still.rests), 6)
        self.assertEqual(still.failures, [])

    def test_all_faults_and_rests_are_done(self):
        still = self.ran(minutes=10, kills=30, rests=7)
        self.assertEqual((still.done["kills"], len(still.rests), still.failures), (30, 7, []))

    def test_rests_that_the_time_is_too_short_for_come_all_the_same(self):
        still = self.ran(minutes=0.1, rests=8)
        self.assertEqual((len(still.rests), still.failures), (8, []))

    def test_rests_without_samples_are_short(self):
        still = self.ran(minutes=10, rests=7, has_samples=False)
        self.assertEqual(len(still.rested_at), 7)
        self.assertEqual(still.failures, ["short: 0 of 7 rests"])

    def test_what_main_closes_is_wrong_before_the_end(self):
        still, of_main, of_other = self.still(), *(types.SimpleNamespace(name=name, server=name) for name in ("main", "other"))
        still.main = types.SimpleNamespace(name="main", server=None)
        for member in (still.main, of_main, of_other):
            still.note(member, "closed", "for a new connection")
        for member in (still.main, of_other):
            still.note(member, "closed", "the peer closed")
        self.assertEqual(still.failures, [])
        still.note(of_main, "closed", "the peer closed")
        self.assertEqual(still.failures, ["closed: main: the peer closed"])
        still.is_finishing = True
        still.note(of_main, "closed", "the peer closed")
        self.assertEqual(len(still.failures), 1)


if __name__ == "__main__":
    unittest.main()
