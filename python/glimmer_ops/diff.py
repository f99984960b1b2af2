"""`glimmer diff`: the same tokens through two exports, or through one on two paths or ISAs.

Both sides run step by step, teacher-forced. Every op's output, and every row of K and V that it
wrote, is compared with the other side's; outputs are matched by method, layer, op, weight and
occurrence, so that exports with other fusion or on another backend still compare what they share.
The report names the first op, in the order of computation, whose output parts.

Errors: ValueError for models or arguments that cannot be compared.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from . import _native
from .ops import OPS
from .program import HEAD, Program, Tensor, read_program
from .session import MAX_DECODE_ROWS, Sampling, Session, load_program

PATHS = ("exact", "int8")
CHUNK = 16
# By default an output parts when a row's rms(a - b) / rms(a) is above the tolerance of the paths
# and above GROWTH times whatever the ops before it in the step showed: what comes in different goes
# out different, so that healthy kernels drift apart with depth, and a wrong one stands out. Sums of
# float32 in another order stay far below the first tolerance; where both sides round activations
# to int8, a value on the edge between two integers may round either way.
TOLERANCE = 1e-4
INT8_TOLERANCE = 2e-2
GROWTH = 8.0
LOGITS_TOLERANCE = 3e-2  # what drift may add up to
_TINY = float(np.finfo(np.float64).tiny)
_FLOOR = 1e-6  # of an output's mean row energy: a row below it is judged against that


@dataclass(frozen=True)
class Side:
    """One of the two: a model, and how its kernels run."""

    model: Path
    path: str
    isa: str

    def __str__(self) -> str:
        return f"{self.model} ({self.path}, {self.isa})"


@dataclass(frozen=True)
class Key:
    """What one output is, whichever export computed it."""

    method: str
    layer: int | str
    op: str
    role: str
    occurrence: int

    def __str__(self) -> str:
        layer = f"layer {self.layer}" if isinstance(self.layer, int) else str(self.layer)
        number = f" output {self.occurrence}" if self.occurrence else ""
        return f"{layer}, {self.op} {self.role}".rstrip() + number


@dataclass
class Step:
    """What one side computed: outputs in order, and the logits of the wanted rows, if any."""

    outputs: dict[Key, np.ndarray] = field(default_factory=dict)
    logits: np.ndarray | None = None


@dataclass(frozen=True)
class Difference:
    """Of one output: by row rms(a - b) / rms(a); the largest |a - b|; elements of other bits."""

    rms: np.ndarray
    max_abs: float
    bits: int

    @property
    def worst(self) -> float:
        """The largest of rms."""
        return float(self.rms.max(initial=0))


def measure(a: np.ndarray, b: np.ndarray) -> Difference:
    """Compares two outputs of one shape. A NaN equals a NaN; any integer differs by infinity."""
    same_type = a.dtype == b.dtype
    raw = f"u{a.dtype.itemsize}"
    bits = int((a.view(raw) != b.view(raw)).sum()) if same_type else int((a != b).sum())
    if bits == 0:
        return Difference(np.zeros(len(a) if a.ndim else 1), 0.0, 0)
    x, y = (v.astype(np.float64).reshape(len(v) if v.ndim else 1, -1) for v in (a, b))
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        distance = np.where(equal, 0.0, np.abs(x - y))
    distance[np.isnan(distance)] = np.inf
    if not np.issubdtype(a.dtype, np.floating):
        distance[~equal] = np.inf
    energy = np.nansum(np.where(np.isfinite(x), x, 0.0) ** 2, axis=1)
    energy = np.maximum(energy, max(_FLOOR * energy.mean(), _TINY))
    return Difference(np.sqrt((distance**2).sum(axis=1) / energy), float(distance.max()), bits)


class Runner:
    """One side, loaded to report its outputs."""

    def __init__(self, side: Side) -> None:
        self.side = side
        pte = side.model / "model.pte" if side.model.is_dir() else side.model
        self._model = load_program(side.model, trace="outputs")
        self.program: Program = read_program(pte)
        self._places = {m.name: m.by_place() for m in self.program.methods}
        self.session = Session(self._model)
        self._slot = self.session.open()

    @contextlib.contextmanager
    def _kernels(self) -> Iterator[None]:
        with _native.use_isa(self.side.isa), _native.use_exact(self.side.path == "exact"):
            yield

    def step(self, ids: Sequence[int], rows: Sequence[int], decode: bool) -> Step:
        """Appends ids. rows: whose logits are wanted; decode gives them of every one."""
        start = self.session.length(self._slot)
        step = Step()
        with self._kernels():
            if decode:
                self.session.decode([self._slot] * len(ids), ids, Sampling())
            else:
                step.logits = self.session.forward([(self._slot, i) for i in ids], rows)
        self._collect(step, range(start, start + len(ids)))
        if decode:
            step.logits = self._decoded_logits(step, len(ids))
        return step

    def _decoded_logits(self, step: Step, n: int) -> np.ndarray | None:
        """Decode returns ids only: its logits are the head's output of their shape, if any."""
        shape = (n, self.session.limits.vocab_size)
        heads = (x for key, x in step.outputs.items() if key.layer == HEAD)
        return next((x for x in heads if x.shape == shape), None)

    def _collect(self, step: Step, positions: range) -> None:
        seen = Counter[tuple[Any, ...]]()
        written: set[int | str] = set()
        method = ""
        for method, chain, index, event, dtype, shape, data in self._model.take_trace()[1]:
            place = self._places[method].get((chain, index))
            if place is None:
                continue
            what = (method, place.layer, event or place.name, place.role)
            array = np.frombuffer(data, _NUMPY[dtype]).reshape(shape)
            step.outputs[Key(*what, seen[what])] = _widen(array, dtype)
            seen[what] += 1
            op = OPS.get(place.name)
            if op is not None and op.mutates and isinstance(place.layer, int):
                written.add(place.layer)
                self._collect_pools(step, method, place.layer, place.name, positions)
        for layer in set(range(self.session.limits.n_layers)) - written:
            self._collect_pools(step, method, layer, "pools", positions)

    def _collect_pools(
        self, step: Step, method: str, layer: int, op: str, positions: range
    ) -> None:
        """The rows that were written to a layer's K and V pools: no op returns them."""
        limits = self.session.limits
        sliding = limits.sliding_layers[layer]
        table = self.session.sliding_table() if sliding else self.session.global_table()
        at = np.array(positions)
        pages = torch.from_numpy(table[self._slot, at // limits.page_size].astype(np.int64))
        offsets = torch.from_numpy(at % limits.page_size)
        for part in "kv":
            rows = self.session.pool(layer, part)[pages, :, offsets].float().numpy()
            step.outputs[Key(method, layer, op, f"{part}_cache", 0)] = rows


_NUMPY = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # numpy has none
    "uint8": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
}


def _widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """Without loss to float32, where numpy has no such type."""
    if dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Worst:
    """The largest difference of an output over all steps."""

    rms: float = 0.0
    max_abs: float = 0.0

    def add(self, d: Difference) -> None:
        self.rms = max(self.rms, d.worst)
        self.max_abs = max(self.max_abs, d.max_abs)


@dataclass(frozen=True)
class First:
    """Where the sides part: an output, the position of its first row that does, by how much."""

    key: Key
    position: int
    rms: float
    max_abs: float


@dataclass(frozen=True)
class Rule:
    """When an output parts. fixed: the tolerance is all that counts, see GROWTH."""

    tolerance: float
    fixed: bool = False
    bits: bool = False

    def limit(self, before: float) -> float:
        """Of an output's rms, after ops of the step whose largest was `before`."""
        if self.fixed:
            return self.tolerance
        # Equal inputs are rounded to the same integers.
        return max(self.tolerance, GROWTH * before) if before > 0 else TOLERANCE

    def parts(self, d: Difference, before: float) -> bool:
        return d.bits > 0 if self.bits else d.worst > self.limit(before)

    def row(self, d: Difference, before: float) -> int:
        """The first row that parts."""
        return int(np.argmax(d.rms > (0.0 if self.bits else self.limit(before))))

    def __str__(self) -> str:
        if self.bits:
            return "any other bit"
        grown = "" if self.fixed else f" and {GROWTH:g} times that of the ops before"
        return f"a row's rms relative above {self.tolerance:g}{grown}"


@dataclass
class Comparison:
    """What `diff` found."""

    sides: tuple[Side, Side]
    rule: Rule
    positions: int = 0
    steps: int = 0
    first: First | None = None
    worst: dict[Key, Worst] = field(default_factory=lambda: defaultdict(Worst))
    bits: int = 0  # elements of all outputs that have other bits
    only: tuple[set[Key], set[Key]] = field(default_factory=lambda: (set(), set()))
    logits: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def add(self, a: Step, b: Step, start: int, n: int, rows: Sequence[int]) -> None:
        """Adds a step of n positions from start; rows: whose logits it has."""
        self.steps, self.positions = self.steps + 1, self.positions + n
        step_first = None
        before = 0.0
        for key, x in a.outputs.items():
            if not _comparable(key, a, b):
                continue
            d = measure(x, b.outputs[key])
            self.worst[key].add(d)
            self.bits += d.bits
            if step_first is None and self.rule.parts(d, before):
                row = self.rule.row(d, before)
                offset = row if len(x) == n else rows[row] if len(x) == len(rows) else 0
                step_first = First(key, start + offset, d.worst, d.max_abs)
            before = max(before, d.worst)
        self.first = self.first or step_first
        self.only[0].update(k for k in a.outputs if not _comparable(k, a, b))
        self.only[1].update(k for k in b.outputs if not _comparable(k, b, a))
        if a.logits is not None and b.logits is not None:
            self.logits.append((a.logits, b.logits))

    @property
    def logits_rms(self) -> float:
        """rms(a - b) / rms(a) over all logits."""
        if not self.logits:
            return 0.0
        a, b = _logits(self)
        return float(np.sqrt(((a - b) ** 2).mean() / max((a**2).mean(), _TINY)))

    @property
    def drifted(self) -> bool:
        """Whether the logits part although no op stands out."""
        judged = self.first is None and not self.rule.fixed and not self.rule.bits
        return judged and self.logits_rms > LOGITS_TOLERANCE

    @property
    def parted(self) -> bool:
        return self.first is not None or self.drifted


def _logits(c: Comparison) -> tuple[np.ndarray, np.ndarray]:
    a, b = zip(*c.logits, strict=True)
    return np.concatenate(a).astype(np.float64), np.concatenate(b).astype(np.float64)


def _comparable(key: Key, one: Step, other: Step) -> bool:
    return key in other.outputs and one.outputs[key].shape == other.outputs[key].shape


def _check_models(a: Runner, b: Runner) -> None:
    def dim(runner: Runner) -> int | None:
        method = runner.program.method("forward_from_embeddings")
        first = method.inputs[0] if method and method.inputs else None
        return first.sizes[-1] if isinstance(first, Tensor) and first.sizes else None

    facts: dict[str, Callable[[Runner], Any]] = {
        "vocabulary size": lambda r: r.session.limits.vocab_size,
        "number of layers": lambda r: r.session.limits.n_layers,
        "embedding width": dim,
    }
    for name, fact in facts.items():
        if fact(a) != fact(b):
            raise ValueError(
                f"{b.side.model}: expected the {name} of {a.side.model}, {fact(a)}, found {fact(b)}"
            )


def _check_tokens(ids: Sequence[int], chunk: int, decode: bool, runners: list[Runner]) -> None:
    if not ids:
        raise ValueError("--tokens: expected at least one id, found none")
    vocab = runners[0].session.limits.vocab_size
    for i in ids:
        if not 0 <= i < vocab:
            raise ValueError(f"--tokens: expected ids in [0, {vocab}), found {i}")
    room = min(r.session.limits.max_seq_len for r in runners)
    if len(ids) > room:
        raise ValueError(f"--tokens: expected at most {room} ids (max_seq_len), found {len(ids)}")
    most = min(r.session.limits.max_chunk for r in runners)
    most = min(most, MAX_DECODE_ROWS) if decode else most
    if not 1 <= chunk <= most:
        raise ValueError(f"--chunk: expected a value in [1, {most}], found {chunk}")


def default_tolerance(sides: tuple[Side, Side]) -> float:
    both_int8 = all(s.path == "int8" for s in sides)
    return INT8_TOLERANCE if both_int8 else TOLERANCE


def diff(
    sides: tuple[Side, Side],
    ids: Sequence[int],
    chunk: int | None = None,
    tolerance: float | None = None,
    bits: bool = False,
    decode: bool = False,
) -> Comparison:
    """Runs ids through both sides.

    chunk: tokens a step; by default 16, or what a model allows. tolerance: a fixed one of rms
    relative, instead of the rule above. bits: any other bit is a difference. decode: through the
    decode method instead of forward_from_embeddings.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"--tolerance: expected a number of at least 0, found {tolerance}")
    runners = [Runner(side) for side in sides]
    _check_models(*runners)
    limits = [r.session.limits for r in runners]
    chunk = min(CHUNK, *(x.max_chunk for x in limits)) if chunk is None else chunk
    _check_tokens(ids, chunk, decode, runners)
    fixed = tolerance is not None
    rule = Rule(default_tolerance(sides) if tolerance is None else tolerance, fixed, bits)
    comparison = Comparison(sides, rule)
    max_rows = min(x.max_rows for x in limits)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        rows = range(len(part)) if decode else range(max(0, len(part) - max_rows), len(part))
        a, b = (r.step(part, rows, decode) for r in runners)
        comparison.add(a, b, start, len(part), rows)
    return comparison


# --- report --------------------------------------------------------------------------------------


def verdict(c: Comparison) -> str:
    """One line: where they part, or that they do not."""
    if c.first is not None:
        how = f"rms relative {c.first.rms:.1e}, max abs {c.first.max_abs:.1e}"
        return f"first difference: position {c.first.position}, {c.first.key}: {how}"
    if c.drifted:
        found = f"{c.logits_rms:.1e} > {LOGITS_TOLERANCE:g}"
        return f"the logits part, rms relative {found}, by drift: no op stands out"
    if c.bits == 0:
        return "no difference: every bit is equal"
    rms = max(w.rms for w in c.worst.values())
    return f"no difference beyond the tolerance: rms relative at most {rms:.1e}"


def summary(c: Comparison) -> list[str]:
    """What was compared."""
    lines = [f"{name}: {side}" for name, side in zip("AB", c.sides, strict=True)]
    compared = f"{c.positions} positions in {c.steps} steps, {len(c.worst)} outputs compared"
    lines.append(f"{compared}; a difference is {c.rule}")
    for name, keys in zip("AB", c.only, strict=True):
        if keys:
            lines.append(f"only in {name}, or of another shape: {len(keys)} outputs")
    return lines


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _layer_table(c: Comparison) -> Table:
    """Growth: each layer's worst output, and its last one, the input of the next layer."""
    table = _table("layer", "worst op", "rms relative", "max abs", "last output", title="by layer")
    layers: dict[int | str, dict[Key, Worst]] = defaultdict(dict)
    for key, worst in c.worst.items():
        layers[key.layer][key] = worst
    for layer, outputs in layers.items():
        key, worst = max(outputs.items(), key=lambda x: x[1].rms)
        last = list(outputs.values())[-1]
        name = f"{key.op} {key.role}".rstrip()
        cells = (f"{worst.rms:.1e}", f"{worst.max_abs:.1e}", f"{last.rms:.1e}")
        table.add_row(str(layer), name, *cells)
    return table


def _op_table(c: Comparison) -> Table:
    table = _table("op", "outputs", "rms relative", "max abs", "in", title="by op, the worst")
    ops: dict[str, list[tuple[Key, Worst]]] = defaultdict(list)
    for key, worst in c.worst.items():
        ops[key.op].append((key, worst))
    for op, outputs in ops.items():
        key, worst = max(outputs, key=lambda x: x[1].rms)
        cells = (f"{worst.rms:.1e}", f"{worst.max_abs:.1e}", f"{key.layer} {key.role}")
        table.add_row(op, str(len(outputs)), *cells)
    return table


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _logits_table(c: Comparison) -> Table:
    a, b = _logits(c)
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    equal = int((a.argmax(-1) == b.argmax(-1)).sum())
    table = _table(
        "rms relative", "max abs", "argmax equal", "KL(A || B) mean", "KL max", title="logits"
    )
    cells = (f"{c.logits_rms:.1e}", f"{np.abs(a - b).max():.1e}", f"{equal}/{len(a)}")
    table.add_row(*cells, f"{kl.mean():.1e}", f"{kl.max():.1e}")
    return table


def tables(c: Comparison) -> list[Table]:
    """Growth over the layers, the worst of each op, and the logits."""
    return [_layer_table(c), _op_table(c), *([_logits_table(c)] if c.logits else [])]


def parse_pair(name: str, text: str | None, default: str, known: Sequence[str]) -> tuple[str, str]:
    """The values of A and B in "a,b", or one for both."""
    values = [default] if text is None else text.split(",")
    if len(values) > 2 or any(v not in known for v in values):
        expected = f"one or two of {', '.join(known)}, separated by a comma"
        raise ValueError(f"--{name}: expected {expected}, found '{text}'")
    return values[0], values[-1]


def make_sides(models: Sequence[Path], path: str | None, isa: str | None) -> tuple[Side, Side]:
    """The sides of the command line's arguments: one model stands for both."""
    if not 1 <= len(models) <= 2:
        raise ValueError(f"--model: expected one or two models, found {len(models)}")
    paths = parse_pair("path", path, "exact" if _native.exact_mode() else "int8", PATHS)
    isas = parse_pair("isa", isa, _native.isa(), _native.isas())
    return Side(models[0], paths[0], isas[0]), Side(models[-1], paths[1], isas[1])
