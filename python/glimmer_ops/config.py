"""Hyper-parameters of a Muse Glimmer decoder and of its DFlash draft model."""

from __future__ import annotations

import dataclasses
import math

MAX_BLOCK = 16  # tokens of a draft block
POST_NORM_EPS = 1e-8  # fixed by the architecture: no GGUF key holds it


def sliding_layers(n_layers: int, period: int) -> tuple[bool, ...]:
    """Layer kinds for a period, True = sliding window with RoPE, False = global without RoPE.

    Muse Glimmer counts layers backward: layer i is global iff (n_layers - 1 - i) % period == 0,
    so the last layer is always global.
    """
    return tuple((n_layers - 1 - i) % period != 0 for i in range(n_layers))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of the decoder; see `validate` for what must hold.

    Sizes count elements, `window` and `context_length` count tokens. The attention score is
    `attn_scale` * dot(rms_norm(q), rms_norm(k)), and
    logits = soft_cap * tanh(logit_scale * (h @ W.T) / soft_cap).
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    eps: float
    rope_theta: float
    window: int
    sliding: tuple[bool, ...]
    soft_cap: float
    logit_scale: float
    q_scale: float
    k_scale: float
    context_length: int
    post_eps: float = POST_NORM_EPS

    @property
    def attn_scale(self) -> float:
        """Multiplier of dot(rms_norm(q), rms_norm(k)): both gains and 1 / sqrt(head_dim)."""
        return self.q_scale * self.k_scale / math.sqrt(self.head_dim)

    def validate(self) -> None:
        """Raise ValueError naming the first field that cannot describe a model."""
        for name in (
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "ffn_dim",
            "vocab_size",
            "context_length",
        ):
            _check_int(name, getattr(self, name), 1)
        _check_int("window", self.window, 0)
        for name in (
            "eps",
            "post_eps",
            "rope_theta",
            "soft_cap",
            "logit_scale",
            "q_scale",
            "k_scale",
        ):
            _check_positive(name, getattr(self, name))
        _check_heads(self)
        _check_sliding(self)


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Shape and constants of a DFlash draft model; see `validate` for what must hold.

    It denoises a block of at most `block_size` tokens at once: the last token and mask tokens,
    which attend to each other and to keys and values made from the target's hidden states. Those
    are tapped before the target's layers `target_layers`. On a layer with `sliding` a query sees
    the keys at most `window` positions behind it: inclusive, unlike the target's. Embedding and
    head are the target's.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    eps: float
    rope_theta: float
    window: int
    sliding: tuple[bool, ...]
    block_size: int
    target_layers: tuple[int, ...]
    mask_token_id: int
    context_length: int

    @property
    def attn_scale(self) -> float:
        """Multiplier of dot(q, k), both normed with their gains."""
        return 1 / math.sqrt(self.head_dim)

    def validate(self) -> None:
        """Raise ValueError naming the first field that cannot describe a draft model."""
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim")
        for name in (*sizes, "context_length"):
            _check_int(name, getattr(self, name), 1)
        _check_int("mask_token_id", self.mask_token_id, 0)
        _check_int("window", self.window, 0)
        for name in ("eps", "rope_theta"):
            _check_positive(name, getattr(self, name))
        _check_heads(self)
        _check_sliding(self)
        if not isinstance(self.block_size, int) or not 2 <= self.block_size <= MAX_BLOCK:
            raise ValueError(
                f"block_size: expected an integer of 2 to {MAX_BLOCK}, found {self.block_size!r}"
            )
        if any(self.sliding) and self.window < self.block_size:
            raise ValueError(
                f"window: expected at least block_size ({self.block_size}), found {self.window}"
            )
        if not self.target_layers:
            raise ValueError("target_layers: expected at least one layer, found none")
        for i, layer in enumerate(self.target_layers):
            _check_int(f"target_layers[{i}]", layer, 0)
        if list(self.target_layers) != sorted(set(self.target_layers)):
            raise ValueError(
                f"target_layers: expected ascending layers, found {list(self.target_layers)}"
            )


def check_draft(draft: DraftConfig, target: ModelConfig) -> None:
    """Raise ValueError, naming the field, unless the draft model fits the target."""
    if draft.dim != target.dim:
        raise ValueError(f"draft: dim: expected the target's {target.dim}, found {draft.dim}")
    if draft.mask_token_id >= target.vocab_size:
        raise ValueError(
            f"draft: mask_token_id: expected an id below the target's vocab_size "
            f"({target.vocab_size}), found {draft.mask_token_id}"
        )
    if draft.target_layers[-1] >= target.n_layers:
        raise ValueError(
            f"draft: target_layers: expected layers below the target's n_layers "
            f"({target.n_layers}), found {draft.target_layers[-1]}"
        )


def _check_heads(config: ModelConfig | DraftConfig) -> None:
    if config.n_heads % config.n_kv_heads:
        raise ValueError(
            f"n_heads: expected a multiple of n_kv_heads ({config.n_kv_heads}), "
            f"found {config.n_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim: expected an even number, found {config.head_dim}")


def _check_sliding(config: ModelConfig | DraftConfig) -> None:
    if len(config.sliding) != config.n_layers:
        raise ValueError(
            f"sliding: expected n_layers ({config.n_layers}) entries, found {len(config.sliding)}"
        )
    for i, kind in enumerate(config.sliding):
        if not isinstance(kind, bool):
            raise ValueError(f"sliding[{i}]: expected a bool, found {kind!r}")
    if any(config.sliding) and config.window < 1:
        raise ValueError(
            f"window: expected at least 1 where a layer is sliding, found {config.window}"
        )


def _check_int(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}: expected an integer of at least {low}, found {value!r}")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}: expected a number, found {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a finite positive number, found {value!r}")
