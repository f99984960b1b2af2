"""A small DFlash draft model with random weights, a script of passes, and both ways to run it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf as gguf_package
import torch

import glimmer_ops
from glimmer_ops.config import DraftConfig, ModelConfig
from glimmer_ops.kquant_encode import encode
from glimmer_ops.lowering import FusedModel, Weight
from glimmer_ops.lowering.dflash import DraftModel
from glimmer_ops.lowering.graph import DRAFT, PoolPages, draft_weight_names, make_pools

ROOT = Path(__file__).parents[2]
PAGE = 64
TARGET = ModelConfig(
    dim=256,
    n_layers=6,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    ffn_dim=512,
    vocab_size=384,
    eps=1e-5,
    rope_theta=5e5,
    window=40,
    sliding=(True,) * 6,
    soft_cap=20.0,
    logit_scale=0.19611613513,
    q_scale=3.87,
    k_scale=1.0,
    context_length=4096,
)
LAYERS = {
    "mixed": (True, True, False),
    "sliding": (True, True, True),
    "global": (False, False, False),
}


def draft_config(layers: str, **changes: object) -> DraftConfig:
    sliding = LAYERS[layers]
    config = DraftConfig(
        dim=256,
        n_layers=len(sliding),
        n_heads=8,
        n_kv_heads=2,
        head_dim=32,
        ffn_dim=512,
        eps=1e-5,
        rope_theta=5e5,
        window=40 if any(sliding) else 0,
        sliding=sliding,
        block_size=16,
        target_layers=(1, 3, 5),
        mask_token_id=TARGET.vocab_size - 1,
        context_length=4096,
    )
    config = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    config.validate()
    return config


def _shape(name: str, d: DraftConfig) -> tuple[int, ...]:
    q, kv = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
    matrices = {
        "fc": (d.dim, len(d.target_layers) * d.dim),
        "attn_q": (q, d.dim),
        "attn_k": (kv, d.dim),
        "attn_v": (kv, d.dim),
        "attn_output": (d.dim, q),
        "ffn_gate": (d.ffn_dim, d.dim),
        "ffn_up": (d.ffn_dim, d.dim),
        "ffn_down": (d.dim, d.ffn_dim),
    }
    vectors = {"attn_q_norm": (d.head_dim,), "attn_k_norm": (d.head_dim,)}
    part = name.removeprefix(DRAFT)
    part = part.split("_", 2)[2] if part.startswith("blk_") else part
    return matrices.get(part) or vectors.get(part) or (d.dim,)


@functools.cache
def random_draft(layers: str, qtype: str = "F16") -> FusedModel:
    """A draft model with its target's embedding and head, all matrices of one type. Its logits have
    a standard deviation near 1."""
    d, g = draft_config(layers), torch.Generator().manual_seed(1)
    shapes = {
        "token_embd": (TARGET.vocab_size, TARGET.dim),
        "output": (TARGET.vocab_size, TARGET.dim),
    } | {name: _shape(name, d) for name in draft_weight_names(d)}
    weights = {}
    for name, shape in shapes.items():
        random = torch.randn(shape, generator=g)
        if len(shape) == 1:
            weights[name] = Weight(1 + 0.3 * random, "F32")
        else:
            weights[name] = Weight(encode(random / shape[1] ** 0.5, qtype), qtype)
    return FusedModel(TARGET, weights, draft=d)


def dense(weight: Weight) -> torch.Tensor:
    """float32 values of a weight, as the gguf package decodes them."""
    if weight.data.dim() == 1:
        return weight.data.float()
    qtype = gguf_package.GGMLQuantizationType[weight.qtype]
    return torch.from_numpy(gguf_package.dequantize(weight.data.numpy(), qtype)).float()


# --- What is run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """Appends the text's tokens up to `length`, then denoises `block`: token ids int64 [B]."""

    length: int
    block: torch.Tensor


@dataclass(frozen=True)
class Script:
    """taps: float32 [tokens, n_taps · dim], what the target's layers give for the whole text."""

    taps: torch.Tensor
    passes: tuple[Pass, ...]


def script(
    target: ModelConfig = TARGET,
    draft: DraftConfig | None = None,
    passes: int = 72,
    first: int = 3,
) -> Script:
    """A text that grows by 1…16 tokens a pass, with blocks of 2…16, in random order, every number
    of each occurring once 17 passes are over; the first pass appends `first`."""
    d, g = draft or draft_config("mixed"), torch.Generator().manual_seed(2)

    def shuffled(low: int, high: int) -> list[int]:
        numbers: list[int] = []
        while len(numbers) < passes:
            numbers += (low + torch.randperm(high - low + 1, generator=g)).tolist()
        return numbers[:passes]

    new, sizes = shuffled(1, 16), shuffled(2, 16)
    new[0] = first
    lengths = torch.tensor(new).cumsum(0).tolist()
    blocks = []
    for size in sizes:
        block = torch.full((size,), d.mask_token_id)
        block[0] = torch.randint(0, target.vocab_size - 1, (1,), generator=g)
        blocks.append(block)
    # Layers deeper in the target have larger residuals: their order matters.
    scale = torch.arange(1, len(d.target_layers) + 1).repeat_interleave(d.dim)
    taps = torch.randn(lengths[-1], scale.numel(), generator=g) * scale
    return Script(taps, tuple(Pass(n, b) for n, b in zip(lengths, blocks, strict=True)))


# --- The fused graph ------------------------------------------------------------------------------


class Runner:
    """The fused graph in eager torch, on float32 pools that hold `fill` where nothing was written,
    their pages in random order. The exact path."""

    def __init__(
        self,
        model: FusedModel,
        tokens: int,
        slots: int = 1,
        graph: type[DraftModel] = DraftModel,
        fill: float = torch.nan,
    ) -> None:
        pages = -(-tokens // PAGE)
        pools = make_pools(
            model.config,
            model.draft,
            PoolPages(0, 0, slots * pages, slots * pages),
            torch.float32,
        )
        for pool in pools.values():
            pool.fill_(fill)
        self.graph = graph(model.config, model.weights, pools, model.id, model.draft)
        g = torch.Generator().manual_seed(slots)
        self.tables = [
            torch.randperm(slots * pages, generator=g).int().view(slots, pages) for _ in range(2)
        ]

    def inject(self, taps: torch.Tensor, start: int, slot: int = 0, chunk: int = 16) -> None:
        """Appends taps [n, ...] of the text's tokens from `start` on."""
        for i in range(0, len(taps), chunk):
            part = taps[i : i + chunk]
            pos = start + i + torch.arange(len(part))
            with torch.no_grad(), glimmer_ops.use_exact(True):
                self.graph.inject(part, pos, torch.full_like(pos, slot), *self.tables)

    def denoise(self, ids: torch.Tensor, pos: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), glimmer_ops.use_exact(True):
            return self.graph.denoise(ids, pos, slot, *self.tables)

    def block(self, ids: torch.Tensor, length: int, slot: int = 0) -> torch.Tensor:
        """Logits [B, vocab_size] of a block behind `length` tokens of text."""
        pos = length + torch.arange(len(ids))
        return self.denoise(ids, pos, torch.full_like(pos, slot))


def fused_logits(
    model: FusedModel,
    what: Script,
    graph: type[DraftModel] = DraftModel,
    chunks: Sequence[int] = (16,),
    fill: float = torch.nan,
) -> list[torch.Tensor]:
    """Logits of every pass. chunks: how many tokens are injected at once, in turn."""
    runner = Runner(model, len(what.taps) + 16, graph=graph, fill=fill)
    logits, done = [], 0
    for i, step in enumerate(what.passes):
        runner.inject(what.taps[done : step.length], done, chunk=chunks[i % len(chunks)])
        logits.append(runner.block(step.block, step.length))
        done = step.length
    return logits


def faulty_graph(file: str, old: str, new: str) -> type[DraftModel]:
    """DraftModel of a copy of lowering/dflash.py in which `old` is replaced."""
    source = (ROOT / file).read_text()
    assert source.count(old) == 1, f"{file}: expected {old!r} once"
    module = types.ModuleType("glimmer_ops.lowering.dflash_faulty")
    module.__package__ = "glimmer_ops.lowering"
    exec(compile(source.replace(old, new), file, "exec"), module.__dict__)
    return module.DraftModel


def distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Largest |difference| of two runs' logits; infinite where one is not a number."""
    worst = max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
    return worst if worst == worst else float("inf")
