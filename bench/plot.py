"""Roofline and scaling of a bench's rows, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import Row

MARKERS = "osD^vP*Xph<>"


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width, height), squeeze=False)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path


def plot(rows: Sequence[Row], path: Path) -> list[Path]:
    """Draws F.png, and F-scaling.png where several M or thread counts were measured."""
    measured = list({r.key: r for r in rows if r.passed and r.ms_median}.values())
    most = max((r.threads for r in measured), default=0)
    on_roof = [r for r in measured if r.pct_limit is not None and r.flops and r.threads == most]
    written = []
    if on_roof:
        written.append(_roofline(on_roof, path))
    series = [*_by_m(measured), *_by_threads(measured)]
    if series:
        written.append(_scaling(series, path.with_name(f"{path.stem}-scaling.png")))
    if not written:
        raise ValueError("--plot: no row has a place on a roofline, nor several M or threads")
    return written


def _series_name(row: Row) -> str:
    return f"{row.op} {row.qtype}".strip()


def _roofline(rows: Sequence[Row], path: Path) -> Path:
    figure, (axes,) = _figure(9, 5.5)
    intensity = [r.flops / r.bytes for r in rows]
    low, high = min(*intensity, 0.25) / 2, max(*intensity, 100.0) * 3
    read = _median([r.limit_gbps for r in rows])
    for peak in sorted({round(p, -1) for p in _peaks(rows)}):
        xs = [low, peak / read, high]
        axes.plot(xs, [min(read * x, peak) for x in xs], color="0.35", lw=1.4, zorder=1)
        # Nothing can lie above the roof, so there is room for the label.
        axes.plot([low, peak / read], [peak, peak], color="0.7", lw=0.8, ls=":", zorder=1)
        axes.text(low * 1.2, peak * 1.06, f"peak {peak:,.0f} GFLOP/s", color="0.25")
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    for i, name in enumerate(dict.fromkeys(map(_series_name, rows))):
        mine = [r for r in rows if _series_name(r) == name]
        xs, ys = [r.flops / r.bytes for r in mine], [r.gflops or 0.0 for r in mine]
        marker = MARKERS[i % len(MARKERS)]
        axes.scatter(xs, ys, marker=marker, s=46, label=name, zorder=3, edgecolor="white", lw=0.6)
    corner = axes.transData.transform([(low, read * low), (low * 10, read * low * 10)])
    angle = _degrees(*(corner[1] - corner[0]))
    x = low * 1.6
    text = f"read {read:.1f} GB/s"
    axes.text(x, read * x * 1.25, text, rotation=angle, rotation_mode="anchor", color="0.25")
    axes.set_xlabel("arithmetic intensity (FLOP/byte)")
    axes.set_ylabel("GFLOP/s (int8 ones for the int8 paths)")
    axes.set_title(f"{rows[0].machine}, {rows[0].threads} threads", fontsize=10)
    axes.grid(True, which="major", color="0.9")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _save(figure, path)


def _peaks(rows: Sequence[Row]) -> list[float]:
    """The median peak of the int8 rows and of the others: the roofs."""
    groups: dict[bool, list[float | None]] = {}
    for r in rows:
        groups.setdefault(r.variant.endswith("int8"), []).append(r.limit_gflops)
    return [_median(g) for g in groups.values()]


def _median(values: Sequence[float | None]) -> float:
    known = sorted(v for v in values if v)
    return known[len(known) // 2]


def _degrees(dx: float, dy: float) -> float:
    import math

    return math.degrees(math.atan2(dy, dx))


Series = tuple[str, str, list[tuple[int, float]]]  # x label, name, points


def _by_m(rows: Sequence[Row]) -> list[Series]:
    """GFLOP/s over M, where one weight was measured with several."""
    groups: dict[tuple, list[Row]] = {}
    for r in rows:
        if r.qtype and r.pct_limit is not None:
            groups.setdefault((_series_name(r), r.n, r.k, r.variant, r.threads), []).append(r)
    result: list[Series] = []
    for (name, n, k, variant, threads), group in groups.items():
        points = sorted((r.m, r.gflops or 0.0) for r in group)
        if len({m for m, _ in points}) > 1:
            result.append(("M (rows)", f"{name} {n}×{k} {variant}, {threads} thr.", points))
    return result


def _by_threads(rows: Sequence[Row]) -> list[Series]:
    """Speed-up over the fewest threads."""
    groups: dict[tuple, list[Row]] = {}
    for r in rows:
        groups.setdefault((r.op, r.case, r.variant, r.backend), []).append(r)
    result: list[Series] = []
    for (op, case, *_), group in groups.items():
        ordered = sorted(group, key=lambda r: r.threads)
        first = ordered[0]
        if len(ordered) > 1:
            points = [
                (r.threads, first.threads * (first.ms_median or 0.0) / (r.ms_median or 1.0))
                for r in ordered
            ]
            result.append(("threads", f"{op} {case}", points))
    return result


def _scaling(series: Sequence[Series], path: Path) -> Path:
    from matplotlib import ticker

    labels = list(dict.fromkeys(s[0] for s in series))
    most = max(sum(s[0] == label for s in series) for label in labels)
    figure, panels = _figure(6 * len(labels), 4.2 + 0.2 * most, len(labels))
    for label, axes in zip(labels, panels, strict=True):
        mine = [s for s in series if s[0] == label]
        for i, (_, name, points) in enumerate(mine):
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, marker=MARKERS[i % len(MARKERS)], ms=5, lw=1.3, label=name)
        ticks = sorted({x for _, _, points in mine for x, _ in points})
        axes.set_xlabel(label)
        axes.grid(True, color="0.9")
        if label == "threads":
            axes.plot(ticks, ticks, color="0.6", lw=1, ls="--", label="linear")
            axes.set_ylabel("speed-up")
        else:
            axes.set(xscale="log", yscale="log", ylabel="GFLOP/s")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, fontsize=8)
    return _save(figure, path)
