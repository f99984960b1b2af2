"""Verdicts on synthetic rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glimmer_ops.bench.compare import compare, noise, table
from glimmer_ops.bench.report import Row

ROW = Row(
    "kquant_linear",
    "cpu",
    "Q4_K/1x8x256",
    variant="scalar",
    ms_median=10.0,
    ms_p10=9.9,
    ms_p90=10.1,
    samples=30,
    bytes=1000,
    flops=10,
    limit_gbps=20.0,
    limit_gflops=100.0,
    pct_limit=80.0,
    gate="pass",
    machine="m",
)


def _times(row: Row, factor: float) -> Row:
    assert row.ms_median and row.ms_p10 and row.ms_p90
    return replace(
        row,
        ms_median=row.ms_median * factor,
        ms_p10=row.ms_p10 * factor,
        ms_p90=row.ms_p90 * factor,
    )


def _kind(base: Row, new: Row) -> str:
    (verdict,) = compare([base], [new])
    return verdict.kind


@pytest.mark.parametrize(
    ("factor", "kind"),
    [(1.0, "same"), (1.04, "same"), (0.96, "same"), (1.2, "slower"), (0.8, "faster")],
)
def test_a_change_beyond_the_floor_counts(factor: float, kind: str) -> None:
    assert _kind(ROW, _times(ROW, factor)) == kind


def test_a_wide_spread_hides_a_change() -> None:
    wide = replace(ROW, ms_p10=7.0, ms_p90=13.0)
    assert noise(wide, wide) == pytest.approx(0.3 * 2**0.5)
    assert _kind(wide, _times(wide, 1.2)) == "same"
    assert _kind(wide, _times(wide, 1.5)) == "slower"
    assert _kind(ROW, _times(ROW, 1.2)) == "slower"


def test_a_slower_hour_is_no_regression() -> None:
    """Memory at half its rate explains twice the time of a row at the memory roof."""
    slow_hour = replace(_times(ROW, 2.0), limit_gbps=10.0)
    assert _kind(ROW, slow_hour) == "same"
    assert _kind(slow_hour, ROW) == "same"
    assert _kind(ROW, replace(_times(ROW, 2.0), limit_gflops=50.0)) == "slower"
    assert _kind(ROW, replace(_times(ROW, 3.0), limit_gbps=10.0)) == "slower"


def test_rows_near_the_other_roof_or_in_cache_follow_the_peak() -> None:
    for row in (replace(ROW, flops=10**6), replace(ROW, pct_limit=None)):
        assert _kind(row, replace(_times(row, 2.0), limit_gflops=50.0)) == "same"
        assert _kind(row, replace(_times(row, 2.0), limit_gbps=10.0)) == "slower"


def test_a_probe_that_alone_moves_is_no_change() -> None:
    assert _kind(ROW, replace(ROW, limit_gbps=30.0)) == "same"
    assert _kind(ROW, replace(ROW, limit_gbps=10.0)) == "same"


def test_ratios_that_disagree_are_no_change() -> None:
    """A third faster while memory was twice as fast: less than the machine gave, and no loss."""
    assert _kind(ROW, replace(_times(ROW, 0.75), limit_gbps=40.0)) == "same"
    assert _kind(replace(_times(ROW, 0.75), limit_gbps=40.0), ROW) == "same"


def test_missing_new_and_failed_rows() -> None:
    other = replace(ROW, case="other")
    failed = replace(ROW, ms_median=None, gate="nmse 1 > 1e-10")
    assert [(v.kind, v.failed) for v in compare([ROW, other], [ROW])] == [
        ("same", False),
        ("missing", True),
    ]
    assert [(v.kind, v.failed) for v in compare([ROW], [ROW, other])] == [
        ("same", False),
        ("new", False),
    ]
    assert [(v.kind, v.failed) for v in compare([ROW], [failed])] == [("gate", True)]
    assert _kind(failed, ROW) == "new"


def test_each_part_of_the_key_tells_rows_apart() -> None:
    for change in ({"op": "x"}, {"backend": "x"}, {"variant": "x"}, {"case": "x"}, {"threads": 9}):
        kinds = {v.kind for v in compare([ROW], [replace(ROW, **change)])}  # type: ignore[arg-type]
        assert kinds == {"new", "missing"}


def test_one_verdict_for_a_row_with_several_peers() -> None:
    rows = [replace(ROW, peer=p) for p in ("upstream", "xnnpack")]
    assert [v.kind for v in compare(rows, rows)] == ["same"]


def test_another_machine_is_named() -> None:
    (verdict,) = compare([ROW], [replace(ROW, machine="n")])
    assert verdict.detail == "base: m"
    assert table([verdict]).row_count == 1
