"""Upstream's eager model as the judge of ours: same GGUF file, dequantised weights, float32.

executorch ships the model under `executorch.examples.models.muse_glimmer`. Its `embed_text` casts
to bfloat16, so the embedding is done here; its ring cache is exact only for chunks of at most
window + 1 tokens, so the tokens go in such chunks.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .config import ModelConfig
from .gguf import GGUFModel


def upstream_config(config: ModelConfig, max_seq_len: int) -> Any:
    """Upstream's MuseGlimmerConfig of a ModelConfig. ValueError when it cannot express it."""
    from executorch.examples.models.muse_glimmer.model.model import MuseGlimmerConfig

    period = 4  # upstream's layer pattern has a fixed length
    upstream = MuseGlimmerConfig(
        dim=config.dim,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        ffn_dim_multiplier=(config.ffn_dim + 0.5) / config.dim,
        vocab_size=config.vocab_size,
        norm_eps=config.eps,
        rope_theta=config.rope_theta,
        output_soft_cap_temp=config.soft_cap,
        global_attn_cfg=str([config.window] * (period - 1) + [0]),
        every_n_layers_nope=period,
        output_multiplier=config.logit_scale,
        post_norm_eps=config.post_eps,
        max_seq_len=max_seq_len,
    )
    sliding = tuple(upstream.layer_window_size(i) > 0 for i in range(config.n_layers))
    if sliding != config.sliding:
        raise ValueError(f"sliding: expected upstream's pattern {sliding}, found {config.sliding}")
    return upstream


def load_upstream(model: GGUFModel, max_seq_len: int) -> Any:
    """Upstream's MuseGlimmerModel of a GGUF file in float32, every weight dequantised once."""
    from executorch.examples.models.muse_glimmer.loaders.checkpoint_loader import load_gguf_model
    from executorch.extension.llm.export.gguf import ExportableGGUFTensor

    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress with print
        upstream, _ = load_gguf_model(
            str(model.path),
            backend="mlx",
            config=upstream_config(model.config, max_seq_len),
            activation_dtype=torch.float32,
        )
    for module in upstream.modules():
        weight = getattr(module, "weight", None)
        raw = getattr(weight, "data", weight)
        if isinstance(raw, ExportableGGUFTensor):
            dense = raw.dequantize(torch.float32)
            module.weight = nn.Parameter(dense, requires_grad=False)
    return upstream


@torch.no_grad()
def run_upstream(upstream: Any, ids: Sequence[int]) -> torch.Tensor:
    """float32 logits [len(ids), vocab_size] of a model that `load_upstream` gave."""
    tokens = torch.tensor(ids, dtype=torch.int64)
    chunk = upstream._sliding_window + 1
    rows = []
    for start in range(0, len(ids), chunk):
        part = tokens[start : start + chunk]
        embeds = upstream.tok_norm(upstream.embed_tokens(part[None]).float())
        positions = torch.arange(start, start + len(part))
        rows.append(upstream.prefill_from_embeds(embeds, positions)[0].float())
    return torch.cat(rows)


def upstream_logits(model: GGUFModel, ids: Sequence[int]) -> np.ndarray:
    """float32 [len(ids), vocab_size]: upstream's logits at every position."""
    return run_upstream(load_upstream(model, max_seq_len=len(ids)), ids).numpy()
