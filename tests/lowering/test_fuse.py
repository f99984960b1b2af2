"""fuse(): upstream's eager model, in each of its projection layouts, as the fused graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executorch.examples.models.muse_glimmer.model import dflash_model
from executorch.examples.models.muse_glimmer.model import model as upstream_model

from glimmer_ops.gguf import load, load_draft
from glimmer_ops.lowering import from_gguf, fuse
from glimmer_ops.oracle import load_upstream, upstream_config, upstream_logits
from glimmer_ops.synth_draft import synth_pair
from support.dflash import distance, fused_logits, script
from support.graph import eager_logits
from support.oracles import TransformersDraft

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


# --- With a draft model ---------------------------------------------------------------------------


def _upstream_draft(dtype: torch.dtype = torch.float32, **settings):
    """A random upstream draft model, of the dims of the tiny target."""
    defaults = {"n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64, "ffn_dim": 768}
    defaults |= {"dim": 512, "target_layers": [1, 3, 5], "mask_token_id": 1023}
    defaults |= {"sliding_window": 40, "sliding_window_pattern": [True, False, True]}
    config = dflash_model.DFlashConfig(**(defaults | settings))
    torch.manual_seed(0)
    draft = dflash_model.DFlashDraftModel(config, max_context_length=256)
    for name, parameter in draft.named_parameters():
        random = torch.randn_like(parameter)
        matrix = parameter.dim() > 1
        parameter.data = (random / parameter.shape[-1] ** 0.5 if matrix else 1 + 0.1 * random).to(
            torch.float32 if "norm" in name else dtype
        )
    return draft.eval().requires_grad_(False)


@pytest.mark.parametrize("quant", ["F16", "Q4_K_M"])
def test_a_draft_through_upstreams_loader_is_the_files(quant: str, tmp_path) -> None:
    """Same rows, types and constants. Upstream casts what is not quantised to its activation type:
    in float16, F16 rows stay as they are and gains are rounded."""
    from executorch.examples.models.muse_glimmer.loaders.dflash_loader import load_dflash_gguf

    files = synth_pair(tmp_path / "t.gguf", tmp_path / "d.gguf", "tiny", quant)
    target, draft = load(files[0]), load_draft(files[1])
    dtype = torch.float16 if quant == "F16" else torch.float32
    upstream, _ = load_dflash_gguf(str(draft.path), "mlx", activation_dtype=dtype)
    ours, theirs = from_gguf(target, draft), fuse(load_upstream(target, max_seq_len=64), upstream)
    assert ours.draft == theirs.draft
    assert ours.weights.keys() == theirs.weights.keys()
    names = [n for n in ours.weights if n.startswith("draft_")]
    assert len(names) == 3 + 3 * 11
    for name in names:
        a, b = ours.weights[name], theirs.weights[name]
        assert a.qtype == b.qtype, name
        rounded = a.data.to(dtype) if a.data.dim() == 1 else a.data
        assert torch.equal(rounded, b.data.to(rounded.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_upstream_draft_drafts_as_transformers(tiny_gguf, dtype: torch.dtype) -> None:
    fused = fuse(load_upstream(tiny_gguf("F16"), max_seq_len=64), _upstream_draft(dtype))
    what = script(fused.config, fused.draft, passes=24)
    oracle = TransformersDraft(fused, incremental=False).logits(what)
    assert distance(fused_logits(fused, what), oracle) < 5e-4


@pytest.mark.parametrize("window", [None, 40])
def test_a_draft_without_a_pattern_is_global(tiny_gguf, window: int | None) -> None:
    """And drafts as upstream's own model, which differs on a sliding layer past its window."""
    target = load_upstream(tiny_gguf("F16"), max_seq_len=64)
    draft = _upstream_draft(sliding_window=window, sliding_window_pattern=None)
    fused = fuse(target, draft)
    assert fused.draft.sliding == (False,) * 3 and fused.draft.window == 0
    what, oracle, done = script(fused.config, fused.draft, passes=24), [], 0
    for step in what.passes:
        embeds, new = target.embed_tokens(step.block)[None], what.taps[None, done : step.length]
        hidden = draft(embeds, new, torch.tensor([done]))
        oracle.append(target.lm_head(hidden)[0])
        done = step.length
    assert distance(fused_logits(fused, what), oracle) < 5e-4


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"dim": 256}, "draft: dim: expected the target's 512, found 256"),
        ({"mask_token_id": 1024}, r"draft: mask_token_id: .*\(1024\), found 1024"),
        ({"target_layers": [1, 6]}, r"draft: target_layers: .*\(6\), found 6"),
        ({"target_layers": [3, 1]}, r"draft: target_layers: expected ascending layers"),
        ({"block_size": 17}, "draft: block_size: expected an integer of 2 to 16, found 17"),
        ({"sliding_window": 8}, r"draft: window: expected at least block_size \(16\), found 8"),
        ({"head_dim": 33}, "draft: head_dim: expected an even number, found 33"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_draft_that_does_not_fit_is_refused(tiny_gguf, settings, message: str) -> None:
    target = load_upstream(tiny_gguf("F16"), max_seq_len=64)
    with pytest.raises(ValueError, match=message):
        fuse(target, _upstream_draft(**settings))


def test_other_weight_types_of_a_draft_are_refused_by_name(tiny_gguf) -> None:
    target, draft = load_upstream(tiny_gguf("F16"), max_seq_len=64), _upstream_draft()
    draft.layers[2].self_attn.k_proj.double()
    with pytest.raises(ValueError, match=r"draft\.layers\.2\.self_attn\.k_proj: expected raw GG"):
        fuse(target, draft)
