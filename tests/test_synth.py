"""Synthetic models: types, statistics, determinism and the way the file is written."""

import collections
import errno
import hashlib
import math
import os

import gguf
import numpy as np
import pytest
import torch

from glimmer_ops import _synth_file as synth_file
from glimmer_ops.gguf import QTYPES, load
from glimmer_ops.synth import PRESETS, QUANTS, plan, plan_bytes, synth


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load(synth(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "tiny", "Q4_K_M"))


def counts(tensors):
    return dict(collections.Counter(qtype for _, _, qtype in tensors))


def values(tensor):
    raw = np.asarray(tensor.raw())
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[tensor.qtype]).reshape(tensor.shape)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the plan ------------------------------------------------------------------------------------


def test_30b_has_the_types_and_bytes_of_the_official_file():
    tensors = plan("30b", "Q4_K_M")
    assert counts(tensors) == {"Q4_K": 365, "Q5_K": 1, "Q6_K": 52, "F32": 313}
    types = {name: qtype for name, _, qtype in tensors}
    assert types["output.weight"] == "Q5_K" and types["token_embd.weight"] == "Q4_K"
    for kind in ("attn_v", "ffn_down"):
        assert sum(types[f"blk.{i}.{kind}.weight"] == "Q6_K" for i in range(52)) == 26
    total = plan_bytes(tensors)
    assert total == pytest.approx(16.75e9, rel=0.005)
    # a decode step reads all but the embedding
    embedding = 202048 * 6656 // 256 * 144
    assert total - embedding == pytest.approx(15.98e9, rel=0.005)


@pytest.mark.parametrize(
    ("preset", "quant", "expected"),
    [
        ("tiny", "Q4_K_M", {"Q4_K": 45, "Q5_K": 1, "Q6_K": 4, "F32": 37}),
        ("tiny", "Q5_K_M", {"Q5_K": 45, "Q6_K": 5, "F32": 37}),
        ("tiny", "Q6_K", {"Q6_K": 50, "F32": 37}),
        ("tiny", "F16", {"F16": 50, "F32": 37}),
        ("mid", "Q4_K_M", {"Q4_K": 29, "Q5_K": 1, "Q6_K": 4, "F32": 25}),
        ("30b", "Q5_K_M", {"Q5_K": 365, "Q6_K": 53, "F32": 313}),
        ("30b", "F16", {"F16": 418, "F32": 313}),
    ],
)
def test_type_mix(preset, quant, expected):
    assert counts(plan(preset, quant)) == expected


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_plan_fits_its_types(preset, quant):
    PRESETS[preset].validate()
    for name, shape, qtype in plan(preset, quant):
        assert shape[-1] % QTYPES[qtype][0] == 0, name


# --- what the file holds -------------------------------------------------------------------------


def test_round_trip(tiny):
    assert tiny.config == PRESETS["tiny"]
    assert [(t.name, t.shape, t.qtype) for t in tiny.tensors.values()] == plan("tiny", "Q4_K_M")
    assert tiny.nbytes == plan_bytes(plan("tiny", "Q4_K_M"))
    assert tiny.config.q_scale == np.float32(43.7840518911 / math.sqrt(128))
    assert tiny.config.logit_scale == np.float32(1 / math.sqrt(2))


@pytest.mark.parametrize("quant", ["Q5_K_M", "Q6_K", "F16"])
def test_round_trip_of_the_other_quants(tmp_path, quant):
    model = load(synth(tmp_path / "m.gguf", "tiny", quant))
    assert model.config == PRESETS["tiny"]
    assert counts([(t.name, t.shape, t.qtype) for t in model.tensors.values()]) == counts(
        plan("tiny", quant)
    )


@pytest.mark.parametrize(
    ("pattern", "gate"),
    [("array", "attn_output_gate"), ("period", "attn_gate"), ("none", "attn_output_gate")],
)
def test_every_spelling_gives_the_same_model(tmp_path, tiny, pattern, gate):
    path = synth(tmp_path / "m.gguf", "tiny", "Q4_K_M", pattern=pattern, gate_name=gate)
    model = load(path)
    found = model.metadata.get("muse-glimmer.attention.sliding_window_pattern")
    kind = "none" if found is None else "period" if isinstance(found, int) else "array"
    assert kind == pattern
    assert f"blk.0.{gate}.weight".encode() in path.read_bytes()[:65536]
    assert model.config == tiny.config
    for name, tensor in model.tensors.items():
        assert (tensor.raw() == tiny.tensors[name].raw()).all(), name


def test_gains_keep_the_model_well_conditioned(tiny):
    for name, tensor in tiny.tensors.items():
        if len(tensor.shape) > 1:
            continue
        gain = tensor.float32()
        if "attn_q_norm" in name:
            assert (gain == np.float32(43.7840518911 / math.sqrt(128))).all()
        elif "attn_k_norm" in name:
            assert (gain == 1).all()
        elif ".post_" in name:
            assert 0.225 <= gain.min() < 0.235 and 0.265 < gain.max() <= 0.275
            assert abs(gain.mean() - 0.25) < 0.0025
        else:
            assert 0.9 <= gain.min() < 0.91 and 1.09 < gain.max() <= 1.1
            assert abs(gain.mean() - 1) < 0.01


def test_weights_are_normal_with_variance_one_over_k(tiny):
    for name, tensor in tiny.tensors.items():
        if len(tensor.shape) == 1:
            continue
        weights = values(tensor)
        std = 1 / math.sqrt(tensor.shape[1])
        if name == "output.weight":
            std = 4.5 / 16
        assert abs(weights.mean()) < 0.02 * std, name
        assert weights.std() == pytest.approx(std, rel=0.02), name
        assert len(np.unique(weights[:, :32], axis=0)) == len(weights)


def test_logits_are_spread(tiny):
    hidden = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    logits = hidden @ values(tiny.tensors["output.weight"]).T * tiny.config.logit_scale
    assert 3 < logits.std() < 6
    top = np.sort(logits, axis=1)[:, -2:]
    assert np.median(top[:, 1] - top[:, 0]) > 0.3


# --- determinism ---------------------------------------------------------------------------------


def test_same_seed_same_bytes_whatever_the_threads(tmp_path, tiny):
    first = digest(synth(tmp_path / "a.gguf", "tiny", "Q4_K_M", seed=3))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert digest(synth(tmp_path / "b.gguf", "tiny", "Q4_K_M", seed=3)) == first
    finally:
        torch.set_num_threads(threads)
    other = load(synth(tmp_path / "c.gguf", "tiny", "Q4_K_M", seed=4))
    assert digest(tmp_path / "c.gguf") != first
    for name, tensor in other.tensors.items():
        if len(tensor.shape) == 2:
            assert (tensor.raw() != tiny.tensors[name].raw()).any(), name


def test_repeated_rows_differ_and_keep_their_statistics(monkeypatch, tmp_path):
    """The way 30b is drawn, on a small model: every row is distinct and well distributed."""
    monkeypatch.setattr(synth_file, "_CHUNK", 200 * 1536)
    monkeypatch.setitem(PRESETS, "30b", PRESETS["tiny"])
    model = load(synth(tmp_path / "m.gguf", "30b", "Q4_K_M"))
    down = model.tensors["blk.3.ffn_down.weight"]
    assert down.shape == (512, 1536)
    weights = values(down).reshape(512, 6, 256)
    base = {block.tobytes() for block in weights[:200].reshape(-1, 256)}
    assert {block.tobytes() for block in weights.reshape(-1, 256)} == base
    assert len({row.tobytes() for row in weights}) == 512
    assert weights.std() == pytest.approx(1 / math.sqrt(1536), rel=0.02)
    again = synth(tmp_path / "n.gguf", "30b", "Q4_K_M")
    assert digest(again) == digest(tmp_path / "m.gguf")


# --- writing -------------------------------------------------------------------------------------


def test_progress_reaches_the_total(tmp_path):
    seen = []
    synth(
        tmp_path / "m.gguf", "tiny", "Q6_K", progress=lambda done, total: seen.append((done, total))
    )
    done = [d for d, _ in seen]
    assert done == sorted(done) and {t for _, t in seen} == {done[-1]}
    assert done[-1] == plan_bytes(plan("tiny", "Q6_K"))


def test_chunks_are_bounded_whatever_the_tensor(monkeypatch, tmp_path):
    """The head of the real model has 1.3 G weights: no more than a chunk is ever held."""
    sizes = []
    encode = synth_file.encode
    monkeypatch.setattr(synth_file, "_CHUNK", 1 << 16)
    monkeypatch.setattr(
        synth_file, "encode", lambda x, qtype: sizes.append(x.numel()) or encode(x, qtype)
    )
    synth(tmp_path / "m.gguf", "tiny", "Q4_K_M")
    assert max(sizes) <= 1 << 16
    assert sum(sizes) == sum(math.prod(s) for _, s, _ in plan("tiny", "Q4_K_M") if len(s) == 2)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError(errno.ENOSPC, "full")])
def test_failure_leaves_no_partial_file_and_keeps_the_old_one(tmp_path, error):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"precious")

    def fail(done, total):
        if done > total // 3:
            raise error

    with pytest.raises(error if isinstance(error, type) else OSError):
        synth(path, "tiny", "Q4_K_M", progress=fail)
    assert os.listdir(tmp_path) == ["m.gguf"]
    assert path.read_bytes() == b"precious"


def test_a_partial_file_never_has_the_final_name(tmp_path):
    path = tmp_path / "m.gguf"
    seen = []
    synth(path, "tiny", "Q4_K_M", progress=lambda done, total: seen.append(path.exists()))
    assert seen and not any(seen)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_lack_of_space_is_found_before_writing(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")(1, 1, 1000)
    monkeypatch.setattr(synth_file.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"expected \d+ bytes of free space, found 1000"):
        synth(tmp_path / "m.gguf", "tiny", "Q4_K_M")
    assert not os.listdir(tmp_path)


def test_bad_arguments_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    for arguments, keywords, words in (
        (("huge", "Q4_K_M"), {}, "preset: expected one of tiny, mid, 30b, found 'huge'"),
        (("tiny", "Q3_K"), {}, "quant: expected one of F16, Q4_K_M, Q5_K_M, Q6_K, found 'Q3_K'"),
        (("tiny", "F16"), {"pattern": "x"}, "pattern: expected one of array, period, none"),
        (("tiny", "F16"), {"gate_name": "x"}, "gate_name: expected one of attn_gate"),
        (("tiny", "F16"), {"seed": -1}, "seed: expected 0 or greater, found -1"),
    ):
        with pytest.raises(ValueError, match=words):
            synth(path, *arguments, **keywords)
    with pytest.raises(IsADirectoryError, match="expected a file name"):
        synth(tmp_path, "tiny", "F16")
    with pytest.raises(FileNotFoundError):
        synth(tmp_path / "no" / "m.gguf", "tiny", "F16")
    assert not os.listdir(tmp_path)
