"""What `glimmer bench` does with its arguments."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from glimmer_ops.backends import BACKENDS, Backend, Variant
from glimmer_ops.check import expected_tensors, worst_nmse
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import Case, Op
from glimmer_ops.session import set_threads, threads

from .compare import compare
from .compare import table as verdict_table
from .measure import Settings, bench_case
from .peers import Counterpart, Peer, peers
from .probes import Probe, probe_of
from .report import Row, notes, provenance, table
from .report import read as read_rows
from .report import write as write_rows

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The command's arguments, see `glimmer bench --help`."""

    op: str | None = None
    backend: str | None = None
    case: str | None = None
    variant: str | None = None
    vs: Sequence[str] = ()
    threads: str = ""
    samples: int | None = None
    quick: bool = False
    json: Path | None = None
    plot: Path | None = None
    compare: Path | None = None
    model: Path | None = None
    gguf: Path | None = None


def _check_files(request: Request) -> list[Row] | None:
    """The rows to compare with, if any. ValueError for a file that cannot be read or written."""
    for option, path in (("--json", request.json), ("--plot", request.plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{option}: expected a file in an existing folder, found {path}")
    if request.plot is not None:
        if request.plot.suffix != ".png":
            raise ValueError(f"--plot: expected a name that ends in .png, found {request.plot}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot: needs matplotlib: pip install 'glimmer-ops[bench]'")
    if request.gguf is not None and request.model is None:
        raise ValueError("--gguf: expected with --model")
    if request.model is not None and request.op:
        raise ValueError("--model: expected without --op")
    if request.compare is None:
        return None
    return _within(request, read_rows(request.compare))


def _within(request: Request, rows: list[Row]) -> list[Row]:
    """The rows that the same request would measure again, so that none is missed in vain."""
    counts = thread_counts(request.threads)
    wanted = [
        r
        for r in rows
        if (r.op == "model") == (request.model is not None)
        and (request.op in (None, r.op))
        and (request.backend in (None, r.backend))
        and (request.case in (None, r.case))
        and (request.variant in (None, "all", r.variant))
        and (not request.threads or r.threads in counts)
    ]
    if not wanted:
        raise ValueError(f"--compare: {request.compare} has no row of what is to be measured")
    return wanted


def _choose(option: str, value: str | None, known: Sequence[str]) -> list[str]:
    if value is None:
        return list(known)
    if value not in known:
        raise ValueError(f"{option}: expected one of {', '.join(known)}, found '{value}'")
    return [value]


def thread_counts(text: str) -> list[int]:
    """The numbers of "4" or "1,2,4"; all cores of this process when empty."""
    if not text:
        return [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads()]
    words = text.split(",")
    if not all(w.strip().isdecimal() and 1 <= int(w) <= 1024 for w in words):
        raise ValueError(f"--threads: expected numbers from 1 to 1024, found '{text}'")
    return sorted({int(w) for w in words})


def chosen_peers(names: Sequence[str]) -> list[Peer]:
    """The peers of these names. ValueError for an unknown one, or one this machine cannot run."""
    for name in names:
        _choose("--vs", name, list(peers()))
        if lack := peers()[name].missing():
            raise ValueError(f"--vs {name}: {lack}")
    return [peers()[name] for name in dict.fromkeys(names)]


def cases_of(op: Op, request: Request) -> list[Case]:
    if request.case is None:
        return [c for c in op.bench_cases() if not (request.quick and c.slow)]
    ordinary = [c for c in op.all_cases() if not c.error]
    found = {c.id: c for c in [*ordinary, *op.bench_cases()]}  # a bench's case goes first
    return [found[request.case]] if request.case in found else []


def variants_of(op: Op, backend: Backend, request: Request) -> list[Variant]:
    """The strongest one; those that --variant names."""
    known = backend.variants(op)
    if request.variant in (None, "all"):
        return known if request.variant else known[-1:]
    return [v for v in known if v.name == request.variant]


@contextmanager
def pool_of(count: int) -> Iterator[None]:
    before = threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


def _plan(request: Request) -> list[tuple[Op, Backend, Variant, Case]]:
    ops = [OPS[n] for n in _choose("--op", request.op, list(OPS))]
    backends = [BACKENDS[n] for n in _choose("--backend", request.backend, list(BACKENDS))]
    pairs = [(o, b) for o in ops for b in backends if b.supports(o)]
    plan = [
        (o, b, v, c)
        for o, b in pairs
        for c in cases_of(o, request)
        for v in variants_of(o, b, request)
    ]
    if plan:
        return plan
    if not pairs:
        raise ValueError("--op: expected one that the backend has a kernel for")
    if request.case is not None and not any(cases_of(o, request) for o, _ in pairs):
        raise ValueError(f"--case: no case has the id '{request.case}'")
    names = sorted({v.name for o, b in pairs for v in b.variants(o)})
    raise ValueError(
        f"--variant: expected all or one of {', '.join(names)}, found '{request.variant}'"
    )


def bench_ops(request: Request, say: Say) -> Iterator[Row]:
    """Rows of all chosen cases. ValueError for an argument that chooses nothing."""
    plan = _plan(request)
    counts, rivals = thread_counts(request.threads), chosen_peers(request.vs)
    quick = Settings(samples=10, seconds=2.0)
    settings = quick if request.quick else Settings()
    if request.samples is not None:
        settings = replace(settings, samples=request.samples, seconds=4 * settings.seconds)
    source = provenance()
    probes: dict[str, Probe | None] = {}
    say = _once(say)
    expected: tuple[Case, dict] | None = None
    for count in counts:
        with pool_of(count):
            for op, backend, variant, case in plan:
                if backend.name not in probes:
                    probes[backend.name] = probe_of(backend.name)
                if expected is None or expected[0] is not case:
                    expected = case, expected_tensors(op, case)
                say(f"{op.name} {case.id} {variant.name}, {count} threads")
                probe = probes[backend.name]
                chosen = replace(settings, threads=count)
                prepared = _prepare(rivals, op, case, probe, count, expected[1], say)
                try:
                    for row in bench_case(
                        op, case, backend, variant, chosen, probe, prepared, expected[1]
                    ):
                        yield replace(row, **source)
                finally:
                    for rival in prepared:
                        rival.close()


def _once(say: Say) -> Say:
    """Says each text but once."""
    said: set[str] = set()

    def call(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    return call


def _prepare(
    rivals: Sequence[Peer],
    op: Op,
    case: Case,
    probe: Probe | None,
    count: int,
    expected: dict,
    say: Say,
) -> list[Counterpart]:
    """The peers' counterparts whose own results are right, within the bounds that they state."""
    prepared = []
    for rival in rivals:
        found = rival.counterpart(op, case, probe.working_set if probe else 0, count)
        if found is None:
            say(f"{op.name}: {rival.name} has no counterpart, or not for every case")
            continue
        want = {n: t for n, t in expected.items() if n not in op.mutates}
        outs = found.output()
        got = dict(zip(want, outs if isinstance(outs, tuple) else (outs,), strict=True))
        value, detail = worst_nmse(got, want)
        if value is None or not value <= found.bound:
            found.close()
            reason = detail or f"nmse {value:.1e} > {found.bound:.0e}"
            say(f"{op.name} {case.id}: {rival.name} is left out, its result is wrong: {reason}")
            continue
        prepared.append(found)
    return prepared


def bench(request: Request, console: Console, errors: Console) -> bool:
    """Measures, prints, writes and compares. False when a gate fails or a row is slower."""
    base = _check_files(request)
    with errors.status("") if errors.is_terminal else nullcontext() as status:

        def say(text: str) -> None:
            if text.endswith("threads") and status is not None:
                status.update(text)
            elif not text.endswith("threads"):
                errors.print(f"note: {text}", markup=False)

        rows = list(_rows(request, say))
    wide = console if console.is_terminal else Console(width=170, highlight=False)
    wide.print(table(rows))
    for line in notes(rows):
        console.print(line, markup=False)
    if request.json is not None:
        write_rows(request.json, rows)
    if request.plot is not None:
        from .plot import plot

        for path in plot(rows, request.plot):
            console.print(f"{path}", markup=False)
    good = all(r.passed for r in rows)
    if base is not None:
        verdicts = compare(base, rows)
        wide.print(verdict_table(verdicts))
        good = good and not any(v.failed for v in verdicts)
    return good


def _rows(request: Request, say: Say) -> Iterator[Row]:
    if request.model is None:
        return bench_ops(request, say)
    from .model import bench_model

    return bench_model(request, say)
