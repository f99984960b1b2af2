"""What a backend must offer so that checks, tests and benches can run any op on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..ops._contract import Op


@dataclass(frozen=True)
class Variant:
    """One way a backend can run an op, e.g. an ISA and a numerical path."""

    name: str
    exact: bool = True
    isa: str = ""


class Timer(Protocol):
    """Calls of one op on sets of arguments that take turns, timed on the device itself."""

    outs: Sequence[tuple[torch.Tensor, ...]]  # what each set's last call wrote

    def run(self, start: int, warm: int, calls: int) -> int:
        """Nanoseconds of `calls` calls on the sets from `start` on, round and round.

        `warm` untimed calls come first, on the sets before.
        """
        ...


class Backend(Protocol):
    name: str

    def supports(self, op: Op) -> bool:
        """Whether this backend has a kernel for op."""
        ...

    def variants(self, op: Op) -> list[Variant]:
        """The ways this machine can run op, most portable first."""
        ...

    def run(self, op: Op, args: Sequence[Any], variant: Variant) -> tuple[torch.Tensor, ...]:
        """The outputs of op; mutated arguments change in place. ValueError refuses bad input."""
        ...

    def timer(self, op: Op, arg_sets: Sequence[Sequence[Any]], variant: Variant) -> Timer:
        """Calls of op on sets of arguments that take turns, for benches."""
        ...
