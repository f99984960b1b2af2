"""The K-quant ops beyond their cases: exact bits, row and thread invariance, bounds, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glimmer_ops import _native
from glimmer_ops.gguf import QTYPES
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import generator
from glimmer_ops.ops._kquant import (
    INT8_QTYPES,
    dequantize,
    infinite_scale,
    linear_inputs,
    random_weight,
)
from support.bits import same_bits
from support.buffers import Paged, copy_to

ISAS = _native.isas()
PATHS = {"exact": True, "int8": False}
every_isa = pytest.mark.parametrize("isa", ISAS)
every_path = pytest.mark.parametrize("path", PATHS)
every_qtype = pytest.mark.parametrize("qtype", QTYPES)
every_int8_qtype = pytest.mark.parametrize("qtype", INT8_QTYPES)


def call(op: str, *args: Any, isa: str = "auto", path: str = "int8") -> torch.Tensor:
    with _native.use_isa(isa), _native.use_exact(PATHS[path]):
        return _native.call(op, OPS[op].arg_names, args)[0]


def linear(
    x: torch.Tensor, weight: torch.Tensor, qtype: str, isa: str = "auto", path: str = "int8"
) -> torch.Tensor:
    return call("kquant_linear", x, weight, qtype, isa=isa, path=path)


# --- decoding -------------------------------------------------------------------------------------


@every_isa
@every_qtype
def test_embedding_decodes_as_gguf(isa, qtype):
    weight = random_weight(generator("bits", qtype), 64, 1024, qtype)
    ids = torch.arange(64).flip(0)
    got = call("kquant_embedding", ids, weight, qtype, isa=isa)
    assert same_bits(got, dequantize(weight, qtype).flip(0))


@pytest.mark.report("G29")
@every_isa
@every_qtype
def test_one_hot_rows_return_the_weights_exactly(isa, qtype):
    k = 768
    weight = random_weight(generator("hot", qtype), 19, k, qtype)
    want = dequantize(weight, qtype)
    assert torch.equal(linear(torch.eye(k), weight, qtype, isa, "exact"), want.T)
    for i in (0, 15, 16, 31, 255, 256, 767):  # a single row is decoded in registers
        assert torch.equal(
            linear(torch.eye(k)[i : i + 1], weight, qtype, isa, "exact")[0], want[:, i]
        )


@pytest.mark.report("G29")
@every_isa
@every_int8_qtype
@pytest.mark.parametrize("sign", (127, -127))
def test_integer_path_decodes_every_weight(isa, qtype, sign):
    # ±127 quantises to itself with scale 1, so only float32 rounding separates the two; a wrong
    # bit of a weight, scale or min is a thousand times larger.
    k = 768
    weight = random_weight(generator("hot8", qtype), 19, k, qtype)
    want = sign * dequantize(weight, qtype).T
    bound = 1e-6 * want.abs().max()
    assert (linear(sign * torch.eye(k), weight, qtype, isa) - want).abs().max() < bound
    for i in (0, 15, 16, 31, 255, 256, 767):
        x = sign * torch.eye(k)[i : i + 1]
        assert (linear(x, weight, qtype, isa)[0] - want[i]).abs().max() < bound


@pytest.mark.report("G5")
@every_isa
@every_int8_qtype
def test_extreme_values_do_not_saturate(isa, qtype):
    # Every value, scale and activation at its largest magnitude: int16 and int32 partial sums too.
    weight = random_weight(generator("max", qtype), 4, 512, qtype)
    size = QTYPES[qtype][1]
    d = {"Q4_K": (0, 1), "Q5_K": (0, 1), "Q6_K": (208, 209), "Q8_0": (0, 1)}[qtype]
    for row, byte in enumerate((0xFF, 0x7F, 0x80, 0x00)):
        blocks = weight[row].view(-1, size)
        scale = blocks[:, list(d)].clone()
        blocks.fill_(byte)
        blocks[:, list(d)] = scale
        if qtype in ("Q4_K", "Q5_K"):
            blocks[:, 2:4] = scale
    x = torch.full((3, 512), 127.0)
    x[1] = -127.0
    x[2, ::2] = -127.0
    want = x.double() @ dequantize(weight, qtype).double().T
    # Relative to the sum of magnitudes: rows of alternating sign cancel.
    magnitude = (x.double().abs() @ dequantize(weight, qtype).double().abs().T).max()
    assert (linear(x, weight, qtype, isa).double() - want).abs().max() <= 1e-6 * magnitude


# --- invariance -----------------------------------------------------------------------------------

ROWS = [*range(1, 18), 33, 64]


def multiply_ops(qtype: str, x: torch.Tensor) -> Iterator[tuple]:
    """Each op with its arguments after x, and the rows of x themselves."""
    k = x.shape[1]
    weight = random_weight(generator("rows", qtype), 37, k, qtype)
    other = "Q6_K" if qtype == "Q4_K" else "Q4_K"
    up = random_weight(generator("rows-up", qtype), 37, k, other)
    yield "kquant_linear", weight, qtype
    yield "kquant_swiglu", weight, qtype, up, other
    yield "kquant_logits", weight, qtype, 0.5, 20.0


@pytest.mark.report("G22")
@every_isa
@every_path
@every_qtype
def test_rows_do_not_depend_on_each_other(isa, path, qtype):
    x = torch.randn(64, 768, generator=generator("x"))
    for op, *rest in multiply_ops(qtype, x):
        alone = torch.cat([call(op, x[i : i + 1], *rest, isa=isa, path=path) for i in range(64)])
        for m in ROWS:
            assert same_bits(call(op, x[:m], *rest, isa=isa, path=path), alone[:m]), (op, m)
        order = torch.randperm(64, generator=generator("order"))
        assert same_bits(call(op, x[order], *rest, isa=isa, path=path), alone[order]), op
        other = torch.randn(64, 768, generator=generator("others")) * 1e3
        other[11] = x[11]
        assert same_bits(call(op, other, *rest, isa=isa, path=path)[11], alone[11]), op


@every_path
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_rows_of_narrow_types_do_not_depend_on_each_other(path, dtype):
    x = torch.randn(17, 768, generator=generator("x")).to(dtype)
    for op, *rest in multiply_ops("Q4_K", x):
        whole = call(op, x, *rest, path=path)
        for i in range(17):
            assert same_bits(call(op, x[i : i + 1], *rest, path=path), whole[i : i + 1]), op


@every_path
def test_more_rows_than_are_handled_together(path):
    x, weight = linear_inputs(2050, 5, 256, "Q5_K")
    y = linear(x, weight, "Q5_K", path=path)
    for i in (0, 1023, 1024, 2047, 2048, 2049):
        assert same_bits(y[i : i + 1], linear(x[i : i + 1], weight, "Q5_K", path=path))


@every_isa
@every_path
@every_int8_qtype
def test_bits_do_not_depend_on_threads(threads, isa, path, qtype):
    results = []
    for count in (1, 2, 3):
        threads(count)
        for m in (1, 6):
            x = torch.randn(m, 1024, generator=generator("threads", m))
            for op, *rest in multiply_ops(qtype, x):
                results.append((count, call(op, x, *rest, isa=isa, path=path)))
    one = [y for count, y in results if count == 1]
    for count in (2, 3):
        many = [y for c, y in results if c == count]
        assert all(same_bits(a, b) for a, b in zip(one, many, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(0, 20),
    n=st.integers(1, 40),
    blocks=st.integers(1, 5),
    qtype=st.sampled_from(list(QTYPES)),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_right_and_invariant(m, n, blocks, qtype, isa, seed):
    g = torch.Generator().manual_seed(seed)
    k = 256 * blocks
    x, weight = torch.randn(m, k, generator=g), random_weight(g, n, k, qtype)
    want = x.double() @ dequantize(weight, qtype).double().T
    size = x.double().norm(dim=1)[:, None] * dequantize(weight, qtype).double().norm(dim=1)
    for path, bound in (("exact", 1e-6), ("int8", 0.05)):
        got = linear(x, weight, qtype, isa, path)
        assert got.shape == (m, n)
        assert ((got.double() - want).abs() <= bound * size).all()
        for i in range(min(m, 2)):
            assert same_bits(linear(x[i : i + 1], weight, qtype, isa, path), got[i : i + 1])


# --- range and propagation ------------------------------------------------------------------------


@pytest.mark.report("G6")
@every_isa
@every_path
@every_int8_qtype
def test_large_activations_agree_for_one_row_and_many(isa, path, qtype):
    x, weight = linear_inputs(64, 33, 512, qtype)
    for big in (x * 1e5, x * 1e30, torch.full_like(x, 3000.0)):
        many = linear(big, weight, qtype, isa, path)
        assert torch.isfinite(many).all()
        for i in (0, 13, 63):
            assert same_bits(linear(big[i : i + 1], weight, qtype, isa, path), many[i : i + 1])


@every_isa
@every_path
@every_qtype
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("m", (3, 9))
def test_bad_activations_stay_in_their_row(isa, path, qtype, bad, m):
    x = torch.randn(m, 512, generator=generator("bad"))
    for op, *rest in multiply_ops(qtype, x):
        clean = call(op, x, *rest, isa=isa, path=path)
        broken = x.clone()
        broken[1, 300] = bad
        got = call(op, broken, *rest, isa=isa, path=path)
        keep = [i for i in range(m) if i != 1]
        assert same_bits(got[keep], clean[keep]), op
        if op == "kquant_linear":
            assert not torch.isfinite(got[1]).any()
        if math.isnan(bad):
            assert torch.isnan(got[1]).all(), op


@every_isa
@every_path
@every_int8_qtype
def test_bad_scales_stay_in_their_weight_row(isa, path, qtype):
    for m in (1, 6):
        x, weight = linear_inputs(m, 7, 512, qtype)
        clean = linear(x, weight, qtype, isa, path)
        infinite_scale(weight[3].view(-1, QTYPES[qtype][1]), qtype)
        got = linear(x, weight, qtype, isa, path)
        keep = [0, 1, 2, 4, 5, 6]
        assert torch.isnan(got[:, 3]).all()
        assert same_bits(got[:, keep].contiguous(), clean[:, keep].contiguous())


@every_isa
def test_tiny_and_zero_activations(isa):
    x, weight = linear_inputs(5, 9, 512, "Q4_K")
    for scale in (0.0, 1e-44, 1e-38, 1e-36):
        y = linear(x * scale, weight, "Q4_K", isa)
        assert torch.isfinite(y).all()
        assert y.abs().max() <= 10 * scale


@pytest.mark.report("N10")
@every_isa
def test_soft_cap_is_accurate_and_saturates(isa):
    x = torch.cat([torch.linspace(-60, 60, 4001), torch.logspace(-30, 2, 997)])[:, None]
    one = torch.ones(1, 1).view(torch.uint8)
    y = call("kquant_logits", x, one, "F32", 0.5, 20.0, isa=isa)[:, 0].double()
    want = 20 * torch.tanh(x[:, 0].double() * 0.5 / 20)
    assert ((y - want).abs() <= 1e-6 * want.abs()).all()
    ends = torch.tensor([[1e4], [-1e4], [3e38], [math.inf], [-math.inf], [math.nan], [0.0]])
    y = call("kquant_logits", ends, one, "F32", 1.0, 20.0, isa=isa)[:, 0]
    assert y[:5].tolist() == [20.0, -20.0, 20.0, 20.0, -20.0]
    assert math.isnan(y[5])
    assert y[6] == 0.0


# --- memory ---------------------------------------------------------------------------------------


def before_guard_page(t: torch.Tensor) -> torch.Tensor:
    """A copy of t that ends where an unreadable page begins."""
    return copy_to(Paged("end"), t)


@pytest.mark.report("G3")
@every_isa
@every_path
@every_qtype
def test_nothing_is_read_past_the_end(isa, path, qtype):
    for m, n, k in ((1, 3, 256), (2, 1, 768), (5, 257, 256), (1, 5, 512), (1, 6657, 256)):
        x, weight = linear_inputs(m, n, k, qtype)
        want = linear(x, weight, qtype, isa, path)
        x, weight = before_guard_page(x), before_guard_page(weight)
        assert same_bits(linear(x, weight, qtype, isa, path), want)
        rows = call("kquant_embedding", torch.tensor([n - 1]), weight, qtype, isa=isa)
        assert same_bits(rows, dequantize(weight, qtype)[n - 1 :])


@every_isa
@every_path
@pytest.mark.parametrize("qtype, k", (("Q8_0", 288), ("F16", 33), ("BF16", 257), ("F32", 7)))
def test_partial_super_blocks_end_where_the_row_ends(isa, path, qtype, k):
    for m in (1, 5):
        x, weight = linear_inputs(m, 3, k, qtype)
        want = linear(x, weight, qtype, isa, path)
        guarded = linear(before_guard_page(x), before_guard_page(weight), qtype, isa, path)
        assert same_bits(guarded, want)


@pytest.mark.report("G2", "G16")
@every_isa
@every_qtype
def test_rows_may_start_at_any_byte(isa, qtype):
    x, weight = linear_inputs(6, 5, 768, qtype)
    want = {p: linear(x, weight, qtype, isa, p) for p in PATHS}
    for offset in (1, 2, 3, 7, 33):
        area = torch.full((weight.numel() + 64,), 0x7F, dtype=torch.uint8)
        moved = area[offset : offset + weight.numel()].view(weight.shape)
        moved.copy_(weight)
        for path in PATHS:
            assert same_bits(linear(x, moved, qtype, isa, path), want[path])


@pytest.mark.report("G13")
@every_isa
@every_path
@every_qtype
def test_scratch_is_never_read_before_it_is_written(isa, path, qtype):
    x = torch.randn(9, 768, generator=generator("scratch"))
    for op, *rest in multiply_ops(qtype, x):
        for m in (1, 3, 9):
            clean = call(op, x[:m], *rest, isa=isa, path=path)
            assert same_bits(poisoned(op, x[:m], *rest, isa=isa, path=path), clean)


@every_isa
@every_path
@pytest.mark.parametrize("qtype, k", (("Q8_0", 96), ("F16", 33), ("BF16", 257), ("F32", 7)))
def test_padding_in_scratch_is_zeroed(isa, path, qtype, k):
    for m in (1, 3, 9):
        x, weight = linear_inputs(m, 11, k, qtype)
        clean = linear(x, weight, qtype, isa, path)
        got = poisoned("kquant_linear", x, weight, qtype, isa=isa, path=path)
        assert same_bits(got, clean)


def poisoned(op: str, *args: Any, isa: str, path: str) -> torch.Tensor:
    _native._C.set_poison_scratch(True)
    try:
        return call(op, *args, isa=isa, path=path)
    finally:
        _native._C.set_poison_scratch(False)


@every_isa
@every_path
def test_outputs_are_written_whole_and_alone(isa, path):
    guard = 64
    for m, n in ((1, 3), (5, 257), (17, 1)):
        x, weight = linear_inputs(m, n, 512, "Q4_K")
        want = linear(x, weight, "Q4_K", isa, path)
        area = torch.full((m * n + 2 * guard,), math.nan)
        out = area[guard : guard + m * n].view(m, n)
        packed = [_native._pack("", "", a) for a in (x, weight, "Q4_K")]
        with _native.use_isa(isa), _native.use_exact(PATHS[path]):
            _native._C.run("kquant_linear", packed, [_native._pack("", "out", out)])
        assert same_bits(out, want)
        assert torch.isnan(area[:guard]).all()
        assert torch.isnan(area[-guard:]).all()


@pytest.mark.report("G24")
@every_isa
@every_path
def test_new_contents_of_the_same_buffer_are_seen(isa, path):
    x, weight = linear_inputs(2, 9, 512, "Q6_K")
    first = linear(x, weight, "Q6_K", isa, path)
    x.neg_()
    assert same_bits(linear(x, weight, "Q6_K", isa, path), -first)
    weight.copy_(weight.flip(0))
    assert same_bits(linear(x, weight, "Q6_K", isa, path), -first.flip(1))


# --- refusals -------------------------------------------------------------------------------------


def test_a_bad_id_leaves_the_output_alone():
    weight = random_weight(generator("ids"), 4, 256, "Q4_K")
    out = torch.full((3, 256), 7.0)
    ids = torch.tensor([0, 1, 4])
    packed = [_native._pack("", "", a) for a in (ids, weight, "Q4_K")]
    with pytest.raises(ValueError, match=r"ids: expected ids in \[0, 4\), found 4 at 2"):
        _native._C.run("kquant_embedding", packed, [_native._pack("", "out", out)])
    assert (out == 7.0).all()


@pytest.mark.parametrize("op", ("kquant_linear", "kquant_embedding"))
def test_an_unknown_type_names_the_known_ones(op):
    x = torch.zeros(1, 256) if op == "kquant_linear" else torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="qtype: expected one of Q4_K, .*F32, found 'Q2_K'"):
        call(op, x, torch.zeros(3, 144, dtype=torch.uint8), "Q2_K")


@pytest.mark.report("G19")
def test_an_empty_call_is_followed_by_a_right_one():
    x, weight = linear_inputs(3, 5, 256, "Q4_K")
    want = linear(x, weight, "Q4_K")
    assert linear(x[:0], weight, "Q4_K").shape == (0, 5)
    assert linear(x, weight[:0], "Q4_K").shape == (3, 0)
    assert same_bits(linear(x, weight, "Q4_K"), want)
