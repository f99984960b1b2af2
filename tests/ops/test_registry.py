"""Every op of the registry, on every backend and variant of this machine, over its cases."""

from __future__ import annotations

import itertools

import pytest
import torch

from glimmer_ops._native import _C
from glimmer_ops.backends import BACKENDS
from glimmer_ops.check import clone_args, run_case, tensors_of
from glimmer_ops.ops import OPS
from support.bits import same_bits
from support.matrix import CASES, VARIANTS
from support.rows import permute_pages, row_count, take_rows

NINE = {
    "rms_norm",
    "add_rms_norm",
    "qk_norm_rope_kv",
    "sdpa",
    "kquant_linear",
    "kquant_swiglu",
    "kquant_embedding",
    "kquant_logits",
    "sample",
}


def test_all_nine_ops_have_a_cpu_kernel() -> None:
    assert set(OPS) >= NINE
    assert all(BACKENDS["cpu"].supports(OPS[n]) for n in NINE)


@pytest.mark.parametrize(("op", "backend", "case"), CASES)
def test_matches_the_reference(op, backend, case) -> None:
    for variant in backend.variants(op):
        verdict = run_case(op, case, backend, variant)
        assert verdict.passed, verdict


def _row_cases(op):
    """Ordinary cases with at least two rows that are independent of each other."""
    for case in op.all_cases():
        if case.error or case.slow:
            continue
        args = case.make()
        named = dict(zip(op.arg_names, args, strict=True))
        if named.get("causal", True) and row_count(op, args) >= 2:
            yield case


@pytest.mark.report("G22", "D6")
@pytest.mark.parametrize(("op", "backend", "variant"), VARIANTS)
def test_row_invariance(op, backend, variant) -> None:
    """For T <= 16 a row's bits depend on the row alone: not on T, its place or the other rows."""
    checked = 0
    for case in itertools.islice(_row_cases(op), 60):
        args = case.make()
        n = min(row_count(op, args), 16)
        args = take_rows(op, args, range(n))
        whole_args = clone_args(args)
        whole = tensors_of(op, whole_args, backend.run(op, whole_args, variant))
        outputs = [k for k in whole if k not in op.mutates and whole[k].shape[:1] == (n,)]
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()
        for rows in ([n - 1], *(list(range(m)) for m in range(1, n)), order):
            part_args = take_rows(op, args, rows)
            part = tensors_of(op, part_args, backend.run(op, part_args, variant))
            for name in outputs:
                expected = whole[name].index_select(0, torch.tensor(rows))
                assert same_bits(part[name], expected), (case.id, rows, name)
            if rows is order:
                assert all(same_bits(part[k], whole[k]) for k in op.mutates), case.id
        checked += 1
    assert checked > 0


@pytest.mark.parametrize(
    ("op", "backend", "variant"), [p for p in VARIANTS if "block_table" in p.values[0].arg_names]
)
def test_page_order_does_not_matter(op, backend, variant) -> None:
    generator = torch.Generator().manual_seed(0)
    checked = 0
    for case in op.all_cases():
        args = case.make()
        named = dict(zip(op.arg_names, args, strict=True))
        if case.error or case.slow or named["block_table"] is None:
            continue
        outs = backend.run(op, clone_args(args), variant)
        moved = permute_pages(op, args, generator)
        assert all(map(same_bits, backend.run(op, moved, variant), outs)), case.id
        checked += 1
    assert checked > 0


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_kernels_name_their_arguments_as_the_schema_does(op) -> None:
    if BACKENDS["cpu"].supports(op):
        assert tuple(_C.arg_names(op.name)) == op.arg_names


@pytest.mark.report("R4")
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_opcheck(op) -> None:
    """Schema, fake, and tracing with dynamic shapes agree with the kernel."""
    call = getattr(torch.ops.glimmer, op.name).default
    cases = [c for c in op.all_cases() if not (c.error or c.slow)]
    small = [c for c in cases if all(_small(a) for a in c.make()) and _finite(call(*c.make()))]
    picked = small[:: max(1, len(small) // 4)][:4]
    assert picked
    for case in picked:
        torch.library.opcheck(call, case.make())


def _finite(outs: object) -> bool:
    """opcheck compares with ==, which NaN fails."""
    return all(bool(torch.isfinite(o).all()) for o in (outs if isinstance(outs, tuple) else [outs]))


def _small(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or 0 < value.numel() < 1 << 20


@pytest.mark.report("R5")
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_fake_keeps_a_dynamic_row_axis(op) -> None:
    """torch.export with a dynamic T: no specialisation, and the output carries the SymInt."""
    args = next(
        a
        for c in op.all_cases()
        if not (c.error or c.slow)
        for a in [c.make()]
        if row_count(op, a) >= 2 and all(_small(x) for x in a)
    )
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

    class Call(torch.nn.Module):
        def forward(self, *values):
            full = list(args)
            for i, v in zip(tensors, values, strict=True):
                full[i] = v
            return getattr(torch.ops.glimmer, op.name)(*full)

    n = row_count(op, args)
    t = torch.export.Dim("T", min=1, max=max(64, n))
    shapes = tuple({0: t} if op.arg_names[i] in op.rows else None for i in tensors)
    inputs = tuple(args[i] for i in tensors)
    program = torch.export.export(Call(), inputs, dynamic_shapes=(shapes,), strict=False)
    node = next(x for x in program.graph.nodes if f"glimmer.{op.name}" in str(x.target))
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    assert isinstance(first.shape[0], torch.SymInt)
