"""Synthetic drafts and pairs: shapes, types, statistics, and how far a pair agrees."""

from __future__ import annotations

import collections
import hashlib
import itertools
import math
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from glimmer_ops import _synth_file, synth_draft
from glimmer_ops._synth_copy import (
    copy_gain,
    error_probability,
    head_scale,
    match,
    residual_noise,
    successor,
)
from glimmer_ops.config import check_draft
from glimmer_ops.gguf import QTYPES, load, load_draft
from glimmer_ops.synth import PRESETS, QUANTS, plan, plan_bytes, synth
from glimmer_ops.synth_draft import DRAFT_PRESETS, draft_plan, synth_pair
from support.draft import EagerPair

PROMPT, COUNT = 32, 256
PAIRS = [("Q4_K_M", rate) for rate in (0.0, 0.05, 0.2, 0.5)] + [("F16", 0.2)]


def values(tensor):
    raw = np.asarray(tensor.raw())
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[tensor.qtype]).reshape(tensor.shape)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def counts(tensors):
    return dict(collections.Counter(qtype for _, _, qtype in tensors))


def pair(folder, *args, **options):
    return synth_pair(folder / "t.gguf", folder / "d.gguf", *args, **options)


@pytest.fixture(scope="module")
def tiny(tiny_pair):
    return tiny_pair("Q4_K_M", None)


def load_files(paths):
    return load(paths[0]), load_draft(paths[1])


# --- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "quant", "expected"),
    [
        ("tiny", "Q4_K_M", {"Q4_K": 20, "Q6_K": 2, "F32": 14}),
        ("tiny", "F16", {"F16": 22, "F32": 14}),
        ("mid", "Q5_K_M", {"Q5_K": 13, "Q6_K": 2, "F32": 10}),
        ("30b", "Q6_K", {"Q6_K": 36, "F32": 22}),
    ],
)
def test_type_mix(preset, quant, expected):
    assert counts(draft_plan(preset, quant)) == expected


@pytest.mark.parametrize("preset", DRAFT_PRESETS)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_plan_fits_its_types_and_its_target(preset, quant):
    config = DRAFT_PRESETS[preset]
    config.validate()
    check_draft(config, PRESETS[preset])
    assert config.mask_token_id == PRESETS[preset].vocab_size - 1
    for name, shape, qtype in draft_plan(preset, quant):
        assert shape[-1] % QTYPES[qtype][0] == 0, name


# --- random pairs --------------------------------------------------------------------------------


def test_round_trip(tiny):
    model, draft = tiny
    assert model.config == PRESETS["tiny"] and draft.config == DRAFT_PRESETS["tiny"]
    assert [(t.name, t.shape, t.qtype) for t in draft.tensors.values()] == draft_plan(
        "tiny", "Q4_K_M"
    )
    assert draft.nbytes == plan_bytes(draft_plan("tiny", "Q4_K_M"))
    assert draft.metadata["tokenizer.ggml.mask_token_id"] == 1023
    assert draft.metadata["dflash.target_layers"].tolist() == [1, 3, 5]


def test_the_target_is_the_one_without_a_draft(tmp_path, tiny):
    alone = synth(tmp_path / "t.gguf", "tiny", "Q4_K_M")
    assert digest(alone) == digest(Path(tiny[0].path))


def test_statistics_of_a_random_draft(tiny):
    for name, tensor in tiny[1].tensors.items():
        weights = tensor.float32() if len(tensor.shape) == 1 else values(tensor)
        if len(tensor.shape) == 1:
            spread = 0.3 if "q_norm" in name or "k_norm" in name else 0.1
            assert abs(weights.mean() - 1) < 0.2 * spread
            assert 0.8 * spread < np.ptp(weights) / 2 <= spread + 1e-6
            continue
        scale = 0.25 if name.endswith(("attn_output.weight", "ffn_down.weight")) else 1.0
        std = scale / math.sqrt(tensor.shape[1])
        assert abs(weights.mean()) < 0.02 * std, name
        assert weights.std() == pytest.approx(std, rel=0.02), name
        assert len(np.unique(weights[:, :32], axis=0)) == len(weights)


def test_target_and_draft_share_no_draws(tiny):
    model, draft = tiny
    rows = {row.tobytes() for t in model.tensors.values() for row in t.raw() if t.qtype != "F32"}
    for name, tensor in draft.tensors.items():
        assert tensor.qtype == "F32" or not rows & {row.tobytes() for row in tensor.raw()}, name


def test_a_repeated_draft_has_distinct_rows(monkeypatch, tmp_path):
    """The way 30b is drawn, on a small model."""
    monkeypatch.setattr(_synth_file, "_CHUNK", 200 * 1536)
    monkeypatch.setitem(PRESETS, "30b", PRESETS["tiny"])
    monkeypatch.setitem(DRAFT_PRESETS, "30b", DRAFT_PRESETS["tiny"])
    fc = values(load_draft(pair(tmp_path, "30b", "Q4_K_M")[1]).tensors["fc.weight"])
    base = {block.tobytes() for block in fc[:200].reshape(-1, 256)}
    assert {block.tobytes() for block in fc.reshape(-1, 256)} == base
    assert len({row.tobytes() for row in fc}) == 512


@pytest.mark.parametrize("error_rate", [None, 0.1])
def test_same_seed_same_bytes_whatever_the_threads(tmp_path, error_rate):
    digests = []
    before = torch.get_num_threads()
    try:
        for threads, seed in ((2, 3), (1, 3), (2, 4)):
            torch.set_num_threads(threads)
            paths = pair(tmp_path, "tiny", "F16", seed, error_rate=error_rate)
            digests.append([digest(path) for path in paths])
    finally:
        torch.set_num_threads(before)
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[2][0] and digests[0][1] != digests[2][1]


# --- pairs that agree ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tiny_pair):
    """written(quant, rate): the text as an array, and the draft's proposals (see EagerPair)."""
    made = {}

    def get(quant, rate):
        if (quant, rate) not in made:
            prompt = np.random.default_rng(5).integers(0, 1024, PROMPT).tolist()
            eager = EagerPair(*tiny_pair(quant, rate), PROMPT + COUNT)
            text, proposals = eager.write(prompt, COUNT)
            made[quant, rate] = np.array(text), proposals
        return made[quant, rate]

    return get


def within(share, rate, count):
    """By three standard deviations of a share of `count`, and a tenth for what the model omits."""
    return abs(share - rate) <= 3 * math.sqrt(rate * (1 - rate) / count) + rate / 10


@pytest.mark.parametrize(("quant", "rate"), PAIRS)
def test_the_target_copies_at_the_asked_rate(written, quant, rate):
    text, _ = written(quant, rate)
    wrong = text[PROMPT:] != successor(text[PROMPT - 16 : -16])
    assert within(wrong.mean(), rate, COUNT), wrong.mean()


@pytest.mark.parametrize(("quant", "rate"), PAIRS)
def test_the_draft_copies_without_error(written, quant, rate):
    text, proposals = written(quant, rate)
    rows = np.arange(COUNT - 15)[:, None] + PROMPT + np.arange(15) - 15
    right = proposals[: COUNT - 15] == successor(text[rows])
    assert right.mean() >= 0.998, right.mean(0)


def test_every_length_of_agreement_occurs(written):
    lengths = collections.Counter()
    for rate in (0.05, 0.2):
        text, proposals = written("Q4_K_M", rate)
        for i in range(COUNT - 15):
            right = proposals[i] == text[PROMPT + i + 1 : PROMPT + i + 16]
            lengths[len(list(itertools.takewhile(bool, right)))] += 1
    assert set(lengths) == set(range(16)), sorted(lengths.items())


def test_a_random_pair_agrees_on_almost_nothing(tiny):
    """What makes the pairs above worth having."""
    prompt = np.random.default_rng(5).integers(0, 1024, PROMPT).tolist()
    text, proposals = EagerPair(*tiny, PROMPT + 32).write(prompt, 32)
    right = [proposals[i] == text[PROMPT + i + 1 : PROMPT + i + 16] for i in range(32 - 15)]
    assert np.mean(right) < 0.05


def test_only_what_copies_is_computed(tmp_path, tiny):
    """The rest of the target is the random model's, and the other layers of the draft are too."""
    model, draft = load_files(pair(tmp_path, "tiny", "Q4_K_M", error_rate=0.1))
    for mine, plain in ((model, tiny[0]), (draft, tiny[1])):
        changed = {n for n, t in mine.tensors.items() if (t.raw() != plain.tensors[n].raw()).any()}
        assert all(n.startswith("blk.0.") or "blk" not in n for n in changed), changed
        assert 6 <= len(changed) <= 8, changed


def test_a_match_peaks_at_its_distance_alone():
    """Over every distance of the official window, by the angles themselves."""
    for interleaved, distance in ((True, 15), (False, 16)):
        query, key = match(5e5, 128, distance, interleaved)
        if interleaved:
            q, k = query.view(-1, 2).T, key.view(-1, 2).T
        else:
            q, k = query.view(2, -1), key.view(2, -1)
        angle = np.outer(np.arange(2049), 5e5 ** (-np.arange(64) / 64))
        turned = np.exp(1j * angle) * torch.complex(*q).numpy()
        scores = (turned * torch.complex(*k).numpy().conj()).real.sum(1)
        scores *= 43.78 / 8  # both are normed: a full match scores the attention's maximum
        assert scores.argmax() == distance
        assert scores[distance] - np.delete(scores, distance).max() > 7


def test_gain_and_head_follow_from_the_noise():
    config = PRESETS["tiny"]
    assert residual_noise(config) == pytest.approx(math.sqrt(1 + 11 / 16))
    draws = np.random.default_rng(0).standard_normal((20000, 64))
    draws[:, 0] += 2.0
    share = (draws.argmax(1) != 0).mean()
    assert error_probability(2.0, 64) == pytest.approx(share, abs=0.01)
    assert error_probability(0.0, 64) == pytest.approx(63 / 64, abs=1e-3)
    gains = [copy_gain(config, rate) for rate in (0.0, 0.01, 0.1, 0.5, 0.9)]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0
    assert copy_gain(config, 0.9999) == pytest.approx(0, abs=1e-3)
    for gain in (0.0, *gains):
        spread = head_scale(config, gain) * config.logit_scale * math.sqrt(config.dim)
        winner = spread * math.sqrt(config.dim) * gain / math.hypot(residual_noise(config), gain)
        assert spread <= 4.5 + 1e-9 and winner <= config.soft_cap + 1e-9


def test_successor_is_a_permutation_that_never_ends_a_text(tiny):
    ids = np.arange(1024)
    assert sorted(successor(ids)) == ids.tolist() and (successor(ids) != ids).all()
    assert (successor(ids) // 16 == ids // 16).all()
    keys = tiny[0].metadata
    begin = keys["tokenizer.ggml.bos_token_id"]
    ends = [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")]
    ordinary = np.flatnonzero(keys["tokenizer.ggml.token_type"] == gguf.TokenType.NORMAL)
    reached = np.append(ordinary, begin)
    for _ in range(16):
        reached = successor(reached)
        assert not np.isin(reached, ends).any()


def test_computed_rows_do_not_depend_on_the_chunks(monkeypatch, tmp_path):
    """Heads and embeddings of the real widths need many chunks, which must agree on a token."""
    monkeypatch.setattr(_synth_file, "_CHUNK", 100 * 512)
    model, _ = load_files(pair(tmp_path, "tiny", "F16", error_rate=0.0))
    embedding = values(model.tensors["token_embd.weight"])
    embedding /= np.sqrt((embedding**2).mean(1, keepdims=True))
    assert 1.7 < embedding[:, 0].min() and embedding[:, 0].max() < 2.4
    codes = embedding @ values(model.tensors["blk.0.attn_v.weight"]).T
    output = values(model.tensors["blk.0.attn_output.weight"])
    spread = np.concatenate([output[:, :128], output[:, 512:640]], 1)
    logits = codes @ spread.T @ values(model.tensors["output.weight"]).T
    assert (logits.argmax(1) == successor(np.arange(1024))).all()


# --- writing -------------------------------------------------------------------------------------


def test_progress_counts_both_files(tmp_path):
    seen = []
    pair(tmp_path, "tiny", "F16", progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done) and {t for _, t in seen} == {done[-1]}
    assert done[-1] == plan_bytes(plan("tiny", "F16")) + plan_bytes(draft_plan("tiny", "F16"))


def test_chunks_are_bounded_whatever_the_tensor(monkeypatch, tmp_path):
    sizes = []
    encode = _synth_file.encode
    monkeypatch.setattr(_synth_file, "_CHUNK", 1 << 17)
    monkeypatch.setattr(
        _synth_file, "encode", lambda x, qtype: sizes.append(x.numel()) or encode(x, qtype)
    )
    pair(tmp_path, "tiny", "F16", error_rate=0.1)
    assert max(sizes) <= 1 << 17


@pytest.mark.parametrize("share", [0.1, 0.95])
def test_both_files_appear_or_none(tmp_path, share):
    """Whether the target fails or the draft: what was there before stays."""
    for name in ("t.gguf", "d.gguf"):
        (tmp_path / name).write_bytes(b"precious")

    def fail(done, total):
        if done > share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair(tmp_path, "tiny", "Q4_K_M", progress=fail)
    assert sorted(os.listdir(tmp_path)) == ["d.gguf", "t.gguf"]
    assert {(tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == {b"precious"}


@pytest.mark.parametrize("folder", [".", "other"])
def test_lack_of_space_is_found_before_writing(tmp_path, monkeypatch, folder):
    """Room for each file, but for both only where they lie on two disks."""
    (tmp_path / folder).mkdir(exist_ok=True)
    sizes = plan_bytes(plan("tiny", "F16")), plan_bytes(draft_plan("tiny", "F16"))
    free = sizes[0] + 1000 if folder == "." else sizes[0]
    usage = collections.namedtuple("usage", "total used free")(1, 1, free)
    monkeypatch.setattr(_synth_file.shutil, "disk_usage", lambda path: usage)
    paths = tmp_path / "t.gguf", tmp_path / folder / "d.gguf"
    if folder == "other":
        monkeypatch.setattr(synth_draft, "_one_disk", lambda *paths: False)
        assert all(path.exists() for path in synth_pair(*paths, "tiny", "F16"))
        return
    words = f"d.gguf: expected {sum(sizes)} bytes of free space, found {free}"
    with pytest.raises(OSError, match=words):
        synth_pair(*paths, "tiny", "F16", progress=lambda done, total: pytest.fail("written"))
    assert not os.listdir(tmp_path)


def test_bad_arguments_are_named(tmp_path):
    for arguments, options, words in (
        (("huge", "F16"), {}, "preset: expected one of tiny, mid, 30b, found 'huge'"),
        (("tiny", "Q3_K"), {}, "quant: expected one of F16, Q4_K_M, Q5_K_M, Q6_K, found 'Q3_K'"),
        (("tiny", "F16", -1), {}, "seed: expected 0 or greater, found -1"),
        (("tiny", "F16"), {"error_rate": 1.0}, "error_rate: expected 0 or greater and below 1, fo"),
        (("tiny", "F16"), {"error_rate": -0.1}, "error_rate: .*found -0.1"),
        (("tiny", "F16"), {"error_rate": math.nan}, "error_rate: .*found nan"),
        (("30b", "F16"), {"error_rate": 0.1}, "error_rate: .* presets tiny, mid, found '30b'"),
    ):
        with pytest.raises(ValueError, match=words):
            pair(tmp_path, *arguments, **options)
    for same in ("t.gguf", f"../{tmp_path.name}/t.gguf"):
        with pytest.raises(ValueError, match="draft_path: expected another file than the target"):
            synth_pair(tmp_path / "t.gguf", tmp_path / same, "tiny", "F16")
    with pytest.raises(IsADirectoryError, match="expected a file name"):
        synth_pair(tmp_path / "t.gguf", tmp_path, "tiny", "F16")
    with pytest.raises(FileNotFoundError):
        synth_pair(tmp_path / "t.gguf", tmp_path / "no" / "d.gguf", "tiny", "F16")
    assert not os.listdir(tmp_path)


# --- the command line ----------------------------------------------------------------------------


def test_synth_command_and_inspect(glimmer, tmp_path):
    import json

    target, draft = tmp_path / "t.gguf", tmp_path / "d.gguf"
    args = ("synth", "--preset", "tiny", "--out", target, "--draft-out", draft)
    status, out, err = glimmer(*args, "--draft-error-rate", 0.2)
    assert status == 0, err
    assert [line.split(":")[0] for line in out.splitlines()] == [str(target), str(draft)]
    d = json.loads(glimmer("inspect", draft, "--json")[1])
    assert d["kind"] == "draft" and "tokenizer" not in d
    assert d["config"]["target_layers"] == [1, 3, 5]
    assert d["by_role"]["enc.output_norm"] == d["by_role"]["output_norm"] == {"F32": ""}
    assert d["tensor_bytes"] == load_draft(draft).nbytes and d["bytes"] == draft.stat().st_size
    out = glimmer("inspect", draft)[1]
    for text in ("block_size", "mask_token_id", "[1, 3, 5]", "ssG", "Q4_K: 0-1; Q6_K: 2"):
        assert text in out
    assert json.loads(glimmer("inspect", target, "--json")[1])["kind"] == "gguf"


def test_synth_command_refuses(glimmer, tmp_path):
    from support.cli import refused

    target, draft = tmp_path / "t.gguf", tmp_path / "d.gguf"
    args = ("synth", "--preset", "tiny", "--out", target)
    refused(glimmer(*args, "--draft-error-rate", 0.2), "--draft-error-rate: expected --draft-out")
    args = (*args, "--draft-out", draft)
    refused(
        glimmer(*args, "--draft-error-rate", 1.5), "--draft-error-rate: expected 0", "found 1.5"
    )
    refused(glimmer(*args[:-1], target), "--draft-out: expected another file than --out")
    assert list(tmp_path.iterdir()) == []
