"""Where the NCCL plugin of this installation lies."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ._errors import LocalError

FILE = "ferrywire/lib/libnccl-net-ferrywire.so"


def nccl_plugin_path() -> str:
    """The file of the NCCL plugin that came with this package, for ``NCCL_NET_PLUGIN``.

    Raises :class:`LocalError` where the package was not installed, but is used from its sources.
    """
    beside = Path(__file__).parent.parent / FILE
    if beside.is_file():
        return str(beside)
    try:
        # Of an editable installation only the modules lie elsewhere.
        installed = Path(str(metadata.distribution("ferrywire").locate_file(FILE)))
    except metadata.PackageNotFoundError:
        installed = beside
    if not installed.is_file():
        raise LocalError(f"no NCCL plugin at {installed}: install the package (pip install .), or build the plugin "
                         "(cargo build --release -p ferrywire-nccl)")
    return str(installed)
