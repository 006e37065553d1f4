"""What the soak counts as wrong, without processes."""

import os
import shutil
import sys
import types
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import soak


class Still(soak.Soak):
    """A soak of no processes."""

    def __init__(self, **options):
        none = {name: 0 for name in soak.PER_MINUTE}
        super().__init__(types.SimpleNamespace(**{"bin": "", "seed": 1, "minutes": None, "bytes": None, "rests": None, **none, **options}))


class Judging(unittest.TestCase):
    def setUp(self):
        self.real_say, soak.say = soak.say, lambda line: None

    def tearDown(self):
        soak.say = self.real_say

    def still(self, **options):
        still = Still(**options)
        self.addCleanup(shutil.rmtree, still.folder)
        return still

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
