"""Backends: one module each, found by being here. `BACKENDS` maps names to them."""

from __future__ import annotations

import importlib
import pkgutil

from ._backend import Allocator, Backend, Variant

__all__ = ["BACKENDS", "Allocator", "Backend", "Variant"]


def _discover() -> dict[str, Backend]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    backends = [importlib.import_module(f"{__name__}.{n}").BACKEND for n in names]
    return {b.name: b for b in backends}


BACKENDS: dict[str, Backend] = _discover()
