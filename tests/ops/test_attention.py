"""qk_norm_rope_kv and sdpa: row invariance, visibility, head mapping, rotation, and refusals."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glimmer_ops
from glimmer_ops import _native
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import FLOAT_DTYPES, generator, randn
from glimmer_ops.ops._paged import Layout, build, locate, rows, split_tokens, visible
from glimmer_ops.ops.qk_norm_rope_kv import _args as qk_args
from glimmer_ops.ops.sdpa import _args as sdpa_args

DTYPES = [pytest.param(d, id=n) for n, d in FLOAT_DTYPES.items()]
NAN = float("nan")


@pytest.fixture(params=_native.isas())
def isa(request):
    with _native.use_isa(request.param):
        yield request.param


def sdpa(*args):
    return _native.call("sdpa", OPS["sdpa"].arg_names, args)[0]


def qk_norm_rope_kv(*args):
    return _native.call("qk_norm_rope_kv", OPS["qk_norm_rope_kv"].arg_names, args)[0]


def take(args, index, names, picked):
    """args with the row arguments of an op cut to some rows."""
    return [
        a[index].contiguous() if n in picked and a is not None else a
        for n, a in zip(names, args, strict=True)
    ]


def repage(args, seed):
    """The arguments of sdpa with the same keys on other physical pages of a larger pool."""
    args = list(args)
    k, v, table = args[1], args[2], args[5]
    pages = k.size(0) + 5
    order = torch.randperm(pages, generator=generator(seed))[: k.size(0)]
    for i, cache in ((1, k), (2, v)):
        args[i] = torch.full((pages, *cache.shape[1:]), NAN, dtype=cache.dtype)
        args[i][order] = cache
    args[5] = torch.where(table >= 0, order[table.clamp(min=0).long()].int(), table)
    return args


MIXED = [(0, p) for p in range(600, 606)] + [(2, 70), (-1, 0), (1, 0), (2, 71), (0, 3), (1, 700)]
MIXED += [(2, p) for p in range(1090, 1094)]


# --- Row invariance -------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 50, 513])
@pytest.mark.parametrize(
    "dtype, cache", [("f32", "f32"), ("f32", "f16"), ("bf16", "bf16"), ("f16", "f32")]
)
def test_sdpa_rows_do_not_depend_on_each_other(isa, window, dtype, cache):
    args = sdpa_args(
        MIXED, FLOAT_DTYPES[dtype], window=window, slots=3, cache_dtype=FLOAT_DTYPES[cache]
    )()
    op, n = OPS["sdpa"], len(MIXED)
    assert n == 16
    whole = sdpa(*args)
    order = torch.randperm(n, generator=generator("order"))
    for index in (*(torch.tensor([i]) for i in range(n)), order, order[:5], order[5:12]):
        part = sdpa(*take(repage(args, index.tolist()), index, op.arg_names, op.rows))
        assert torch.equal(part, whole[index])


@pytest.mark.parametrize("isa", glimmer_ops.isas())
def test_sdpa_key_of_no_weight_adds_nothing(isa) -> None:
    """exp(-200) is 0 in float32: a value of 1e38 behind it must not show."""
    q, one = torch.ones(1, 4), torch.ones(1, 1, 64, 4)
    k, v = torch.zeros_like(one), torch.zeros_like(one)
    k[0, 0, 0], v[0, 0, 0], v[0, 0, 1] = -50.0, 1e38, 1.0
    pos, slot = torch.tensor([1]), torch.tensor([0])
    table = torch.zeros(1, 1, dtype=torch.int32)
    with glimmer_ops.use_isa(isa):
        out = torch.ops.glimmer.sdpa(q, k, v, pos, slot, table, 1.0, 0, True, None)
    assert torch.equal(out, torch.ones(1, 4))


def test_sdpa_position_that_would_overflow_is_refused() -> None:
    q, cache = torch.ones(1, 4), torch.zeros(1, 1, 4, 4)
    pos, slot = torch.tensor([2**63 - 1]), torch.tensor([0])
    with pytest.raises(ValueError, match="pos: token 0: expected 0 <= pos"):
        torch.ops.glimmer.sdpa(q, cache, cache.clone(), pos, slot, None, 1.0, 3, True, None)


@pytest.mark.report("S4")
@pytest.mark.parametrize("heads", [(32, 2, 128), (32, 8, 128), (4, 1, 64), (5, 5, 33)])
@pytest.mark.parametrize("window", [0, 100])
def test_sdpa_prefill_equals_decode_steps(isa, heads, window):
    """Every way to cut 150 tokens into calls gives the same bits: both schedules, all chunks."""
    args = sdpa_args([(0, p) for p in range(450, 600)], torch.float32, heads, window)()
    op = OPS["sdpa"]
    whole = sdpa(*args)
    for chunk in (1, 7, 16, 64):
        for begin in range(0, 150, chunk):
            index = torch.arange(begin, min(150, begin + chunk))
            part = sdpa(*take(args, index, op.arg_names, op.rows))
            assert torch.equal(part, whole[index]), (chunk, begin)


@pytest.mark.report("S4")
def test_sdpa_window_4_prefill_equals_decode(isa):
    args = sdpa_args([(0, p) for p in range(9)], torch.float32, window=4)()
    whole = sdpa(*args)
    for i in range(9):
        alone = sdpa_args([(0, i)], torch.float32, window=4)()
        # Only the four visible keys exist for the decode step.
        k, v = (torch.full_like(c, NAN) for c in (args[1], args[2]))
        for p in range(max(0, i - 3), i + 1):
            page, row = locate(k, args[5], torch.tensor([0]), torch.tensor([p]))
            k[page, :, row], v[page, :, row] = args[1][page, :, row], args[2][page, :, row]
        step = (args[0][i : i + 1], k, v, *alone[3:5], args[5], *args[6:9], args[9][i : i + 1])
        assert torch.equal(sdpa(*step), whole[i : i + 1])


@pytest.mark.report("S1")
def test_sdpa_row_keeps_its_zeros_sign_beside_a_longer_row(isa):
    """A split that only another row of the block sees must not even turn -0 into +0."""
    tokens = [(0, 1023), (0, 1024)]  # the second row alone sees the third split of 512 keys
    args = list(sdpa_args(tokens, torch.float32, (1, 1, 16), scale=1.0, gate=False)())
    args[0].fill_(1.0)
    page, row = locate(args[1], args[5], torch.zeros(1025, dtype=torch.int64), torch.arange(1025))
    args[1][page, 0, row], args[2][page, 0, row] = 0.0, -0.0
    args[1][page[700], 0, row[700]] = 10.0  # outweighs every other key by more than e^87
    for j in (0, 512):
        args[2][page[j], 0, row[j]] = -1e-20  # so these values' shares underflow to -0
    alone = sdpa(*take(args, torch.tensor([0]), OPS["sdpa"].arg_names, OPS["sdpa"].rows))
    assert torch.signbit(alone).all() and torch.signbit(sdpa(*args)[0]).all()


@pytest.mark.report("S2")
def test_sdpa_runs_are_bit_equal(isa):
    args = sdpa_args([(0, 4095), (1, 16)], torch.float32, slots=2, cache_dtype=torch.float16)()
    first = sdpa(*args)
    assert all(torch.equal(sdpa(*args), first) for _ in range(20))


@pytest.mark.parametrize("rope", ["interleaved", "half", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_rows_do_not_depend_on_each_other(isa, rope, dtype):
    op = OPS["qk_norm_rope_kv"]
    tokens = [*MIXED[:10], *((0, p) for p in (131071, 4095, 9, 10, 11, 12))]
    make = qk_args(tokens, dtype, rope=rope, weights=True, slots=3, cache_dtype=torch.float16)
    whole = make()
    out = qk_norm_rope_kv(*whole)
    order = torch.randperm(16, generator=generator("order"))
    for index in (*(torch.tensor([i]) for i in range(16)), order, order[:5]):
        args = make()
        part = qk_norm_rope_kv(*take(args, index, op.arg_names, op.rows))
        assert torch.equal(part, out[index])
        real = index[args[9][index] >= 0]
        page, row = locate(args[11], args[10], args[9][real], args[8][real])
        for i in (11, 12):
            assert torch.equal(args[i][page, :, row], whole[i][page, :, row])


# --- Visibility -----------------------------------------------------------------------------------


@pytest.mark.report("S10")
@pytest.mark.parametrize("heads", [(32, 2, 128), (32, 8, 128), (24, 1, 128), (28, 4, 128)])
def test_each_query_head_reads_its_kv_head(isa, heads):
    n_heads, kv_heads, dim = heads
    args = list(sdpa_args([(0, 70)], torch.float32, heads, gate=False)())
    args[2] = torch.arange(1.0, kv_heads + 1)[:, None, None].expand_as(args[2]).contiguous()
    out = sdpa(*args).view(n_heads, dim)
    expected = torch.arange(1.0, kv_heads + 1).repeat_interleave(n_heads // kv_heads)
    torch.testing.assert_close(out, expected[:, None].expand(-1, dim), rtol=1e-6, atol=0)


@pytest.mark.report("S7")
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_nan_reaches_exactly_the_rows_that_see_it(isa, window, causal):
    positions = list(range(60, 76))
    args = sdpa_args([(0, p) for p in positions], torch.float32, window=window, causal=causal)()
    seen = visible(args[3], args[4], window, causal)
    clean = sdpa(*args)
    for bad in (0, 21, 36, 63, 64, 70, 75):
        for cache in (1, 2):
            poisoned = list(args)
            poisoned[cache] = args[cache].clone()
            page, row = locate(args[cache], args[5], torch.tensor([0]), torch.tensor([bad]))
            poisoned[cache][page, 1, row, 5] = NAN
            out = sdpa(*poisoned)
            for t, keys in enumerate(seen):
                if keys is not None and bad in range(*keys):
                    assert out[t, 2048:].isnan().any() and not out[t, :2048].isnan().any()
                else:
                    assert torch.equal(out[t], clean[t])


@pytest.mark.report("S4", "S8")
def test_a_key_weighs_on_its_own_query_only_from_its_position_on(isa):
    """One-hot values: the key at position j contributes to rows at i ≥ j within the window only."""
    args = list(sdpa_args([(0, p) for p in range(9)], torch.float32, (1, 1, 16), 4, gate=False)())
    page, row = locate(args[2], args[5], torch.zeros(9, dtype=torch.int64), torch.arange(9))
    args[2][page, 0, row] = torch.eye(16)[:9]
    i, j = torch.arange(9)[:, None], torch.arange(16)[None]
    assert torch.equal(sdpa(*args) > 0, (j <= i) & (i - j < 4) & (j < 9))


@pytest.mark.report("D1")
def test_rejected_drafts_leave_no_trace(isa):
    """A block written past the end and rewritten later: as if it had never been drafted."""
    layout = Layout(kv_heads=2, head_dim=16)
    g = generator("draft")
    k_cache, v_cache, table = build(g, layout, {0: range(60)}, {0: range(60, 90)})
    accepted, rejected = ([randn(g, 16, 32) for _ in range(3)] for _ in range(2))
    pos, slot = split_tokens([(0, p) for p in range(60, 76)])
    results = []
    for draft in (True, False):
        k, v = k_cache.clone(), v_cache.clone()
        common = (None, None, 1e-5, "half", 1e4)
        if draft:
            qk_norm_rope_kv(*rejected, *common, pos, slot, table, k, v)
        q = qk_norm_rope_kv(*(x[:3] for x in accepted), *common, pos[:3], slot[:3], table, k, v)
        results.append(sdpa(q, k, v, pos[:3], slot[:3], table, 0.3, 0, True, None))
    assert torch.equal(*results)


def test_ring_equals_paged(isa):
    """A ring of window + T - 1 rows that has wrapped many times gives a paged cache's bits."""
    window, t = 50, 16
    paged = sdpa_args([(0, p) for p in range(1000, 1000 + t)], torch.float32, window=window)()
    ring = [torch.full((1, 2, window + t - 1, 128), NAN) for _ in range(2)]
    for p in range(1000 - window + 1, 1000 + t):
        page, row = locate(paged[1], paged[5], torch.tensor([0]), torch.tensor([p]))
        for i in range(2):
            ring[i][0, :, p % (window + t - 1)] = paged[1 + i][page[0], :, row[0]]
    args = (paged[0], *ring, *paged[3:5], None, *paged[6:])
    assert torch.equal(sdpa(*args), sdpa(*paged))


def dense_attention(q, keys, values, allowed, scale, gate):
    """Of one slot, in float64: q and gate [T, H, D], keys and values [J, KV, D], allowed [T, J]."""
    group = q.size(1) // keys.size(1)
    k, v = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,jhd->htj", q, k) * scale
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
    return torch.einsum("htj,jhd->thd", weights, v) * torch.sigmoid(gate)


@pytest.mark.report("S8")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sdpa_matches_dense_masked_attention(data):
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    dim = draw(st.integers(1, 40))
    begin, t = draw(st.integers(0, 600)), draw(st.integers(1, 20))
    window, causal = draw(st.sampled_from([0, 1, 5, 64, 100])), draw(st.booleans())
    size = draw(st.sampled_from([1, 3, 16, 64]))
    heads = (kv_heads * group, kv_heads, dim)
    tokens = [(0, p) for p in range(begin, begin + t)]
    args = sdpa_args(tokens, torch.float32, heads, window, causal, page_size=size)()
    first = max(0, begin - window + 1) if window else 0
    keys, values = (rows(args[i], args[5], 0, first, begin + t) for i in (1, 2))
    i, j = args[3][:, None], torch.arange(first, begin + t)[None]
    allowed = ((j <= i) | (not causal)) & ((i - j < window) | (window == 0))
    q, gate = (args[i].double().view(t, heads[0], dim) for i in (0, 9))
    expected = dense_attention(q, keys, values, allowed, args[6], gate).flatten(1)
    for name in _native.isas():
        with _native.use_isa(name):
            torch.testing.assert_close(sdpa(*args).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.report("S16")
def test_time_follows_what_is_visible():
    """A short context in a large pool costs what it sees, not the pool's capacity."""
    args = list(sdpa_args([(0, 131071)], torch.float32, (2, 1, 8), gate=False)())

    def seconds(pos):
        args[3] = torch.tensor([pos])
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            sdpa(*args)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert seconds(131071) > 8 * seconds(511)


# --- Rotation and norm ----------------------------------------------------------------------------


def rotated(rope, positions, q=None, k=None, dim=64, dtype=torch.float32):
    """(q, k) after the op, [T, dim] each, one head; the same vector at every position."""
    g = generator("rotated")
    q, k = (randn(g, dim) if x is None else x for x in (q, k))
    pos, slot = split_tokens([(0, p) for p in positions])
    layout = Layout(kv_heads=1, head_dim=dim)
    k_cache, v_cache, table = build(g, layout, {}, {0: positions})
    args = [x.expand(len(positions), dim).contiguous().to(dtype) for x in (q, k, k)]
    out = qk_norm_rope_kv(*args, None, None, 0.0, rope, 5e5, pos, slot, table, k_cache, v_cache)
    page, row = locate(k_cache, table, slot, pos)
    return out, k_cache[page, 0, row]


@pytest.mark.report("P2")
@pytest.mark.parametrize("rope", ["interleaved", "half"])
def test_score_depends_on_distance_only(isa, rope):
    """RoPE's defining property, up to the last position of the model's context."""
    starts = [0, 1, 63, 4000, 65504, 131060]
    for distance in (0, 1, 5, 11):
        q, _ = rotated(rope, [s + distance for s in starts])
        _, k = rotated(rope, starts)
        scores = (q * k).double().sum(1)
        torch.testing.assert_close(scores, scores[:1].expand(6), rtol=0, atol=5e-5)
    a, b = ((rotated(rope, [s])[0] * rotated(rope, [0])[1]).sum() for s in (1, 5))
    assert abs(a - b) > 0.1


@pytest.mark.report("P3")
def test_neighbouring_positions_differ_everywhere(isa):
    for start in (255, 15962, 65535, 131067):
        q, _ = rotated("interleaved", list(range(start, start + 5)))
        assert ((q[1:] - q[:-1]).abs().amax(1) > 0.1).all()


@pytest.mark.report("P5")
def test_first_pair_turns_by_the_position_in_radians(isa):
    """Frequency 0 is 1: the angle is the position itself, 131071 radians, reduced without loss."""
    x = torch.zeros(64)
    x[0] = 1.0
    for rope, partner in (("interleaved", 1), ("half", 32)):
        q, k = rotated(rope, [131071], x, x)
        angle = torch.tensor(131071.0, dtype=torch.float64)
        for y in (q[0].double() / 8, k[0].double() / 8):  # a one-hot of 64 has rms 1/8
            assert abs(y[0] - angle.cos()) < 1e-6 and abs(y[partner] - angle.sin()) < 1e-6


@pytest.mark.report("P1")
def test_layouts_are_permutations_of_each_other(isa):
    x = randn(generator("layouts"), 64)
    halves = x.view(32, 2).T.flatten()  # (0, 2, 4, … , 1, 3, 5, …)
    interleaved, _ = rotated("interleaved", [77], x, x)
    half, _ = rotated("half", [77], halves, halves)
    expected = interleaved[0].view(32, 2).T.flatten()
    torch.testing.assert_close(half[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.report("P6")
def test_none_turns_nothing(isa):
    q, k = rotated("none", [0, 1, 4095, 131071])
    assert torch.equal(q, q[:1].expand_as(q)) and torch.equal(k, k[:1].expand_as(k))
    torch.testing.assert_close(q.square().mean(1), torch.ones(4), rtol=1e-5, atol=0)


def test_append_touches_only_its_rows(isa):
    args = qk_args([(1, 70), (-1, 0), (0, 3)], torch.float32, slots=2)()
    before = [args[i].clone().fill_(7.0) for i in (11, 12)]
    for i, b in zip((11, 12), before, strict=True):
        args[i].copy_(b)
    qk_norm_rope_kv(*args)
    page, row = locate(args[11], args[10], torch.tensor([1, 0]), torch.tensor([70, 3]))
    for i, b in zip((11, 12), before, strict=True):
        changed = (args[i] != b).any(-1)
        expected = torch.zeros_like(changed)
        expected[page, :, row] = True
        assert torch.equal(changed, expected)


def test_values_are_copied_exactly(isa):
    for dtype in FLOAT_DTYPES.values():
        args = qk_args([(0, 5), (0, 6)], dtype, cache_dtype=dtype, heads=(4, 2, 20))()
        qk_norm_rope_kv(*args)
        page, row = locate(args[12], args[10], args[9], args[8])
        assert torch.equal(args[12][page, :, row].flatten(1), args[2])


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [c for c in OPS["qk_norm_rope_kv"].all_cases() if c.error], ids=lambda c: c.id
)
def test_refused_append_writes_nothing(case):
    args = case.make()
    before = [args[i].clone() for i in (11, 12)]
    with pytest.raises(ValueError, match="qk_norm_rope_kv: "):
        qk_norm_rope_kv(*args)
    for i, b in zip((11, 12), before, strict=True):
        assert torch.equal(args[i].nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("tokens", [17, 100])
def test_duplicates_are_found_in_long_calls(tokens):
    pairs = [(0, p) for p in range(tokens - 1)] + [(0, 11)]
    args = qk_args(pairs, torch.float32, heads=(2, 1, 8))()
    with pytest.raises(ValueError, match=rf"token 11 \(slot 0, pos 11\) and token {tokens - 1} "):
        qk_norm_rope_kv(*args)


@pytest.mark.report("S5")
@pytest.mark.parametrize("tokens, refused", [(4, False), (5, False), (6, True), (8, True)])
def test_ring_of_8_with_window_4(tokens, refused):
    chunk = [(0, p) for p in range(37, 37 + tokens)]
    args = sdpa_args(chunk, torch.float32, window=4, cache_len=8)()
    if refused:
        with pytest.raises(ValueError, match="k_cache: token 0 sees position 34"):
            sdpa(*args)
    else:
        assert sdpa(*args).isfinite().all()
