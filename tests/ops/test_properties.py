"""Properties of every op on random small arguments, on every backend and variant.

The result is the reference's; a row's bits depend on that row alone, whatever the number and order
of rows; no rows give no rows. The examples are the same in every run.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glimmer_ops.backends import BACKENDS
from glimmer_ops.check import clone_args, tensors_of
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import DEFAULT_NMSE, FLOAT_DTYPES, Op
from support.bits import same_bits
from support.rows import row_count, take_rows
from support.strategies import ARGUMENTS

NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
# Squared unit roundoff: what one rounding may cost a tensor of a single element.
ROUNDING = {torch.float32: 2.0**-46, torch.bfloat16: 2.0**-16, torch.float16: 2.0**-22}


def profile(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def run(op: Op, backend, variant, args) -> dict[str, torch.Tensor]:
    own = clone_args(args)
    return tensors_of(op, own, backend.run(op, own, variant))


def reference(op: Op, args) -> dict[str, torch.Tensor]:
    own = clone_args(args)
    return tensors_of(op, own, op.reference(*own))


def error(op: Op, got: torch.Tensor, want: torch.Tensor) -> float:
    """The mean of (got - want)² in units of the mean square of want, or of a floor if that is more.

    Unlike NMSE it does not explode when the few elements of a small tensor cancel: the products of
    `strategies.py` have a mean square of about 1.
    """
    floor = 0.3 if op.qtypes else 1e-6
    g, w = got.double(), want.double()
    assert torch.equal(g.isnan(), w.isnan())
    difference, power = (g - w).nan_to_num().square(), w.nan_to_num().square()
    return float(difference.mean() / power.mean().clamp(min=floor))


def check_values(op: Op, variant, args, got: dict[str, torch.Tensor]) -> None:
    for name, want in reference(op, args).items():
        value = got[name]
        assert value.shape == want.shape and value.dtype == want.dtype
        if want.dtype not in NAMES:
            assert torch.equal(value, want)
        elif want.numel():
            assert error(op, value, want) <= bound(op, variant, want.dtype), (variant.name, name)


def bound(op: Op, variant, dtype: torch.dtype) -> float:
    """The op's bound for an output type. With few outputs int8 activations stray from the mean."""
    rounded = max(op.nmse.get(NAMES[dtype], DEFAULT_NMSE[NAMES[dtype]]), ROUNDING[dtype])
    if op.integer_nmse is None or variant.exact:
        return rounded
    return max(rounded, 20 * op.integer_nmse)


def check_rows(op: Op, backend, variant, args, got, rows: list[int]) -> None:
    n = row_count(op, args)
    part = run(op, backend, variant, take_rows(op, args, rows))
    for name, whole in got.items():
        if name not in op.mutates and whole.shape[:1] == (n,):
            assert same_bits(part[name], whole[torch.tensor(rows, dtype=torch.int64)]), name
        elif name in op.mutates and len(rows) == n:
            assert same_bits(part[name], whole), name


def independent(op: Op, args) -> bool:
    """Whether rows are: in a block that is not causal they see each other."""
    return dict(zip(op.arg_names, args, strict=True)).get("causal", True)


def check(op: Op, data: st.DataObject) -> None:
    args = data.draw(ARGUMENTS[op.name]())
    n = row_count(op, args)
    rows = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1), label="some rows")
    order = data.draw(st.permutations(range(n)), label="all rows")
    for backend in (b for b in BACKENDS.values() if b.supports(op)):
        for variant in backend.variants(op):
            got = run(op, backend, variant, args)
            check_values(op, variant, args, got)
            check_rows(op, backend, variant, args, got, list(order))
            if independent(op, args):
                check_rows(op, backend, variant, args, got, rows)
            check_rows(op, backend, variant, args, got, [])


OPS_WITH_ARGUMENTS = pytest.mark.parametrize("op", [OPS[n] for n in ARGUMENTS], ids=ARGUMENTS)


@OPS_WITH_ARGUMENTS
@profile(25)
@given(data=st.data())
def test_properties(op, data) -> None:
    check(op, data)


@pytest.mark.slow
@OPS_WITH_ARGUMENTS
@profile(100)
@given(data=st.data())
def test_properties_of_many_examples(op, data) -> None:
    check(op, data)


@profile(40)
@given(args=ARGUMENTS["sample"](), other=st.integers(-(2**63), 2**63 - 1))
def test_a_token_follows_from_its_seed_and_step(args, other) -> None:
    """Equal logits, parameters, seed and step: equal tokens, in any row of any batch."""
    op = OPS["sample"]
    for backend in (b for b in BACKENDS.values() if b.supports(op)):
        for variant in backend.variants(op):
            once = run(op, backend, variant, args)["out"]
            twice = run(op, backend, variant, tuple(torch.cat((a, a)) for a in args))["out"]
            assert torch.equal(twice, torch.cat((once, once)))
            alone = tuple(a[-1:].clone() for a in args)
            assert torch.equal(run(op, backend, variant, alone)["out"], once[-1:])
            # A neighbour's seed and step are its own affair.
            changed = clone_args(args)
            changed[4][0], changed[5][0] = other, -other - 1
            assert torch.equal(run(op, backend, variant, changed)["out"][1:], once[1:])
