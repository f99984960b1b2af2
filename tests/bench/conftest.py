"""Little memory for the probe's reads and one thread for torch, so that benches take no seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from glimmer_ops.bench.probes import cpu


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "working_set", lambda: 16 << 20)
