"""Offsets beyond 2³¹ and 2³²: bytes of weights, elements of caches, activations and outputs.

The memory is sparse: a page that was never written costs nothing and reads as zeros, so that only
the rows that matter exist.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import pytest
import torch

from glimmer_ops.backends import BACKENDS
from glimmer_ops.gguf import row_bytes
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import generator, nbytes, randn
from glimmer_ops.ops._kquant import dequantize, random_weight
from support.bits import same_bits
from support.matrix import SUPPORTED

MAP_NORESERVE = 0x4000  # Linux; absent from Python's mmap module
K = 6656


def sparse(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are written.

    As much as an int32 index reaches lies readable before them: a wrapped offset finds zeros there
    and a test fails, where it would crash.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, (2**31 + math.prod(shape)) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)[2**31 :].view(tuple(shape))


def on_backends(name: str):
    """Every backend that has the op, as (op, backend)."""
    pairs = [(o, b) for o, b in SUPPORTED if o.name == name]
    return pytest.mark.parametrize(("op", "backend"), pairs, ids=[b.name for _, b in pairs])


def rows_beyond(limit: int, qtype: str, extra: int = 37) -> int:
    """So many rows of K weights that the last `extra` lie beyond limit bytes."""
    return limit // row_bytes(K, qtype) + 1 + extra


def sparse_weight(n: int, qtype: str, written: Sequence[int]) -> torch.Tensor:
    """Encoded rows [n, row_bytes], random at the written indices and zeros elsewhere."""
    weight = sparse((n, row_bytes(K, qtype)), torch.uint8)
    index = torch.tensor(written)
    weight[index] = random_weight(generator("sparse", qtype), len(written), K, qtype)
    return weight


@pytest.mark.report("G8", "G18")
@on_backends("kquant_embedding")
@pytest.mark.parametrize("qtype", ["Q4_K", "Q6_K", "F32"])
def test_embedding_of_the_last_rows_of_a_large_table(op, backend, qtype) -> None:
    written = []
    for limit in (2**31, 2**32):
        written += [rows_beyond(limit, qtype, e) - 1 for e in (0, 1)]
    n = written[-1] + 1
    weight = sparse_weight(n, qtype, written)
    assert nbytes(weight) > 2**32
    ids = torch.tensor([*written, 0, 5])
    want = dequantize(weight[ids], qtype)
    assert want[:4].count_nonzero() > 4 * K * 0.9 and not want[4:].any()
    for variant in backend.variants(op):
        assert same_bits(backend.run(op, (ids, weight, qtype), variant)[0], want), variant.name


def check_matmul(op, backend, variants, limit: int, m: int, up: str = "") -> None:
    """Products with a weight of more than limit bytes equal those with its written rows alone."""
    qtype = "Q4_K"
    n = rows_beyond(limit, qtype)
    written = [0, *range(n - 35, n)]
    weight = sparse_weight(n, qtype, written)
    assert (n - 35) * weight.shape[1] > limit
    x = randn(generator("large", m), m, K)

    def args(w: torch.Tensor):
        if op.name == "kquant_logits":
            return x, w, qtype, 0.5, 20.0
        return (x, w, qtype, w, qtype) if op.name == "kquant_swiglu" else (x, w, qtype)

    for variant in variants:
        few = backend.run(op, args(weight[torch.tensor(written)]), variant)[0]
        many = backend.run(op, args(weight), variant)[0]
        assert same_bits(many[:, torch.tensor(written)], few), variant.name
        assert few.abs().min() > 0 and many.count_nonzero() == few.numel(), variant.name


MATMULS = ["kquant_linear", "kquant_logits", "kquant_swiglu"]


@pytest.mark.report("G8", "G18")
@pytest.mark.parametrize("name", MATMULS)
def test_matmul_with_more_than_2_31_bytes_of_weights(name) -> None:
    op, backend = OPS[name], BACKENDS["cpu"]
    check_matmul(op, backend, backend.variants(op)[-2:], 2**31, m=1)


@pytest.mark.slow
@pytest.mark.report("G8", "G18")
@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("name", MATMULS)
def test_matmul_with_more_than_2_32_bytes_of_weights(name, m) -> None:
    op, backend = OPS[name], BACKENDS["cpu"]
    variants = backend.variants(op)
    check_matmul(op, backend, variants if m == 1 else variants[-2:], 2**32, m)


KV_HEADS, PAGE, DIM = 2, 64, 128
PAGE_ELEMENTS = KV_HEADS * PAGE * DIM


def large_caches(pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (pages, KV_HEADS, PAGE, DIM)
    return sparse(shape, torch.float16), sparse(shape, torch.float16)


@pytest.mark.report("G8", "S11")
@on_backends("sdpa")
@pytest.mark.parametrize("paged", [True, False])
def test_attention_to_a_page_beyond_2_31_elements(op, backend, paged) -> None:
    """One-hot values: the key at the last position is read from its own page, and no other."""
    for limit in (2**31, 2**32):
        used = limit // PAGE_ELEMENTS + 1
        k, v = large_caches(used + 1)
        k[used], v[used, :, 9] = 1.0, 1.0
        v[used, 1, 9, :5] = 3.0
        q = torch.ones(1, 4 * DIM)
        table = torch.tensor([[used]], dtype=torch.int32) if paged else None
        slot = torch.tensor([0 if paged else used])
        args = (q, k, v, torch.tensor([9]), slot, table, 1.0, 1, True, None)
        want = torch.ones(4, DIM)
        want[2:, :5] = 3.0
        for variant in backend.variants(op):
            got = backend.run(op, args, variant)[0]
            assert torch.equal(got, want.view(1, -1)), (limit, variant.name)


@pytest.mark.report("G8", "S11")
@on_backends("qk_norm_rope_kv")
@pytest.mark.parametrize("paged", [True, False])
def test_append_to_a_page_beyond_2_31_elements(op, backend, paged) -> None:
    for limit in (2**31, 2**32):
        used = limit // PAGE_ELEMENTS + 1
        for variant in backend.variants(op):
            k_cache, v_cache = large_caches(used + 1)
            k, v = (randn(generator("append", i), 1, KV_HEADS * DIM) for i in range(2))
            table = torch.tensor([[used]], dtype=torch.int32) if paged else None
            pos, slot = torch.tensor([9]), torch.tensor([0 if paged else used])
            common = (None, k, v, None, None, 0.0, "none", 1.0)
            backend.run(op, (*common, pos, slot, table, k_cache, v_cache), variant)
            small = torch.zeros(1, KV_HEADS, PAGE, DIM, dtype=torch.float16)
            small = small, small.clone()
            op.reference(*common, pos, slot * 0, table and table * 0, *small)
            assert torch.equal(v_cache[used], small[1][0]), (limit, variant.name)
            torch.testing.assert_close(k_cache[used], small[0][0])


@pytest.mark.slow
@pytest.mark.report("N7")
@on_backends("rms_norm")
def test_norm_of_more_than_2_31_elements(op, backend) -> None:
    rows, dim = 2**31 // K + 3, K
    x = sparse((rows, dim), torch.bfloat16)
    x[-2:] = randn(generator("norm"), 2, dim, dtype=torch.bfloat16)
    for variant in backend.variants(op)[-1:]:
        out = backend.run(op, (x, None, 1e-5), variant, sparse)[0]
        want = backend.run(op, (x[-2:].clone(), None, 1e-5), variant)[0]
        assert same_bits(out[-2:], want) and not out[:5].any() and not out[-5:-2].any()


@pytest.mark.slow
@pytest.mark.report("G18")
@on_backends("sample")
def test_argmax_in_more_than_2_31_logits(op, backend) -> None:
    rows, vocab = 1026, 2**21
    logits = sparse((rows, vocab), torch.float32)
    assert logits.numel() > 2**31
    logits[-2:, 77] = torch.tensor([1.0, 2.0])
    ints = torch.zeros(rows, dtype=torch.int64)
    args = (logits, torch.zeros(rows), ints, torch.ones(rows), ints, ints)
    for variant in backend.variants(op)[-1:]:
        assert backend.run(op, args, variant)[0].tolist() == [0] * (rows - 2) + [77, 77]


@pytest.mark.slow
@pytest.mark.report("G18")
@on_backends("kquant_linear")
def test_more_than_2_31_products(op, backend) -> None:
    """M beyond 53,774 rows of gate and up: here a short K, so that it takes seconds."""
    m, n, k = 70000, 30720, 32
    assert m * n > 2**31
    x = sparse((m, k), torch.float16)
    x[-2:] = randn(generator("rows"), 2, k, dtype=torch.float16)
    weight = random_weight(generator("wide"), n, k, "Q8_0")
    for variant in backend.variants(op)[-1:]:
        out = backend.run(op, (x, weight, "Q8_0"), variant, sparse)[0]
        want = backend.run(op, (x[-2:].clone(), weight, "Q8_0"), variant)[0]
        assert same_bits(out[-2:], want) and not out[:3].any() and not out[-5:-2].any()
