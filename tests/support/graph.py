"""Running the fused graph in eager torch, without any runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import glimmer_ops
from glimmer_ops.lowering import FusedModel
from glimmer_ops.lowering.graph import PoolPages, make_pools


@torch.no_grad()
def eager_logits(model: FusedModel, ids: Sequence[int], chunk: int, exact: bool) -> np.ndarray:
    """float32 [len(ids), vocab_size] of one sequence, in chunks, with float32 pools."""
    n_pages = -(-len(ids) // 64)
    pooled = model.with_pools(
        make_pools(model.config, None, PoolPages(n_pages, n_pages), torch.float32)
    )
    table = torch.arange(n_pages, dtype=torch.int32).flip(0)[None]
    tokens, rows = torch.tensor(list(ids)), []
    with glimmer_ops.use_exact(exact):
        for start in range(0, len(ids), chunk):
            part = tokens[start : start + chunk]
            pos = torch.arange(start, start + len(part))
            slot = torch.zeros(len(part), dtype=torch.int64)
            hidden = pooled.blocks(pooled.embed(part), pos, slot, table, table)
            rows.append(pooled.head(hidden))
    return torch.cat(rows).numpy()
