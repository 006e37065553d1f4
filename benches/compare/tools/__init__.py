"""The tools by the name that `--only` takes."""

from .ferrywire import Ferrywire
from .gloo import Gloo, Gloo4
from .iperf3 import Iperf3, Iperf3Pairs
from .mooncake import Mooncake
from .nixl import Nixl, NixlTuned
from .raw import Raw, RawPlain
from .ucx import UcxPut, UcxTag

TOOLS = {t.name: t for t in (Raw, RawPlain, Iperf3, Iperf3Pairs, UcxPut, UcxTag, Nixl, NixlTuned, Mooncake, Gloo,
                             Gloo4, Ferrywire)}
