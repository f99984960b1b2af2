"""Hyper-parameters of a Muse Glimmer decoder."""

from __future__ import annotations

import dataclasses
import math

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
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads: expected a multiple of n_kv_heads ({self.n_kv_heads}), "
                f"found {self.n_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, found {self.head_dim}")
        if len(self.sliding) != self.n_layers:
            raise ValueError(
                f"sliding: expected n_layers ({self.n_layers}) entries, found {len(self.sliding)}"
            )
        for i, kind in enumerate(self.sliding):
            if not isinstance(kind, bool):
                raise ValueError(f"sliding[{i}]: expected a bool, found {kind!r}")
        if any(self.sliding) and self.window < 1:
            raise ValueError(
                f"window: expected at least 1 where a layer is sliding, found {self.window}"
            )


def _check_int(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}: expected an integer of at least {low}, found {value!r}")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}: expected a number, found {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a finite positive number, found {value!r}")
