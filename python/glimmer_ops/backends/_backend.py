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

    def run(self, op: Op, args: Sequence[Any], variant: Variant) -> tuple[torch.Tensor, ...]:
        """The outputs of op; mutated arguments change in place. ValueError refuses bad input."""
        ...
