"""Selecting and permuting the rows of an op's arguments, and its page tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glimmer_ops.ops._contract import Op


def row_count(op: Op, args: Sequence[Any]) -> int:
    named = dict(zip(op.arg_names, args, strict=True))
    return next(named[n].shape[0] for n in op.rows if named[n] is not None)


def take_rows(op: Op, args: Sequence[Any], rows: Sequence[int]) -> tuple[Any, ...]:
    """The arguments with only the given rows, in that order; other tensors are cloned."""
    index = torch.tensor(list(rows), dtype=torch.int64)

    def one(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.index_select(0, index) if name in op.rows else value.clone()

    return tuple(one(n, a) for n, a in zip(op.arg_names, args, strict=True))


def permute_pages(op: Op, args: Sequence[Any], generator: torch.Generator) -> tuple[Any, ...]:
    """The same caches with their physical pages in another order, and the table to match."""
    named = dict(zip(op.arg_names, args, strict=True))
    table = named["block_table"]
    pages = named["k_cache"].shape[0]
    to = torch.randperm(pages, generator=generator)
    moved = torch.where(table >= 0, to[table.clamp(min=0).long()].to(table.dtype), table)
    origin = torch.argsort(to)
    named["block_table"] = moved
    for cache in ("k_cache", "v_cache"):
        named[cache] = named[cache].index_select(0, origin)
    return tuple(named[n] for n in op.arg_names)
