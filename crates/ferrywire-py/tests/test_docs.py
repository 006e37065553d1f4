"""Checks that the docs match the package: the table of verbs, the errors in the docstrings, the types of the stubs.

The blocks of Python code of the pages run as they stand.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import ferrywire as fw
from ferrywire import _errors, _ferrywire

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "python.md"
CLASSES = {
    "endpoint": fw.Endpoint,
    "peer": fw.Peer,
    "region": fw.Region,
    "transfer": fw.Transfer,
    "BlockList": fw.BlockList,
}

# All methods of `nixl_agent`, and of UCCL's `Endpoint`, in their sources of August 2026. UCCL's messages are of older
# ones, its notifications of its C interface, and its forms over shared memory stand in the table as one.
NIXL = """
add_remote_agent check_remote_metadata check_remote_xfer_done check_xfer_state create_backend deregister_memory
deserialize_descs estimate_xfer_cost fetch_remote_metadata get_agent_metadata get_backend_mem_types get_backend_params
get_new_notifs get_partial_agent_metadata get_plugin_list get_plugin_mem_types get_plugin_params get_reg_descs
get_remote_descs get_serialized_descs get_xfer_descs get_xfer_telemetry initialize_xfer invalidate_local_metadata
make_connection make_prepped_xfer prep_mem_view prep_xfer_dlist query_memory query_xfer_backend register_memory
release_dlist_handle release_mem_view release_xfer_handle remove_remote_agent send_local_metadata send_notif
send_partial_agent_metadata transfer update_notifs
""".split()
UCCL = """
accept accept_local add_remote_endpoint advertise advertise_ipc advertisev conn_id_of_rank connect connect_local dereg
deregister_memory deserialize_descs get_metadata get_notifs get_oob_ip get_serialized_descs parse_metadata poll_async
read read_async read_ipc readv readv_async recv recv_async recvv recvv_async reg register_memory regv
remove_remote_endpoint send send_async send_notif sendv sendv_async start_passive_accept transfer write write_async
write_ipc writev writev_async
""".split()


def verbs() -> list[list[str]]:
    """The rows of the table of verbs: NIXL, UCCL, ferrywire."""
    table = PAGE.read_text().partition("| NIXL agent | UCCL p2p endpoint | ferrywire |")[2]
    lines = [line for line in table.splitlines()[2:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_verb_of_nixl_and_uccl_is_in_the_table():
    rows = verbs()
    for column, names in ((0, NIXL), (1, UCCL)):
        told = [name for row in rows for name in re.findall(r"`(\w+)", row[column])]
        assert not set(names) - set(told), set(names) - set(told)
    for row in rows:
        assert len(row) == 3 and (row[0] or row[1]), row
        # A counterpart, or the reason why there is none.
        assert re.search(r"`[\w.]+\(?", row[2]) or re.match("not (needed, because|there)", row[2]), row


def test_the_right_column_names_what_is_there():
    seen = set()
    for *_, ours in verbs():
        for code in re.findall(r"`([^`]+)`", ours):
            keywords = set(re.findall(r"(\w+)=", code))
            takers = []
            for name, member in re.findall(r"\b(\w+)\.(\w+)", re.sub(r'"[^"]*"', "", code)):
                assert hasattr(CLASSES[name], member), code
                takers.append(getattr(CLASSES[name], member))
                seen.add(f"{name}.{member}")
            for name in re.findall(r"\b([A-Z]\w+)", re.sub(r'"[^"]*"', "", code)):
                assert hasattr(fw, name), code
                takers.append(getattr(fw, name))
            # `message=` of `peer.write`: the method is named in the same cell.
            takers += [getattr(fw.Peer, name) for name in re.findall(r"`peer\.(\w+)`", ours)]
            for keyword in keywords:
                assert any(keyword in inspect.signature(taker).parameters for taker in takers), (code, keyword)
    assert len(seen) > 30, seen


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """The blocks of Python code: the number of the line before, what stands behind `python`, the code."""
    text = page.read_text()
    found = re.finditer(r"^```python ?(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    return [(text.count("\n", 0, block.start(2)), block.group(1), block.group(2)) for block in found]


def together(page: Path) -> str:
    """All blocks that can run here as one program, each in its own line of the page."""
    program = ""
    for line, mark, code in blocks(page):
        compile("\n" * line + code, str(page), "exec")
        assert mark in ("", "needs-torch"), mark
        if not mark:
            program += "\n" * (line - program.count("\n")) + code
    return program


def test_the_blocks_of_the_page_run(program):
    pytest.importorskip("numpy", reason="needs numpy")
    assert len(blocks(PAGE)) >= 5
    with program(together(PAGE)) as running:
        assert running.end() == ""


# The state that the README assumes: the other end has registered memory and passed on its metadata and descriptor.
OWNER = """
import ferrywire
SECRET = "a secret of a test"
owner = ferrywire.Endpoint("127.0.0.1:0", secret=SECRET)
memory, tensor = bytearray(1 << 16), bytearray(b"7" * (1 << 16))
region = owner.register(memory)
metadata, descriptor = owner.metadata(), region.descriptor()
"""
FILLED = """
assert owner.accept(timeout=60).wait_notification(timeout=60) == b"filled"
assert memory == tensor
"""


def test_the_block_of_the_readme_runs(program):
    readme = ROOT / "README.md"
    assert [mark for _, mark, _ in blocks(readme)] == [""]
    with program(OWNER + together(readme) + FILLED) as running:
        assert running.end() == ""


def operations() -> list[tuple[str, object]]:
    kinds = (fw.Endpoint, fw.Peer, fw.Region, fw.RemoteRegion, fw.BlockList, fw.Transfer)
    methods = [(f"{kind.__name__}.{name}", getattr(kind, name)) for kind in kinds for name in vars(kind) if name[0] != "_"]
    functions = [("share", fw.share), ("fetch", fw.fetch), ("nccl_plugin_path", fw.nccl_plugin_path)]
    functions.append(("wait_any", fw.wait_any))
    return [each for each in methods + functions if callable(each[1])]


# These operations cannot fail.
NEVER_RAISES = {"Peer.stats", "RemoteRegion.descriptor", "Transfer.done", "Transfer.cancel"}


@pytest.mark.parametrize(("name", "operation"), operations(), ids=[name for name, _ in operations()])
def test_each_operation_names_the_errors_that_it_raises(name: str, operation: object):
    text = operation.__doc__
    if name in NEVER_RAISES:
        assert "Raises" not in text
        return
    raises = re.search(r"\bRaises?\b(.*)", text, re.DOTALL | re.IGNORECASE)
    named = set(re.findall(r"`(\w+)`", raises.group(1))) if raises else set()
    errors = {each for each in named if each[0].isupper()}
    assert errors and errors <= set(_errors.__all__), f"{name}: {text}"
    # Other methods that the docstring names exist.
    others = named - errors - set(inspect.signature(operation).parameters)
    assert all(hasattr(fw.Peer, each) or hasattr(fw.Endpoint, each) or hasattr(fw.Transfer, each) for each in others), text


def test_every_exception_is_in_the_table_and_in_the_docs():
    page = PAGE.read_text()
    table = page.partition("## Errors")[2].partition("##")[0]
    assert set(re.findall(r"`([A-Z]\w+)`", table)) >= set(_errors.__all__)
    for name in _errors.__all__:
        assert getattr(fw, name).__doc__


def test_names_are_those_of_the_stubs():
    stubs = ast.parse(Path(fw.__file__).with_name("_ferrywire.pyi").read_text())
    # The stubs have no docstrings and refer to the module's.
    assert "help(ferrywire.Peer)" in ast.get_docstring(stubs)
    for node in stubs.body:
        if isinstance(node, ast.FunctionDef):
            assert callable(getattr(_ferrywire, node.name))
        if not isinstance(node, ast.ClassDef):
            continue
        told = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        kind = getattr(_ferrywire, node.name)
        there = {name for name in vars(kind) if not name.startswith("__")}
        assert {name for name in told if not name.startswith("__")} == there, node.name
        for name in told - {"__buffer__"}:
            assert hasattr(kind, name), f"{node.name}.{name}"
        for name in there:
            assert name.startswith("_") or vars(kind)[name].__doc__, f"{node.name}.{name} has no docstring"
