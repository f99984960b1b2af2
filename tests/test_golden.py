"""Our logits beside llama.cpp's on the same file: another author's code, kept as numbers.

`tests/golden/make_golden.py` wrote them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

import glimmer_ops
from glimmer_ops.lowering import from_gguf
from support.graph import eager_logits

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def golden(tiny_gguf):
    """golden(quant): the loaded file, its ids, and compare(logits) -> rms relative difference."""

    def get(quant: str):
        model = tiny_gguf(quant)
        with np.load(GOLDEN / f"tiny-{quant}.npz") as file:
            kept = {name: file[name] for name in file.files}
        digest = hashlib.sha256(Path(model.path).read_bytes()).hexdigest()
        assert digest == str(kept["sha256"]), "the synthetic file is not the golden one's"
        want = kept["logits"].astype(np.float64)

        def compare(logits: np.ndarray) -> float:
            difference = logits[:, kept["columns"]] - want
            return float(np.sqrt(np.mean(difference**2) / np.mean(want**2)))

        return model, kept["ids"].tolist(), compare

    return get


# Ours in float32 against what llama.cpp rounds: with F16 weights the activations and the cache, to
# float16 (measured: 1.03e-3); with K-quants the activations, to int8 in groups of 256 (2.52e-2),
# beside our own rounding in groups of 32 on the default path (2.99e-2).
BOUNDS = {("F16", True): 1.5e-3, ("Q4_K_M", True): 3e-2, ("Q4_K_M", False): 3.6e-2}


@pytest.mark.parametrize(("quant", "exact"), BOUNDS)
@pytest.mark.parametrize("isa", glimmer_ops.isas())
def test_logits(golden, quant, exact, isa) -> None:
    model, ids, compare = golden(quant)
    assert len(ids) >= 4 * model.config.window
    with glimmer_ops.use_isa(isa):
        ours = eager_logits(from_gguf(model), ids, 16, exact)
    assert compare(ours) <= BOUNDS[quant, exact]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_off_by_one_would_be_noticed(golden, change) -> None:
    model, ids, compare = golden("F16")
    config = dataclasses.replace(model.config, window=model.config.window + change)
    ours = eager_logits(from_gguf(dataclasses.replace(model, config=config)), ids, 16, exact=True)
    assert compare(ours) > 2 * max(BOUNDS.values())


def test_half_split_rope_would_be_noticed(golden, monkeypatch) -> None:
    from glimmer_ops.lowering import graph

    monkeypatch.setattr(graph, "ROPE", "half")
    model, ids, compare = golden("F16")
    ours = eager_logits(from_gguf(model), ids, 16, exact=True)
    assert compare(ours) > 2 * max(BOUNDS.values())
