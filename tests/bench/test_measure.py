"""The measuring loop: gate, rotation, samples, limits; on small cases and with little memory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from glimmer_ops.backends import BACKENDS
from glimmer_ops.bench import measure
from glimmer_ops.bench.measure import Samples, Settings, bench_case, dims, make_sets, quantile
from glimmer_ops.bench.probes import Limits, probe_of
from glimmer_ops.bench.probes.cpu import CpuProbe
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import Op

CPU = BACKENDS["cpu"]
FEW = Settings(samples=3, seconds=0.5, threads=1)


class SmallProbe:
    """Constant limits: what a row says of them can be computed."""

    working_set = 1 << 20

    def limits(self) -> Limits:
        return Limits(gbps=10.0, gflops=100.0, int8_gops=400.0)

    def freedom(self) -> float:
        return 5.0

    def others(self) -> float:
        return 0.0


def _case(op: str, case_id: str):
    return next(c for c in OPS[op].all_cases() if c.id == case_id)


def _best(op: Op):
    return CPU.variants(op)[-1]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_op_has_cases_to_measure(op: Op) -> None:
    cases = op.bench_cases()
    assert cases and len({c.id for c in cases}) == len(cases)
    assert any(not c.slow for c in cases) and not any(c.error for c in cases)


def test_an_op_without_a_bench_measures_its_dearest_cases() -> None:
    op = replace(OPS["rms_norm"], bench=None)
    cases = op.bench_cases()
    assert [c.id for c in cases][:1] == ["f32/131072"]
    assert len(cases) == 3 and not any(c.error or c.slow for c in cases)


def test_a_row_agrees_with_its_own_figures() -> None:
    op = OPS["kquant_linear"]
    case = _case("kquant_linear", "Q4_K/f32/5x257x768")
    for variant in CPU.variants(op)[:2]:  # exact and int8
        (row,) = bench_case(op, case, CPU, variant, FEW, SmallProbe())
        cost = op.cost(*case.make())
        assert row.gate == "pass" and row.samples >= 3
        assert (row.m, row.n, row.k, row.qtype) == (5, 257, 768, "Q4_K")
        assert (row.bytes, row.flops) == (cost.bytes, cost.flops)
        assert row.ms_median and row.ms_p10 and row.ms_p90 and row.gbps and row.gflops
        assert row.ms_p10 <= row.ms_median <= row.ms_p90
        assert row.gbps == pytest.approx(cost.bytes / row.ms_median / 1e6)
        assert row.gflops == pytest.approx(cost.flops / row.ms_median / 1e6)
        peak = 100.0 if variant.exact else 400.0
        assert (row.limit_gbps, row.limit_gflops) == (10.0, peak)
        need = max(cost.bytes / 10.0, cost.flops / peak)
        assert row.pct_limit == pytest.approx(100 * need / (row.ms_median * 1e6))
        assert row.working_set >= SmallProbe.working_set


def test_resident_cases_have_no_limit_and_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["rms_norm"]
    case = replace(_case("rms_norm", "f32/1x6656"), resident=True)
    (row,) = bench_case(op, case, CPU, _best(op), FEW, SmallProbe())
    assert row.pct_limit is None and row.limit_gbps == 10.0
    assert row.working_set == row.bytes
    (other,) = bench_case(op, replace(case, resident=False), CPU, _best(op), FEW, SmallProbe())
    assert other.pct_limit is not None and other.working_set >= SmallProbe.working_set
    monkeypatch.setattr(measure, "MAX_MEMORY", 100_000)
    (short,) = bench_case(op, replace(case, resident=False), CPU, _best(op), FEW, SmallProbe())
    assert short.pct_limit is None and short.note == "too little memory to rotate through"


@pytest.mark.parametrize("touched", [1 << 10, 100_000, 1 << 20, 5 << 20])
def test_sets_cover_the_working_set_and_share_nothing(touched: int) -> None:
    x = torch.ones(1024)
    sets = make_sets((x, 1.0, None), touched, 1 << 20)
    assert (len(sets) - 1) * touched < 1 << 20 <= len(sets) * touched
    assert len({s[0].data_ptr() for s in sets}) == len(sets)
    assert all(torch.equal(s[0], x) and s[1:] == (1.0, None) for s in sets)


class Broken:
    """The CPU backend with a fault of one kind in every kernel."""

    name = "cpu"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def variants(self, op: Op):
        return CPU.variants(op)

    def run(self, op, args, variant, empty=None):
        if self.fault == "refusal":
            raise ValueError("rms_norm: x: not today")
        outs = CPU.run(op, args, variant, empty)
        if self.fault == "value":
            outs[0].view(-1)[-1] += 1.0
        if self.fault == "nan":
            outs[0].view(-1)[-1] = math.nan
        return tuple(o[:-1] for o in outs) if self.fault == "shape" else outs

    def timer(self, op, arg_sets, variant):
        timer = CPU.timer(op, arg_sets, variant)
        if self.fault == "later":
            timer.outs[-1][0].view(-1)[0] += 1.0
            timer.run = lambda start, warm, calls: 1000
        return timer


@pytest.mark.parametrize(
    ("fault", "gate"),
    [
        ("value", "nmse"),
        ("nan", "a result is not finite"),
        ("shape", "out: expected torch.float32[5, 6656], found"),
        ("refusal", "refused: rms_norm: x: not today"),
        ("later", "a result changed while it was timed"),
    ],
)
def test_the_gate_refuses_a_broken_kernel(fault: str, gate: str) -> None:
    op, case = OPS["rms_norm"], _case("rms_norm", "f32/5x6656")
    (row,) = bench_case(op, case, Broken(fault), _best(op), FEW, SmallProbe())  # type: ignore[arg-type]
    assert row.gate.startswith(gate) and not row.passed
    assert row.ms_median is None and row.gbps is None and row.samples == 0


def test_a_result_that_is_not_finite_fails_even_if_the_reference_agrees() -> None:
    op, case = OPS["rms_norm"], _case("rms_norm", "f32/5x6656")
    bad = replace(case, make=lambda: (torch.full((1, 8), math.nan), None, 1e-5))
    (row,) = bench_case(op, bad, CPU, _best(op), FEW, SmallProbe())
    assert row.gate == "a result is not finite"


def test_disturbed_samples_are_dropped() -> None:
    samples = Samples()
    for i in range(20):
        samples.add(1.0, 5.0, 1.0)
        samples.add(2.0, 2.5, 1.0)  # a neighbour on the core
        samples.add(3.0, 5.0, 0.5)  # another process
        assert samples.kept() == [1.0] * (i + 1)
    alike = Samples()
    for _ in range(5):
        alike.add(2.0, 2.5, 0.5)
    assert alike.kept() == [2.0] * 5


def test_quantiles_are_numpys() -> None:
    values = [5.0, 1.0, 4.0, 2.5]
    for q in (0.0, 0.1, 0.5, 0.77, 1.0):
        assert quantile(values, q) == pytest.approx(np.quantile(values, q))
    assert quantile([3.0], 0.9) == 3.0


def test_dims_of_ops_without_rows_or_tensors_first() -> None:
    op = OPS["sdpa"]
    args = op.bench_cases()[0].make()
    assert dims(op, args, [op.fake(*args)]) == (1, 4096, 4096)


def test_the_timer_is_the_kernel() -> None:
    """Its results are those of a call, its time grows with the calls, and bad sets are refused."""
    op, case = OPS["kquant_linear"], _case("kquant_linear", "Q4_K/f32/5x257x768")
    args, variant = case.make(), _best(OPS["kquant_linear"])
    timer = CPU.timer(op, [args, args], variant)
    few = min(timer.run(1, 1, 10) for _ in range(5))
    many = min(timer.run(0, 0, 200) for _ in range(5))
    assert 0 < 4 * few < many
    (expected,) = CPU.run(op, case.make(), variant)
    assert all(torch.equal(outs[0], expected) for outs in timer.outs)
    bad = (args[0], args[1], "Q3_K")
    with pytest.raises(ValueError, match="kquant_linear: qtype: expected one of"):
        CPU.timer(op, [bad], variant)
    with pytest.raises(ValueError, match="sets"):
        CPU.timer(op, [], variant)


def test_probes_are_sane() -> None:
    """More than 1 GB/s and 1 GFLOP/s, time that grows with the bytes, and a core that adds."""
    from glimmer_ops import _bench

    stream = _bench.Stream(64 << 20)
    assert max(size / ns for size, ns in (stream.read(16 << 20) for _ in range(5))) > 1.0

    def seconds(size: int) -> float:
        return min(stream.read(size)[1] for _ in range(7))

    assert seconds(2 << 20) < seconds(16 << 20) < seconds(64 << 20)
    read = stream.read(64 << 20)[0]
    assert 0.9 * (64 << 20) < read <= 64 << 20
    assert _bench.fp32_peak() > 1.0 and _bench.int8_peak() >= 0.0
    assert 0.0 <= _bench.ipc() < 20.0
    for bad in (0, 1 << 10):
        with pytest.raises(ValueError):
            _bench.Stream(bad)
        with pytest.raises(ValueError):
            stream.read(bad)


def test_the_cpu_probe_reads_past_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    from glimmer_ops.bench.probes import cpu

    monkeypatch.setattr(cpu, "available_memory", lambda: 64 << 30)
    for cache, expected in ((0, 256 << 20), (32 << 20, 256 << 20), (260 << 20, 520 << 20)):
        monkeypatch.setattr(cpu, "last_level_cache", lambda cache=cache: cache)
        assert cpu.working_set() == expected
    monkeypatch.setattr(cpu, "available_memory", lambda: 1 << 30)
    assert cpu.working_set() == 256 << 20
    assert probe_of("nothing") is None
    monkeypatch.setattr(cpu, "working_set", lambda: 64 << 20)
    probe = CpuProbe()
    assert probe.limits().gbps > 0.5 and probe.limits().int8_gops >= probe.limits().gflops
    before, now = probe.others(), probe.others()
    assert before is None or now is None or abs(now - before) < 10.0
