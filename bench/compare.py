"""Compares the rows of a bench with those of an earlier one: a verdict a row that knows the noise.

Two ratios of base to new medians are taken, as above 1 is faster: one of the times as they are, one
of the times in units of what the machine could do in those same minutes (its read rate for rows
near that roof, its arithmetic peak for the others and for those in cache). When both say faster, or
both slower, the one nearer to 1 counts; when they disagree, nothing changed but the machine. So a
slow hour is no regression, and a fast one hides none but within the probe's own change.

The change counts when it exceeds the noise: 5 %, or the half widths of p10 … p90 of both rows,
taken together as independent, if that is more. Medians are known better than that where samples
are independent; on a shared machine they are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from .report import Row

FLOOR = 0.05


@dataclass(frozen=True)
class Verdict:
    """kind: faster, slower, same, missing, new or gate. ratio: base / new, judged by `noise`."""

    key: tuple[str, str, str, str, int]
    kind: str
    ratio: float | None = None
    noise: float | None = None
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("slower", "missing", "gate")


def _unit(row: Row) -> float | None:
    """What the machine could do then, at the roof that the row is near."""
    if not row.limit_gbps or not row.limit_gflops:
        return None
    memory_bound = row.bytes / row.limit_gbps > row.flops / row.limit_gflops
    return row.limit_gbps if memory_bound and row.pct_limit is not None else row.limit_gflops


def _spread(row: Row) -> float:
    """Half of p10 … p90 over the median."""
    if not row.ms_median or row.ms_p10 is None or row.ms_p90 is None:
        return 0.0
    return (row.ms_p90 - row.ms_p10) / 2 / row.ms_median


def noise(base: Row, new: Row) -> float:
    """The relative change that means nothing."""
    return max(FLOOR, math.hypot(_spread(base), _spread(new)))


def ratio(base: Row, new: Row) -> float:
    """base / new of the times, as far as the machine's own change cannot explain it."""
    assert base.ms_median and new.ms_median
    raw = base.ms_median / new.ms_median
    units = _unit(base), _unit(new)
    if not units[0] or not units[1]:
        return raw
    normalised = raw * units[0] / units[1]
    if (raw - 1) * (normalised - 1) <= 0:
        return 1.0
    return min(raw, normalised, key=lambda r: abs(math.log(r)))


def _verdict(base: Row | None, new: Row | None) -> Verdict:
    row = new or base
    assert row is not None
    if new is None:
        return Verdict(row.key, "missing")
    if not new.passed:
        return Verdict(row.key, "gate", detail=new.gate)
    if base is None or not base.passed or not base.ms_median or not new.ms_median:
        return Verdict(row.key, "new")
    r, bound = ratio(base, new), noise(base, new)
    kind = "faster" if r > 1 + bound else "slower" if r < 1 / (1 + bound) else "same"
    other = "" if base.machine == new.machine else f"base: {base.machine}"
    return Verdict(row.key, kind, r, bound, other)


def compare(base: Sequence[Row], new: Sequence[Row]) -> list[Verdict]:
    """A verdict for each (op, backend, variant, case, threads) of either, in new's order."""
    before = {r.key: r for r in base}
    after = {r.key: r for r in new}
    keys = [*after, *(k for k in before if k not in after)]
    return [_verdict(before.get(k), after.get(k)) for k in keys]


def table(verdicts: Sequence[Verdict]) -> Table:
    result = Table("verdict", "op", "case", "variant", "thr.", "base / new", "noise", "")
    for v in verdicts:
        op, _, variant, case, threads = v.key
        change = "-" if v.ratio is None else f"{v.ratio:.2f}×"
        bound = "-" if v.noise is None else f"± {100 * v.noise:.0f} %"
        result.add_row(v.kind, op, case, variant, str(threads), change, bound, v.detail)
    return result
