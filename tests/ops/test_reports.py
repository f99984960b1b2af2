"""Public bug reports (support/reports.py) that no case or other test answers, and the index."""

from __future__ import annotations

import pytest
import torch

from glimmer_ops.check import clone_args, nmse, tensors_of
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import generator, randn
from glimmer_ops.ops._kquant import INT8_QTYPES, linear_inputs
from glimmer_ops.ops._paged import Layout, build, split_tokens
from glimmer_ops.ops.qk_norm_rope_kv import _args as qk_args
from glimmer_ops.ops.sdpa import _args as sdpa_args
from support.bits import same_bits
from support.matrix import PAIRS, SUPPORTED
from support.reports import REPORTS, answers, marked_tests, matching_cases
from support.rows import row_count, take_rows

# --- The index ------------------------------------------------------------------------------------


def test_marks_name_known_reports() -> None:
    marks = list(marked_tests())
    assert len(marks) > 60 and {id for id, _ in marks} <= set(REPORTS)


@pytest.mark.parametrize("id", REPORTS)
def test_every_report_is_answered(id) -> None:
    assert all(matching_cases(pattern) for pattern in REPORTS[id].cases), REPORTS[id].cases
    assert answers()[id] or not REPORTS[id].must


# --- Weights --------------------------------------------------------------------------------------


def runs(name: str):
    """(backend, variant) for every way to run an op."""
    return [(b, v) for o, b in SUPPORTED if o.name == name for v in b.variants(o)]


def run(name: str, args, backend, variant) -> torch.Tensor:
    return backend.run(OPS[name], args, variant)[0]


def path_bound(op, variant) -> float:
    """The NMSE that a float32 case may have on a variant."""
    return op.nmse["f32"] if variant.exact else op.integer_nmse


@pytest.mark.report("G1")
@pytest.mark.parametrize("qtype", INT8_QTYPES)
@pytest.mark.parametrize("blocks", [1, 3, 26, 78])
def test_any_number_of_super_blocks(qtype, blocks) -> None:
    op = OPS["kquant_linear"]
    for m in (1, 5):
        args = (*linear_inputs(m, 101, 256 * blocks, qtype), qtype)
        want = op.reference(*args)
        for backend, variant in runs(op.name):
            got = run(op.name, args, backend, variant)
            assert nmse(got, want) <= path_bound(op, variant), variant.name


@pytest.mark.report("G7", "G30")
@pytest.mark.parametrize("qtype", INT8_QTYPES)
@pytest.mark.parametrize("name", ["kquant_linear", "kquant_swiglu", "kquant_logits"])
def test_amplitude_beyond_float16_at_every_row_count(name, qtype) -> None:
    """Activations of 1.6e5 and partial sums beyond 65504, at either side of a change of path."""
    x, weight = linear_inputs(33, 67, 512, qtype)
    x = x.clamp(-1, 1) * 1.6e5
    # Logits without a cap, which would hide what is wrong.
    extra = {"kquant_swiglu": (weight, qtype), "kquant_logits": (1.0, 0.0)}.get(name, ())
    want = OPS[name].reference(x, weight, qtype, *extra)
    for backend, variant in runs(name):
        whole = run(name, (x, weight, qtype, *extra), backend, variant)
        assert nmse(whole, want) <= path_bound(OPS[name], variant), variant.name
        for m in (1, 2, 4, 5, 16, 17, 32):
            part = run(name, (x[:m].contiguous(), weight, qtype, *extra), backend, variant)
            assert same_bits(part, whole[:m]), (variant.name, m)


@pytest.mark.report("G10", "G13")
@pytest.mark.parametrize("qtype", INT8_QTYPES)
def test_more_workers_than_there_is_work(threads, qtype) -> None:
    """One super-block, one weight row, 8 threads, poisoned scratch: nothing is left unwritten."""
    for m, n in ((1, 1), (1, 3), (5, 1), (17, 2)):
        args = (*linear_inputs(m, n, 256, qtype), qtype)
        for backend, variant in runs("kquant_linear"):
            threads(1)
            want = run("kquant_linear", args, backend, variant)
            threads(8)
            with backend.poison_scratch():
                got = run("kquant_linear", args, backend, variant)
            assert same_bits(got, want) and got.isfinite().all(), (m, n, variant.name)


@pytest.mark.report("G20")
def test_the_models_ffn_width() -> None:
    op = OPS["kquant_swiglu"]
    x, weight = linear_inputs(2, 19968, 256, "Q4_K")
    args = (x, weight, "Q4_K", weight.flip(0), "Q4_K")
    want = op.reference(*args)
    for backend, variant in runs(op.name):
        assert nmse(run(op.name, args, backend, variant), want) <= path_bound(op, variant)


# --- Every op -------------------------------------------------------------------------------------


@pytest.mark.report("G19")
@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_no_rows_then_some(op, backend) -> None:
    """Zero rows give zero rows and change nothing; the next call is as right as before."""
    cases = [c for c in op.all_cases() if not (c.error or c.slow)]
    args = next(a for c in cases for a in [c.make()] if row_count(op, a) >= 2)
    for variant in backend.variants(op):
        first = clone_args(args)
        want = tensors_of(op, first, backend.run(op, first, variant))
        none = take_rows(op, args, [])
        empty = backend.run(op, none, variant)
        assert all(o.shape[0] == 0 for o in empty)
        for name, a, b in zip(op.arg_names, none, args, strict=True):
            assert name not in op.mutates or same_bits(a, b)
        again = clone_args(args)
        got = tensors_of(op, again, backend.run(op, again, variant))
        assert all(same_bits(got[k], v) for k, v in want.items())


@pytest.mark.report("G21")
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_inputs_do_not_depend_on_order_or_global_state(op) -> None:
    cases = [c for c in op.all_cases() if not c.slow][::11]
    first = [c.make() for c in cases]
    torch.manual_seed(7)
    for case, args in zip(reversed(cases), reversed(first), strict=True):
        for a, b in zip(case.make(), args, strict=True):
            assert same_bits(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b), case.id


# --- Attention and its cache ----------------------------------------------------------------------


@pytest.mark.report("S2", "G13")
@pytest.mark.parametrize("keys", [1, 2, 17, 513, 1025])
def test_short_contexts_in_split_attention(keys) -> None:
    """Beside a long context, whose splits they do not reach; twenty times, scratch poisoned."""
    tokens = [(0, keys - 1), (1, 16000)]
    args = sdpa_args(tokens, torch.float32, (4, 1, 16), slots=2)()
    want = OPS["sdpa"].reference(*args)
    for backend, variant in runs("sdpa"):
        with backend.poison_scratch():
            first = run("sdpa", args, backend, variant)
            assert nmse(first, want) <= OPS["sdpa"].nmse["f32"]
            assert all(same_bits(run("sdpa", args, backend, variant), first) for _ in range(20))


@pytest.mark.report("C3")
def test_position_is_read_at_every_call() -> None:
    """The same buffers with pos one further: as if it had been so from the start."""
    make = sdpa_args([(0, 63), (0, 64)], torch.float32, (4, 1, 16), window=9)
    for backend, variant in runs("sdpa"):
        args = list(make())
        row = [a[:1].contiguous() if n in OPS["sdpa"].rows else a for n, a in _named("sdpa", args)]
        before = run("sdpa", row, backend, variant).clone()
        row[3].add_(1)
        after = run("sdpa", row, backend, variant)
        fresh = [a.clone() if isinstance(a, torch.Tensor) else a for a in row]
        assert same_bits(after, run("sdpa", fresh, backend, variant))
        assert not torch.allclose(after, before)


def _named(name: str, args):
    return zip(OPS[name].arg_names, args, strict=True)


def step(backend, variant, x, tokens, caches, table, window: int) -> torch.Tensor:
    """Appends x [T, 3, width] of the tokens to the caches and attends to them."""
    pos, slot = split_tokens(tokens)
    q, k, v = (x[:, i].contiguous() for i in range(3))
    common = (q, k, v, None, None, 1e-5, "half", 1e4, pos, slot, table, *caches)
    q = run("qk_norm_rope_kv", common, backend, variant)
    args = (q, *caches, pos, slot, table, 0.3, window, True, None)
    return run("sdpa", args, backend, variant)


@pytest.mark.report("D1")
def test_rolled_back_ring_is_as_if_never_drafted() -> None:
    """A ring of 8 that has wrapped: three rejected drafts overwrite nothing that is still seen."""
    x = randn(generator("ring"), 17, 3, 32)
    drafts = randn(generator("drafts"), 3, 3, 32)
    for backend, variant in runs("sdpa"):
        results = []
        for draft in (True, False):
            layout = Layout(kv_heads=2, head_dim=16, cache_len=8)
            *caches, table = build(generator("empty"), layout, {})
            for p in range(11):
                step(backend, variant, x[p : p + 1], [(0, p)], caches, table, 4)
            if draft:
                tokens = [(0, p) for p in range(11, 14)]
                step(backend, variant, drafts, tokens, caches, table, 4)
            later = range(11, 17)
            rows = [step(backend, variant, x[p : p + 1], [(0, p)], caches, table, 4) for p in later]
            results.append(torch.cat(rows))
        assert same_bits(*results) and results[0].isfinite().all()


@pytest.mark.report("D2")
@pytest.mark.parametrize("name, make", [("qk_norm_rope_kv", qk_args), ("sdpa", sdpa_args)])
def test_block_of_16_at_the_end_of_the_table(name, make) -> None:
    """Fits up to the last position; one further is refused before anything is written."""
    op, tokens = OPS[name], [(0, p) for p in range(48, 64)]
    for backend, variant in runs(name):
        args = make(tokens, torch.float32)()
        assert backend.run(op, args, variant)[0].isfinite().all()
        args = make(tokens, torch.float32)()
        args[op.arg_names.index("pos")].add_(1)
        before = clone_args(args)
        with pytest.raises(ValueError, match="pos: token 15: expected 0 <= pos < 1 pages of 64"):
            backend.run(op, args, variant)
        assert all(
            same_bits(a, b)
            for a, b in zip(args, before, strict=True)
            if isinstance(a, torch.Tensor)
        )


@pytest.mark.report("S6")
def test_layer_kinds_of_the_model() -> None:
    """39 sliding layers with RoPE, 13 global ones without: every fourth, counted from the last."""
    from glimmer_ops.synth import PRESETS

    sliding = PRESETS["30b"].sliding
    assert [i for i, s in enumerate(sliding) if not s] == list(range(3, 52, 4))
    assert len(sliding) == 52
