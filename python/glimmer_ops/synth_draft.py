"""Random but valid DFlash draft models, and pairs of a target and a draft that fits it.

A draft with random weights agrees with a random target about once in a vocabulary. So that every
acceptance can be tried, a pair can also be built to agree (`error_rate`): see `_synth_copy`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from . import synth
from ._synth_copy import Computed, agree
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
from .config import MAX_BLOCK, DraftConfig
from .gguf import ARCHITECTURE, DRAFT_ARCHITECTURE, expected_draft_tensors

BRANCH_SCALE = 0.25  # of attn_output and ffn_down: a draft has no post-norms to tame its branches
_STREAM = (1 << 31,)  # of draws, apart from the target's


def _preset(
    preset: str, n_kv_heads: int, sliding: tuple[bool, ...], target_layers: tuple[int, ...]
) -> DraftConfig:
    """The draft of a target preset: what they share is taken from there."""
    target = synth.PRESETS[preset]
    return DraftConfig(
        dim=target.dim,
        n_layers=len(sliding),
        n_heads=target.n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=target.head_dim,
        ffn_dim=target.ffn_dim,
        eps=target.eps,
        rope_theta=target.rope_theta,
        window=target.window,
        sliding=sliding,
        block_size=MAX_BLOCK,
        target_layers=target_layers,
        mask_token_id=target.vocab_size - 1,
        context_length=target.context_length,
    )


# tiny has a global layer, so that both kinds are met; 30b is the official draft's shape.
DRAFT_PRESETS = {
    "tiny": _preset("tiny", 4, (True, True, False), (1, 3, 5)),
    "mid": _preset("mid", 8, (True, True), (1, 2)),
    "30b": _preset("30b", 8, (True,) * 5, (2, 14, 26, 38, 50)),
}
AGREEING = ("tiny", "mid")  # presets whose pair can be built to agree


def draft_plan(preset: str, quant: str) -> Plan:
    """(name, row-major shape, type) of every tensor, in file order; nothing is written.

    Raises ValueError for an unknown preset or quant.
    """
    synth.check_choice("preset", preset, DRAFT_PRESETS)
    config = DRAFT_PRESETS[preset]
    return synth.typed(expected_draft_tensors(config), config.n_layers, quant)


def synth_pair(
    path: str | os.PathLike[str],
    draft_path: str | os.PathLike[str],
    preset: str,
    quant: str,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    error_rate: float | None = None,
) -> tuple[Path, Path]:
    """Write a random target and a draft that fits it.

    As `synth.synth`, which gives the same target where no error rate is asked for. The files take
    their names when both are complete; only a failure of the renaming itself can leave one.

    Args:
        error_rate: build the pair to agree: the share of greedy tokens, 0 or greater and below 1,
            of which the draft names another than the target. Only for the presets `AGREEING`.

    Raises:
        ValueError: an argument is not one of its choices.
        OSError: a folder is missing, lacks the space, or cannot be written.
    """
    plans = synth.plan(preset, quant), draft_plan(preset, quant)
    synth.check_seed(seed)
    target, draft = Path(path), Path(draft_path)
    if target.resolve() == draft.resolve():
        raise ValueError(f"draft_path: expected another file than the target's, found {draft}")
    fillings = synth.filling(preset, seed), _filling(preset, seed)
    if error_rate is not None:
        _check_rate(error_rate, preset)
        fillings = _agreeing(preset, seed, error_rate)
    sizes = [plan_bytes(plan) for plan in plans]
    report = counting(progress, sum(sizes))
    check_place(target, sizes[0])
    check_place(draft, sum(sizes) if _one_disk(target, draft) else sizes[1])
    with staged(target) as target_part, staged(draft) as draft_part:
        keys = functools.partial(synth.add_keys, preset=preset, quant=quant, pattern="array")
        write(target_part, ARCHITECTURE, keys, plans[0], fillings[0], report)
        keys = functools.partial(_add_keys, preset=preset, quant=quant)
        write(draft_part, DRAFT_ARCHITECTURE, keys, plans[1], fillings[1], report)
    return target, draft


def _one_disk(*paths: Path) -> bool:
    return len({os.stat(path.absolute().parent).st_dev for path in paths}) == 1


def _check_rate(error_rate: float, preset: str) -> None:
    if not 0 <= error_rate < 1:
        raise ValueError(f"error_rate: expected 0 or greater and below 1, found {error_rate}")
    if preset not in AGREEING:
        raise ValueError(
            f"error_rate: expected one of the presets {', '.join(AGREEING)}, found {preset!r}"
        )


def _agreeing(preset: str, seed: int, error_rate: float) -> tuple[Filling, Filling]:
    configs = synth.PRESETS[preset], DRAFT_PRESETS[preset]
    target, draft = agree(*configs, seed, error_rate)
    return _with(synth.filling(preset, seed), target), _with(_filling(preset, seed), draft)


def _with(filling: Filling, computed: Computed) -> Filling:
    return dataclasses.replace(filling, matrices=computed.matrices, norms=computed.norms)


def _filling(preset: str, seed: int) -> Filling:
    return Filling(seed, _std, _gains, repeat=preset == "30b", stream=_STREAM)


def _std(name: str, k: int) -> float:
    branch = name.endswith((".attn_output.weight", ".ffn_down.weight"))
    return (BRANCH_SCALE if branch else 1.0) / math.sqrt(k)


def _gains(name: str, size: int, draw: np.random.Generator) -> npt.NDArray[np.float32]:
    # Those of Q and K differ by dimension, so that one who leaves them out is found
    return uniform_gains(size, 1.0, 0.3 if "_q_norm" in name or "_k_norm" in name else 0.1, draw)


def _add_keys(writer: gguf.GGUFWriter, preset: str, quant: str) -> None:
    config = DRAFT_PRESETS[preset]
    writer.add_name(f"Muse Glimmer synthetic {preset} {quant} draft")
    synth.add_types(writer, quant)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.dim)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_sliding_window(config.window)
    prefix = DRAFT_ARCHITECTURE
    writer.add_array(f"{prefix}.attention.sliding_window_pattern", list(config.sliding))
    writer.add_uint32(f"{prefix}.block_size", config.block_size)
    writer.add_array(f"{prefix}.target_layers", list(config.target_layers))
    writer.add_mask_token_id(config.mask_token_id)
