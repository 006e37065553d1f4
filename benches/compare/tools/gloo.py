"""Gloo, through torch.distributed."""

from .base import Unavailable
from .peer import PeerTool


class Gloo(PeerTool):
    name = "gloo"
    method = "torch isend and irecv, one process group (one connection); 8 B us is a round trip"
    program = "gloo_peer.py"
    options = ("--groups", "1")

    def prepare(self, network):
        network.site_packages("torch")
        self.found = "torch " + network.wheel_version("torch")
        try:
            network.source([network.python, "-c", "import torch.distributed as d; assert d.is_gloo_available()"], 30)
        except Unavailable as e:
            raise Unavailable(f"torch cannot be imported: {e}") from None

    def version(self):
        return self.found

    def env(self, network):
        return {"GLOO_SOCKET_IFNAME": network.device}


class Gloo4(Gloo):
    name = "gloo-4"
    method = "as gloo, four process groups (four connections)"
    options = ("--groups", "4")

    def latency(self, network, seconds):
        return None
