"""Weights of a target and a draft that agree: both copy, and only the target is disturbed.

The text that the pair writes repeats what stands 16 tokens before, changed by `successor`:
token[i] = successor(token[i - 16]). A token's code is 256 random projections of its embedding.

Target, layer 0: embeddings have a constant first component, and of the first layer's Q and K only
that component's columns are not 0. So every query is one vector and every key another; rotated by
their positions, they match where the key is 15 positions behind. Values are codes; the output
projection spreads them over the residual, where the post-norm's gain g sets their size, and row
successor(t) of the output head recognises t's code. All else stays random. To the head that is
noise of known size, so g follows from the wanted share of tokens at which the noise wins.

Draft: `fc` passes on the first tap, the residual after that layer, which still holds the token's
embedding. Its first layer does the same with keys 16 positions behind the token to be named, which
are all of the context, and writes the codes at full size over the small raw embedding of a mask
token. Its other layers stay random, too small to disturb.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ._synth_file import GROUP, Rows, normal
from .config import DraftConfig, ModelConfig
from .synth import CONTROL_IDS, LOGIT_STD, POST_GAIN

PERIOD = 16  # tokens between one and its copy: a block's rows never see each other's sources
CODE = 256  # dimensions of a code: two heads
CONSTANT = 2.0  # the first component of a normed embedding
PAIRS = 8  # rotary pairs in use, those of the highest frequencies: no false peak within 2048
DRAFT_GAIN = 2.0  # of the draft's Q and K norms: scores peak at 45
CLEAR = 12.0  # more than any error rate needs, less than the codes' own overlap allows
_SLAB = 64  # rows of the head computed at once
_STREAM = 1 << 31 | 1  # of draws, apart from the random weights'
_CODES, _SPREAD, _EMBEDDINGS = range(3)


def successor(token: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The token that follows 16 later: the next in its group of 16 ids, the last's is the first.

    In groups with control tokens ids 2i and 2i + 1 take turns instead, so that no token of ordinary
    text, nor the one that begins it, leads to one that ends it.
    """
    group = token // GROUP
    paired = (group >= CONTROL_IDS[0] // GROUP) & (group <= CONTROL_IDS[-1] // GROUP)
    return np.where(paired, token ^ 1, group * GROUP + (token + 1) % GROUP)


@dataclass(frozen=True)
class Computed:
    """Matrices, as a function of the row span, and gains, by tensor name."""

    matrices: Mapping[str, Rows]
    norms: Mapping[str, npt.NDArray[np.float32]]


def agree(
    target: ModelConfig, draft: DraftConfig, seed: int, error_rate: float
) -> tuple[Computed, Computed]:
    """What the target's and the draft's files must hold; see the top of this file.

    The greedy tokens of the two differ with a probability of about `error_rate`, in [0, 1).
    """
    codes = _Codes(target, seed)
    gain = copy_gain(target, error_rate)
    return _target(target, codes, gain), _draft(draft, codes)


class _Codes:
    """Token embeddings, and the projections to and from codes."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.dim, self.seed = config.dim, seed
        self.make = self._projection(_CODES, CODE, config.dim)  # [CODE, dim]: codes of rms 1
        self.make[:, 0] = 0  # the constant tells nothing
        self.spread = self._projection(_SPREAD, config.dim, CODE)  # [dim, CODE]: rms 1 again
        self.spread[0] = 0  # and stays

    def _projection(self, which: int, rows: int, k: int) -> torch.Tensor:
        return normal(rows, k, 1 / math.sqrt(k), self.seed, _STREAM, which)

    def embeddings(self, start: int, stop: int) -> torch.Tensor:
        """float32 rows [start, stop) of the embedding, of rms 1 / sqrt(dim); start is a multiple
        of GROUP."""
        std = math.sqrt((1 - CONSTANT**2 / self.dim) / self.dim)  # the constant has its share
        rows = torch.empty(stop - start, self.dim)
        for first in range(start, stop, GROUP):
            count = min(GROUP, stop - first)
            group = normal(count, self.dim, std, self.seed, _STREAM, _EMBEDDINGS, first)
            rows[first - start : first - start + count] = group
        rows[:, 0] = CONSTANT / math.sqrt(self.dim)
        return rows

    def head(self, scale: float, start: int, stop: int) -> torch.Tensor:
        """float32 rows [start, stop) of the output head, start a multiple of GROUP."""
        make, spread = self.make.double().T, self.spread.double().T * scale
        out = torch.empty(stop - start, self.dim)
        for first in range(start, stop, _SLAB):
            tokens = np.arange(first, min(first + _SLAB, stop))
            # In float64, so as not to depend on how many threads add up
            rows = self.embeddings(first, first + len(tokens)).double()
            codes = rows / rows.square().mean(1, keepdim=True).sqrt() @ make
            out[successor(tokens) - start] = (codes @ spread).float()
        return out


def _target(config: ModelConfig, codes: _Codes, gain: float) -> Computed:
    heads, group = config.n_heads, config.n_heads // config.n_kv_heads
    query, key = match(config.rope_theta, config.head_dim, PERIOD - 1, interleaved=True)
    gains = np.full(config.dim, gain, np.float32)
    gains[0] = 0
    scale = head_scale(config, gain)
    layer = "blk.0."
    return Computed(
        {
            "token_embd.weight": codes.embeddings,
            f"{layer}attn_q.weight": _first_column(query.repeat(heads), config.dim),
            f"{layer}attn_k.weight": _first_column(key.repeat(config.n_kv_heads), config.dim),
            f"{layer}attn_v.weight": _padded(codes.make, config.n_kv_heads * config.head_dim),
            f"{layer}attn_gate.weight": lambda start, stop: torch.zeros(stop - start, config.dim),
            f"{layer}attn_output.weight": _columns(codes.spread, heads, group, config.head_dim),
            "output.weight": functools.partial(codes.head, scale),
        },
        {f"{layer}post_attention_norm.weight": gains},
    )


def _draft(config: DraftConfig, codes: _Codes) -> Computed:
    heads, group = config.n_heads, config.n_heads // config.n_kv_heads
    query, key = match(config.rope_theta, config.head_dim, PERIOD, interleaved=False)
    gains = np.full(config.head_dim, DRAFT_GAIN, np.float32)
    layer = "blk.0."
    return Computed(
        {
            "fc.weight": _first_tap(config.dim, len(config.target_layers)),
            f"{layer}attn_q.weight": _first_column(query.repeat(heads), config.dim),
            f"{layer}attn_k.weight": _first_column(key.repeat(config.n_kv_heads), config.dim),
            f"{layer}attn_v.weight": _padded(codes.make, config.n_kv_heads * config.head_dim),
            f"{layer}attn_output.weight": _columns(codes.spread, heads, group, config.head_dim),
        },
        {f"{layer}attn_q_norm.weight": gains, f"{layer}attn_k_norm.weight": gains},
    )


def match(
    theta: float, head_dim: int, distance: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A query and a key, float32 [head_dim], whose rotated product is largest where the key is
    `distance` positions behind."""
    pair = torch.arange(PAIRS)
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + head_dim // 2)
    phase = distance * theta ** (-2.0 * pair / head_dim)
    query, key = torch.zeros(head_dim), torch.zeros(head_dim)
    query[first] = 1
    key[first], key[second] = torch.cos(phase), torch.sin(phase)
    return query, key


def _first_column(column: torch.Tensor, k: int) -> Rows:
    def rows(start: int, stop: int) -> torch.Tensor:
        out = torch.zeros(stop - start, k)
        out[:, 0] = column[start:stop]
        return out

    return rows


def _padded(matrix: torch.Tensor, n: int) -> Rows:
    """The rows of a matrix, and 0 up to n."""

    def rows(start: int, stop: int) -> torch.Tensor:
        out = torch.zeros(stop - start, matrix.shape[1])
        part = matrix[start:stop]
        out[: len(part)] = part
        return out

    return rows


def _columns(spread: torch.Tensor, heads: int, group: int, head_dim: int) -> Rows:
    """The output projection that reads a code from the first query heads of the kv heads that hold
    it, and nothing from the others."""

    def rows(start: int, stop: int) -> torch.Tensor:
        out = torch.zeros(stop - start, heads, head_dim)
        parts = spread[start:stop].view(stop - start, -1, head_dim)
        out[:, : parts.shape[1] * group : group] = parts
        return out.flatten(1)

    return rows


def _first_tap(dim: int, taps: int) -> Rows:
    def rows(start: int, stop: int) -> torch.Tensor:
        out = torch.zeros(stop - start, taps * dim)
        span = torch.arange(start, stop)
        out[span - start, span] = 1
        return out

    return rows


# --- noise ---------------------------------------------------------------------------------------


def residual_noise(config: ModelConfig) -> float:
    """rms of the last residual without the copied code: the embedding and the random branches."""
    branches = 2 * config.n_layers - 1
    return math.sqrt(1 + branches * POST_GAIN**2)


def error_probability(signal: float, vocab_size: int) -> float:
    """That one of vocab_size - 1 noisy logits beats a noisy one that is higher by `signal`, in
    units of the noise's deviation."""
    x = np.linspace(-9, 9, 3601)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    below = 0.5 * torch.special.erfc(torch.from_numpy(-(x + signal) / math.sqrt(2))).numpy()
    # 1 - below^(n - 1) without cancellation
    beaten = -np.expm1((vocab_size - 1) * np.log(np.maximum(below, 1e-300)))
    return float(np.sum(density * beaten) * (x[1] - x[0]))


def copy_gain(config: ModelConfig, error_rate: float) -> float:
    """The gain of layer 0's post-norm at which a share `error_rate` of greedy tokens is not the
    copy's successor."""
    low, high = 0.0, CLEAR
    for _ in range(60):
        middle = (low + high) / 2
        if error_probability(middle, config.vocab_size) > max(error_rate, 1e-6):
            low = middle
        else:
            high = middle
    # 1 / signal² = (noise / (gain * sqrt(dim)))² + 1 / CODE, the latter the codes' own overlap
    signal = (low + high) / 2
    return residual_noise(config) / math.sqrt(config.dim * (1 / signal**2 - 1 / CODE))


def head_scale(config: ModelConfig, gain: float) -> float:
    """Deviation of the head's entries, which are those of a random head unless the copied token's
    logit then exceeded the soft cap."""
    total = math.hypot(residual_noise(config), gain)
    winner = config.logit_scale * config.dim * gain / total  # at scale 1
    spread = config.logit_scale * math.sqrt(config.dim)
    return min(LOGIT_STD / spread, config.soft_cap / winner if winner > 0 else math.inf)
