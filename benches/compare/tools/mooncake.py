"""Mooncake Transfer Engine, its TCP transport."""

import os

from .base import Unavailable
from .peer import PeerTool


class Mooncake(PeerTool):
    name = "mooncake"
    method = "one-sided writes in batches of the depth, defaults; 8 B us is one completed write"
    program = "mooncake_peer.py"

    def prepare(self, network):
        network.site_packages("mooncake")
        self.libraries = ":".join(os.path.join(network.cache, "root", *p) for p in
                                  (("usr", "lib", "x86_64-linux-gnu"), ("lib", "x86_64-linux-gnu")))
        self.found = "Mooncake " + network.wheel_version("mooncake_transfer_engine_non_cuda")
        try:
            network.source([network.python, "-c", "from mooncake.engine import TransferEngine"], 5, self.env(network))
        except Unavailable as e:
            raise Unavailable(f"the mooncake package cannot be imported: {e}") from None

    def version(self):
        return self.found

    def env(self, network):
        return {"LD_LIBRARY_PATH": self.libraries, "MC_FORCE_TCP": "true", "MC_LOG_LEVEL": "ERROR",
                "MC_TCP_BIND_ADDRESS": ""}
