"""What an op module must define: an `OP`, from which everything else works.

The schema defines `torch.ops.glimmer.<name>`; the fake its export; the reference judges every
backend; the cases feed `glimmer check` and the tests; the cost feeds the benchmarks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

FLOAT_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

# Bounds on NMSE = Σ(y - ref)² / Σref² against the float64 reference: float32 arithmetic, or one
# rounding to the output type. With unit roundoff u (2^-8 for bfloat16, 2^-11 for float16) values
# spread evenly have about u²/6; a tensor of very few elements may reach u².
DEFAULT_NMSE = {"f32": 1e-10, "bf16": 4e-6, "f16": 6e-8}


@dataclass(frozen=True)
class Cost:
    """What an op must move and compute: bytes of DRAM traffic and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """One set of arguments.

    make returns fresh, deterministic arguments. `error`, when set, is text that the refusal of this
    case must contain. `nmse` overrides the op's bound and then `why` says for what reason.
    `resident`, for benches: in real use these arguments are in cache, as one row of activations is.
    """

    id: str
    make: Callable[[], tuple[Any, ...]]
    dtype: str = "f32"
    qtype: str = ""
    nmse: float | None = None
    why: str = ""
    error: str = ""
    slow: bool = False
    resident: bool = False

    def __post_init__(self) -> None:
        if self.nmse is not None and not self.why:
            raise ValueError(f"case {self.id}: a bound of its own needs a reason")


@dataclass(frozen=True)
class Op:
    """An op's contract.

    args: the schema's arguments, as text. returns: the number of output tensors.
    reference(*args): plain torch with float64 (or float32) accumulation; mutates what the op
    mutates; returns a tensor, or a tuple for several. cost(*args): see Cost.
    rows: arguments whose axis 0 is the row (token) axis. For at most 16 rows, the bits of an
    output row depend on that row alone (row invariance).
    qtypes: GGUF weight types, for ops that have weights. integer_nmse: the bound of the default
    path with int8 activations, where an op has one besides the exact path. bench: cases to measure,
    such as the model's shapes, the most telling first; the slow ones are left out of a quick run.
    """

    name: str
    args: str
    fake: Callable[..., Any]
    reference: Callable[..., Any]
    cases: Callable[[], Iterable[Case]]
    cost: Callable[..., Cost]
    returns: int = 1
    rows: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("f32", "bf16", "f16")
    qtypes: tuple[str, ...] = ()
    nmse: dict[str, float] = field(default_factory=lambda: dict(DEFAULT_NMSE))
    integer_nmse: float | None = None
    bench: Callable[[], Iterable[Case]] | None = None

    @cached_property
    def arg_names(self) -> tuple[str, ...]:
        return tuple(a.split("=")[0].split()[-1] for a in self.args.split(", "))

    @cached_property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the op changes in place."""
        return tuple(re.findall(r"Tensor\(\w!\)\??\s+(\w+)", self.args))

    @property
    def schema(self) -> str:
        returns = "Tensor" if self.returns == 1 else f"({', '.join(['Tensor'] * self.returns)})"
        return f"{self.name}({self.args}) -> {returns}"

    @property
    def out_schema(self) -> str:
        if self.returns == 1:
            outs, returns = "Tensor(z!) out", "Tensor(z!)"
        else:
            alias = "zyxw"[: self.returns]
            outs = ", ".join(f"Tensor({a}!) out{i}" for i, a in enumerate(alias))
            returns = f"({', '.join(f'Tensor({a}!)' for a in alias)})"
        return f"{self.name}.out({self.args}, *, {outs}) -> {returns}"

    def all_cases(self) -> list[Case]:
        cases = list(self.cases())
        ids = [c.id for c in cases]
        if len(set(ids)) != len(ids):
            raise ValueError(f"{self.name}: case ids are not unique")
        return cases

    def bench_cases(self, most: int = 3) -> list[Case]:
        """What to measure: `bench`, else the ordinary cases of the highest cost."""
        if self.bench is not None:
            return list(self.bench())
        costs = {c: self.cost(*c.make()) for c in self.all_cases() if not (c.error or c.slow)}
        return sorted(costs, key=lambda c: -(costs[c].bytes + costs[c].flops))[:most]

    def bound(self, case: Case, exact: bool = True) -> float:
        """The NMSE that a backend may have on a case."""
        if case.nmse is not None:
            return case.nmse
        if self.integer_nmse is not None and not exact:
            return max(self.integer_nmse, self.nmse[case.dtype])
        return self.nmse[case.dtype]


def generator(*key: object) -> torch.Generator:
    """A generator seeded by the key's text: the same on every machine and in every order."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal values, drawn in float32 and rounded to dtype."""
    return torch.randn(*shape, generator=g).to(dtype)


def nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
