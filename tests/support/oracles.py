"""Judges from other projects, run live on the same GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import gguf as gguf_package
import numpy as np
import torch

from glimmer_ops.config import ModelConfig
from glimmer_ops.gguf import GGUFModel


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


@torch.no_grad()
def transformers_logits(model: GGUFModel, ids: Sequence[int]) -> np.ndarray:
    """float32 [len(ids), vocab_size] of transformers' MuseGlimmer text model, eager, float32."""
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
    missing, unexpected = hf.load_state_dict(state, strict=False)
    assert not unexpected and all("inv_freq" in m for m in missing), (missing, unexpected)
    hidden = hf(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
    logits = hidden @ dense(model, "output").T
    return (torch.tanh(logits * c.logit_scale / c.soft_cap) * c.soft_cap).numpy()
