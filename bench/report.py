"""The rows of a bench: their fields, their file, their table."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from glimmer_ops._files import check_not_special

BUSY = 0.2  # CPUs of other processes that a reader must know of


@dataclass(frozen=True)
class Row:
    """One measurement, with at most one peer's. Times in ms, rates in 1e9 a second.

    m, n, k: rows, and the widths of a row of the result and of the argument. ms_median, ms_p10 and
    ms_p90 of `samples` samples; `dropped` others were taken while a neighbour slowed the core.
    bytes and flops: what the op must move and compute. limit_gbps and limit_gflops: what this
    machine could do in the same minutes; pct_limit: the time that the nearer limit asks for, in %
    of the time taken, or None for arguments that are in cache in real use. ratio: the peer's median
    over ours, above 1 where we are faster. gate: "pass", or why no figure is given. working_set:
    bytes that pass through between two uses of an argument. freedom: median of the core's adds a
    cycle. busy: CPUs that other processes used meanwhile. tok_s, load_s and peak_rss (bytes): of
    whole models only. tokens_per_pass and accepted_per_pass (of passes with drafts): of speculative
    decoding. note: what a reader must know.
    """

    op: str
    backend: str
    case: str
    qtype: str = ""
    dtype: str = "f32"
    m: int = 0
    n: int = 0
    k: int = 0
    threads: int = 1
    variant: str = ""
    ms_median: float | None = None
    ms_p10: float | None = None
    ms_p90: float | None = None
    samples: int = 0
    dropped: int = 0
    bytes: int = 0
    flops: int = 0
    gbps: float | None = None
    gflops: float | None = None
    limit_gbps: float | None = None
    limit_gflops: float | None = None
    pct_limit: float | None = None
    peer: str | None = None
    peer_ms_median: float | None = None
    ratio: float | None = None
    gate: str = ""
    working_set: int = 0
    freedom: float | None = None
    busy: float | None = None
    tok_s: float | None = None
    load_s: float | None = None
    peak_rss: int | None = None
    tokens_per_pass: float | None = None
    accepted_per_pass: float | None = None
    note: str = ""
    git: str = ""
    machine: str = ""
    command: str = ""

    @property
    def passed(self) -> bool:
        return self.gate == "pass"

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What a row is compared by."""
        return self.op, self.backend, self.variant, self.case, self.threads


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
}


def write(path: Path, rows: Iterable[Row]) -> None:
    """A JSON list with one row a line, replaced at once."""
    lines = ",\n".join(json.dumps(asdict(r), allow_nan=False) for r in rows)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(f"[\n{lines}\n]\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> list[Row]:
    """Rows that `write` wrote. ValueError for anything else, naming the row and the field."""
    check_not_special(path)
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, list) or not data:
        raise ValueError(f"{path}: expected a list of rows, found {type(data).__name__}")
    return [_row(f"{path}: row {i}", item) for i, item in enumerate(data)]


def _row(where: str, item: Any) -> Row:
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected an object, found {type(item).__name__}")
    types = {f.name: str(f.type) for f in fields(Row)}
    unknown = sorted(item.keys() - types.keys())
    missing = [n for n in ("op", "backend", "case", "gate") if n not in item]
    if unknown or missing:
        raise ValueError(f"{where}: expected the fields of a row; missing {missing}, not {unknown}")
    for name, value in item.items():
        valid = isinstance(value, _TYPES[types[name]]) and not isinstance(value, bool)
        if not valid or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{where}: {name}: expected {types[name]}, found {value!r}")
    return Row(**item)


def provenance() -> dict[str, Any]:
    """git, machine and command of this process."""
    return {"git": _git(), "machine": _machine(), "command": _command()}


def _command() -> str:
    return shlex.join(["glimmer", *sys.argv[1:]])


def _git() -> str:
    """The commit of the source tree, `+` for changes to it; the version outside of a repository."""
    from glimmer_ops import __version__

    def git(*args: str) -> str:
        folder = Path(__file__).resolve().parent
        run = subprocess.run(["git", "-C", folder, *args], capture_output=True, text=True)
        return run.stdout.strip() if run.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        ours = git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = git("status", "--porcelain", "--untracked-files=no", ":/")
    except OSError:  # no git
        return __version__
    return commit + ("+" if changed else "") if commit and ours else __version__


def _machine() -> str:
    from .probes.cpu import last_level_cache

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cache = last_level_cache()
    parts = [_cpu_model(), f"{cpus} CPUs"]
    parts += [f"{cache >> 20} MiB cache"] if cache else []
    return ", ".join([*parts, f"{platform.system()} {platform.machine()}"])


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _times(*values: float | None) -> list[str]:
    """Milliseconds in the unit that suits the first, which alone shows it."""
    first = values[0]
    if first is None:
        return ["-"] * len(values)
    scale, unit, digits = (1e3, "µs", 2) if first < 0.1 else (1, "ms", 3 if first < 10 else 1)
    texts = ["-" if v is None else f"{v * scale:.{digits}f}" for v in values]
    return [f"{texts[0]} {unit}", *texts[1:]]


def _number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def table(rows: Sequence[Row]) -> Table:
    """One line a row; see `Row` for the columns."""
    with_peers, models = any(r.peer for r in rows), any(r.tok_s for r in rows)
    result = Table("op", "case", "variant", "thr.", pad_edge=False)
    names = ["median", "p10", "p90", "samples", "GB/s", "GFLOP/s", "% limit"]
    names += ["tok/s"] * models
    for name in names:
        result.add_column(name, justify="right", no_wrap=True)
    if with_peers:
        result.add_column("peer", no_wrap=True)
        result.add_column("its median", justify="right", no_wrap=True)
        result.add_column("ratio", justify="right", no_wrap=True)
    for r in rows:
        tok_s = [_number(r.tok_s)] * models
        result.add_row(*_cells(r), *tok_s, *(_peer_cells(r) if with_peers else ()))
    return result


def _cells(r: Row) -> list[str]:
    start = [r.op, r.case, r.variant, str(r.threads)]
    if not r.passed:
        return [*start, "FAIL", "-", "-", "-", "-", "-", "-"]
    samples = f"{r.samples} (-{r.dropped})" if r.dropped else str(r.samples)
    in_cache = r.pct_limit is None and r.limit_gbps is not None
    limit = "in cache" if in_cache else _number(r.pct_limit, 1, " %")
    rates = [_number(None if in_cache else v) for v in (r.gbps, r.gflops)]
    return [*start, *_times(r.ms_median, r.ms_p10, r.ms_p90), samples, *rates, limit]


def _peer_cells(r: Row) -> list[str]:
    return [r.peer or "-", *_times(r.peer_ms_median), _number(r.ratio, 2, "×")]


def notes(rows: Sequence[Row]) -> list[str]:
    """The limits of each number of threads, then failed gates, a model's load, and notes, once."""
    lines = []
    for threads in sorted({r.threads for r in rows}):
        mine = [r for r in rows if r.threads == threads and r.limit_gbps and r.limit_gflops]
        if mine:
            read = statistics.median(r.limit_gbps or 0.0 for r in mine)
            line = f"limits, {threads} threads: read {read:.1f} GB/s"
            for kind, of_kind in (("int8", True), ("float32", False)):
                at = [r for r in mine if r.variant.endswith("int8") == of_kind]
                peaks = [r.limit_gflops or 0.0 for r in at]
                line += f", {kind} {statistics.median(peaks):.0f} GFLOP/s" if peaks else ""
            lines.append(line)
    lines += [f"FAIL {r.op} {r.case} {r.variant}: {r.gate}" for r in rows if not r.passed]
    for r in rows:
        if r.load_s is not None and r.peak_rss is not None:
            lines.append(f"load {r.load_s:.2f} s, peak RSS {r.peak_rss / 1e9:.2f} GB")
        if r.tokens_per_pass is not None:
            lines.append(
                f"{r.case}: {r.tokens_per_pass:.2f} tokens a pass, "
                f"{r.accepted_per_pass:.2f} drafts accepted a drafting pass"
            )
    busy = [r.busy for r in rows if r.busy is not None]
    if busy and max(busy) > BUSY:
        lines.append(f"other processes kept up to {max(busy):.1f} CPUs busy: figures are too low")
    return list(dict.fromkeys([*lines, *(r.note for r in rows if r.note)]))
