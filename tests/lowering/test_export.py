"""What an exported program must not lose: few instructions, no copies, weights once and raw."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glimmer_ops.lowering import ExportOptions, from_gguf, stream, to_executorch
from glimmer_ops.lowering.export import export_methods
from glimmer_ops.lowering.graph import Weight, weights_id
from glimmer_ops.program import read_program

METHODS = {"embed_text", "forward_from_embeddings", "decode"}


@pytest.fixture(scope="module")
def report(exported):
    return read_program(exported("Q4_K_M") / "model.pte")


def test_methods(report) -> None:
    assert {m.name for m in report.methods} >= METHODS


def test_eleven_instructions_a_layer(report) -> None:
    for method in report.methods:
        if method.name in ("decode", "forward_from_embeddings"):
            assert method.per_layer == 11
            assert not method.delegates


def test_nothing_but_our_ops_and_the_row_gather(report) -> None:
    """In particular no copy of a pool, no view of a weight and no dequantisation."""
    for method in report.methods:
        others = {c for c in method.calls if not c.startswith("glimmer::")}
        assert others <= {"aten::index_select"}, (method.name, others)


@pytest.mark.report("G28")
def test_weights_are_stored_once_and_raw(report, exported, tiny_gguf) -> None:
    stored = tiny_gguf("Q4_K_M").nbytes
    folder = exported("Q4_K_M")
    assert sum(w.tensor.nbytes for w in report.weights.values()) <= 1.02 * stored
    assert (folder / "model.ptd").stat().st_size <= 1.02 * stored
    assert (folder / "model.pte").stat().st_size < 1 << 20


@pytest.mark.report("R10")
def test_pools_are_shared_by_the_methods(report, tiny_gguf) -> None:
    config = tiny_gguf("Q4_K_M").config
    assert set(report.pools) == {f"pools.{k}_{i}" for k in "kv" for i in range(config.n_layers)}
    shared = {m.arenas[-1] for m in report.methods if m.name != "embed_text"}
    assert len(shared) == 1 and shared.pop() >= sum(p.tensor.nbytes for p in report.pools.values())


@pytest.mark.report("R5")
def test_row_axis_is_dynamic_in_every_method(tiny_gguf) -> None:
    programs = export_methods(from_gguf(tiny_gguf("Q4_K_M")), ExportOptions(max_seq_len=256))
    for name, program in programs.items():
        inputs = program.graph_signature.user_inputs
        values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
        first = values[inputs[0]]
        assert isinstance(first.shape[0], torch.SymInt), name


def test_smallest_and_clamped_sizes(tiny_gguf, tmp_path: Path) -> None:
    """One page of context: the default chunk of 512 is cut to it."""
    from glimmer_ops.session import Session

    folder = to_executorch(
        from_gguf(tiny_gguf("F16")), tmp_path / "small", ExportOptions(max_seq_len=64, slots=1)
    )
    session = Session.load(folder)
    assert session.limits.max_chunk == session.limits.max_seq_len == 64
    result = session.generate(session.open(), list(range(60)), 4)
    assert len(result.ids) == 4


def test_fused_upstream_model_exports_too(tiny_gguf, exported, tmp_path: Path) -> None:
    """In-memory weights, some of them row slices of one tensor, give the same .ptd bytes."""
    from executorch.examples.models.muse_glimmer.loaders.checkpoint_loader import load_gguf_model

    from glimmer_ops.lowering import fuse
    from glimmer_ops.oracle import upstream_config

    file = tiny_gguf("Q4_K_M")
    config = upstream_config(file.config, max_seq_len=1024)
    model, _ = load_gguf_model(file.path, "mlx", config=config, activation_dtype=torch.float32)
    options = ExportOptions(max_seq_len=1024, slots=4, max_chunk=128, kv_dtype="f32")
    folder = to_executorch(fuse(model), tmp_path / "fused", options)
    expected = (exported("Q4_K_M") / "model.ptd").read_bytes()
    assert (folder / "model.ptd").read_bytes() == expected


@pytest.mark.report("R7")
@pytest.mark.parametrize("at", [0, 30_000, -1])
def test_weights_id_tells_models_apart(tiny_gguf, at: int) -> None:
    """One changed byte of one tensor, or another type of the same bytes."""
    model = from_gguf(tiny_gguf("Q4_K_M"))
    weights = dict(model.weights)
    original = weights["blk_3_attn_v"]
    data = original.data.clone()
    data.view(-1)[at] ^= 1
    weights["blk_3_attn_v"] = dataclasses.replace(original, data=data, path=None)
    assert weights_id(weights) != model.id
    weights["blk_3_attn_v"] = dataclasses.replace(original, qtype="Q5_K")
    assert weights_id(weights) != model.id
    weights["blk_3_attn_v"] = original
    assert weights_id(weights) == model.id


def test_streaming_is_undone_and_checks_the_emitter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = stream._emitter._Emitter._tensor_spec_to_evalue
    with stream.streamed_constants({}):
        assert stream._emitter._Emitter._tensor_spec_to_evalue is not before
    assert stream._emitter._Emitter._tensor_spec_to_evalue is before
    monkeypatch.setattr(stream._emitter._Emitter, "_tensor_spec_to_evalue", lambda self, x: None)
    with pytest.raises(RuntimeError, match="not the one that weight streaming knows"):
        stream._check_emitter()


def test_a_file_that_shrinks_while_it_is_copied_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(b"x" * 100)
    data = torch.zeros(1, 100, dtype=torch.uint8)
    weight = stream.WeightBytes("name", Weight(data, "Q4_K", source, offset=50))
    with open(tmp_path / "out", "wb") as out, pytest.raises(OSError, match="ended while"):
        weight.write_to_file(out)


def test_a_folder_in_the_way_is_refused_before_anything_is_written(tiny_gguf, tmp_path) -> None:
    (tmp_path / "out" / "model.pte").mkdir(parents=True)
    with pytest.raises(ValueError, match="expected a file or nothing at .*model.pte"):
        to_executorch(from_gguf(tiny_gguf("F16")), tmp_path / "out", ExportOptions(max_seq_len=64))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.pte"]


@pytest.mark.report("R14")
@pytest.mark.slow
def test_export_streams_and_run_maps(tmp_path: Path) -> None:
    """Real widths, 1.4 GB: neither the export nor a run holds the weights in anonymous memory."""
    code = f"""
import sys
from pathlib import Path
from glimmer_ops.gguf import load
from glimmer_ops.lowering import ExportOptions, from_gguf, to_executorch
from glimmer_ops.session import Session
from glimmer_ops.synth import synth

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024

folder = Path({str(tmp_path)!r})
file = load(synth(folder / "mid.gguf", "mid", "Q4_K_M"))
before = anonymous()
to_executorch(from_gguf(file), folder / "mid", ExportOptions(max_seq_len=2048, slots=1))
print(anonymous() - before)
session = Session.load(folder / "mid")
slot = session.open()
session.prefill(slot, [1, 2, 3], rows=[2])
print(anonymous() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    after_export, after_run = map(float, result.stdout.split())
    assert after_export < 600 and after_run < 900  # MB; pools and activations are about 300
