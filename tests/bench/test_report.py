"""The file of rows: its fields, and the refusal of any other file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from glimmer_ops.bench.report import Row, notes, provenance, read, table, write

FIELDS = (
    *("op", "backend", "case", "qtype", "dtype", "m", "n", "k", "threads", "variant"),
    *("ms_median", "ms_p10", "ms_p90", "samples", "bytes", "flops", "gbps", "gflops"),
    *("limit_gbps", "limit_gflops", "pct_limit", "peer", "peer_ms_median", "ratio"),
    *("gate", "git", "machine", "command"),
)
ROW = Row("rms_norm", "cpu", "1x8", ms_median=0.001, ms_p10=0.001, ms_p90=0.002, gate="pass")


def test_rows_have_the_promised_fields(tmp_path: Path) -> None:
    write(tmp_path / "a.json", [ROW])
    (row,) = json.loads((tmp_path / "a.json").read_text())
    assert set(FIELDS) <= row.keys()


def test_read_gives_what_was_written(tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, peer="upstream", ratio=1.5, m=3, ms_median=2.0)]
    write(tmp_path / "a.json", rows)
    assert read(tmp_path / "a.json") == rows
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write(tmp_path / "a.json", [replace(ROW, ratio=float("nan"))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("{}", "expected a list of rows, found dict"),
        ("[]", "expected a list of rows"),
        ("[1]", "row 0: expected an object, found int"),
        (
            '[{"op": "x"}]',
            "row 0: expected the fields of a row; missing ['backend', 'case', 'gate']",
        ),
        (json.dumps([asdict(ROW), asdict(ROW) | {"x": 1}]), "row 1: expected the fields of a row"),
        (json.dumps([asdict(ROW) | {"threads": "2"}]), "row 0: threads: expected int, found '2'"),
        (json.dumps([asdict(ROW) | {"m": True}]), "row 0: m: expected int, found True"),
        (json.dumps([asdict(ROW) | {"ratio": float("inf")}]), "row 0: ratio: expected float"),
        (json.dumps([asdict(ROW) | {"note": None}]), "row 0: note: expected str, found None"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError) as failure:
        read(tmp_path / "a.json")
    assert words in str(failure.value)


def test_table_and_notes() -> None:
    failed = replace(ROW, ms_median=None, gate="nmse 1.0e+00 > 1e-10")
    busy = replace(ROW, busy=1.5, limit_gbps=10.0, limit_gflops=99.0, variant="avx2")
    shown = table([ROW, failed, replace(busy, peer="upstream", peer_ms_median=0.1, ratio=2.0)])
    assert shown.row_count == 3
    assert len(shown.columns) == len(table([ROW]).columns) + 3
    lines = notes([failed, busy])
    assert lines[0] == "limits, 1 threads: read 10.0 GB/s, float32 99 GFLOP/s"
    assert "FAIL rms_norm 1x8 : nmse 1.0e+00 > 1e-10" in lines
    assert any("other processes kept up to 1.5 CPUs busy" in line for line in lines)


def test_provenance_says_where_and_how() -> None:
    source = provenance()
    assert source["machine"] and source["git"] and source["command"].startswith("glimmer ")
