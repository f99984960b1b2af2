"""Measures one case of an op: gate, rotation, rounds of samples.

How a figure comes about:

- Gate: the backend's result is compared with the float64 reference, and must be finite, before
  anything is timed; after the timing the results of all sets must have the same bits as that one.
- Rotation: arguments and results exist as often as it takes for the probe's `working_set` bytes to
  pass through between two uses of one set, as a model's other layers would. They lie in small pages
  wherever torch puts them, as mapped weights do, and are touched before the timing. Cases that are
  in cache in real use keep one set, and get no % of limit.
- A sample is the mean of as many calls as last 0.2 ms, timed in C++ and without Python, after
  untimed calls that wake the pool's threads. Each call checks its arguments, as ExecuTorch's does.
- A round takes one sample of ours, one of each peer and one of the machine's limits, so that all
  see the same neighbours. Before another project's sample, its and our idle threads must sleep.
- Freedom is probed before and after every sample, and the share of the threads' time that this
  process got during it. Where their product is a fifth below the best tenth of that party's, a
  neighbour on the core or another process slowed the sample: it is dropped and counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from glimmer_ops.backends import Backend, Variant
from glimmer_ops.backends._backend import Timer
from glimmer_ops.check import clone_args, expected_tensors, poisoned, tensors_of, worst_nmse
from glimmer_ops.ops._contract import Case, Cost, Op, nbytes

from .peers import Counterpart
from .probes import Limits, Probe
from .report import Row

SAMPLE_NS = 200_000
QUIET = 0.8  # of a party's best quality: samples below are dropped
MAX_MEMORY = 4 << 30


@dataclass(frozen=True)
class Settings:
    """samples: wanted of each party. seconds: no more rounds are begun after them."""

    samples: int = 30
    seconds: float = 8.0
    threads: int = 1
    least: int = 3


@dataclass
class Samples:
    """Times of one party in ms, with the core's freedom then and the share of it that we got."""

    ms: list[float] = field(default_factory=list)
    freedom: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)

    def add(self, ms: float, freedom: float, share: float) -> None:
        self.ms.append(ms)
        self.freedom.append(freedom)
        self.share.append(share)

    def kept(self) -> list[float]:
        """The times of undisturbed samples; not empty once there are samples."""
        quality = [f * s for f, s in zip(self.freedom, self.share, strict=True)]
        least = QUIET * quantile(quality, 0.9) if quality else 0.0
        return [t for t, q in zip(self.ms, quality, strict=True) if q >= least]


@dataclass(frozen=True)
class Gate:
    """What the backend made of a case, and whether it may be timed: "pass" or the reason."""

    verdict: str
    result: dict[str, torch.Tensor]


def check_gate(
    op: Op, case: Case, backend: Backend, variant: Variant, expected: dict[str, torch.Tensor]
) -> Gate:
    args = case.make()
    try:
        outs = backend.run(op, args, variant, poisoned)
    except (ValueError, RuntimeError) as error:
        return Gate(f"refused: {error}", {})
    result = tensors_of(op, args, outs)
    value, detail = worst_nmse(result, expected)
    bound = op.bound(case, variant.exact)
    if value is None:
        return Gate(detail, result)
    if not all(bool(torch.isfinite(result[n]).all()) for n in result if n not in op.mutates):
        return Gate("a result is not finite", result)
    if not value <= bound:
        return Gate(f"nmse {value:.1e} > {bound:.0e}", result)
    return Gate("pass", result)


def make_sets(args: tuple[Any, ...], touched: int, working_set: int) -> list[tuple[Any, ...]]:
    """Copies of args, so many that working_set bytes are touched by using each once.

    Fewer where the copies, whose untouched parts count too, would take more than 4 GiB.
    """
    size = max(1, nbytes(*(a for a in args if isinstance(a, torch.Tensor))))
    copies = min(math.ceil(working_set / max(1, touched)), MAX_MEMORY // size)
    return [args, *(clone_args(args) for _ in range(copies - 1))]


def dims(op: Op, args: tuple[Any, ...], outs: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """(m, n, k): rows, and the widths of the first result's rows and the first row argument's."""
    named = dict(zip(op.arg_names, args, strict=True))
    tensors = [named[n] for n in op.rows] or list(args)
    x = next(t for t in tensors if isinstance(t, torch.Tensor))
    width = lambda t: t.size(-1) if t.dim() > 1 else 1  # noqa: E731
    return (x.size(0) if x.dim() else 1), width(outs[0]), width(x)


def settle(limit: float = 5.0) -> None:
    """Waits until the idle threads of this process's pools have stopped spinning.

    A thread that spins takes a core from the next sample, and passes for our own share of it:
    RuntimeError when one does not stop.
    """
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(0.002)
        if time.process_time() - cpu < 0.1 * (time.perf_counter() - wall):
            return
    raise RuntimeError(f"idle threads of this process still spin after {limit:g} s")


class Party:
    """One side of a measurement: gives samples, each from where the last one ended."""

    def __init__(self, run: Callable[[int, int, int], int], sets: int) -> None:
        self._run, self._sets, self._at = run, sets, 0
        self.samples = Samples()
        run(0, 0, sets)  # touches everything
        one = max(1, run(0, 1, 1))
        self._calls = max(1, min(SAMPLE_NS // one, 10_000))
        # A short call is slower after a pause, until threads and clock have woken up.
        self._warm = 0 if one > 20_000_000 else self._calls

    def sample(self, threads: int) -> tuple[float, float]:
        """(milliseconds a call, share of the threads' time that this process was given)."""
        at = (self._at + self._warm) % self._sets
        wall, cpu = time.perf_counter(), time.process_time()
        ns = self._run(at, self._warm, self._calls)
        share = (time.process_time() - cpu) / threads / (time.perf_counter() - wall)
        self._at = (at + self._calls) % self._sets
        return ns / self._calls / 1e6, share


@dataclass
class Round:
    """Everything that the rounds of one case gathered."""

    ours: Samples
    peers: list[Samples]
    limits: list[Limits]
    busy: float | None  # CPUs that other processes used


def rounds(ours: Party, peers: Sequence[Party], probe: Probe | None, settings: Settings) -> Round:
    freedom = probe.freedom if probe else lambda: 1.0
    limits: list[Limits] = []
    start, others = time.perf_counter(), probe.others() if probe else None
    end = start + settings.seconds

    def enough() -> bool:
        if any(len(p.samples.kept()) < settings.samples for p in (ours, *peers)):
            late = time.perf_counter() > end or len(ours.samples.ms) >= 3 * settings.samples
            return late and len(ours.samples.ms) >= settings.least
        return True

    while not enough():
        for party in (ours, *peers):
            if peers:
                settle()
            before = freedom()
            ms, share = party.sample(settings.threads)
            party.samples.add(ms, min(before, freedom()), share)
        if probe:
            if peers:
                settle()
            # Rounds of long samples are few, and the best tenth of few readings is no limit.
            long = int(ours.samples.ms[-1] / 20)
            limits += [probe.limits() for _ in range(min(max(1, long), 8))]
    now = probe.others() if probe else None
    busy = None
    if now is not None and others is not None:
        busy = max(0.0, now - others) / (time.perf_counter() - start)
    return Round(ours.samples, [p.samples for p in peers], limits, busy)


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between the nearest two."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def pct_limit(cost: Cost, ms: float, gbps: float, gflops: float) -> float:
    """The time that the nearer of both roofs asks for, in % of ms."""
    return 100 * max(cost.bytes / gbps, cost.flops / gflops) / (ms * 1e6)


def bench_case(
    op: Op,
    case: Case,
    backend: Backend,
    variant: Variant,
    settings: Settings,
    probe: Probe | None,
    peers: Sequence[Counterpart] = (),
    expected: dict[str, torch.Tensor] | None = None,
) -> list[Row]:
    """A row for each peer, or one without; a single row without figures when the gate fails."""
    expected = expected_tensors(op, case) if expected is None else expected
    base = Row(
        op.name,
        backend.name,
        case.id,
        case.qtype,
        case.dtype,
        threads=settings.threads,
        variant=variant.name,
    )
    gate = check_gate(op, case, backend, variant, expected)
    if gate.verdict != "pass":
        return [replace(base, gate=gate.verdict)]
    args = case.make()
    cost = op.cost(*args)
    m, n, k = dims(op, args, [gate.result[name] for name in gate.result])
    wanted = 1 if case.resident or probe is None else probe.working_set
    sets = make_sets(args, cost.bytes, wanted)
    timer = backend.timer(op, sets, variant)
    party = Party(timer.run, len(sets))
    theirs = [Party(p.run, p.sets) for p in peers]
    taken = rounds(party, theirs, probe, settings)
    if not _unchanged(timer, op, gate.result):
        return [replace(base, gate="a result changed while it was timed")]
    touched = len(sets) * cost.bytes
    base = replace(
        base, m=m, n=n, k=k, bytes=cost.bytes, flops=cost.flops, working_set=touched, gate="pass"
    )
    in_cache = case.resident or touched < wanted
    note = "" if case.resident or not in_cache else "too little memory to rotate through"
    integer = op.integer_nmse is not None and not variant.exact
    base = replace(base, note=note, **figures(cost, taken, integer, in_cache))
    pairs = zip(peers, taken.peers, strict=True)
    return [peer_row(base, peer, samples) for peer, samples in pairs] or [base]


def _unchanged(timer: Timer, op: Op, result: dict[str, torch.Tensor]) -> bool:
    first = [result[name] for name in result if name not in op.mutates]
    return all(torch.equal(a, b) for outs in timer.outs for a, b in zip(outs, first, strict=True))


def figures(cost: Cost, taken: Round, integer: bool, in_cache: bool) -> dict[str, Any]:
    """A row's fields from its samples. integer: whether the peak of int8 limits it."""
    kept = taken.ours.kept()
    median = statistics.median(kept)
    values: dict[str, Any] = {
        "ms_median": median,
        "ms_p10": quantile(kept, 0.1),
        "ms_p90": quantile(kept, 0.9),
        "samples": len(kept),
        "dropped": len(taken.ours.ms) - len(kept),
        "gbps": cost.bytes / median / 1e6,
        "gflops": cost.flops / median / 1e6,
        "busy": taken.busy,
    }
    if taken.limits:
        # The best tenth of both, since samples are kept by what the best tenth was like.
        gbps = quantile([x.gbps for x in taken.limits], 0.9)
        peak = quantile([x.int8_gops if integer else x.gflops for x in taken.limits], 0.9)
        values |= {"limit_gbps": gbps, "limit_gflops": peak}
        values["freedom"] = statistics.median(taken.ours.freedom)
        if not in_cache:
            values["pct_limit"] = pct_limit(cost, median, gbps, peak)
    return values


def peer_row(row: Row, peer: Counterpart, samples: Samples) -> Row:
    """The row with a peer's figures."""
    assert row.ms_median
    median = statistics.median(samples.kept())
    note = f"{peer.peer}, {row.op}: {peer.note}" if peer.note else row.note
    ratio = median / row.ms_median
    return replace(row, peer=peer.peer, peer_ms_median=median, ratio=ratio, note=note)
