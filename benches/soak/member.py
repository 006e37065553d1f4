"""One process of the soak: it takes orders and says what it does, as `src/driver.rs` describes."""

import os
import subprocess
import threading
import time


class Member:
    """One process of the soak, and what it has said since it was started."""

    def __init__(self, soak, name, host, command, server=None):
        self.soak, self.name, self.host, self.command, self.server = soak, name, host, command, server
        self.process, self.starts = None, 0

    def start(self):
        self.is_up, self.acks, self.sample, self.samples = False, 0, {}, 0
        self.ending_until, self.heard = None, time.monotonic()
        command = [word.replace("SEED", str(self.soak.o.seed * 1000 + self.starts)) for word in self.command]
        self.starts += 1
        with open(os.path.join(self.soak.folder, self.name + ".errors"), "ab") as errors:
            self.process = subprocess.Popen(self.soak.on(self.host, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=errors, text=True, env=self.soak.env, start_new_session=True)
        self.order("secret", *filter(None, self.soak.secrets))
        self.reader = threading.Thread(target=self.read, args=(self.process,), daemon=True)
        self.reader.start()

    def order(self, *words):
        try:
            self.process.stdin.write(" ".join(words) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # It has ended; `tick` sees that.

    def read(self, process):
        for line in process.stdout:
            kind, _, text = line.strip().partition(" ")
            self.heard = time.monotonic()
            if kind == "up":
                self.is_up = True
            elif kind == "ok":
                self.acks += 1
            elif kind == "sample":
                self.sample = {name: int(value) for name, value in (word.split("=") for word in text.split())}
                self.samples += 1
            elif kind == "moved":
                self.soak.add(self, *map(int, text.split()))
            else:
                self.soak.note(self, kind, text)

    @property
    def runs(self):
        return self.process is not None and self.process.poll() is None

    @property
    def is_ending(self):
        return self.ending_until is not None

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.reader.join(5)

    def usage(self):
        """What the kernel counts for this process."""
        folder = f"/proc/{self.process.pid}"
        with open(folder + "/status") as f:
            status = {name: value for name, _, value in (line.partition(":") for line in f)}
        kb = {name: int(status.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmLck", "VmPin")}
        descriptors = []
        for each in os.listdir(folder + "/fd"):
            try:
                descriptors.append(os.readlink(f"{folder}/fd/{each}"))
            except OSError:
                pass
        return {"memory_kb": kb["VmRSS"], "threads": int(status["Threads"]), "descriptors": len(descriptors),
                "sockets": sum(name.startswith("socket:") for name in descriptors), "pinned_kb": kb["VmLck"] + kb["VmPin"]}
