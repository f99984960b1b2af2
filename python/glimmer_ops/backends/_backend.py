"""What a backend must offer so that checks, tests and benches can run any op on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..ops._contract import Op

# Makes an output of a shape and dtype, contiguous, of any contents, where the backend can write.
Allocator = Callable[[Sequence[int], torch.dtype], torch.Tensor]


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

    def compiled(self, op: Op) -> list[Variant]:
        """The ways this build has to run op, whatever this machine can run; same order."""
        ...

    def variants(self, op: Op) -> list[Variant]:
        """The ways this machine can run op, most portable first."""
        ...

    def run(
        self, op: Op, args: Sequence[Any], variant: Variant, empty: Allocator | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of op; mutated arguments change in place.

        empty, if given, is called once for each output, in order, and makes the tensor that is
        returned. ValueError refuses bad input, strided tensors among it, and changes nothing.
        """
        ...

    def poison_scratch(self) -> AbstractContextManager[None]:
        """While open, working memory is full of NaN whenever a kernel is given it. For tests."""
        ...

    def timer(self, op: Op, arg_sets: Sequence[Sequence[Any]], variant: Variant) -> Timer:
        """Calls of op on sets of arguments that take turns, for benches."""
        ...
