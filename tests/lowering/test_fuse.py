"""fuse(): upstream's eager model, in each of its projection layouts, as the fused graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executorch.examples.models.muse_glimmer.model import model as upstream_model

from glimmer_ops.lowering import from_gguf, fuse
from glimmer_ops.oracle import load_upstream, upstream_config, upstream_logits
from support.graph import eager_logits

LAYOUTS = ["qkv", "qko", "apart"]
IDS = np.random.default_rng(1).integers(0, 1024, 60).tolist()


def _upstream(tiny, layout: str, gate_up: bool, dtype: torch.dtype):
    """A random upstream model of one layout; every layout gets the same weights."""
    config = upstream_config(tiny.config, max_seq_len=128)
    config.fuse_qkv, config.fuse_qko = layout == "qkv", layout == "qko"
    config.fuse_gate_up = gate_up
    torch.manual_seed(0)
    fused = upstream_config(tiny.config, max_seq_len=128)
    state = upstream_model.MuseGlimmerModel(fused).state_dict()
    for name, value in state.items():
        if "norm" in name:
            value.copy_(1 + 0.1 * torch.randn_like(value))
        else:
            value.copy_(torch.randn_like(value) / value.shape[-1] ** 0.5)
    if layout == "qko":
        state = upstream_model._split_fused_qkv_to_qko(state, config)
    if layout == "apart":
        state = upstream_model._split_fused_qkv(state, config)
    if not gate_up:
        state = upstream_model._split_gate_up(state, config)
    model = upstream_model.MuseGlimmerModel(config)
    model.load_state_dict(state)
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    return model.eval()


@torch.no_grad()
def _upstream_eager(model) -> np.ndarray:
    model = model.float()
    rows, chunk = [], model._sliding_window + 1
    for start in range(0, len(IDS), chunk):
        part = torch.tensor(IDS[start : start + chunk])
        embeds = model.tok_norm(model.embed_tokens(part[None]))
        positions = torch.arange(start, start + len(part))
        rows.append(model.prefill_from_embeds(embeds, positions)[0])
    return torch.cat(rows).numpy()


@pytest.mark.parametrize("gate_up", [True, False], ids=["gate_up", "gate-up"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_projection_layout(tiny_gguf, layout: str, gate_up: bool) -> None:
    model = _upstream(tiny_gguf("F16"), layout, gate_up, torch.float32)
    ours = eager_logits(fuse(model), IDS, chunk=16, exact=True)
    assert np.abs(ours - _upstream_eager(model)).max() < 5e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_weights_are_kept_as_they_are(tiny_gguf, dtype: torch.dtype) -> None:
    model = _upstream(tiny_gguf("F16"), "apart", True, dtype)
    fused = fuse(model)
    expected = {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert fused.weights["blk_0_attn_q"].qtype == expected
    assert (
        fused.weights["blk_0_attn_q"].data.nbytes
        == 2 * model.layers[0].self_attn.q_proj.weight.numel()
    )
    ours = eager_logits(fused, IDS, chunk=16, exact=True)
    assert np.abs(ours - _upstream_eager(model)).max() < 5e-4


def test_gguf_weights_through_upstreams_loader_are_the_files_bytes(tiny_gguf) -> None:
    """Upstream's loader and ours lead to the same graph: same raw rows, types and constants."""
    from executorch.examples.models.muse_glimmer.loaders.checkpoint_loader import load_gguf_model

    file = tiny_gguf("Q4_K_M")
    config = upstream_config(file.config, max_seq_len=128)
    model, _ = load_gguf_model(file.path, "mlx", config=config, activation_dtype=torch.float32)
    ours, theirs = from_gguf(file), fuse(model)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        assert weight.qtype == theirs.weights[name].qtype, name
        assert torch.equal(weight.data, theirs.weights[name].data), name
    assert ours.id == theirs.id
    a, b = ours.config, theirs.config
    assert a.sliding == b.sliding and a.window == b.window
    assert a.attn_scale == pytest.approx(b.attn_scale, rel=1e-7)


@pytest.mark.report("P6", "S6")
@pytest.mark.parametrize("chunk", [1, 16, 41])
def test_graph_from_gguf_equals_upstream(tiny_gguf, chunk: int) -> None:
    file = tiny_gguf("Q4_K_M")
    ours = eager_logits(from_gguf(file), IDS, chunk, exact=True)
    assert np.abs(ours - upstream_logits(file, IDS)).max() < 5e-4


def test_other_weight_types_are_refused_by_name(tiny_gguf) -> None:
    model = _upstream(tiny_gguf("F16"), "apart", True, torch.float32)
    model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(
        model.layers[1].mlp.down_proj.weight.double(), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: expected raw GGUF rows"):
        fuse(model)


def test_variants_without_a_gate_are_refused(tiny_gguf) -> None:
    model = load_upstream(tiny_gguf("F16"), max_seq_len=64)
    model.config.use_attn_o_gate = False
    with pytest.raises(ValueError, match=r"config\.use_attn_o_gate: expected True"):
        fuse(model)


def test_unequal_windows_are_refused(tiny_gguf) -> None:
    model = _upstream(tiny_gguf("F16"), "qkv", True, torch.float32)
    model.layers[0].self_attn.window_size = 7
    with pytest.raises(ValueError, match="layers: expected one window size"):
        fuse(model)
