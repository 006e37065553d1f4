"""Drives the soak: starts the peers, disturbs them, counts, and judges. `run` starts this file.

    host b                                    host a
    main, a server that is never killed  <──  plain, sealed, gpu, python, c: clients that are killed and restarted
    other, a server that is killed       <──  anchor, a client that is never killed

All bytes come from one file, so that every process can verify every byte. `main` and `anchor` live as long as the soak:
their memory, descriptors, threads, sockets and pinned memory are sampled while nothing is disturbed ("at rest").
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import hosts
from member import Member

HERE = os.path.dirname(os.path.abspath(__file__))
POOL_BYTES = 72 << 20
# What a server allocates for a client: its region, and a buffer of that size.
CLIENT_BYTES = 2 * 64 << 20
# Faults of a minute, where no number is given.
PER_MINUTE = {"kills": 6, "flaps": 6, "restarts": 2, "rotations": 0.5, "delays": 1, "blackouts": 0.5}
NEED_LINKS = ("flaps", "delays", "blackouts")
# A NIC is down for so long; all of them for less than the peer timeout of 10 s.
FLAP_S, BLACKOUT_S, DELAY_S = (0.2, 3.0), (0.5, 2.0), (2.0, 6.0)
# What a path does that is disturbed: with netem, or else a queue before a rate that delays and then drops.
NETEM, TBF = ("netem", "delay", "5ms", "2ms", "loss", "1%"), ("tbf", "rate", "200mbit", "burst", "128k", "latency", "20ms")
# A process that says nothing for so long has an operation without an end; it waits 60 s for each.
SILENT_S = 150
# After all faults are over: time until every client is connected, dead ones are forgotten and every channel is back.
REST_S = 60
SAMPLES_OF_A_REST, INTERVAL_S = 10, 10
# What may be gained between the first and the last quarter of the rests. Memory is judged from so many rests on.
GROWTH_MAX = {"memory_kb": 16 << 10, "descriptors": 4, "threads": 4, "sockets": 4, "pinned_kb": 1 << 10}
RESTS_FOR_MEMORY = 6
UNEXPECTED_ENDS_MAX = 20


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", required=True)
    p.add_argument("--minutes", type=float)
    p.add_argument("--bytes", type=size)
    for fault in PER_MINUTE:
        p.add_argument("--" + fault, type=int)
    p.add_argument("--rests", type=int)
    p.add_argument("--copies", type=int, default=1)
    p.add_argument("--device", default="sim:0")
    p.add_argument("--loopback", action="store_true")
    p.add_argument("--seed", type=int)
    p.add_argument("--json", required=True)
    o = p.parse_args()
    if o.minutes is None and o.bytes is None:
        o.minutes = 1.0
    o.seed = random.SystemRandom().randrange(1 << 32) if o.seed is None else o.seed
    return o


def size(text):
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    return int(float(text[:-1]) * units[text[-1]]) if text[-1] in units else int(text)


class Stopped(Exception):
    """The soak cannot go on; the text says why."""


class Soak:
    def __init__(self, o):
        self.o, self.dice = o, random.Random(o.seed)
        self.lock = threading.Lock()
        self.totals, self.done, self.noted = collections.Counter(), collections.Counter(), collections.Counter()
        self.failures, self.left_out, self.rests, self.intervals, self.by = [], [], [], [], collections.Counter()
        self.timers, self.down, self.secrets, self.number = [], {}, ("soak-secret-0", None), 0
        self.unexpected, self.full_channels, self.began, self.hosts = 0, 0, time.monotonic(), None
        self.is_finishing, self.rest_goal, self.rests_tried = False, 0, 0
        self.folder = tempfile.mkdtemp(prefix="ferrywire-soak-")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("FERRYWIRE_")}
        self.env["PYTHONPATH"] = os.path.join(o.bin, "soak-python")
        # Else each of many short-lived threads may leave an arena behind, which looks like growth for a while.
        self.env["MALLOC_ARENA_MAX"] = "2"

    # --- the hosts and the processes ---

    def on(self, host, command):
        return self.hosts.on(host, command) if self.hosts else command

    def make(self):
        why = "--loopback" if self.o.loopback else no_namespaces()
        if why:
            self.left_out.append(f"NIC flaps, delay and loss, and several NICs: no network namespaces ({why})")
        else:
            self.hosts = hosts.Hosts("", "none", {})
            self.has_netem = succeeds("tc", "-n", self.hosts.names["a"], "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us")
            if self.has_netem:
                hosts.call("tc", "-n", self.hosts.names["a"], "qdisc", "del", "dev", "lo", "root")
            else:
                self.left_out.append("netem, which this kernel lacks: a short queue before 200 Mbit/s delays and drops instead")
        with open(os.path.join(self.folder, "pool"), "wb") as f:
            f.write(random.Random(self.o.seed).randbytes(POOL_BYTES))
        self.servers = {name: self.server(name, port) for name, port in (("main", 7420), ("other", 7421))}
        self.main, self.other = self.servers["main"], self.servers["other"]
        soak = [os.path.join(self.o.bin, "soak"), "client"]
        clients = []
        for copy in range(self.o.copies):
            mark = str(copy + 1) if copy else ""
            clients += [self.client("plain" + mark, soak), self.client("sealed" + mark, soak, encryption="required"),
                        self.client("gpu" + mark, soak, memory=self.o.device)]
        python = [sys.executable, os.path.join(HERE, "peers", "peer.py")]
        if succeeds(sys.executable, "-c", "import ferrywire", env=self.env):
            clients.append(self.client("python", python))
        else:
            self.left_out.append("the Python peer: this Python cannot load the package")
        c = os.path.join(self.o.bin, "soak-c")
        if os.path.exists(c):
            clients.append(self.client("c", [c], encryption="preferred"))
        else:
            self.left_out.append("the C peer: it is not built")
        self.clients, self.anchor = clients, self.client("anchor", soak, server="other")
        self.members = [*self.servers.values(), self.anchor, *self.clients]

    def server(self, name, port):
        listen = f"0.0.0.0:{port}" if self.hosts else "127.0.0.1:0"
        return Member(self, name, "b", [os.path.join(self.o.bin, "soak"), "serve", "--listen", listen, "--label", name,
                                        "--encryption", "preferred", *self.files(name), *self.nics("b")])

    def client(self, name, program, encryption="off", memory="host", server="main"):
        return Member(self, name, "a", [*program, "--label", name, "--seed", f"SEED{len(name)}{sum(name.encode())}", "--encryption",
                                        encryption, "--memory", memory, *self.files(server), *self.nics("a")], server)

    def files(self, server):
        # A number that is given: chosen, it would depend on the NICs that are up at that moment.
        return ["--pool", os.path.join(self.folder, "pool"), "--metadata", os.path.join(self.folder, server + ".metadata"),
                "--channels", str(hosts.LINKS)]

    def nics(self, host):
        return ["--nics", ",".join(f"v{host}{link}" for link in range(1, hosts.LINKS + 1))] if self.hosts else []

    # --- what the processes say ---

    def add(self, member, operations, moved, cancelled):
        with self.lock:
            self.totals.update(operations=operations, bytes=moved, cancelled=cancelled)
            self.by[member.name] += moved

    def note(self, member, kind, text):
        with self.lock:
            self.noted[kind] += 1
            # A server that is never killed is never lost, and loses no more peers than were killed.
            if kind == "lost" and member is self.main:
                self.noted["lost by main"] += 1
                is_wrong = self.noted["lost by main"] > self.done["kills of clients"]
            elif kind == "lost":
                self.noted["lost of other"] += 1
                is_wrong = member.server != "other" or self.noted["lost of other"] > self.done["kills of other"]
            elif kind == "closed" and member.server == "main":
                # `main` closes nothing before the end of the soak.
                is_wrong = text != "for a new connection" and not self.is_finishing
            else:
                is_wrong = kind not in ("closed", "retried")
            if is_wrong:
                self.failures.append(f"{kind}: {member.name}: {text}")
        if is_wrong:
            say(f"  FAILURE  {kind}: {member.name}: {text}")
        self.write_down(member, kind, text)

    def write_down(self, member, kind, text):
        with open(os.path.join(self.folder, "notes"), "a") as f:
            f.write(f"{self.elapsed():9.2f} {member.name} {kind} {text}\n")

    def fail(self, text):
        with self.lock:
            self.failures.append(text)
        say(f"  FAILURE  {text}")

    # --- time ---

    def elapsed(self):
        return time.monotonic() - self.began

    def tick(self):
        """Does what is due: ends of faults, processes that have ended, reports."""
        now = time.monotonic()
        for timer in [timer for timer in self.timers if timer[0] <= now]:
            self.timers.remove(timer)
            timer[1]()
        for member in self.members:
            self.look_after(member, now)
        if now > self.next_report:
            self.report()
        time.sleep(0.02)

    def look_after(self, member, now):
        if member.process is None:
            return
        if not member.runs:
            status = member.process.wait()
            member.reader.join(5)
            if not member.is_ending or status != 0:
                self.unexpected += 1
                self.fail(f"{member.name} ended with status {status}: {self.last_words(member)}")
            if member is self.main or self.unexpected > UNEXPECTED_ENDS_MAX:
                raise Stopped(f"{member.name} has ended")
            member.start()
        elif member.is_ending and now > member.ending_until:
            self.fail(f"unended: {member.name} does not end")
            member.kill()
        elif now > member.heard + SILENT_S:
            self.fail(f"unended: {member.name} has said nothing for {SILENT_S} s")
            member.kill()

    def last_words(self, member):
        with open(os.path.join(self.folder, member.name + ".errors"), errors="replace") as f:
            return " ".join(f.read()[-400:].split())

    def wait(self, done, limit_s):
        until = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > until:
                return False
            self.tick()
        return True

    # --- faults; each says whether it could be done now ---

    def some_member(self):
        """A process that a fault may strike now; None if there is none."""
        ready = [m for m in [*self.clients, self.other] if m.runs and m.is_up and not m.is_ending]
        return self.dice.choice(ready) if ready else None

    def kill(self):
        member = self.some_member()
        if not member:
            return False
        # Counted first: the other end may notice before this process goes on.
        with self.lock:
            self.done["kills of other" if member is self.other else "kills of clients"] += 1
        member.kill()
        member.start()
        return True

    def restart(self):
        member = self.some_member()
        if not member:
            return False
        if member is self.other:
            # No one may wait for an answer of a server that ends.
            acks = self.anchor.acks
            self.anchor.order("leave")
            if not self.wait(lambda: self.anchor.acks > acks, SILENT_S):
                self.fail("unended: anchor does not leave other")
        member.ending_until = time.monotonic() + SILENT_S
        member.order("end")
        if member is self.other:
            self.wait(lambda: not member.is_ending, SILENT_S)
            self.anchor.order("come")
        return True

    def rotation(self):
        self.number += 1
        old, new = self.secrets[0], f"soak-secret-{self.number}"
        for self.secrets in ((old, new), (new, old), (new, None)):
            asked = [(m, m.process, m.acks) for m in self.members if m.runs and not m.is_ending]
            for member, _, _ in asked:
                member.order("secret", *filter(None, self.secrets))
            if not self.wait(lambda: all(m.process is not p or m.acks > acks or not m.runs for m, p, acks in asked), SILENT_S):
                self.fail(f"unended: a rotation of the secret at {[m.name for m, p, acks in asked if m.acks <= acks]}")
        return True

    def flap(self):
        up = [link for link in self.links() if link not in self.down]
        if len(up) < 2:
            return False
        self.take_down([self.dice.choice(up)], self.dice.uniform(*FLAP_S))
        return True

    def blackout(self):
        if self.down:
            return False
        self.take_down(list(self.links()), self.dice.uniform(*BLACKOUT_S))
        return True

    def links(self):
        return range(1, hosts.LINKS + 1)

    def take_down(self, links, hold_s):
        host = self.dice.choice("ab")
        for link in links:
            self.down[link] = host
            hosts.call("ip", "-n", self.hosts.names[host], "link", "set", f"v{host}{link}", "down")
        self.timers.append((time.monotonic() + hold_s, lambda: self.bring_up(links)))

    def bring_up(self, links):
        for link in links:
            host = self.down.pop(link)
            hosts.call("ip", "-n", self.hosts.names[host], "link", "set", f"v{host}{link}", "up")

    def delay(self):
        link = self.dice.choice(list(self.links()))
        self.shape(link, NETEM if self.has_netem else TBF)
        self.timers.append((time.monotonic() + self.dice.uniform(*DELAY_S), lambda: self.shape(link, None)))
        return True

    def shape(self, link, how):
        for host in "ab":
            within = ("tc", "-n", self.hosts.names[host], "qdisc")
            if how:
                hosts.call(*within, "replace", "dev", f"v{host}{link}", "root", *how)
            else:
                # Another delay of this link may have ended first.
                succeeds(*within, "del", "dev", f"v{host}{link}", "root")

    # --- samples ---

    def ask(self, member, limit_s=30):
        before = member.samples
        member.order("sample")
        return member.sample if self.wait(lambda: member.samples > before or not member.runs, limit_s) else {}

    def is_whole(self, sample):
        count = len(self.clients)
        return (sample.get("peers") == sample.get("known") == count and sample["channels"] >= self.full_channels
                and sample["client_bytes"] == count * CLIENT_BYTES)

    def rest(self):
        """Ends all faults, waits until everything is connected again, and samples."""
        for timer in sorted(self.timers, key=lambda timer: timer[0]):
            timer[1]()
        self.timers.clear()
        limit, since, samples, last = time.monotonic() + REST_S, time.monotonic(), [], {}
        settled = None
        self.write_down(self.main, "rest", "begins")
        while len(samples) < SAMPLES_OF_A_REST:
            if time.monotonic() > limit:
                self.fail(f"after {REST_S} s without faults main has {last}; expected {len(self.clients)} peers and "
                          f"{self.full_channels} channels; {len(samples)} samples")
                break
            self.wait(lambda: all(m.is_up and not m.is_ending for m in self.members), REST_S)
            last = before = self.ask(self.main)
            if not self.rests:
                # The first rest says what all channels are: their number has to stay for a while.
                if settled is None or settled[0] != before.get("channels"):
                    settled = (before.get("channels"), time.monotonic())
                if time.monotonic() < settled[1] + 2:
                    continue
            self.write_down(self.main, "sample", str(before))
            usage, anchor = self.main.usage(), self.anchor.usage()
            after = self.ask(self.main)
            if not self.is_whole(before) or any(before[name] != after.get(name) for name in ("peers", "channels", "client_bytes")):
                self.wait(lambda: False, 0.1)
                continue
            usage["memory_kb"] -= before["client_bytes"] >> 10
            usage["pinned_kb"] += before["pinned"] >> 10
            samples.append({"main": usage, "anchor": anchor, "channels": before["channels"]})
            self.wait(lambda: False, 0.2)
        if not samples:
            return
        self.full_channels = self.full_channels or samples[-1]["channels"]
        # Operations go on, and sessions and regions begin and end between two samples: memory that is in use for a moment only
        # adds to what is there all the time, which is what a leak would raise.
        typical = {who: {name: (min if name == "memory_kb" else statistics.median)(sample[who][name] for sample in samples)
                         for name in GROWTH_MAX} for who in ("main", "anchor")}
        self.rests.append({"s": self.elapsed(), "waited_s": time.monotonic() - since, "bytes": self.totals["bytes"], **typical})
        sample = typical["main"]
        say(f"  at rest after {self.rests[-1]['waited_s']:.1f} s: main "
            + ", ".join(f"{name} {sample[name]:.0f}" for name in GROWTH_MAX) + f", channels {samples[-1]['channels']}")

    def judge_growth(self):
        rests = self.rests[1:] if len(self.rests) > 3 else self.rests
        if len(rests) < 2:
            self.fail("too few rests to see growth")
            return
        quarter, self.growth = max(1, len(rests) // 4), {}
        for who in ("main", "anchor"):
            for name, most in GROWTH_MAX.items():
                of = lambda part: statistics.median(rest[who][name] for rest in part)
                first, last = of(rests[:quarter]), of(rests[-quarter:])
                judged = name != "memory_kb" or len(self.rests) >= RESTS_FOR_MEMORY
                self.growth[f"{who} {name}"] = {"first": first, "last": last, "most": most, "judged": judged}
                if judged and last - first > most:
                    self.fail(f"growth: {name} of {who} from {first:.0f} to {last:.0f}, more than {most}")

    # --- the run ---

    def planned(self):
        """The faults in random order, and what there should be of each."""
        minutes = self.o.minutes or 10
        goal = {}
        for fault, per_minute in PER_MINUTE.items():
            given = getattr(self.o, fault)
            goal[fault] = max(1, round(per_minute * minutes)) if given is None else given
            if fault in NEED_LINKS and not self.hosts:
                goal[fault] = 0
        plan = [fault for fault, count in goal.items() for _ in range(count)]
        self.dice.shuffle(plan)
        return plan, goal

    def left_s(self):
        """Seconds until the end, as far as can be told."""
        left = []
        if self.o.minutes is not None:
            left.append(self.end - time.monotonic())
        if self.o.bytes is not None:
            rate = self.totals["bytes"] / max(1, self.elapsed())
            left.append((self.o.bytes - self.totals["bytes"]) / max(1, rate))
        return max(0, min(left))

    def is_over(self, plan):
        is_late = self.o.minutes is not None and time.monotonic() > self.end
        is_done = not plan and self.rests_tried >= self.rest_goal - 1
        return is_done and (is_late or self.o.bytes is not None and self.totals["bytes"] >= self.o.bytes)

    def rest_is_due(self, plan, total):
        """Whether the next rest before the last one is due: rests divide the faults, the time or the bytes evenly."""
        shares = []
        if total:
            shares.append((total - len(plan)) / total)
        if self.o.minutes is not None:
            shares.append(self.elapsed() / max(1, 60 * self.o.minutes))
        if self.o.bytes is not None:
            shares.append(self.totals["bytes"] / max(1, self.o.bytes))
        last = self.rest_goal - 1
        return self.rests_tried < last and max(shares) >= self.rests_tried / last

    def run(self):
        self.next_report = time.monotonic() + INTERVAL_S
        self.make()
        for line in self.left_out:
            say(f"left out: {line}")
        say(f"seed {self.o.seed}; {'four NICs on each of two hosts' if self.hosts else 'loopback'}; "
            f"clients {', '.join(m.name for m in self.clients)}; files in {self.folder}")
        for server in self.servers.values():
            server.start()
        if not self.wait(lambda: all(m.is_up for m in self.servers.values()), 60):
            raise Stopped("the servers do not start")
        for member in (self.anchor, *self.clients):
            member.start()
        if not self.wait(lambda: all(m.is_up for m in self.members), 120):
            raise Stopped(f"not connected: {[m.name for m in self.members if not m.is_up]}")
        self.end = self.began + 60 * self.o.minutes if self.o.minutes is not None else None
        plan, self.goal = self.planned()
        # Growth is seen between two rests.
        self.rest_goal = max(2, self.o.rests or min(12, int(self.o.minutes or 12) + 1))
        self.take_rest()
        total, last = len(plan), time.monotonic()
        while not self.is_over(plan):
            self.tick()
            if self.rest_is_due(plan, total):
                self.take_rest()
                last = time.monotonic()
            if not plan or time.monotonic() < last + self.gap_s(plan):
                continue
            fault, last = plan.pop(), time.monotonic()
            if getattr(self, fault[:-1])():
                self.done[fault] += 1
            else:
                plan.insert(self.dice.randrange(len(plan) + 1), fault)
        self.take_rest()

    def take_rest(self):
        self.rests_tried += 1
        self.rest()

    def judge_goals(self):
        """Fails if anything is short of what was asked for."""
        for fault, count in self.goal.items():
            if self.done[fault] < count:
                self.fail(f"short: {self.done[fault]} of {count} {fault}")
        if len(self.rests) < self.rest_goal:
            self.fail(f"short: {len(self.rests)} of {self.rest_goal} rests")
        if self.o.bytes is not None and self.totals["bytes"] < self.o.bytes:
            self.fail(f"short: {self.totals['bytes'] / 1e9:.2f} of {self.o.bytes / 1e9:.2f} GB")

    def gap_s(self, plan):
        """Time between two faults, so that the last ones come shortly before the end."""
        for_rests = 8 * max(0, self.rest_goal - 1 - self.rests_tried)
        return max(0.05, (self.left_s() * 0.95 - for_rests) / len(plan))

    def finish(self):
        """Ends all processes in an orderly way, clients first."""
        self.is_finishing = True
        for group in ((self.anchor, *self.clients), tuple(self.servers.values())):
            for member in group:
                if member.runs:
                    member.ending_until = time.monotonic() + SILENT_S
                    member.order("end")
            for member in group:
                try:
                    status = member.process.wait(SILENT_S)
                except subprocess.TimeoutExpired:
                    self.fail(f"unended: {member.name} does not end")
                    member.kill()
                    continue
                member.reader.join(5)
                if status != 0:
                    self.fail(f"{member.name} ended with status {status}: {self.last_words(member)}")

    def stop(self):
        for member in getattr(self, "members", []):
            if member.runs:
                member.kill()
        if self.hosts:
            self.hosts.close()

    # --- what is said ---

    def report(self):
        with self.lock:
            totals, done, noted = dict(self.totals), dict(self.done), dict(self.noted)
        last = self.intervals[-1] if self.intervals else {"s": 0, "bytes": 0}
        now = {"s": self.elapsed(), "bytes": totals.get("bytes", 0)}
        rate = (now["bytes"] - last["bytes"]) / max(0.1, now["s"] - last["s"]) / 1e9
        self.intervals.append({**now, "usage": self.main.usage() if self.main.runs else None})
        self.next_report = time.monotonic() + INTERVAL_S
        faults = ", ".join(f"{done.get(fault, 0)} {fault}" for fault in PER_MINUTE)
        say(f"{now['s']:7.0f} s  {now['bytes'] / 1e9:9.2f} GB  {rate:5.2f} GB/s  {totals.get('operations', 0)} operations; {faults}; "
            f"{noted.get('wrong', 0)} wrong, {noted.get('unended', 0)} unended, {noted.get('lost', 0)} lost by name")
        if self.main.runs:
            self.main.order("sample")
        self.write()

    def result(self, is_finished):
        return {"schema": 1, "finished": is_finished, "passed": is_finished and not self.failures, "seconds": self.elapsed(),
                "seed": self.o.seed, "cores": os.cpu_count(), "kernel": os.uname().release, "time": int(time.time()),
                "left_out": self.left_out, "clients": [m.name for m in getattr(self, "clients", [])],
                **{name: self.totals[name] for name in ("bytes", "operations", "cancelled")}, "bytes_by_client": dict(self.by),
                "goal": getattr(self, "goal", {}), "done": dict(self.done), "noted": dict(self.noted), "failures": self.failures,
                "growth": getattr(self, "growth", {}), "rests": self.rests, "intervals": self.intervals}

    def write(self, is_finished=False):
        unfinished = self.o.json + ".new"
        with open(unfinished, "w") as f:
            json.dump(self.result(is_finished), f, indent=1)
        os.replace(unfinished, self.o.json)

    def table(self):
        rows = [("moved and verified", f"{self.totals['bytes'] / 1e9:.2f} GB in {self.elapsed():.0f} s"),
                ("operations", f"{self.totals['operations']}, and {self.totals['cancelled']} that were cancelled"),
                ("wrong", self.noted["wrong"]), ("without an end", sum("unended" in text for text in self.failures)),
                ("failed by name", f"{self.noted['lost']} lost, {self.noted['closed']} closed, {self.noted['retried']} connects retried")]
        rows += [(fault, f"{self.done[fault]} of {self.goal[fault]}") for fault in getattr(self, "goal", {})]
        for name, row in getattr(self, "growth", {}).items():
            rows.append((name, f"{row['first']:.0f} -> {row['last']:.0f}" + ("" if row["judged"] else " (too few rests to judge)")))
        rows += [("left out", line) for line in self.left_out]
        rows += [("FAILURE", line) for line in self.failures[:20]]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            say(f"{name:>{width}s}  {value}")


def interrupt(*_):
    raise KeyboardInterrupt


def say(line):
    print(line, flush=True)


def succeeds(*command, env=None):
    return subprocess.run(command, capture_output=True, env=env).returncode == 0


def no_namespaces():
    """Why there can be no two hosts here; None: there can."""
    missing = hosts.possible()
    if missing:
        return f"needs {missing}"
    probe = f"fwsoak-{os.getpid()}"
    if not succeeds("ip", "netns", "add", probe):
        return "ip netns add fails"
    has_links = succeeds("ip", "-n", probe, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    succeeds("ip", "netns", "del", probe)
    return None if has_links else "no veth pairs"


def main():
    o = options()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    soak = Soak(o)
    is_finished = False
    try:
        soak.run()
        soak.finish()
        soak.judge_growth()
        soak.judge_goals()
        is_finished = True
    except Stopped as error:
        soak.fail(str(error))
    except KeyboardInterrupt:
        say("stopped; what was reached follows")
    finally:
        soak.stop()
    soak.table()
    soak.write(is_finished)
    passed = is_finished and not soak.failures
    say(f"{'PASSED' if passed else 'FAILED' if soak.failures else 'STOPPED'}; details in {o.json}")
    if passed:
        shutil.rmtree(soak.folder)
    else:
        say(f"what the processes said: {soak.folder}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
