"""The measured tables of numerics.md: errors of each op and of a small model, ISA against ISA."""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from glimmer_ops import _native
from glimmer_ops.backends import BACKENDS, Variant
from glimmer_ops.check import nmse, tensors_of
from glimmer_ops.demo import POSITIONS, compare
from glimmer_ops.gguf import GGUFModel, load
from glimmer_ops.lowering import ExportOptions, from_gguf, to_executorch
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import Case, Op
from glimmer_ops.oracle import upstream_logits
from glimmer_ops.session import Session
from glimmer_ops.synth import synth
from glimmer_ops.tokenizer import Tokenizer
from mutation.faults import DRAFT_FAULTS
from support.dflash import LAYERS, distance, faulty_graph, fused_logits, random_draft, script
from support.oracles import TransformersDraft

CPU = BACKENDS["cpu"]
Row = list[str]


def markdown(*rows: Row) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *body))


def path_of(op: Op, variant: Variant) -> str:
    if op.integer_nmse is None:
        return "-"
    return "exact" if variant.exact else "int8"


# --- Ops ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One case on one variant: the error against the reference, and against the scalar kernel."""

    case: Case
    variant: Variant
    error: float
    bound: float
    equal_to_scalar: bool
    from_scalar: float


def run(op: Op, case: Case, variant: Variant) -> dict[str, torch.Tensor]:
    args = case.make()
    return tensors_of(op, args, CPU.run(op, args, variant))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def measure_case(op: Op, case: Case) -> Iterator[Result]:
    args = case.make()
    expected = tensors_of(op, args, op.reference(*args))
    scalar: dict[bool, dict[str, torch.Tensor]] = {}
    for variant in CPU.variants(op):  # the scalar ones come first
        outs = run(op, case, variant)
        base = scalar.setdefault(variant.exact, outs)
        yield Result(
            case,
            variant,
            max(nmse(outs[k], want) for k, want in expected.items()),
            op.bound(case, variant.exact),
            all(same_bits(outs[k], base[k]) for k in outs),
            max(nmse(outs[k], base[k]) for k in outs),
        )


@functools.cache
def results(op_name: str) -> list[Result]:
    op = OPS[op_name]
    cases = [c for c in op.all_cases() if not (c.error or c.slow)]
    return [r for c in cases for r in measure_case(op, c)]


def op_errors() -> str:
    """Worst NMSE over an op's ordinary cases and this machine's ISAs, by path and dtype."""
    rows: list[Row] = [["op", "path", "cases", "f32", "bf16", "f16"]]
    for op in OPS.values():
        plain = [r for r in results(op.name) if r.case.nmse is None]
        for path in dict.fromkeys(path_of(op, r.variant) for r in plain):
            mine = [r for r in plain if path_of(op, r.variant) == path]
            cells = []
            for dtype in ("f32", "bf16", "f16"):
                of_dtype = [r for r in mine if r.case.dtype == dtype]
                worst = max((r.error for r in of_dtype), default=None)
                bound = of_dtype[0].bound if of_dtype else 0.0
                cells.append("-" if worst is None else f"{worst:.1e} (≤ {bound:.0e})")
            rows.append([f"`{op.name}`", path, str(len({r.case.id for r in mine})), *cells])
    return markdown(*rows)


def own_bounds() -> str:
    """Cases with a bound of their own, by reason."""
    groups: dict[tuple[str, str, float], list[Result]] = defaultdict(list)
    for op in OPS.values():
        for r in results(op.name):
            if r.case.nmse is not None:
                groups[op.name, r.case.why, r.case.nmse].append(r)
    rows: list[Row] = [["op", "cases", "worst NMSE", "bound", "reason"]]
    for (op_name, why, bound), found in groups.items():
        cases = list(dict.fromkeys(r.case.id for r in found))
        names = ", ".join(f"`{c}`" for c in cases[:2]) + (", …" if len(cases) > 2 else "")
        worst = max(r.error for r in found)
        rows.append([f"`{op_name}`", names, f"{worst:.1e}", f"{bound:.0e}", why])
    return markdown(*rows)


def isa_differences() -> str:
    """How the vector kernels' outputs differ from the scalar ones, over an op's cases."""
    isas = [i for i in _native.isas() if i != "scalar"]
    rows: list[Row] = [["op", "path", *(f"{i} = scalar" for i in isas)]]
    for op in OPS.values():
        for path in dict.fromkeys(path_of(op, r.variant) for r in results(op.name)):
            cells = []
            for isa in isas:
                mine = [r for r in results(op.name) if r.variant.isa == isa]
                mine = [r for r in mine if path_of(op, r.variant) == path]
                equal = sum(r.equal_to_scalar for r in mine)
                worst = max(r.from_scalar for r in mine if r.case.dtype == "f32")
                text = "every bit" if equal == len(mine) else f"{equal} of {len(mine)} cases"
                cells.append(text + (f"; NMSE ≤ {worst:.1e}" if worst else ""))
            rows.append([f"`{op.name}`", path, *cells])
    return markdown(*rows)


# --- A model --------------------------------------------------------------------------------------


def export(model: GGUFModel, folder: Path, kv_dtype: str) -> Path:
    options = ExportOptions(max_seq_len=1024, max_chunk=128, kv_dtype=kv_dtype)
    return to_executorch(from_gguf(model), folder / kv_dtype, options, Tokenizer.from_gguf(model))


def logits(folder: Path, ids: list[int], exact: bool, chunk: int) -> np.ndarray:
    session = Session.load(folder)
    with _native.use_exact(exact):
        return session.prefill(session.open(), ids, chunk, range(len(ids)))


def model_errors() -> str:
    """Logits of a tiny Q4_K_M model against upstream's eager model in float32."""
    with tempfile.TemporaryDirectory() as name:
        model = load(synth(Path(name) / "tiny.gguf", "tiny", "Q4_K_M"))
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, POSITIONS).tolist()
        oracle = upstream_logits(model, ids)
        rows: list[Row] = [
            ["path", "KV", "max abs diff", "rms relative", "argmax equal", "chunks 1, 7 = 16"]
        ]
        for kv_dtype in ("f32", "f16", "bf16"):
            folder = export(model, Path(name), kv_dtype)
            for exact in (True, False):
                ours = {c: logits(folder, ids, exact, c) for c in (16, 1, 7)}
                path = "exact" if exact else "int8"
                c = compare(path, ours[16], oracle, exact)
                equal = all(np.array_equal(v, ours[16]) for v in ours.values())
                rows.append(
                    [
                        path,
                        kv_dtype,
                        f"{c.max_abs:.1e}",
                        f"{c.rms_relative:.1e}",
                        f"{c.argmax_equal}/{c.positions}",
                        "every bit" if equal else "NO",
                    ]
                )
    return markdown(*rows)


# --- The draft model ------------------------------------------------------------------------------


def draft_errors() -> str:
    """Logits of a small random draft against transformers', by its use of its cache."""
    rows: list[Row] = [["layers", "weights", "max abs diff, cache kept", "new cache a pass"]]
    what = script()
    for layers in LAYERS:
        for qtype in ("F16", "Q4_K"):
            model = random_draft(layers, qtype)
            ours = fused_logits(model, what)
            errors = [
                distance(ours, TransformersDraft(model, incremental).logits(what))
                for incremental in (True, False)
            ]
            rows.append([layers, qtype, *(f"{e:.1e}" for e in errors)])
    return markdown(*rows)


def draft_faults() -> str:
    """What each planted fault of the draft's graph does to its logits."""
    rows: list[Row] = [["fault", "max abs diff", "rms diff"]]
    model, what = random_draft("mixed"), script()
    oracle = torch.cat(TransformersDraft(model, incremental=True).logits(what))
    for f in DRAFT_FAULTS:
        graph = faulty_graph(f.file, f.old, f.new)
        diff = torch.cat(fused_logits(model, what, graph, fill=0.0)) - oracle
        rms = float(diff.square().mean().sqrt())
        rows.append([f"{f.kind}: {f.what}", f"{diff.abs().max():.1e}", f"{rms:.1e}"])
    return markdown(*rows)


TABLES = {
    "op-errors": op_errors,
    "own-bounds": own_bounds,
    "isa": isa_differences,
    "model": model_errors,
    "draft": draft_errors,
    "draft-faults": draft_faults,
}
