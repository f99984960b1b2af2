"""A target and its draft model in eager torch, without any runtime: text and proposals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from glimmer_ops.gguf import GGUFDraft, GGUFModel
from glimmer_ops.lowering import from_gguf
from glimmer_ops.lowering.dflash import DraftModel
from glimmer_ops.lowering.graph import PoolPages, make_pools


class EagerPair:
    """One sequence in float32 pools. `text` grows by `feed`; `propose` drafts what follows it."""

    def __init__(self, model: GGUFModel, draft: GGUFDraft, capacity: int) -> None:
        fused = from_gguf(model, draft)
        pages = -(-(capacity + draft.config.block_size) // 64)
        pools = make_pools(model.config, draft.config, PoolPages(*[pages] * 4), torch.float32)
        self.model = DraftModel(model.config, fused.weights, pools, fused.id, draft.config)
        self.table = torch.arange(pages, dtype=torch.int32).flip(0)[None]
        self.text: list[int] = []
        self.draft = draft.config

    def _at(self, start: int, count: int) -> tuple[torch.Tensor, ...]:
        pos = torch.arange(start, start + count)
        return pos, torch.zeros(count, dtype=torch.int64), self.table, self.table

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> int:
        """Appends tokens to the text, for the target and the draft; the greedy next token."""
        at = self._at(len(self.text), len(ids))
        taps: list[torch.Tensor] = []
        hidden = self.model.blocks(self.model.embed(torch.tensor(list(ids))), *at, taps)
        self.model.inject(torch.cat(taps, -1), *at)
        self.text += ids
        return int(self.model.head(hidden[-1:]).argmax())

    @torch.no_grad()
    def propose(self, anchor: int) -> np.ndarray:
        """int64 [block_size - 1]: the tokens that the draft names after the text and `anchor`."""
        block = torch.full((self.draft.block_size,), self.draft.mask_token_id)
        block[0] = anchor
        logits = self.model.denoise(block, *self._at(len(self.text), len(block)))
        return logits[1:].argmax(1).numpy()

    def write(self, prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
        """(prompt and `count` greedy tokens, proposals int64 [count, block_size - 1]): row i is
        what the draft names to follow token i of those."""
        token, proposals = self.feed(prompt), []
        for _ in range(count):
            proposals.append(self.propose(token))
            token = self.feed([token])
        return self.text, np.stack(proposals)
