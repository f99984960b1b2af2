"""One module a target, found by being here; each defines `TARGET`."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SEEDS = Path(__file__).parents[1] / "seeds"


@dataclass(frozen=True)
class Target:
    """A reader of untrusted bytes.

    instrument: modules whose branches guide the search. prepare(folder): makes what every input
    needs and returns read(data), which raises one of `refusals` for bad input and nothing else.
    named: what every refusal's message contains. mutate(data, rng): another input, of the same
    structure. make_seeds(): file name -> bytes, what `seeds/<target>/` holds.
    """

    instrument: tuple[str, ...]
    prepare: Callable[[Path], Callable[[bytes], None]]
    refusals: Callable[[], tuple[type[Exception], ...]]  # imported late, to be instrumented
    mutate: Callable[[bytes, random.Random], bytes]
    make_seeds: Callable[[], dict[str, bytes]]
    named: str = ""


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def target(name: str) -> Target:
    if name not in names():
        raise ValueError(f"target: expected one of {', '.join(names())}, found {name!r}")
    return importlib.import_module(f"{__name__}.{name}").TARGET
