"""NIXL over UCX's TCP transport, with its defaults and with the best settings that were found."""

from .peer import PeerTool


class Nixl(PeerTool):
    name = "nixl"
    method = "one-sided writes, defaults, UCX held to TCP as between two hosts; 8 B us is one completed write"
    program = "nixl_peer.py"

    def prepare(self, network):
        network.site_packages("nixl_cu12")
        self.found = "NIXL " + network.wheel_version("nixl_cu12")

    def version(self):
        return self.found

    def env(self, network):
        return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": network.device, "NIXL_LOG_LEVEL": "ERROR"}


class NixlTuned(Nixl):
    name = "nixl-tuned"
    method = "as nixl, source's progress thread off, 256 KiB segments, 4 MiB socket buffers, below 1 MiB two requests of half the depth each"
    options = ("--no-progress-thread", "--batched")

    def env(self, network):
        return {**super().env(network), "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k",
                "UCX_TCP_SNDBUF": "4m", "UCX_TCP_RCVBUF": "4m"}
