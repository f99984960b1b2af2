"""Paged and contiguous caches: how references address them, and how cases build them.

Paged: cache [pages, kv_heads, page_size, head_dim] and block_table int32 [slots, max_pages], where
-1 marks an absent page. Contiguous (block_table None): cache [slots, kv_heads, cache_len, head_dim]
with position p at row p mod cache_len. The row of (slot, pos) is cache[page, :, row].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ._contract import randn


def locate(
    cache: torch.Tensor, block_table: torch.Tensor | None, slot: torch.Tensor, pos: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, row) of each (slot, pos), int64 tensors of one shape."""
    size = cache.size(2)
    if block_table is None:
        return slot, pos % size
    return block_table[slot, pos // size].long(), pos % size


def rows(
    cache: torch.Tensor, block_table: torch.Tensor | None, slot: int, begin: int, end: int
) -> torch.Tensor:
    """Positions [begin, end) of a slot in float64: [end - begin, kv_heads, head_dim]."""
    pos = torch.arange(begin, end)
    page, row = locate(cache, block_table, torch.full_like(pos, slot), pos)
    return cache[page, :, row].double()


def visible(
    pos: torch.Tensor, slot: torch.Tensor, window: int, causal: bool
) -> list[tuple[int, int] | None]:
    """The range [begin, end) of positions that each token sees; None for padding.

    A token at position i of a slot sees j ≤ i (causal) or j ≤ the slot's largest position in this
    call, and i - j < window if window > 0.
    """
    last: dict[int, int] = {}
    for p, s in zip(pos.tolist(), slot.tolist(), strict=True):
        last[s] = max(p, last.get(s, 0))
    return [
        None if s < 0 else (max(0, p - window + 1) if window else 0, (p if causal else last[s]) + 1)
        for p, s in zip(pos.tolist(), slot.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Layout:
    """The shape of a cache. cache_len > 0 makes it contiguous; spare pages are never mapped."""

    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 64
    dtype: torch.dtype = torch.float32
    slots: int = 1
    cache_len: int = 0
    spare: int = 2


Positions = Mapping[int, Iterable[int]]  # slot → positions


def build(
    g: torch.Generator, layout: Layout, filled: Positions, mapped: Positions | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(k_cache, v_cache, block_table): random rows at `filled`, NaN everywhere else.

    Pages of `filled` and `mapped` positions exist, in random physical order; all others are absent.
    A later position of `filled` overwrites an earlier one at the same row of a ring.
    """
    others = mapped or {}
    wanted = {s: sorted({*filled.get(s, ()), *others.get(s, ())}) for s in range(layout.slots)}
    table = None if layout.cache_len else _table(g, layout, wanted)
    pages = layout.slots if table is None else int((table >= 0).sum()) + layout.spare
    size = layout.cache_len or layout.page_size
    shape = (pages, layout.kv_heads, size, layout.head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=layout.dtype) for _ in range(2))
    for s, positions in filled.items():
        pos = torch.tensor(sorted(positions), dtype=torch.int64)
        if layout.cache_len:
            pos = pos[-layout.cache_len :]
        page, row = locate(k, table, torch.full_like(pos, s), pos)
        for cache in (k, v):
            cache[page, :, row] = randn(
                g, len(pos), layout.kv_heads, layout.head_dim, dtype=layout.dtype
            )
    return k, v, table


def _table(g: torch.Generator, layout: Layout, wanted: Mapping[int, list[int]]) -> torch.Tensor:
    size = layout.page_size
    logical = [(s, p) for s, ps in wanted.items() for p in sorted({i // size for i in ps})]
    max_pages = max((p for _, p in logical), default=0) + 1
    table = torch.full((layout.slots, max_pages), -1, dtype=torch.int32)
    physical = torch.randperm(len(logical) + layout.spare, generator=g)
    for (s, p), page in zip(logical, physical.tolist(), strict=False):
        table[s, p] = page
    return table


def split_tokens(tokens: Iterable[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(pos, slot), int64, of (slot, pos) pairs."""
    pairs = list(tokens)
    slot, pos = ([t[i] for t in pairs] for i in range(2))
    return torch.tensor(pos, dtype=torch.int64), torch.tensor(slot, dtype=torch.int64)
