"""The support matrix as Markdown, from the registries: what this build has, on any machine."""

from __future__ import annotations

from collections.abc import Sequence

from .backends import BACKENDS, Variant
from .ops import OPS


def _unique(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(n for n in names if n))


def _cell(variants: Sequence[Variant]) -> str:
    if not variants:
        return "-"
    isas = _unique([v.isa for v in variants]) or "yes"
    if all(v.exact for v in variants):
        return isas
    return f"{isas}; {_unique(['exact' if v.exact else 'int8' for v in variants])}"


def markdown() -> str:
    """One row an op: each backend's variants as compiled, dtypes of activations, weight types."""
    head = ["op", *BACKENDS, "dtypes", "weight types"]
    rows = [head, ["---"] * len(head)]
    for op in OPS.values():
        cells = [_cell(b.compiled(op) if b.supports(op) else []) for b in BACKENDS.values()]
        weights = ", ".join(op.qtypes) or "-"
        rows.append([f"`{op.name}`", *cells, ", ".join(op.dtypes), weights])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
