"""Little memory for the probe's reads, so that tests of the bench take no seconds of it."""

from __future__ import annotations

import pytest

from glimmer_ops.bench.probes import cpu


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "working_set", lambda: 16 << 20)
