"""`glimmer bench` from its arguments to its files, and one line for every refusal."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from glimmer_ops.backends import BACKENDS
from glimmer_ops.bench import plot
from glimmer_ops.bench.command import thread_counts
from glimmer_ops.bench.report import Row, read, write
from glimmer_ops.session import Session, threads

CASE = ("--op", "rms_norm", "--case", "f32/5x6656", "--samples", 3, "--threads", 1)


@pytest.fixture
def bench(glimmer, small_probe: None):
    """bench("--op", "sdpa"): (exit status, stdout, stderr), run in this process."""
    return functools.partial(glimmer, "bench")


def test_one_case(bench, tmp_path: Path) -> None:
    before = threads()
    status, out, _ = bench(*CASE, "--json", tmp_path / "a.json")
    assert status == 0 and "rms_norm" in out and "limits, 1 threads: read" in out
    assert threads() == before
    (row,) = read(tmp_path / "a.json")
    assert row.passed and row.samples >= 3 and row.threads == 1 and row.ms_median
    assert row.command.startswith("glimmer bench --op rms_norm --case f32/5x6656")
    assert row.variant == BACKENDS["cpu"].variants(_op("rms_norm"))[-1].name


def _op(name: str):
    from glimmer_ops.ops import OPS

    return OPS[name]


def test_every_variant_and_thread_count(bench, tmp_path: Path) -> None:
    args = ("--op", "kquant_linear", "--case", "Q4_K/f32/2x64x512", "--samples", 3)
    more = ("--variant", "all", "--threads", "1,2", "--json", tmp_path / "a.json")
    status, _, _ = bench(*args, *more)
    assert status == 0
    variants = [v.name for v in BACKENDS["cpu"].variants(_op("kquant_linear"))]
    found = [(r.threads, r.variant) for r in read(tmp_path / "a.json")]
    assert found == [(t, v) for t in (1, 2) for v in variants]


def test_compare_decides_the_status(bench, tmp_path: Path) -> None:
    base = tmp_path / "a.json"
    assert bench(*CASE, "--json", base)[0] == 0
    (row,) = read(base)
    assert row.ms_median and row.ms_p10 and row.ms_p90

    def scaled(factor: float) -> Row:
        ms = {n: getattr(row, n) * factor for n in ("ms_median", "ms_p10", "ms_p90")}
        return replace(row, **ms)

    write(base, [scaled(1e-3)])  # a thousand times as fast
    status, out, _ = bench(*CASE, "--compare", base)
    assert status == 1 and "slower" in out
    write(base, [scaled(1e3)])
    status, out, _ = bench(*CASE, "--compare", base)
    assert status == 0 and "faster" in out
    write(base, [row, replace(row, variant="sse9")])  # chosen too, and measured no more
    status, out, _ = bench(*CASE, "--compare", base)
    assert status == 1 and "missing" in out
    write(base, [scaled(1e3), replace(row, op="sdpa")])  # not asked for
    assert bench(*CASE, "--compare", base)[0] == 0


def test_a_broken_kernel_gets_no_figure(bench, monkeypatch, tmp_path: Path) -> None:
    cpu = BACKENDS["cpu"]
    run = type(cpu).run

    def broken(self, op, args, variant, empty=None):
        outs = run(self, op, args, variant, empty)
        outs[0].add_(1.0)
        return outs

    monkeypatch.setattr(type(cpu), "run", broken)
    status, out, _ = bench(*CASE, "--json", tmp_path / "a.json")
    assert status == 1 and "FAIL" in out and "nmse" in out and "µs" not in out
    (row,) = read(tmp_path / "a.json")
    assert row.ms_median is None and not row.passed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--op", "softmax"), "--op: expected one of"),
        (("--backend", "tpu"), "--backend: expected one of"),
        (("--op", "rms_norm", "--case", "f64/1x1"), "--case: no case has the id 'f64/1x1'"),
        (("--op", "rms_norm", "--variant", "mmx"), "--variant: expected all or one of"),
        (("--vs", "mlx", "--op", "rms_norm"), "--vs: expected one of"),
        (("--threads", "0", "--op", "rms_norm"), "--threads: expected numbers from 1 to 1024"),
        (("--threads", "two", "--op", "rms_norm"), "--threads: expected numbers"),
        (("--json", "/nonexistent/a.json"), "--json: expected a file in an existing folder"),
        (("--plot", "/nonexistent/a.png"), "--plot: expected a file in an existing folder"),
        (("--plot", "a.svg"), "--plot: expected a name that ends in .png"),
        (("--compare", "/nonexistent.json"), "/nonexistent.json: cannot be read"),
        (("--gguf", "a.gguf"), "--gguf: expected with --model"),
        (("--model", "m", "--op", "sdpa"), "--model: expected without --op"),
        (("--model", "/nonexistent"), "/nonexistent"),
        (("--model", "m", "--vs", "upstream"), "--vs: expected --gguf"),
    ],
)
def test_refusals_are_one_line(bench, args: tuple[str, ...], words: str) -> None:
    status, out, err = bench(*args)
    assert status == 1 and words in err, err
    assert err.startswith("error: ") and err.count("\n") == 1, err


def test_compare_with_nothing_in_common(bench, tmp_path: Path) -> None:
    write(tmp_path / "a.json", [Row("sdpa", "cpu", "x", gate="pass")])
    status, _, err = bench(*CASE, "--compare", tmp_path / "a.json")
    assert status == 1 and "has no row of what is to be measured" in err


def test_thread_counts() -> None:
    assert thread_counts("2, 1,2") == [1, 2]
    assert thread_counts("")[0] >= 1


def test_a_model(bench, exported, tmp_path: Path) -> None:
    folder = exported("Q4_K_M")
    path = tmp_path / "a.json"
    status, out, _ = bench("--model", folder, "--quick", "--threads", 1, "--json", path)
    assert status == 0 and "tok/s" in out and "peak RSS" in out
    rows = read(path)
    assert [r.case for r in rows] == ["prefill-64", "prefill-512", "decode"]
    assert all(r.passed and r.tok_s and r.load_s and r.bytes for r in rows)
    assert all(r.peak_rss and r.peak_rss > 100e6 for r in rows)
    decode = rows[-1]
    weights = (folder / "model.ptd").stat().st_size
    assert 0.5 * weights < decode.bytes < 1.1 * weights  # all but the embedding, and the cache
    assert rows[0].flops == pytest.approx(64 * decode.flops, rel=0.2)


def test_a_model_with_wrong_logits_gets_no_figure(bench, exported, monkeypatch) -> None:
    import numpy as np

    from glimmer_ops.bench import model

    logits = model._logits
    monkeypatch.setattr(
        model, "_logits", lambda s, ids, chunk: logits(s, ids, chunk) + np.float32(chunk == 7)
    )
    status, out, _ = bench("--model", exported("Q4_K_M"), "--quick", "--threads", 1)
    assert status == 1 and "logits depend on the chunk" in out and "FAIL" in out


def test_speculative_passes(bench, exported_pair, tmp_path: Path) -> None:
    folder, path = exported_pair("Q4_K_M"), tmp_path / "a.json"
    rows = {}
    for case in ("verify-2", "verify-16", "speculate"):
        status, _, _ = bench(
            "--model", folder, "--quick", "--threads", 1, "--case", case, "--json", path
        )
        assert status == 0
        (rows[case],) = read(path)
        row = rows[case]
        assert row.passed and row.peer == "plain decoding" and row.ratio and row.peer_ms_median
    assert rows["verify-16"].m == 16 and rows["verify-16"].tok_s is None
    assert rows["verify-16"].ms_median > rows["verify-2"].ms_median
    assert rows["verify-16"].flops == 8 * rows["verify-2"].flops
    weights = (folder / "model.ptd").stat().st_size
    assert 0.5 * weights < rows["verify-2"].bytes < 1.3 * weights  # some are read twice
    assert rows["speculate"].tokens_per_pass >= 1 and rows["speculate"].accepted_per_pass >= 0


def test_a_text_that_speculation_changes_gets_no_figure(bench, exported_pair, monkeypatch) -> None:
    generate = Session.generate

    def changed(self, *args, speculation=None, **kwargs):
        result = generate(self, *args, speculation=speculation, **kwargs)
        return replace(result, ids=result.ids[::-1]) if speculation else result

    monkeypatch.setattr(Session, "generate", changed)
    status, out, _ = bench(
        "--model", exported_pair("Q4_K_M"), "--quick", "--threads", 1, "--case", "speculate"
    )
    assert status == 1 and "the text differs from plain decoding's" in out


def test_speculative_cases_need_a_draft(bench, exported) -> None:
    status, _, err = bench("--model", exported("Q4_K_M"), "--quick", "--case", "verify-4")
    assert status == 1 and "--case: expected one of prefill-64, prefill-512, decode, found" in err


def _row(op: str, m: int, thread_count: int, gflops: float) -> Row:
    return Row(
        op, "cpu", f"Q4_K/{m}", "Q4_K", m=m, n=8, k=256, threads=thread_count, variant="int8",
        ms_median=1.0 / thread_count, bytes=100, flops=100 * m, gflops=gflops, limit_gbps=10.0,
        limit_gflops=100.0, pct_limit=50.0, gate="pass", machine="a machine",
    )  # fmt: skip


def test_plots_are_png_files(tmp_path: Path) -> None:
    rows = [_row("kquant_linear", m, t, 3.0 * m * t) for m in (1, 4) for t in (1, 2)]
    paths = plot.plot(rows, tmp_path / "a.png")
    assert [p.name for p in paths] == ["a.png", "a-scaling.png"]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in data[-12:]
        assert int.from_bytes(data[16:20], "big") > 600
    assert [p.name for p in plot.plot(rows[:1], tmp_path / "b.png")] == ["b.png"]
    with pytest.raises(ValueError, match="--plot: no row"):
        plot.plot([replace(rows[0], gate="nmse")], tmp_path / "c.png")
