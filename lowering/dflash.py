"""DFlash: the draft model as `glimmer` ops, and the target's methods that feed it.

A pass denoises a block of up to 16 tokens at once. The block is the last token of the text, the
anchor, and mask tokens, at the positions that follow the text; its rows attend to each other, and
to keys and values of the text made from the target's hidden states. Row i > 0 names the token at
its own position. (Chen et al. 2026, "DFlash: block diffusion for flash speculative decoding",
arXiv:2602.06036; layout: transformers' MuseGlimmerAssistantModel.)

`draft_prefill` appends the text's keys and values to the draft's own pools. `draft_forward` writes
the block's behind them, where the next call overwrites them. Embedding and head are the target's:
the embedding without its norm, the head without multiplier and cap.
"""

from __future__ import annotations

import torch

from .graph import DRAFT, Decode, ForwardFromEmbeddings, FusedModel

ROPE = "half"  # pairs (i, i + head_dim / 2), unlike the target's


class DraftModel(FusedModel):
    """The draft model's part of a fused graph."""

    def _draft(self, layer: int, name: str) -> str:
        return f"{DRAFT}blk_{layer}_{name}"

    def _draft_pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (getattr(self.pools, f"{DRAFT}{part}_{layer}") for part in "kv")
        return k, v

    def inject(
        self,
        taps: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
    ) -> torch.Tensor:
        """Appends the keys and values of text tokens: taps float32 [T, n_taps · dim], the target's
        residual before each of target_layers. Returns an empty tensor, shape [0]."""
        d = self.draft
        assert d is not None
        h = self._linear(taps, DRAFT + "fc")
        h = torch.ops.glimmer.rms_norm(h, self._w(DRAFT + "enc_output_norm"), d.eps)
        for i, sliding in enumerate(d.sliding):
            out = torch.ops.glimmer.qk_norm_rope_kv(
                None,
                self._linear(h, self._draft(i, "attn_k")),
                self._linear(h, self._draft(i, "attn_v")),
                None,
                self._w(self._draft(i, "attn_k_norm")),
                d.eps,
                ROPE,
                d.rope_theta,
                pos,
                slot,
                sliding_table if sliding else global_table,
                *self._draft_pools(i),
            )
        return out

    def denoise(
        self,
        ids: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
    ) -> torch.Tensor:
        """Block tokens int64 [T] -> float32 logits [T, vocab_size] of the tokens at their own
        positions; an anchor's row means nothing."""
        d = self.draft
        assert d is not None
        qtype = self.weights["token_embd"].qtype
        x = torch.ops.glimmer.kquant_embedding(ids, self._w("token_embd"), qtype)
        h = torch.ops.glimmer.rms_norm(x, self._w(self._draft(0, "attn_norm")), d.eps)
        for i, sliding in enumerate(d.sliding):
            attn = self._block_attention(h, i, pos, slot, (global_table, sliding_table)[sliding])
            x, h = self._add_norm(x, attn, self._draft(i, "ffn_norm"))
            last = i + 1 == d.n_layers
            following = DRAFT + "output_norm" if last else self._draft(i + 1, "attn_norm")
            x, h = self._add_norm(x, self._ffn(h, self._draft(i, "")), following)
        head = self.weights["output"].qtype
        return torch.ops.glimmer.kquant_logits(h, self._w("output"), head, 1.0, 0.0)

    def _add_norm(
        self, x: torch.Tensor, y: torch.Tensor, norm: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.draft is not None
        return torch.ops.glimmer.add_rms_norm(x, y, None, None, self._w(norm), self.draft.eps)

    def _block_attention(
        self,
        h: torch.Tensor,
        layer: int,
        pos: torch.Tensor,
        slot: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:
        d = self.draft
        assert d is not None
        q, k, v = (self._linear(h, self._draft(layer, n)) for n in ("attn_q", "attn_k", "attn_v"))
        gains = (self._w(self._draft(layer, n)) for n in ("attn_q_norm", "attn_k_norm"))
        pools = self._draft_pools(layer)
        q = torch.ops.glimmer.qk_norm_rope_kv(
            q, k, v, *gains, d.eps, ROPE, d.rope_theta, pos, slot, table, *pools
        )
        window = d.window + 1 if d.sliding[layer] else 0  # the draft's is inclusive
        out = torch.ops.glimmer.sdpa(q, *pools, pos, slot, table, d.attn_scale, window, False, None)
        return self._linear(out, self._draft(layer, "attn_output"))


class TargetForwardFromEmbeddings(FusedModel):
    """forward_from_embeddings that also returns every row's taps, float32 [T, n_taps · dim]."""

    reads = ForwardFromEmbeddings.reads

    def forward(
        self,
        embeds: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taps: list[torch.Tensor] = []
        h = self.blocks(embeds, pos, slot, global_table, sliding_table, taps)
        return self.head(h.index_select(0, rows)), torch.cat(taps, -1)


class TargetDecode(FusedModel):
    """decode that also returns every row's taps, float32 [T, n_taps · dim]."""

    reads = Decode.reads

    def forward(
        self,
        ids: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        seed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taps: list[torch.Tensor] = []
        h = self.blocks(self.embed(ids), pos, slot, global_table, sliding_table, taps)
        sampled = torch.ops.glimmer.sample(self.head(h), temperature, top_k, top_p, seed, pos)
        return sampled, torch.cat(taps, -1)


class DraftPrefill(DraftModel):
    @staticmethod
    def reads(name: str) -> bool:
        made = ("_attn_k", "_attn_v", "_attn_k_norm", "_fc", "_enc_output_norm")
        pool = name.startswith((f"{DRAFT}k_", f"{DRAFT}v_"))
        return pool or (name.startswith(DRAFT) and name.endswith(made))

    def forward(
        self,
        taps: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
    ) -> torch.Tensor:
        return self.inject(taps, pos, slot, global_table, sliding_table)


class DraftForward(DraftModel):
    """The sampled token at each row's own position. step: what to sample it with, the position
    before it, so that draft and target draw the same noise for a token."""

    @staticmethod
    def reads(name: str) -> bool:
        made = (f"{DRAFT}fc", f"{DRAFT}enc_output_norm")
        return name in ("token_embd", "output") or (name.startswith(DRAFT) and name not in made)

    def forward(
        self,
        ids: torch.Tensor,
        pos: torch.Tensor,
        slot: torch.Tensor,
        global_table: torch.Tensor,
        sliding_table: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        seed: torch.Tensor,
        step: torch.Tensor,
    ) -> torch.Tensor:
        logits = self.denoise(ids, pos, slot, global_table, sliding_table)
        return torch.ops.glimmer.sample(logits, temperature, top_k, top_p, seed, step)


DRAFT_METHODS: dict[str, type[FusedModel]] = {
    "target_forward_from_embeddings": TargetForwardFromEmbeddings,
    "target_decode": TargetDecode,
    "draft_prefill": DraftPrefill,
    "draft_forward": DraftForward,
}
