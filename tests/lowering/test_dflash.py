"""The fused draft model against transformers' MuseGlimmerAssistantModel, and the target's taps."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

import glimmer_ops
from glimmer_ops.gguf import GGUFModel, load, load_draft
from glimmer_ops.lowering import FusedModel, from_gguf
from glimmer_ops.lowering.dflash import DRAFT_METHODS
from glimmer_ops.lowering.graph import METHODS, PoolPages, make_pools
from glimmer_ops.synth_draft import synth_pair
from mutation.faults import DRAFT_FAULTS, Fault
from support.dflash import (
    LAYERS,
    PAGE,
    TARGET,
    Runner,
    distance,
    draft_config,
    faulty_graph,
    fused_logits,
    random_draft,
    script,
)
from support.oracles import TransformersDraft, transformers_taps, upstream_taps

BOUND = 5e-4  # of logits whose standard deviation is 1
TARGET_IDS = np.random.default_rng(3).integers(0, 1024, 100).tolist()
TAPPED = (0, 2, 3, 5)
METHOD_WITH_TAPS = {
    "decode": "target_decode",
    "forward_from_embeddings": "target_forward_from_embeddings",
}


def test_the_script_runs_far_past_the_window_with_every_size() -> None:
    what = script()
    lengths = [0, *(p.length for p in what.passes)]
    assert lengths[-1] > 10 * TARGET.window
    assert sum(n > TARGET.window for n in lengths) >= 64
    assert {b - a for a, b in zip(lengths, lengths[1:], strict=False)} == set(range(1, 17))
    assert {len(p.block) for p in what.passes} == set(range(2, 17))


@pytest.mark.parametrize("qtype", ["F16", "Q4_K"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("incremental", [True, False], ids=str)
def test_logits_equal_transformers(incremental: bool, layers: str, qtype: str) -> None:
    """Over 72 passes with 1…16 new tokens of text and blocks of 2…16.

    `incremental` is transformers' own use of its cache. A sliding layer of it keeps window - 1
    keys, one less than its inclusive mask admits; as a pass appends at least one token before the
    block's first row, no visible key is lost, and it equals a cache that has the whole text.
    """
    model, what = random_draft(layers, qtype), script()
    oracle = TransformersDraft(model, incremental).logits(what)
    assert 0.5 < torch.cat(oracle).std() < 2
    assert distance(fused_logits(model, what), oracle) <= BOUND


@pytest.mark.parametrize("chunks", [(128,), (1,), (7, 16, 3)], ids=str)
def test_a_long_prompt_in_any_chunks(chunks: tuple[int, ...]) -> None:
    model, what = random_draft("mixed"), script(passes=6, first=200)
    oracle = TransformersDraft(model, incremental=True).logits(what)
    assert distance(fused_logits(model, what, chunks=chunks), oracle) <= BOUND


@pytest.mark.parametrize("error_rate", [None, 0.2], ids=["random", "agreeing"])
def test_draft_files_with_the_targets_own_taps(error_rate: float | None, tmp_path) -> None:
    """Files, loaders and both models together."""
    files = synth_pair(
        tmp_path / "t.gguf", tmp_path / "d.gguf", "tiny", "Q4_K_M", error_rate=error_rate
    )
    model = from_gguf(load(files[0]), load_draft(files[1]))
    what = script(model.config, model.draft, passes=20)
    ids = np.random.default_rng(4).integers(0, 1024, len(what.taps)).tolist()
    outs = run_target(model, "target_forward_from_embeddings", ids, 16)
    what = dataclasses.replace(what, taps=torch.cat([taps for _, taps in outs]))
    oracle = TransformersDraft(model, incremental=True).logits(what)
    assert torch.cat(oracle).std() > 1
    assert distance(fused_logits(model, what), oracle) <= BOUND


@pytest.mark.parametrize("fault", DRAFT_FAULTS, ids=lambda f: f.id)
def test_a_faulty_draft_is_told(fault: Fault) -> None:
    """A fault moves logits by twenty times the bound or more: what passes is no garbage."""
    model, what = random_draft("mixed"), script()
    oracle = TransformersDraft(model, incremental=True).logits(what)
    graph = faulty_graph(fault.file, fault.old, fault.new)
    moved = distance(fused_logits(model, what, graph, fill=0.0), oracle)
    assert 20 * BOUND <= moved < math.inf


# --- Slots, padding, order, rejected blocks -------------------------------------------------------


def prepared(lengths: list[int]) -> Runner:
    """A slot for each length, with so many tokens of a text of its own."""
    runner = Runner(random_draft("mixed"), 200, slots=len(lengths))
    for slot, length in enumerate(lengths):
        runner.inject(text(slot, length), 0, slot)
    return runner


def text(slot: int, length: int) -> torch.Tensor:
    return script().taps[50 * slot :][:length]


def block(slot: int, size: int) -> torch.Tensor:
    ids = torch.full((size,), TARGET.vocab_size - 1)
    ids[0] = 10 + slot
    return ids


@pytest.mark.report("S1")
def test_slots_padding_and_order_change_no_bit() -> None:
    """Blocks of three slots in one call with padding rows, in any order, are what each is alone."""
    lengths, sizes = [130, 7, 64], [6, 2, 5]
    alone = [prepared(lengths).block(block(s, size), lengths[s], s) for s, size in enumerate(sizes)]
    rows = [(s, i) for s, size in enumerate(sizes) for i in range(size)]
    rows += [(-1, 0)] * (16 - len(rows))
    for seed in range(3):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
        mixed = [rows[o] for o in order]
        ids = torch.tensor([int(block(s, 6)[i]) for s, i in mixed])
        pos = torch.tensor([lengths[s] + i if s >= 0 else -1 for s, i in mixed])
        together = prepared(lengths).denoise(ids, pos, torch.tensor([s for s, _ in mixed]))
        for row, (s, i) in zip(together, mixed, strict=True):
            if s >= 0:
                assert torch.equal(row, alone[s][i]), (seed, s, i)


def test_many_slots_with_long_blocks() -> None:
    """More than 16 rows in one call: no equal bits are promised, equal logits are."""
    lengths = [130, 7, 64, 90]
    ids = torch.cat([block(s, 16) for s in range(4)])
    pos = torch.cat([n + torch.arange(16) for n in lengths])
    together = prepared(lengths).denoise(ids, pos, torch.arange(4).repeat_interleave(16))
    for s, rows in enumerate(together.split(16)):
        alone = prepared(lengths).block(block(s, 16), lengths[s], s)
        assert distance([rows], [alone]) <= BOUND


@pytest.mark.parametrize("length", [55, 64, 120], ids=lambda n: f"at-{n}")
def test_a_rejected_block_leaves_nothing(length: int) -> None:
    """Rows that a longer block wrote behind the text are neither seen by the next block, nor left
    under the text that follows; also over a page's edge."""
    taps = text(0, length + 3)
    fresh, used = prepared([length]), prepared([length])
    used.block(block(1, 16), length)
    for runner in (fresh, used):
        runner.inject(taps[length:], length)
    a, b = (r.block(block(0, 2), length + 3) for r in (fresh, used))
    assert torch.equal(a, b)
    assert not torch.equal(a, fresh.block(block(2, 2), length + 3))


def test_chunks_of_up_to_16_inject_equal_bits() -> None:
    model, what = random_draft("mixed"), script(passes=20)
    whole = fused_logits(model, what)
    for chunks in ((1,), (5, 16, 2)):
        assert distance(fused_logits(model, what, chunks=chunks), whole) == 0


# --- Taps -----------------------------------------------------------------------------------------


def tapped_model(file: GGUFModel) -> FusedModel:
    draft = draft_config("mixed", dim=file.config.dim, target_layers=TAPPED)
    weights = from_gguf(file).weights
    return FusedModel(file.config, weights, draft=draft)


def run_target(
    model: FusedModel, method: str, tokens: list[int], chunk: int
) -> list[tuple[torch.Tensor, ...]]:
    """What an exported method's graph returns of one sequence, chunk by chunk."""
    pages = -(-len(tokens) // PAGE)
    pools = make_pools(model.config, None, PoolPages(pages, pages), torch.float32)
    graph = (METHODS | DRAFT_METHODS)[method](
        model.config, model.weights, pools, model.id, model.draft
    )
    table, outs = torch.arange(pages, dtype=torch.int32).flip(0)[None], []
    for start in range(0, len(tokens), chunk):
        ids = torch.tensor(tokens[start : start + chunk])
        pos, slot = start + torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.int64)
        if method.endswith("decode"):
            f, i = torch.ones(len(ids)), torch.full_like(ids, 20)
            args = (ids, pos, slot, table, table, 0.8 * f, i, 0.9 * f, i)
        else:
            args = (graph.embed(ids), pos, slot, table, table, torch.arange(len(ids)))
        with torch.no_grad(), glimmer_ops.use_exact(True):
            out = graph(*args)
        outs.append(out if isinstance(out, tuple) else (out,))
    return outs


def test_taps_are_the_residuals_before_the_layers(tiny_gguf) -> None:
    file = tiny_gguf("Q4_K_M")
    outs = run_target(tapped_model(file), "target_forward_from_embeddings", TARGET_IDS, 16)
    ours = torch.cat([taps for _, taps in outs])
    assert ours.shape == (len(TARGET_IDS), len(TAPPED) * file.config.dim)
    for taps in (transformers_taps, upstream_taps):
        assert distance([ours], [taps(file, TARGET_IDS, TAPPED)]) <= BOUND, taps
    # No layer passes for another.
    theirs = transformers_taps(file, TARGET_IDS, range(file.config.n_layers))
    parts = theirs.split(file.config.dim, 1)
    for a, b in itertools.combinations(parts, 2):
        assert distance([a], [b]) > 100 * BOUND


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.parametrize("plain", ["decode", "forward_from_embeddings"])
def test_tapping_changes_no_bit(tiny_gguf, plain: str, chunk: int) -> None:
    model = tapped_model(tiny_gguf("Q4_K_M"))
    with_taps = run_target(model, METHOD_WITH_TAPS[plain], TARGET_IDS, chunk)
    without = run_target(model, plain, TARGET_IDS, chunk)
    for (out, taps), (expected,) in zip(with_taps, without, strict=True):
        assert torch.equal(out, expected) and len(taps) == len(out)


def test_both_target_methods_tap_equal_bits(tiny_gguf) -> None:
    model = tapped_model(tiny_gguf("F16"))
    runs = [run_target(model, method, TARGET_IDS, 16) for method in METHOD_WITH_TAPS.values()]
    for (_, a), (_, b) in zip(*runs, strict=True):
        assert torch.equal(a, b)
