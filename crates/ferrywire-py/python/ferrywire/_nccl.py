"""The path of the NCCL plugin of this installation."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ._errors import LocalError

FILE = "ferrywire/lib/libnccl-net-ferrywire.so"


def nccl_plugin_path() -> str:
    """The path of the NCCL plugin that came with this package, for ``NCCL_NET_PLUGIN``.

    Raises :class:`LocalError` if there is no plugin, because the package is used from its sources.
    """
    beside = Path(__file__).parent.parent / FILE
    if beside.is_file():
        return str(beside)
    try:
        # In an editable installation only the Python modules are in another folder.
        installed = Path(str(metadata.distribution("ferrywire").locate_file(FILE)))
    except metadata.PackageNotFoundError:
        installed = beside
    if not installed.is_file():
        raise LocalError(f"no NCCL plugin at {installed}: install the package (pip install .), or build the plugin "
                         "(cargo build --release -p ferrywire-nccl)")
    return str(installed)
