"""Judges from other projects, run live on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gguf as gguf_package
import numpy as np
import torch
from torch import nn

from glimmer_ops.config import ModelConfig
from glimmer_ops.gguf import GGUFModel
from glimmer_ops.lowering import FusedModel
from glimmer_ops.lowering.graph import DRAFT
from glimmer_ops.oracle import load_upstream, run_upstream

from . import dflash


def dense(model: GGUFModel, name: str) -> torch.Tensor:
    """A tensor of the file in float32, dequantised by the gguf package."""
    tensor = model.tensors[f"{name}.weight"]
    if len(tensor.shape) == 1:
        return torch.from_numpy(tensor.float32())
    qtype = gguf_package.GGMLQuantizationType[tensor.qtype]
    return torch.from_numpy(gguf_package.dequantize(np.asarray(tensor.raw()), qtype)).float()


def _half_split(weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rows reordered so that interleaved RoPE pairs become the half-split pairs of transformers."""
    heads = weight.view(-1, config.head_dim // 2, 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape).contiguous()


def _transformers_config(config: ModelConfig):
    from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig

    types = ["sliding_attention" if s else "full_attention" for s in config.sliding]
    result = MuseGlimmerTextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.eps,
        post_norm_eps=config.post_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        sliding_window=config.window,
        layer_types=types,
        layer_rope_theta=[config.rope_theta if s else 0 for s in config.sliding],
        final_logit_softcapping=config.soft_cap,
        output_multiplier=config.logit_scale,
        qk_scale_factor=config.q_scale,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
    )
    result._attn_implementation = "eager"
    return result


def _load(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert not unexpected and all("inv_freq" in m for m in missing), (missing, unexpected)


def _transformers_text_model(model: GGUFModel):
    from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextModel

    c = model.config
    hf = MuseGlimmerTextModel(_transformers_config(c)).float().eval()
    state = {
        "embed_tokens.weight": dense(model, "token_embd"),
        "norm.weight": dense(model, "output_norm"),
    }
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.gate_proj": "attn_gate",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    for i in range(c.n_layers):
        for theirs, ours in names.items():
            weight = dense(model, f"blk.{i}.{ours}")
            if ours in ("attn_q", "attn_k"):
                weight = _half_split(weight, c)
            state[f"layers.{i}.{theirs}.weight"] = weight - 1 if "layernorm" in theirs else weight
    _load(hf, state)
    return hf


@torch.no_grad()
def transformers_logits(model: GGUFModel, ids: Sequence[int]) -> np.ndarray:
    """float32 [len(ids), vocab_size] of transformers' MuseGlimmer text model, eager, float32."""
    c = model.config
    hf = _transformers_text_model(model)
    hidden = hf(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
    logits = hidden @ dense(model, "output").T
    return (torch.tanh(logits * c.logit_scale / c.soft_cap) * c.soft_cap).numpy()


@torch.no_grad()
def transformers_taps(
    model: GGUFModel, ids: Sequence[int], target_layers: Sequence[int]
) -> torch.Tensor:
    """float32 [len(ids), n_taps · dim]: the residual before each of target_layers, as transformers
    hands it to a draft model whose target_layer_ids are one less."""
    hf = _transformers_text_model(model)
    states = hf(input_ids=torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in target_layers], -1)


@torch.no_grad()
def upstream_taps(
    model: GGUFModel, ids: Sequence[int], target_layers: Sequence[int]
) -> torch.Tensor:
    """float32 [len(ids), n_taps · dim]: what enters each of target_layers of upstream's model."""
    upstream = load_upstream(model, max_seq_len=len(ids))
    taps: list[list[torch.Tensor]] = [[] for _ in target_layers]
    for layer, seen in zip(target_layers, taps, strict=True):
        upstream.layers[layer].register_forward_pre_hook(
            lambda _, args, to=seen: to.append(args[0])
        )
    run_upstream(upstream, ids)
    return torch.cat([torch.cat(seen, 1)[0] for seen in taps], -1)


# --- The draft model ------------------------------------------------------------------------------


class TransformersDraft:
    """transformers' MuseGlimmerAssistantModel with a fused model's weights, eager, float32, driven
    as its DFlashTokenCandidateGenerator drives it; the head without multiplier and cap.

    incremental: one cache for all passes, rolled back after each as that class does it. Else a new
    cache a pass, filled with the whole text at once.
    """

    def __init__(self, model: FusedModel, incremental: bool) -> None:
        self.incremental = incremental
        self.embedding = dflash.dense(model.weights["token_embd"])
        self.head = dflash.dense(model.weights["output"])
        self.module = _assistant(model)
        self.cache: Any = None

    def _new_cache(self) -> Any:
        from transformers.cache_utils import DFlashCache

        cache = DFlashCache(config=self.module.config)
        cache.activate_past_recording()
        return cache

    @torch.no_grad()
    def logits(self, what: dflash.Script) -> list[torch.Tensor]:
        """Logits [B, vocab_size] of every pass."""
        logits, done = [], 0
        for step in what.passes:
            if self.cache is None or not self.incremental:
                self.cache, done = self._new_cache(), 0
            logits.append(self._logits(what.taps[done : step.length], done, step.block))
            self.cache.crop(-len(step.block))
            done = step.length
        self.cache = None
        return logits

    def _logits(self, taps: torch.Tensor, start: int, block: torch.Tensor) -> torch.Tensor:
        self.cache.set_previous_accepted_tokens(len(taps))
        hidden = self.module(
            noise_embeds=self.embedding[block][None],
            context_hidden_states=taps[None],
            position_ids=torch.arange(start, start + len(taps) + len(block))[None],
            cache=self.cache,
        ).last_hidden_state[0]
        return hidden @ self.head.T


def _assistant(model: FusedModel):
    from transformers.models import muse_glimmer_assistant as hf

    d = model.draft
    assert d is not None
    config = hf.MuseGlimmerAssistantConfig(
        hidden_size=d.dim,
        intermediate_size=d.ffn_dim,
        num_hidden_layers=d.n_layers,
        num_attention_heads=d.n_heads,
        num_key_value_heads=d.n_kv_heads,
        head_dim=d.head_dim,
        rms_norm_eps=d.eps,
        rope_parameters={"rope_type": "default", "rope_theta": d.rope_theta},
        max_position_embeddings=d.context_length,
        sliding_window=max(d.window, 1),
        layer_types=["sliding_attention" if s else "full_attention" for s in d.sliding],
        block_size=d.block_size,
        mask_token_id=d.mask_token_id,
        target_layer_ids=[layer - 1 for layer in d.target_layers],
    )
    config._attn_implementation = "eager"
    module = hf.MuseGlimmerAssistantModel(config).float().eval()
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {
        "encoder.fc": "fc",
        "encoder.output_norm_enc": "enc_output_norm",
        "norm": "output_norm",
    }
    for i in range(d.n_layers):
        state |= {f"layers.{i}.{theirs}": f"blk_{i}_{ours}" for theirs, ours in names.items()}
    weights = {f"{k}.weight": dflash.dense(model.weights[DRAFT + v]) for k, v in state.items()}
    _load(module, weights)
    return module
