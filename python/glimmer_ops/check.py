"""Judges a backend's op against the reference, one case at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .backends import Backend, Variant
from .ops._contract import Case, Op


@dataclass(frozen=True)
class Verdict:
    op: str
    case: str
    backend: str
    variant: str
    passed: bool
    nmse: float | None  # None for a refusal
    bound: float
    detail: str


def nmse(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Σ(value - expected)² / Σexpected², over the places where the reference is finite.

    0 for equal tensors, inf where the value is not finite but the reference is, or the reverse.
    """
    v, e = value.double(), expected.double()
    finite = torch.isfinite(e)
    if not torch.equal(torch.isfinite(v), finite):
        return float("inf")
    if not torch.equal(torch.isnan(v), torch.isnan(e)):
        return float("inf")
    v, e = v[finite], e[finite]
    error = (v - e).square().sum().item()
    if error == 0:
        return 0.0
    power = e.square().sum().item()
    return error / power if power else float("inf")


def clone_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else copy.copy(a) for a in args)


def tensors_of(op: Op, args: tuple[Any, ...], outs: Any) -> dict[str, torch.Tensor]:
    """Everything an op produced: its outputs and its mutated arguments, by name."""
    outs = outs if isinstance(outs, tuple) else (outs,)
    named = {f"out{i}" if len(outs) > 1 else "out": o for i, o in enumerate(outs)}
    by_name = dict(zip(op.arg_names, args, strict=True))
    return named | {name: by_name[name] for name in op.mutates}


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An output full of NaN, or of -1: new memory may hold the right answer of an earlier call."""
    out = torch.empty(tuple(shape), dtype=dtype)
    out.view(torch.uint8).fill_(0xFF)
    return out


def expected_tensors(op: Op, case: Case) -> dict[str, torch.Tensor]:
    """What the reference produces for a case."""
    args = case.make()
    return tensors_of(op, args, op.reference(*args))


def worst_nmse(
    result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float | None, str]:
    """The largest NMSE of all tensors, or None and what differs in shape or dtype."""
    worst = 0.0
    for name, want in expected.items():
        got = result[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            expected_type = f"{want.dtype}{list(want.shape)}"
            found_type = f"{got.dtype}{list(got.shape)}"
            return None, f"{name}: expected {expected_type}, found {found_type}"
        worst = max(worst, nmse(got, want))
    return worst, ""


def run_case(op: Op, case: Case, backend: Backend, variant: Variant) -> Verdict:
    """Runs one case and compares every output and mutated argument with the reference.

    Outputs and working memory are full of NaN before.
    """
    bound = op.bound(case, variant.exact)

    def verdict(passed: bool, value: float | None, detail: str) -> Verdict:
        return Verdict(op.name, case.id, backend.name, variant.name, passed, value, bound, detail)

    args = case.make()
    try:
        with backend.poison_scratch():
            result = tensors_of(op, args, backend.run(op, args, variant, poisoned))
    except ValueError as error:
        if case.error:
            return verdict(case.error in str(error), None, str(error))
        return verdict(False, None, f"refused: {error}")
    if case.error:
        return verdict(False, None, f"accepted; expected a refusal with '{case.error}'")
    worst, detail = worst_nmse(result, expected_tensors(op, case))
    return verdict(worst is not None and worst <= bound, worst, detail)


def check(
    op: Op, backend: Backend, case_id: str | None = None, slow: bool = False
) -> Iterator[Verdict]:
    """Verdicts of op's cases on every variant of backend that this machine can run."""
    for case in op.all_cases():
        if (case_id is None or case.id == case_id) and (slow or not case.slow):
            for variant in backend.variants(op):
                yield run_case(op, case, backend, variant)
