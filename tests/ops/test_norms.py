"""add_rms_norm: equality with the ops that it fuses, row invariance and the two epsilons."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glimmer_ops import _native
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import FLOAT_DTYPES, generator, randn

OP = OPS["add_rms_norm"]
DTYPES = [pytest.param(d, id=n) for n, d in FLOAT_DTYPES.items()]


@pytest.fixture(params=_native.isas(), autouse=True)
def isa(request):
    with _native.use_isa(request.param):
        yield request.param


def add_rms_norm(*args):
    return _native.call("add_rms_norm", OP.arg_names, args)


def rms_norm(*args):
    return _native.call("rms_norm", OPS["rms_norm"].arg_names, args)[0]


def inputs(
    m: int, d: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = generator(m, d, str(dtype), scale)
    residual, x = ((randn(g, m, d) * scale).to(dtype) for _ in range(2))
    post, following = (1 + 0.1 * randn(g, d) for _ in range(2))
    return residual, x, post, following


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [6656, 769, 5])
def test_normed_equals_norm_of_rounded_sum(dtype, d):
    residual, x, post, following = inputs(5, d, dtype)
    total, normed = add_rms_norm(residual, x, post, 1e-8, following, 1e-5)
    assert torch.equal(normed, rms_norm(total, following, 1e-5))


def test_equals_unfused_ops_in_float32():
    residual, x, post, following = inputs(5, 6656, torch.float32)
    total, normed = add_rms_norm(residual, x, post, 1e-8, following, 1e-5)
    assert torch.equal(total, residual + rms_norm(x, post, 1e-8))
    assert torch.equal(normed, rms_norm(total, following, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_sum_is_rounded_once(dtype):
    # The nearest value to the exact sum for all but what float32 cannot tell; rounding the
    # post-norm before the sum would change a quarter of them.
    residual, x, post, _ = inputs(4, 6656, dtype)
    total, _ = add_rms_norm(residual, x, post, 1e-8, None, 1e-5)
    exact, _ = OP.reference(residual.double(), x.double(), post, 1e-8, None, 1e-5)
    assert (total != exact.to(dtype)).double().mean() < 5e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_each_other(dtype):
    residual, x, post, following = inputs(16, 6656, dtype)
    whole = add_rms_norm(residual, x, post, 1e-8, following, 1e-5)
    order = torch.randperm(16, generator=generator("order"))
    for rows in (*(torch.tensor([i]) for i in range(16)), order, order[:7]):
        part = add_rms_norm(residual[rows], x[rows], post, 1e-8, following, 1e-5)
        assert all(torch.equal(p, w[rows]) for p, w in zip(part, whole, strict=True))


@pytest.mark.report("N3")
@pytest.mark.parametrize("which", ["post", "next"])
def test_each_epsilon_reaches_its_norm(which):
    residual, x, post, following = inputs(3, 512, torch.float32, 1e-4)
    if which == "post":
        out, right, wrong = 0, (1e-8, 1e-5), (1e-5, 1e-5)
    else:
        out, right, wrong = 1, (1e9, 1e-5), (1e9, 1e-8)  # a post-norm of about 0: small rows stay
    value, expected, other = (
        f(residual, x, post, e[0], following, e[1])
        for f, e in ((add_rms_norm, right), (OP.reference, right), (OP.reference, wrong))
    )
    torch.testing.assert_close(value[out], expected[out], rtol=1e-5, atol=1e-6)
    assert (value[out] - other[out]).norm() > 0.1 * expected[out].norm()


@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(0, 9),
    d=st.integers(1, 130),
    dtype=st.sampled_from(list(FLOAT_DTYPES)),
    weights=st.booleans(),
)
def test_any_shape(m, d, dtype, weights):
    residual, x, post, following = inputs(m, d, FLOAT_DTYPES[dtype])
    gains = (post, following) if weights else (None, None)
    args = (residual, x, gains[0], 1e-8, gains[1], 1e-5)
    rtol = {"f32": 1e-4, "bf16": 2**-7, "f16": 2**-9}[dtype]
    for value, expected in zip(add_rms_norm(*args), OP.reference(*args), strict=True):
        torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_post_norm_the_sum_is_plain(dtype):
    residual, x, _, following = inputs(5, 6656, dtype)
    total, normed = add_rms_norm(residual, x, None, None, following, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, rms_norm(total, following, 1e-5))
