"""Random but valid Muse Glimmer GGUF files: everything can be tried with no download.

A file has the official names, keys, types and shapes, and weights that keep the model well
conditioned: matrices are N(0, 1 / K), the gains of the pre-norms lie near 1 and those of the
post-norms near 0.25, so that rounding errors are not amplified from layer to layer, and the output
head is scaled so that logits differ by whole units and greedy decoding is decisive.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ._synth_file import (
    Filling,
    Plan,
    Progress,
    check_place,
    counting,
    plan_bytes,
    staged,
    uniform_gains,
    write,
)
from .config import ModelConfig, sliding_layers
from .gguf import ARCHITECTURE, DEFAULT_PERIOD, expected_tensors
from .tokenizer import byte_alphabet

QK_SCALE = 43.7840518911  # of the official checkpoint; attn_q_norm holds it over sqrt(head_dim)
LOGIT_STD = 4.5  # of the logits before the soft cap
POST_GAIN = 0.25  # mean gain of the post-norms
PATTERNS = ("array", "period", "none")
GATE_NAMES = ("attn_gate", "attn_output_gate")
# Quant -> (most matrices, attn_v and ffn_down of the layers that use more bits, output head)
QUANTS = {
    "F16": ("F16", "F16", "F16"),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q5_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"),
}
_FILE_TYPES = {
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K_M": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": gguf.LlamaFileType.MOSTLY_Q6_K,
}


def _f32(x: float) -> float:
    return float(np.float32(x))


def _preset(
    dim: int,
    n_layers: int,
    n_heads: int,
    ffn_dim: int,
    vocab_size: int,
    window: int,
    context_length: int,
) -> ModelConfig:
    return ModelConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=2,
        head_dim=128,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        eps=_f32(1e-5),
        rope_theta=5e5,
        window=window,
        sliding=sliding_layers(n_layers, DEFAULT_PERIOD),
        soft_cap=20.0,
        logit_scale=_f32(1 / math.sqrt(dim / 256)),
        q_scale=_f32(QK_SCALE / math.sqrt(128)),
        k_scale=1.0,
        context_length=context_length,
    )


# tiny: six layers, so that counting layers forward and backward differ, and a window shorter than
# a test prompt. mid: the real widths, so that every kernel shape of the real model is met.
PRESETS = {
    "tiny": _preset(512, 6, 8, 1536, 1024, 40, 4096),
    "mid": _preset(6656, 4, 32, 19968, 32768, 2048, 131072),
    "30b": _preset(6656, 52, 32, 19968, 202048, 2048, 131072),
}


def plan(preset: str, quant: str) -> Plan:
    """(name, row-major shape, type) of every tensor, in file order; nothing is written.

    `30b` with `Q4_K_M` has the types of the official 17 GB file: 365 Q4_K, 1 Q5_K, 52 Q6_K and
    313 F32 tensors. Raises ValueError for an unknown preset or quant.
    """
    check_choice("preset", preset, PRESETS)
    config = PRESETS[preset]
    return typed(expected_tensors(config), config.n_layers, quant)


def typed(shapes: dict[str, tuple[int, ...]], n_layers: int, quant: str) -> Plan:
    """The plan of tensors of these names and shapes: each with the type that the quant gives it."""
    check_choice("quant", quant, QUANTS)
    base, more, head = QUANTS[quant]
    tensors: Plan = []
    for name, shape in shapes.items():
        if len(shape) == 1:
            qtype = "F32"
        elif name == "output.weight":
            qtype = head
        elif name.endswith((".attn_v.weight", ".ffn_down.weight")) and _uses_more_bits(
            int(name.split(".")[1]), n_layers
        ):
            qtype = more
        else:
            qtype = base
        tensors.append((name, shape, qtype))
    return tensors


def synth(
    path: str | os.PathLike[str],
    preset: str,
    quant: str,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    pattern: str = "array",
    gate_name: str = "attn_gate",
) -> Path:
    """Write a random model; the same arguments give the same bytes, whatever the thread count.

    Memory stays below 256 MB whatever the preset. The file appears under its name only when it is
    complete: until then its bytes are in a hidden file beside it, which is removed on failure.

    `tiny` and `mid` draw every weight. `30b` draws and encodes about four million weights of each
    tensor; the rows after those repeat them with the super-blocks of 256 weights along K in
    another random order for each repeat, so that no two rows are equal. That makes it a matter of
    a minute or two, and changes neither the bytes a kernel reads nor the statistics of the weights.

    Args:
        preset: a key of `PRESETS`.
        quant: a key of `QUANTS`.
        seed: 0 or greater.
        progress: called with (tensor bytes written, tensor bytes in all).
        pattern: how the file tells its layer kinds: "array" of bools (as the official files),
            "period" (an integer) or "none" (no key).
        gate_name: the spelling of the output gate's tensors.

    Raises:
        ValueError: an argument is not one of its choices.
        OSError: the folder is missing, lacks the space, or cannot be written.
    """
    tensors = plan(preset, quant)
    check_choice("pattern", pattern, PATTERNS)
    check_choice("gate_name", gate_name, GATE_NAMES)
    check_seed(seed)
    target = Path(path)
    total = plan_bytes(tensors)
    check_place(target, total)
    with staged(target) as partial:
        write(
            partial,
            ARCHITECTURE,
            functools.partial(add_keys, preset=preset, quant=quant, pattern=pattern),
            tensors,
            filling(preset, seed),
            counting(progress, total),
            lambda name: name.replace(".attn_gate.", f".{gate_name}."),
        )
    return target


def check_seed(seed: int) -> None:
    if seed < 0:
        raise ValueError(f"seed: expected 0 or greater, found {seed}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, found {value!r}")


def _uses_more_bits(i: int, n_layers: int) -> bool:
    """Whether a K-quant "M" mix spends more bits on layer i: the first and last eighth, and every
    third between (26 of 52 layers), the rule of ggml's quantisation tool."""
    eighth = n_layers // 8
    return i < eighth or i >= 7 * n_layers // 8 or (i - eighth) % 3 == 2


def filling(preset: str, seed: int) -> Filling:
    """The weights of a preset's random model."""
    config = PRESETS[preset]
    return Filling(
        seed,
        functools.partial(_std, config),
        functools.partial(_gains, config),
        repeat=preset == "30b",
    )


def _std(config: ModelConfig, name: str, k: int) -> float:
    if name == "output.weight":
        # The normed hidden state has rms 1, so h @ W.T has std * sqrt(dim)
        return LOGIT_STD / (math.sqrt(config.dim) * config.logit_scale)
    return 1 / math.sqrt(k)


def _gains(
    config: ModelConfig, name: str, size: int, draw: np.random.Generator
) -> npt.NDArray[np.float32]:
    if ".attn_q_norm." in name:
        return np.full(size, config.q_scale, np.float32)
    if ".attn_k_norm." in name:
        return np.full(size, config.k_scale, np.float32)
    centre, spread = (POST_GAIN, POST_GAIN / 10) if ".post_" in name else (1.0, 0.1)
    return uniform_gains(size, centre, spread, draw)


# --- metadata ------------------------------------------------------------------------------------


def add_keys(writer: gguf.GGUFWriter, preset: str, quant: str, pattern: str) -> None:
    """Keys and vocabulary of a preset."""
    config = PRESETS[preset]
    writer.add_name(f"Muse Glimmer synthetic {preset} {quant}")
    add_types(writer, quant)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.dim)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_sliding_window(config.window)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_final_logit_softcapping(config.soft_cap)
    writer.add_logit_scale(config.logit_scale)
    key = f"{ARCHITECTURE}.attention.sliding_window_pattern"
    if pattern == "array":
        writer.add_array(key, list(config.sliding))
    elif pattern == "period":
        writer.add_uint32(key, DEFAULT_PERIOD)
    _add_tokenizer(writer, config.vocab_size)


def add_types(writer: gguf.GGUFWriter, quant: str) -> None:
    """The keys that tell the mix of weight types."""
    writer.add_file_type(_FILE_TYPES[quant])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


# Enough merges that a prompt meets multi-byte tokens, chained merges and leading spaces
_MERGES = (
    "t h|th e|Ġ the|i n|e r|a n|Ġ a|o n|r e|Ġ t|a t|e n|o r|i s|e s|in g|an d|Ġ and|o f|Ġ of"
    "|Ġt o|l l|o u|Ġ w|Ġ s|l o|s t|Ġ in|Ġ is|er s|in d|lo w|Ġw or|l d|Ġwor ld|h e|he ll|hell o"
    "|H e|He ll|Hell o|Ã ©|â Ģ"
)
_CONTROL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
)


_FIRST_CONTROL = 256 + len(_MERGES.split("|"))  # after the bytes and the merges
CONTROL_IDS = range(_FIRST_CONTROL, _FIRST_CONTROL + len(_CONTROL))


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = byte_alphabet()
    merges = _MERGES.split("|")
    for merge in merges:
        left, right = merge.split(" ")
        tokens.append(left + right)
    types = [gguf.TokenType.NORMAL] * len(tokens)
    first_control = len(tokens)
    tokens += _CONTROL
    types += [gguf.TokenType.CONTROL] * len(_CONTROL)
    unused = vocab_size - len(tokens)
    tokens += [f"[unused{i}]" for i in range(unused)]
    types += [gguf.TokenType.UNUSED] * unused
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(first_control + _CONTROL.index("<|begin_of_text|>"))
    writer.add_eos_token_id(first_control + _CONTROL.index("<|end_of_text|>"))
    writer.add_eot_token_id(first_control + _CONTROL.index("<|eot|>"))
