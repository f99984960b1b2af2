"""The op set: one module per op, found by being here. `OPS` maps names to contracts."""

from __future__ import annotations

import importlib
import pkgutil

from ._contract import Op


def _discover() -> dict[str, Op]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    ops = {n: importlib.import_module(f"{__name__}.{n}").OP for n in names}
    for name, op in ops.items():
        if op.name != name:
            raise ImportError(f"ops/{name}.py: expected OP.name '{name}', found '{op.name}'")
    return ops


OPS: dict[str, Op] = _discover()
