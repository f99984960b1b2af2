"""`glimmer diff`: a planted fault is found where it was planted, and healthy pairs show none."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from glimmer_ops import _native
from glimmer_ops.diff import Comparison, Rule, Runner, Side, Step, diff, make_sides, measure
from glimmer_ops.lowering.export import FILES
from glimmer_ops.session import Session
from runtime.toy_program import export_toy
from support.cli import refused

IDS = [(7 * i) % 1000 for i in range(40)]
TEXT = ",".join(map(str, IDS))
BEST, WEAKEST = _native.isas()[-1], _native.isas()[0]


@pytest.fixture
def altered(exported, tiny_gguf, tmp_path: Path):
    """altered("blk.3.ffn_down", byte): the export with one byte of that weight changed."""

    def make(name: str, at: int) -> Path:
        folder = tmp_path / "altered"
        shutil.copytree(exported("Q4_K_M"), folder)
        raw = np.asarray(tiny_gguf("Q4_K_M").tensors[f"{name}.weight"].raw()).tobytes()
        data = bytearray((folder / "model.ptd").read_bytes())
        start = data.find(raw)
        assert start > 0 and data.find(raw, start + 1) < 0
        data[start + at] ^= 0x08
        (folder / "model.ptd").write_bytes(data)
        return folder

    return make


# Byte 1 of a K-quant block is the upper half of its scale, byte 3 of a float32 its exponent; a Q6_K
# block has its scale at the end.
@pytest.mark.parametrize(
    ("weight", "at", "place"),
    [
        ("blk.3.ffn_down", 1, "layer 3, kquant_linear ffn_down"),
        ("blk.0.attn_k", 144 * 5 + 1, "layer 0, kquant_linear attn_k"),
        ("blk.5.attn_v", 209, "layer 5, kquant_linear attn_v"),
        ("blk.2.ffn_up", 1, "layer 2, kquant_swiglu ffn_gate+ffn_up"),
        ("blk.4.post_ffw_norm", 3, "layer 4, add_rms_norm post_ffw_norm+attn_norm"),
        ("output", 1, "head, kquant_logits output"),
    ],
)
def test_one_altered_byte_is_located(exported, altered, weight, at, place) -> None:
    sides = make_sides([exported("Q4_K_M"), altered(weight, at)], "exact", None)
    result = diff(sides, IDS)
    assert result.first is not None
    assert str(result.first.key) == place
    assert result.first.position == 0 and result.first.rms > 1e-4
    for key, worst in result.worst.items():
        if key == result.first.key:
            break
        assert worst.rms == 0, key
    fixed = diff(sides, IDS[:2], tolerance=1e-6)  # which every later op exceeds too
    assert fixed.first is not None and str(fixed.first.key) == place


def test_the_position_is_that_of_the_first_row_that_parts(exported, altered) -> None:
    """One token's embedding is wrong: the sides part where it first occurs."""
    position = 21
    folder = altered("token_embd", IDS[position] * 288 + 1)
    result = diff(make_sides([exported("Q4_K_M"), folder], None, None), IDS)
    assert result.first is not None
    assert str(result.first.key) == "embed, kquant_embedding token_embd"
    assert result.first.position == position == IDS.index(IDS[position])


def test_report_of_a_fault(glimmer, exported, altered) -> None:
    folder = altered("blk.3.ffn_down", 1)
    command = ("diff", "--model", exported("Q4_K_M"), "--model", folder, "--tokens", TEXT)
    status, out, err = glimmer(*command)
    assert status == 1 and err == ""
    last = out.strip().splitlines()[-1]
    assert re.fullmatch(
        r"first difference: position 0, layer 3, kquant_linear ffn_down: "
        r"rms relative \S+e-\d+, max abs \S+e-\d+",
        last,
    )
    assert "by layer" in out and "argmax equal" in out
    assert glimmer(*command, "--tolerance", 1e9)[0] == 0


def test_equal_exports_have_no_difference(glimmer, exported) -> None:
    for extra in ((), ("--decode",), ("--bits", "--chunk", 7)):
        command = ("diff", "--model", exported("Q4_K_M"), "--tokens", TEXT, *extra)
        status, out, _ = glimmer(*command)
        assert status == 0
        assert out.strip().endswith("no difference: every bit is equal")
        assert "40/40" in out, out


def test_paths_part_at_the_first_matmul(exported) -> None:
    result = diff(make_sides([exported("Q4_K_M")], "exact,int8", None), IDS)
    assert result.first is not None
    assert str(result.first.key) == "layer 0, kquant_linear attn_q"


@pytest.mark.skipif(BEST == WEAKEST, reason="this machine runs one ISA only")
@pytest.mark.parametrize("path", ["exact", "int8"])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_healthy_isas_only_drift(exported, path, kv_dtype) -> None:
    """They differ in bits, grow apart with depth, and no op stands out."""
    folder = exported("Q4_K_M", kv_dtype=kv_dtype)
    sides = make_sides([folder], path, f"{WEAKEST},{BEST}")
    result = diff(sides, IDS, decode=kv_dtype == "f16")
    assert not result.parted and result.bits > 0
    assert diff(sides, IDS[:4], bits=True).parted


def test_rows_of_the_pools_are_compared(exported) -> None:
    """No op returns K and V: what rounds them differently shows at the op that wrote them."""
    models = [exported("Q4_K_M"), exported("Q4_K_M", kv_dtype="f16")]
    result = diff(make_sides(models, "exact", None), IDS, tolerance=1e-5)
    assert result.first is not None
    assert str(result.first.key) == "layer 0, qk_norm_rope_kv k_cache"


def test_exports_of_other_types_compare_every_output(exported) -> None:
    result = diff(make_sides([exported("Q4_K_M"), exported("F16")], "exact", None), IDS)
    assert result.first is not None and result.first.key.layer == "embed"
    assert result.only == (set(), set())
    assert len(result.worst) == len(diff(make_sides([exported("F16")], None, None), IDS[:2]).worst)


def test_decode_logits_are_the_heads(exported) -> None:
    """Another output has the logits' shape in this model."""
    folder = exported("Q4_K_M")
    ids = IDS[:5]
    expected = Session.load(folder)
    rows = expected.prefill(expected.open(), ids, rows=range(5))
    step = Runner(Side(folder, "int8", BEST)).step(ids, range(5), decode=True)
    assert sum(x.shape == (5, 1024) for x in step.outputs.values()) > 1
    assert np.array_equal(step.logits, rows)


def test_long_chunks_compare_every_position(exported, altered) -> None:
    """With 16 rows of logits a step, the ops are still compared at all of its positions."""
    position = 3
    folder = altered("token_embd", IDS[position] * 288 + 1)
    result = diff(make_sides([exported("Q4_K_M"), folder], None, None), IDS, chunk=40)
    assert result.first is not None and result.first.position == position
    assert sum(len(a) for a, _ in result.logits) == 16


def test_slow_drift_is_reported(exported) -> None:
    """Differences that grow slowly enough to blame no op still fail when they reach the logits."""
    side = Side(Path("x"), "exact", BEST)
    c = Comparison((side, side), Rule(1e-4))
    logits = np.ones((2, 8), np.float32)
    c.add(Step(logits=logits), Step(logits=logits * 1.05), 0, 2, range(2))
    assert c.first is None and c.parted
    c = Comparison((side, side), Rule(1e-4))
    c.add(Step(logits=logits), Step(logits=logits * 1.01), 0, 2, range(2))
    assert not c.parted


def test_measure() -> None:
    nan = np.float32("nan")
    a = np.array([[1, 2], [3, 4], [nan, 0]], np.float32)
    assert measure(a, a.copy()).worst == 0 and measure(a, a.copy()).bits == 0
    b = a.copy()
    b[1, 0] += 0.5
    d = measure(a, b)
    assert d.rms.tolist() == [0, pytest.approx(0.1), 0] and d.max_abs == 0.5 and d.bits == 1
    b[0, 1] = nan
    assert measure(a, b).worst == np.inf
    b[0, 1], b[2, 0] = 2, 1
    assert measure(a, b).worst == np.inf
    zero = np.zeros((1, 2), np.float32)
    assert measure(zero, -zero).bits == 2 and measure(zero, -zero).worst == 0
    assert measure(np.array([3, 4]), np.array([3, 5])).worst == np.inf
    inf = np.full((1, 2), np.inf, np.float32)
    assert measure(inf, inf.copy()).worst == 0 and measure(inf, -inf).worst == np.inf
    empty = np.zeros((0, 4), np.float32)
    assert measure(empty, empty).worst == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens", ""), ("--tokens: expected at least one id",)),
        (("--tokens", "1,1024"), ("--tokens: expected ids in [0, 1024), found 1024",)),
        (("--tokens", ",".join(["1"] * 1025)), ("at most 1024 ids",)),
        (("--tokens", "1", "--chunk", "0"), ("--chunk: expected a value in [1, 128]",)),
        (("--tokens", "1", "--chunk", "17", "--decode"), ("--chunk", "[1, 16]")),
        (("--tokens", "1", "--path", "fast"), ("--path: expected one or two of", "'fast'")),
        (("--tokens", "1", "--isa", "scalar,sse,avx2"), ("--isa: expected one or two of",)),
        (("--tokens", "1", "--tolerance", "nan"), ("--tolerance: expected a number", "nan")),
        (("--tokens", "1", "--model", "/a", "--model", "/b"), ("--model", "found 3")),
        (("--tokens", "1", "--model", "/nonexistent"), ("/nonexistent",)),
    ],
)
def test_diff_refuses(glimmer, exported, args, words) -> None:
    refused(glimmer("diff", "--model", exported("Q4_K_M"), *args), *words)


def test_other_models_are_refused(glimmer, exported, tmp_path: Path) -> None:
    export_toy(tmp_path / "toy")
    command = ("diff", "--model", exported("Q4_K_M"), "--model", tmp_path / "toy", "--tokens", "1")
    refused(glimmer(*command), "toy: expected the vocabulary size of", "1024, found 11")


def test_any_program_can_be_compared(glimmer, tmp_path: Path) -> None:
    """A program of stock operators only."""
    export_toy(tmp_path / "toy")
    status, out, err = glimmer("diff", "--model", tmp_path / "toy", "--tokens", "1,2,3")
    assert status == 0, err
    assert "pools k_cache" in out or "aten::" in out
    assert "no difference: every bit is equal" in out


def test_model_files_are_needed(glimmer, exported, tmp_path: Path) -> None:
    for name in FILES:
        source = exported("F16" if name == "model.ptd" else "Q4_K_M")
        (tmp_path / name).write_bytes((source / name).read_bytes())
    refused(glimmer("diff", "--model", tmp_path, "--tokens", "1"), "model.ptd", "holds weights")
