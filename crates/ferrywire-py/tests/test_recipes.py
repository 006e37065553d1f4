"""The recipes run unchanged, each in development mode and without a warning."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import LIMIT

pytest.importorskip("numpy", reason="needs numpy")

RECIPES = Path(__file__).parents[3] / "examples" / "python"
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


def recipe(name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "dev", str(RECIPES / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def said(running: subprocess.Popen[str]) -> str:
    out, complaints = running.communicate(timeout=2 * LIMIT)
    assert (running.returncode, complaints) == (0, ""), (out, complaints)
    return out


def test_a_kv_cache_of_100_000_blocks():
    assert "100000 blocks of 512 bytes" in said(recipe("kv_cache.py", "--block-bytes", "512", "--rounds", "2"))


def test_weights_for_8_receivers():
    assert said(recipe("weights.py", "--receivers", "8", "--mib", "4")).startswith("8 receivers have 4196")


@pytest.mark.parametrize("command", [("kv_cache.py",), ("weights.py", "--receivers", "1")])
def test_a_recipe_ends_when_its_child_fails(command: tuple[str, ...], tmp_path: Path):
    # The recipe's child processes import this at start.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '--multiprocessing-fork' in sys.argv: os._exit(3)\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with recipe(*command, PYTHONPATH=paths) as running:
        try:
            complaints = running.communicate(timeout=LIMIT)[1]
        finally:
            running.kill()
    # Which error it is depends on what was sent to the child before.
    ends = ("EOFError", "ConnectionResetError", "BrokenPipeError")
    assert running.returncode == 1 and any(end in complaints for end in ends), complaints


@needs_torch
def test_a_state_dict_of_torch():
    assert said(recipe("weights.py", "--receivers", "2", "--mib", "4", "--torch")).startswith("2 receivers have")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_rendezvous_of_ranks():
    # The ranks meet on the port behind the master's.
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1), "WORLD_SIZE": "4"}
    ranks = [recipe("torchrun.py", RANK=str(rank), **environment) for rank in range(4)]
    for rank, running in enumerate(ranks):
        others = [other for other in range(4) if other != rank]
        assert said(running) == f"rank {rank} of 4 has heard {others}\n"


@needs_torch
def test_a_rendezvous_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(RECIPES / "torchrun.py")]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command[:3], "--master-port", str(free_port()), *command[3:]],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of 3 has heard {[other for other in range(3) if other != rank]}" for rank in range(3)
    ]
