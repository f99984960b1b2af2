"""`glimmer run --profile`: time per op and per layer, from ExecuTorch's ETDump.

A `Recorder` takes the ETDumps of a traced model step by step, so that a long run stays small, and
keeps them in a temporary file. A `Profile` then sums them up and writes a Chrome trace, which
chrome://tracing and Perfetto open. Events are told apart by method, chain and instruction, which
`program` maps to op and layer: the same for every backend. A delegate call is one op.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from rich.table import Table

from ._native import _C
from .program import Instruction, Program

STEPS_A_DUMP = 32
SLOWEST = 3  # layers named in the table
OP_EVENTS = ("OPERATOR_CALL", "DELEGATE_CALL")
METHOD_EVENT = "Method::execute"
Place = tuple[int, int]  # chain and index of an instruction
# Every other method is prefill's.
PHASE_OF = {
    "decode": "decode",
    "target_decode": "decode",
    "draft_forward": "draft",
    "draft_prefill": "draft",
}


class Recorder:
    """Collects the ETDumps of a model that was loaded with trace="times".

    whole: keep them as one ETDump, about 64 bytes an event and two events an op of every step in
    memory, instead of one for every 32 steps.
    """

    def __init__(self, model: Any, whole: bool = False) -> None:
        self._model, self._whole = model, whole
        self._steps = 0
        self._sizes: list[int] = []
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the recorder)

    def step(self) -> None:
        """Call after every step."""
        self._steps += 1
        if not self._whole and self._steps % STEPS_A_DUMP == 0:
            self._take()

    def _take(self) -> None:
        etdump, _ = self._model.take_trace()
        if etdump:
            self._spool.write(etdump)
            self._sizes.append(len(etdump))

    def dumps(self) -> Iterator[bytes]:
        """Everything recorded so far, in order."""
        self._take()
        self._spool.seek(0)
        for size in self._sizes:
            yield self._spool.read(size)


@dataclass
class Sum:
    """Of calls: their number, time in ns and bytes of weights read."""

    calls: int = 0
    ns: float = 0.0
    weight_bytes: int = 0

    def add(self, ns: float, weight_bytes: int = 0) -> None:
        self.calls += 1
        self.ns += ns
        self.weight_bytes += weight_bytes

    def __add__(self, other: Sum) -> Sum:
        weight_bytes = self.weight_bytes + other.weight_bytes
        return Sum(self.calls + other.calls, self.ns + other.ns, weight_bytes)


@dataclass
class Phase:
    """Prefill, decode or draft. steps: calls of its methods that run layers. wall: seconds."""

    steps: int = 0
    tokens: int = 0
    wall: float = 0.0
    method_ns: float = 0.0  # of whole method calls
    ops: dict[tuple[str, str], Sum] = field(default_factory=lambda: defaultdict(Sum))
    layers: dict[int | str, Sum] = field(default_factory=lambda: defaultdict(Sum))

    @property
    def ns(self) -> float:
        return sum(s.ns for s in self.ops.values())

    @property
    def coverage(self) -> float:
        """The ops' share of the wall time of the steps."""
        return self.ns / (self.wall * 1e9) if self.wall else 0.0


class Profile:
    """Sums of a run's ETDumps, by phase: "prefill", "decode" or "draft"."""

    def __init__(self, program: Program) -> None:
        self._places = {m.name: m.by_place() for m in program.methods}
        self._layered = {m.name for m in program.methods if m.layers or m.delegates}
        self._calls: dict[str, int] = defaultdict(int)
        self.phases = {"prefill": Phase(), "decode": Phase(), "draft": Phase()}

    def add(self, etdump: bytes) -> Iterator[dict[str, Any]]:
        """Adds one ETDump; yields its events as Chrome trace events, times in µs."""
        # Takes seconds to import
        from executorch.devtools.etdump.serialize import deserialize_from_etdump_flatcc

        for run in deserialize_from_etdump_flatcc(etdump).run_data:
            if run.name not in self._places:
                continue
            step = self._calls[run.name]
            self._calls[run.name] += 1
            phase = self.phases[PHASE_OF.get(run.name, "prefill")]
            phase.steps += run.name in self._layered
            for event in run.events or ():
                if event.profile_event is not None:
                    yield from self._event(run.name, step, phase, event.profile_event)

    def _event(self, method: str, step: int, phase: Phase, e: Any) -> Iterator[dict[str, Any]]:
        ns = (e.end_time - e.start_time) * _C.tick_nanoseconds()
        inside = e.delegate_debug_id_str or (e.delegate_debug_id_int or -1) >= 0
        args: dict[str, Any] = {"method": method, "step": step}
        if e.name == METHOD_EVENT:
            name, kind = method, "method"
            phase.method_ns += ns
        elif inside:
            name, kind = str(e.delegate_debug_id_str or e.delegate_debug_id_int), "delegate"
        elif e.name in OP_EVENTS:
            op = self._places[method][e.chain_index, e.instruction_id]
            self._count(phase, op, ns)
            name, kind = f"{op.name} {op.role}".strip(), "op"
            args |= {"layer": op.layer, "instruction": op.index}
        else:
            return
        start = e.start_time * _C.tick_nanoseconds() / 1e3
        yield {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": start,
            "dur": ns / 1e3,
            "pid": 1,
            "tid": 1,
            "args": args,
        }

    @staticmethod
    def _count(phase: Phase, op: Instruction, ns: float) -> None:
        matrices = any(len(w.tensor.sizes) > 1 for w in op.weights)
        use = op.role if matrices else ""
        phase.ops[op.name, use].add(ns, 0 if op.gathers else op.weight_bytes)
        phase.layers[op.layer].add(ns)


def write_trace(profile: Profile, recorder: Recorder, out: IO[str]) -> None:
    """Adds all of a recorder's dumps to the profile and writes their Chrome trace."""
    out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    separator = ""
    for dump in recorder.dumps():
        for event in profile.add(dump):
            out.write(separator + json.dumps(event))
            separator = ",\n"
    out.write("\n]}\n")


def write_etdump(profile: Profile, recorder: Recorder, out: IO[bytes]) -> None:
    """Adds a whole recorder's dump to the profile and writes it, for ExecuTorch's Inspector."""
    for dump in recorder.dumps():
        for _ in profile.add(dump):
            pass
        out.write(dump)


# --- tables --------------------------------------------------------------------------------------


def _op_rows(phase: Phase) -> Iterator[tuple[str, Sum]]:
    """Ops by time; below an op that serves several weights, its uses."""
    uses: dict[str, list[tuple[str, Sum]]] = defaultdict(list)
    for (op, role), s in sorted(phase.ops.items(), key=lambda x: -x[1].ns):
        uses[op].append((role, s))
    totals = {op: sum((s for _, s in parts), Sum()) for op, parts in uses.items()}
    for op, total in sorted(totals.items(), key=lambda x: -x[1].ns):
        yield op, total
        if len(uses[op]) > 1:
            yield from ((f"  {role or '-'}", s) for role, s in uses[op])


def _op_table(name: str, phase: Phase, rates: bool) -> Table:
    title = f"{name}: {phase.steps} steps, {phase.tokens} tokens, {phase.wall * 1e3:.1f} ms"
    table = Table(title=title)
    table.add_column("op", overflow="fold")
    # A prefill step does not read the head's weights, and of others it is not a measure.
    for column in ("calls", "ms", "share", "ms a call", *["weights GB/s"] * rates):
        table.add_column(column, justify="right", no_wrap=True)
    total = max(phase.ns, 1.0)
    for op, s in _op_rows(phase):
        rate = f"{s.weight_bytes / s.ns:.2f}" if s.weight_bytes and s.ns else "-"
        each = f"{s.ns / s.calls / 1e6:.4f}"
        cells = (op, str(s.calls), f"{s.ns / 1e6:.2f}", f"{s.ns / total:.1%}", each)
        table.add_row(*cells, *[rate] * rates)
    table.add_row("all ops", "", f"{phase.ns / 1e6:.2f}", f"{phase.coverage:.1%} of wall")
    return table


def _layer_table(phases: dict[str, Phase]) -> Table:
    table = Table(title="layers: ms a step")
    for column in ("phase", "layers", "mean", "min", "max", "slowest", "outside layers"):
        table.add_column(column, overflow="fold")
    for name, phase in phases.items():
        ms = {layer: s.ns / 1e6 / max(phase.steps, 1) for layer, s in phase.layers.items()}
        layers = {k: v for k, v in ms.items() if isinstance(k, int)}
        outside = ", ".join(f"{k} {v:.3f}" for k, v in ms.items() if not isinstance(k, int))
        if layers:
            slowest = sorted(layers, key=lambda k: -layers[k])[:SLOWEST]
            times = (sum(layers.values()) / len(layers), min(layers.values()), max(layers.values()))
            named = ", ".join(f"{k} ({layers[k]:.3f})" for k in slowest)
            table.add_row(name, str(len(layers)), *(f"{t:.3f}" for t in times), named, outside)
        else:
            table.add_row(name, "0", "-", "-", "-", "-", outside)
    return table


def tables(profile: Profile) -> list[Table]:
    """Ops of each phase that ran, then the layers."""
    ran = {name: phase for name, phase in profile.phases.items() if phase.steps}
    return [
        *(_op_table(name, phase, name != "prefill") for name, phase in ran.items()),
        _layer_table(ran),
    ]
