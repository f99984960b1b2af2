"""Other projects on the same cases: one module each, found by being here.

A peer's module defines `PEER`; modules without one serve others.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from glimmer_ops.ops._contract import Case, Op


@dataclass
class Counterpart:
    """What a peer has for one case.

    run(start, warm, calls): nanoseconds, as of `Timer`. output: what the first set gives, as ours
    does. bound: the NMSE it may have against our reference, because of what `note` says.
    """

    peer: str
    run: Callable[[int, int, int], int]
    output: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
    sets: int = 1
    bound: float = 1e-9
    note: str = ""
    close: Callable[[], None] = field(default=lambda: None)


class Peer(Protocol):
    """quick: whether it prepares a case in seconds, so that a quick bench can afford it."""

    name: str
    quick: bool

    def missing(self) -> str:
        """What this machine lacks to run it, or an empty string."""
        ...

    def model(self, gguf: Path, name: str, tokens: int, threads: int) -> Counterpart | None:
        """The same of a whole model: "prefill-N", `tokens` tokens in one call, or "decode"."""
        ...

    def counterpart(self, op: Op, case: Case, working_set: int, threads: int) -> Counterpart | None:
        """The peer's way to compute a case, prepared; None when it has none."""
        ...


@functools.cache
def peers() -> dict[str, Peer]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "__main__")
    modules = [importlib.import_module(f"{__name__}.{n}") for n in names]
    return {m.PEER.name: m.PEER for m in modules if hasattr(m, "PEER")}


def timed(calls_of: list[Callable[[], Any]]) -> Callable[[int, int, int], int]:
    """`Counterpart.run` for Python callables that take turns."""
    import time

    def run(start: int, warm: int, calls: int) -> int:
        n = len(calls_of)
        for i in range(start - warm, start):
            calls_of[i % n]()
        begin = time.perf_counter_ns()
        for i in range(start, start + calls):
            calls_of[i % n]()
        return time.perf_counter_ns() - begin

    return run
