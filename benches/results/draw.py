#!/usr/bin/env python3
"""Draws the tables of docs/performance.md and the plots docs/img/*.svg from the CSV files beside this program.

    benches/results/draw.py            writes tables and plots; plots need matplotlib
    benches/results/draw.py --check    writes nothing; exit 1 where a row is malformed or page or plots differ from the data

`--check` needs only the standard library. It recognizes a plot by the digest of the plotted data, which the SVG contains.
"""

import csv
import datetime
import hashlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PAGE = REPOSITORY / "docs" / "performance.md"
IMAGES = REPOSITORY / "docs" / "img"

HEADER = ["date", "commit", "hardware", "setup", "subject", "command", "metric", "unit", "value", "min", "max", "runs"]
UNITS = {"GB/s", "CPU-s/GB", "TFLOP/s", "s", "ms", "us", "ns", "bytes", "KB", "KiB", "MB", "GB", "% of a core", "ratio", "count", "bool"}
UNIT_OF_METRIC = {"throughput": "GB/s", "throughput_p50": "GB/s", "cpu": "CPU-s/GB", "latency_p50": "us", "latency_p99": "us"}
NUMBER = re.compile(r"\d+(\.\d+)?")


# --- The data ---------------------------------------------------------------------------------------------------------


def faults_of(row):
    """Yields the faults of one row, as text."""
    if len(row) != len(HEADER):
        yield f"{len(row)} fields, expected {len(HEADER)}"
        return
    field = dict(zip(HEADER, row))
    try:
        if datetime.date.fromisoformat(field["date"]).isoformat() != field["date"]:
            raise ValueError
    except ValueError:
        yield f"date {field['date']!r} is not YYYY-MM-DD"
    if not re.fullmatch(r"([0-9a-f]{7,40})?", field["commit"]):
        yield f"commit {field['commit']!r} is not a hash"
    for word in field["setup"].split():
        if not re.fullmatch(r"[a-z0-9_]+=\S+", word):
            yield f"setup has {word!r}, expected key=value"
    for name in ("hardware", "subject", "metric"):
        if not field[name].strip():
            yield f"{name} is empty"
    if field["unit"] not in UNITS:
        yield f"unknown unit {field['unit']!r}"
    elif field["unit"] != UNIT_OF_METRIC.get(field["metric"], field["unit"]):
        yield f"{field['metric']} is in {UNIT_OF_METRIC[field['metric']]}, not in {field['unit']}"
    if not re.fullmatch(r"([1-9]\d*)?", field["runs"]):
        yield f"runs {field['runs']!r} is not a positive integer"
    numbers = [field[name] for name in ("min", "value", "max") if field[name]]
    malformed = [number for number in numbers if not NUMBER.fullmatch(number)]
    for number in malformed:
        yield f"{number!r} is not a number"
    if not field["value"] and not (field["min"] and field["max"]):
        yield "value is empty, and min and max are not both there"
    if not malformed and numbers != sorted(numbers, key=float):
        yield f"min, value, max are out of order: {', '.join(numbers)}"


def load():
    """Reads all files. Returns the rows by file name, and a line for every fault."""
    files, faults = {}, []
    for path in sorted(HERE.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.reader(lines)
            if next(reader, None) != HEADER:
                faults.append(f"{path.name}:1: the header is not {','.join(HEADER)}")
                continue
            rows, seen = [], {}
            for row in reader:
                where = f"{path.name}:{reader.line_num}"
                found = list(faults_of(row))
                faults += [f"{where}: {fault}" for fault in found]
                if found:
                    continue
                key = tuple(row[: HEADER.index("value")])
                if key in seen:
                    faults.append(f"{where}: the same measurement as line {seen[key]}")
                seen[key] = reader.line_num
                rows.append(dict(zip(HEADER, row)))
            files[path.stem] = rows
    if not files:
        faults.append(f"no CSV file in {HERE}")
    return files, faults


class Data:
    """The rows of one file that match some fields, with queries by words of `setup`."""

    def __init__(self, files, file, **fields):
        self.name, self.fields = file, fields
        self.rows = [row for row in files[file] if all(row[name] == value for name, value in fields.items())]

    def row(self, subject, setup="", metric="throughput"):
        """Returns the row whose setup has all given words; of several, the one with the fewest other words."""
        words = set(setup.split())
        found = [row for row in self.rows if row["subject"] == subject and row["metric"] == metric]
        found = [row for row in found if words <= set(row["setup"].split())]
        fewest = min((len(row["setup"].split()) for row in found), default=0)
        found = [row for row in found if len(row["setup"].split()) == fewest]
        if len(found) != 1:
            sys.exit(f"{self.name}.csv: {len(found)} rows of {subject!r}, {metric}, {setup!r} in {self.fields}")
        return found[0]

    def value(self, *what):
        return self.row(*what)["value"]

    def number(self, *what):
        return float(self.value(*what))

    def with_cpu(self, subject, setup=""):
        """Returns `GB/s (CPU-s/GB)` of a row as text."""
        return f"{self.value(subject, setup)} ({self.value(subject, setup, 'cpu')})"


# --- Tables -----------------------------------------------------------------------------------------------------------


def markdown(head, rows):
    """Formats a table; `-` marks a figure that was not measured."""
    return ["| " + " | ".join(cell or "-" for cell in cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


WRITE = "ferrywire write"
RINGS = "raw sockets, rings"
NCCL = ["NCCL 2.28.9 sockets", "NCCL 2.28.9 sockets, tuned", "NCCL 2.28.9 over ferrywire"]
NIXL = ["NIXL 1.5.1 over UCX TCP", "NIXL 1.5.1 over UCX TCP, tuned", "NIXL 1.5.1 over ferrywire"]
OPERATIONS = {"send_recv": "send/recv", "both_ways": "both ways", "all_reduce": "all-reduce", "all_to_all": "all-to-all"}
GPU_RUN = {"file": "gpu", "commit": "38fabe3"}
TWO_CORES = "2 cores AMD EPYC VM, Linux 6.18"


def table_gpu(files):
    data = Data(files, **GPU_RUN)
    rows = [[f"**ferrywire** write, 64 MiB{name}", data.value(WRITE, setup), data.value(WRITE, setup, "cpu")] for name, setup in (
        ("", "size=64M channels=default"), (", both directions at once", "pattern=bidir size=64M"))]
    later = Data(files, "gpu", commit="0e792c2")
    rows += [[f"ferrywire write, {name}", later.value(WRITE, setup), later.value(WRITE, setup, "cpu")] for name, setup in (
        ("1 MiB, 16 in flight", "size=1M depth=16"), ("256 KiB, 64 in flight", "size=256K depth=64"),
        ("64 KiB, 64 in flight", "size=64K depth=64"), ("4 KiB, 64 in flight", "size=4K depth=64"),
        ("16,384 blocks of 4 KiB", "blocks=16384 block=4K"))]
    rows += [["ferrywire write, 16,384 blocks of 64 KiB", data.value(WRITE, "blocks=16384 block=64K"), ""]]
    rows += [[name, data.value(subject, "size=64M"), ""] for name, subject in (
        ("NCCL 2.28.9 over sockets, send/recv", f"{NCCL[0]}, send/recv"),
        ("the same, 2 threads of 8 sockets", f"{NCCL[1]}, send/recv"),
        ("NIXL 1.5.1 over UCX/TCP", NIXL[0]))]
    rows += [["plain copies between GPU and host memory", data.value("copies alone", "directions=1"), ""],
             ["the same, both directions at once", data.value("copies alone", "directions=2"), ""]]
    return markdown(["two H200 of one host", "GB/s", "CPU-s/GB"], rows)


def table_gpu_channels(files):
    data = Data(files, **GPU_RUN)
    return markdown(["channels", "ferrywire", "plain sockets, same rings, no GPU", "plain sockets with copies"], [
        [count, data.with_cpu(WRITE, f"size=64M channels={count}"), data.with_cpu(RINGS, f"channels={count}"),
         data.value("plain rings and copies", f"channels={count}")] for count in ("1", "4", "8", "16")])


def table_nixl(files):
    data = Data(files, "nixl", commit="37e98e1")
    return markdown(["NIXL, two H100 of one host", "UCX/TCP", "UCX/TCP, tuned", "ferrywire"], [
        [f"{op}, {depth} at a time, {name}"] +
        [data.with_cpu(subject, f"memory=cuda op={op} depth={depth} {setup}") for subject in NIXL]
        for op in ("write", "read") for depth in ("1", "4")
        for name, setup in (("1,024 x 64 KiB", "blocks=1024 block=64K"), ("64 MiB", "blocks=1 block=64M"))
        if (depth, name) != ("1", "64 MiB")])


def table_encryption(files):
    data = Data(files, "encryption", commit="ca1ca16c")
    return markdown(["a host with two H200", "off", "keyed checksum", "encrypted"], [
        [name] + [data.with_cpu(WRITE, f"{setup} protection={kind}") for kind in ("off", "keyed-checksum", "encrypted")]
        for name, setup in (
            ("host, 2 cores, 64 MiB", "memory=host cores=2 size=64M"), ("host, 16 cores, 64 MiB", "memory=host cores=16 size=64M"),
            ("host, 16 cores, 64 KiB, 64 in flight", "memory=host cores=16 size=64K"),
            ("host, 16 cores, 4 KiB, 64 in flight", "memory=host cores=16 size=4K"),
            ("GPU to GPU, 64 MiB", "memory=cuda size=64M"), ("GPU to GPU, 64 KiB, 64 in flight", "memory=cuda size=64K"))])


def table_nccl(files):
    rows = []
    for gpus, commit, op, size in (
            ("2", "ef0c76f", "send_recv", "64M"), ("2", "ef0c76f", "all_reduce", "256M"), ("2", "ef0c76f", "all_to_all", "256M"),
            ("4", "ef0c76f", "all_reduce", "256M"),
            ("2", "bc04472", "send_recv", "64K"), ("2", "bc04472", "both_ways", "64K"), ("2", "bc04472", "all_reduce", "64K")):
        data = Data(files, "nccl", commit=commit)
        size_text = size.replace("M", " MiB").replace("K", " KiB")
        rows.append([f"{gpus} GPUs, {OPERATIONS[op]}, {size_text}"] +
                    [data.with_cpu(subject, f"gpus={gpus} op={op} size={size}") for subject in NCCL])
    return markdown(["NCCL, H200s of one host", "sockets", "sockets, tuned", "ferrywire"], rows)


def table_host(files):
    rows = []
    for name, commit, hardware, path in (
            ("2 cores, loopback", "6ad68cc", TWO_CORES, "path=loopback"),
            ("2 cores, veth, MTU 1500", "28fc29e", TWO_CORES, "path=veth mtu=1500"),
            ("16 cores, loopback", "b9790ed", "16 cores Intel Xeon VM with 1 H200, Linux 6.18", "path=loopback")):
        data = Data(files, "host", commit=commit, hardware=hardware)
        rows.append([name] + [
            data.value(WRITE, f"{path} size=64M depth=4 channels={count}") + " / " + data.value("raw sockets", f"{path} channels={count}")
            for count in ("1", "2", "4", "8")])
    return markdown(["ferrywire / plain sockets", "1 channel", "2", "4", "8"], rows)


def table_cores(files):
    data = Data(files, "host", commit="ca1ca16c")
    cores = ("2", "8", "16", "32")
    return markdown(["loopback, by default", *(f"{count} cores" for count in cores)], [
        [name] + [data.with_cpu(WRITE, f"cores={count} {setup}") for count in cores]
        for name, setup in (("4 KiB, 64 in flight", "size=4K"), ("64 KiB, 64 in flight", "size=64K"),
                            ("1 MiB, 16 in flight", "size=1M"), ("64 MiB", "size=64M"))])


PEERS = (("ferrywire", "ferrywire"), ("plain sockets", "raw sockets"), ("UCX put", "UCX 1.22.0 put"), ("UCX tag", "UCX 1.22.0 tag"),
         ("NIXL over UCX, tuned", "NIXL 1.5.1 over UCX 1.22.0, tuned"), ("Gloo", "Gloo of torch 2.15.0"), ("Mooncake", "Mooncake 0.3.13"))
PEER_SIZES = {"4 KiB": "4K", "64 KiB": "64K", "64 MiB": "64M", "256 MiB": "256M"}


def peer_rows(files):
    """Returns the GB/s of each engine at each size, None if it was not measured, and its CPU-s/GB at 64 MiB."""
    data = Data(files, "peers", commit="91338c2")
    for name, subject in PEERS:
        of = {tuple(row["setup"].split())[2]: row["value"] for row in data.rows
              if row["subject"] == subject and row["metric"] == "throughput"}
        cpu = [row["value"] for row in data.rows
               if row["subject"] == subject and row["metric"] == "cpu" and "size=64M" in row["setup"].split()]
        yield name, [of.get(f"size={size}") for size in PEER_SIZES.values()], cpu[0] if cpu else None


def table_peers(files):
    return markdown(["veth, MTU 1500", *PEER_SIZES, "CPU-s/GB at 64 MiB"], [
        [name, *(value or "" for value in values), cpu or ""] for name, values, cpu in peer_rows(files)])


def table_delay(files):
    rows = []
    near, far = (("0", "none"), ("0.0001", "0.01 %")), (("0.001", "0.1 %"), ("0.01", "1 %"))
    for rtt, commit, losses in (("0.1", "57b67db", near[:1]), ("1", "57b67db", near[1:]), ("10", "d610a65", near),
                                ("50", "74bffa27", far), ("100", "74bffa27", far[:1])):
        for loss, loss_text in losses:
            data = Data(files, "delay", commit=commit)
            setup = f"rate=5Gbit/s rtt_ms={rtt} loss={loss}"
            raw = [max((row["value"] for row in data.rows if row["subject"] == "raw sockets" and
                        {f"cc={control}", *setup.split()} <= set(row["setup"].split())), key=float, default="")
                   for control in ("cubic", "bbr")]
            rows.append([f"{rtt} ms", loss_text, data.value(WRITE, setup), *raw])
    return markdown(["round trip", "loss", "ferrywire", "plain sockets, cubic", "bbr"], rows)


def table_latency(files):
    rows = []
    half, spinning = "ferrywire write+notify, half round trip", "raw sockets, half round trip, spinning"
    for name, commit in (("host, 2 cores", "f38e39f"), ("host, 16 cores", "b9790ed")):
        data = Data(files, "latency", commit=commit)
        for size, text in (("8", "8 B"), ("4K", "4 KiB")):
            rows.append([f"{name}, {text}", *(data.value(half, f"size={size}", f"latency_{p}") for p in ("p50", "p99")),
                         data.value(spinning, f"size={size}", "latency_p50")])
    data = Data(files, "gpu", commit="e6f18502")
    for size, text in (("8", "8 B"), ("64K", "64 KiB")):
        rows.append([f"GPU to GPU, {text}", *(data.value(half, f"size={size}", f"latency_{p}") for p in ("p50", "p99")), ""])
    return markdown(["half a round trip, us", "p50", "p99", "plain sockets, p50"], rows)


def table_scale(files):
    data, rows = Data(files, "scale", commit="8bf67c2"), []
    for peers, channels in (("2", "256"), ("128", "4"), ("256", "4")):
        setup = f"peers={peers} channels={channels}"
        rows.append([f"{peers} x {channels}", f"{data.value('ferrywire', setup, 'setup_time')} s",
                     f"{data.value('ferrywire', setup, 'resident_memory_per_channel')} KB",
                     data.value("ferrywire", setup, "descriptors_per_channel"),
                     f"{data.value('ferrywire', setup, 'cpu_idle')} % of a core"])
    return markdown(["peers x channels", "set-up", "memory of a channel", "descriptors of a channel", "idle"], rows)


def table_loss(files):
    rows = []
    for name, commit, subject in (("peer killed", "6ad68cc", "peer killed"), ("peer stopped", "bc43ec6", "peer stopped"),
                                  ("packets dropped one way", "bc43ec6", "packets dropped one way"),
                                  ("namespace deleted", "bc43ec6", "namespace deleted")):
        row = Data(files, "latency", commit=commit).row(subject, "", "time_to_notice_p50")
        rows.append([name, f"{row['value']} s", f"{row['max']} s"])
    return markdown(["time until the peer is lost", "p50", "longest"], rows)


TABLES = {name[len("table_"):].replace("_", "-"): draw for name, draw in list(globals().items()) if name.startswith("table_")}
BLOCK = re.compile(r"(<!-- table: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(text, files):
    """Returns the page with all tables generated from the data."""
    named = [found[1] for found in BLOCK.findall(text)]
    if sorted(named) != sorted(TABLES):
        sys.exit(f"{PAGE}: tables {sorted(named)}, expected each of {sorted(TABLES)} once")
    return BLOCK.sub(lambda found: found[1] + "\n".join(TABLES[found[2]](files)) + "\n" + found[4], text)


# --- Plots ------------------------------------------------------------------------------------------------------------

OURS, RIVALS, BASELINE = "#1b6ca8", ["#c9c9c9", "#8f8f8f"], "#d9822b"


def plot_gpu(files):
    """Returns panels of bars; all bars of a panel are from one host and one run."""
    ours, nixl, nccl = Data(files, **GPU_RUN), Data(files, "nixl", commit="37e98e1"), Data(files, "nccl", commit="ef0c76f")
    return [
        ("64 MiB one way, two H200", [
            ("NIXL over UCX/TCP", ours.number(NIXL[0], "size=64M")),
            ("NCCL send/recv, sockets", ours.number(f"{NCCL[0]}, send/recv", "size=64M")),
            ("NCCL send/recv, sockets tuned", ours.number(f"{NCCL[1]}, send/recv", "size=64M")),
            ("ferrywire write", ours.number(WRITE, "size=64M channels=default"))]),
        ("NIXL writes of 64 MiB, four at a time, two H100", [
            (name, nixl.number(subject, "memory=cuda op=write depth=4 blocks=1 block=64M"))
            for name, subject in zip(("UCX/TCP", "UCX/TCP, tuned", "ferrywire backend"), NIXL)]),
        ("NCCL send/recv of 64 MiB, two H200", [
            (name, nccl.number(subject, "gpus=2 op=send_recv size=64M"))
            for name, subject in zip(("sockets", "sockets, tuned", "ferrywire plugin"), NCCL)]),
    ]


def plot_nccl(files):
    """Returns panels of bus bandwidth over message size in KiB, with a line for each network."""
    data = Data(files, "nccl", commit="ef0c76f")
    sizes = {64 << shift: text for shift, text in zip(range(0, 14, 2), ("64K", "256K", "1M", "4M", "16M", "64M", "256M"))}
    return [(OPERATIONS[op], [
        (name, [(kib, data.number(subject, f"gpus=2 op={op} size={text}")) for kib, text in sizes.items()])
        for name, subject in zip(("sockets", "sockets, tuned", "ferrywire plugin"), NCCL)])
        for op in ("send_recv", "all_reduce", "all_to_all")]


def plot_peers(files):
    """Returns panels with the GB/s of each engine at 64 KiB and 64 MiB, if it was measured."""
    sizes = list(PEER_SIZES)
    return [(f"{text} messages", [(name, float(values[sizes.index(text)])) for name, values, _ in reversed(list(peer_rows(files)))
                                  if values[sizes.index(text)]]) for text in ("64 KiB", "64 MiB")]


def draw_bars(plt, panels, unit):
    heights = [len(bars) for _, bars in panels]
    figure, axes = plt.subplots(len(panels), 1, figsize=(7, 0.34 * sum(heights) + 0.42 * len(panels) + 0.3), sharex=True,
                                gridspec_kw={"height_ratios": heights}, layout="constrained")
    for axis, (title, bars) in zip(axes, panels):
        colours = [OURS if name.startswith("ferrywire") else BASELINE if name == "plain sockets" else RIVALS[0] for name, _ in bars]
        drawn = axis.barh([name for name, _ in bars], [value for _, value in bars], color=colours, height=0.7)
        axis.bar_label(drawn, fmt="%g", padding=3)
        axis.set_title(title, loc="left", fontsize=10)
    axes[0].set_xlim(0, max(value for _, bars in panels for _, value in bars) * 1.1)
    axes[-1].set_xlabel(unit)
    return figure, axes


def draw_lines(plt, panels, unit):
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 3), sharey=True, layout="constrained")
    for axis, (title, lines) in zip(axes, panels):
        for (name, points), colour, mark in zip(lines, (*RIVALS, OURS), "sv."):
            axis.plot(*zip(*points), color=colour, marker=mark, label=name)
        ticks = [kib for kib, _ in lines[0][1]][::2]
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{kib}K" if kib < 1024 else f"{kib // 1024}M" for kib in ticks])
        axis.minorticks_off()
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("message size, bytes")
    axes[0].set_ylim(0)
    axes[0].set_ylabel(unit)
    axes[-1].legend(frameon=False)
    return figure, axes


PLOTS = {
    "gpu": (plot_gpu, draw_bars, "GB/s, GPU to GPU of one host over loopback TCP"),
    "nccl": (plot_nccl, draw_lines, "bus bandwidth, GB/s"),
    "peers": (plot_peers, draw_bars, "GB/s over one veth pair, MTU 1500, 2 cores, host memory"),
}


def digest_of(name, files):
    plotted, draw, unit = PLOTS[name]
    return hashlib.sha256(repr((plotted(files), draw.__name__, unit)).encode()).hexdigest()


def mark_of(name, files):
    return f"<!-- data: {digest_of(name, files)} -->"


def draw_plots(files):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "ferrywire", "svg.fonttype": "none", "font.family": "sans-serif",
                                "axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as plt

    IMAGES.mkdir(exist_ok=True)
    for name, (plotted, draw, unit) in PLOTS.items():
        figure, _ = draw(plt, plotted(files), unit)
        path = IMAGES / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
        text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
        path.write_text(f"{text}\n{mark_of(name, files)}\n", encoding="utf-8")
        plt.close(figure)


# --- The command ------------------------------------------------------------------------------------------------------


def stale(files):
    """Yields a line for each place where the page or a plot differs from the data."""
    text = PAGE.read_text(encoding="utf-8")
    page, drawn = text.splitlines(), with_tables(text, files).splitlines()
    if len(page) != len(drawn):
        yield f"{PAGE.relative_to(REPOSITORY)}: a table has more or fewer rows than the data give"
    else:
        for number, (old, new) in enumerate(zip(page, drawn), 1):
            if old != new:
                yield f"{PAGE.relative_to(REPOSITORY)}:{number}: has {old!r}, the data give {new!r}"
    for name in PLOTS:
        path = IMAGES / f"{name}.svg"
        if not path.exists() or mark_of(name, files) not in path.read_text(encoding="utf-8"):
            yield f"{path.relative_to(REPOSITORY)} was not drawn from the data"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    files, faults = load()
    if not faults and "--check" in sys.argv:
        faults = list(stale(files))
        if faults:
            faults.append("run benches/results/draw.py")
    if faults:
        sys.exit("\n".join(faults))
    if "--check" in sys.argv:
        print(f"{sum(map(len, files.values()))} rows in {len(files)} files; {len(TABLES)} tables and {len(PLOTS)} plots agree")
        return
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(text, files), encoding="utf-8")
    draw_plots(files)


if __name__ == "__main__":
    main()
