"""The exported model against upstream's eager model and transformers, live, on the same file."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import glimmer_ops
from glimmer_ops.demo import EXACT_BOUND, INTEGER_BOUND, compare
from glimmer_ops.oracle import upstream_logits
from glimmer_ops.session import Session
from support.oracles import transformers_logits

POSITIONS = 240
QUANTS = ["F16", "Q4_K_M"]
ORACLES = {"upstream": upstream_logits, "transformers": transformers_logits}


@pytest.fixture(scope="module")
def oracle_logits(tiny_gguf):
    """oracle_logits(oracle, quant): computed once."""
    made: dict[tuple[str, str], np.ndarray] = {}

    def get(oracle: str, quant: str) -> np.ndarray:
        if (oracle, quant) not in made:
            made[oracle, quant] = ORACLES[oracle](tiny_gguf(quant), _ids(tiny_gguf(quant)))
        return made[oracle, quant]

    return get


def _ids(model) -> list[int]:
    return np.random.default_rng(7).integers(0, model.config.vocab_size, POSITIONS).tolist()


def _ours(exported, model, quant: str, exact: bool, **options: object) -> np.ndarray:
    session = Session.load(exported(quant, **options))
    with glimmer_ops.use_exact(exact):
        return session.prefill(session.open(), _ids(model), 16, range(POSITIONS))


def test_positions_go_well_past_the_window(tiny_gguf) -> None:
    assert POSITIONS >= 200 and POSITIONS >= 4 * tiny_gguf("F16").config.window


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("isa", glimmer_ops.isas())
def test_exact_path(exported, tiny_gguf, oracle_logits, quant, oracle, isa) -> None:
    with glimmer_ops.use_isa(isa):
        ours = _ours(exported, tiny_gguf(quant), quant, exact=True)
    result = compare("exact", ours, oracle_logits(oracle, quant), exact=True)
    assert result.max_abs <= EXACT_BOUND and result.argmax_equal == POSITIONS, result


@pytest.mark.parametrize(
    ("oracle", "quant"),
    [(o, q) for o in ORACLES for q in QUANTS] + [("upstream", "Q5_K_M"), ("upstream", "Q6_K")],
)
@pytest.mark.parametrize("isa", glimmer_ops.isas())
def test_integer_path(exported, tiny_gguf, oracle_logits, quant, oracle, isa) -> None:
    with glimmer_ops.use_isa(isa):
        ours = _ours(exported, tiny_gguf(quant), quant, exact=False)
    result = compare("int8", ours, oracle_logits(oracle, quant), exact=False)
    assert result.rms_relative <= INTEGER_BOUND, result


@pytest.mark.parametrize(("kv_dtype", "bound"), [("f16", 2e-3), ("bf16", 2e-2)])
def test_half_precision_pools(exported, tiny_gguf, oracle_logits, kv_dtype, bound) -> None:
    """Rounding K and V is the only loss: three and two decimal digits of the logits' rms."""
    ours = _ours(exported, tiny_gguf("Q4_K_M"), "Q4_K_M", exact=True, kv_dtype=kv_dtype)
    result = compare("exact", ours, oracle_logits("upstream", "Q4_K_M"), exact=False)
    assert result.rms_relative <= bound, result


@pytest.mark.report("G17")
def test_every_weight_type_in_one_file(tmp_path, monkeypatch) -> None:
    """Q8_0, F16, BF16, F32 and K-quants mixed by tensor, the old gate name and no layer pattern."""
    from glimmer_ops import gguf, synth
    from glimmer_ops.lowering import from_gguf
    from support.graph import eager_logits

    types = itertools.cycle(gguf.QTYPES)
    tensors = [
        (name, shape, next(types) if len(shape) == 2 else qtype)
        for name, shape, qtype in synth.plan("tiny", "Q4_K_M")
    ]
    monkeypatch.setattr(synth, "plan", lambda preset, quant: tensors)
    options = {"pattern": "none", "gate_name": "attn_output_gate"}
    model = gguf.load(synth.synth(tmp_path / "mixed.gguf", "tiny", "Q4_K_M", **options))
    assert {t.qtype for t in model.tensors.values()} == set(gguf.QTYPES)
    ids = _ids(model)[:100]
    ours = eager_logits(from_gguf(model), ids, 16, exact=True)
    assert compare("exact", ours, transformers_logits(model, ids), exact=True).passed
    ours = eager_logits(from_gguf(model), ids, 16, exact=False)
    assert compare("int8", ours, transformers_logits(model, ids), exact=False).passed


def test_the_oracles_would_notice_a_broken_convention(tiny_gguf, oracle_logits) -> None:
    """The bounds separate right from wrong: a window off by one already misses them by far."""
    import dataclasses

    model = tiny_gguf("F16")
    broken = dataclasses.replace(model.config, window=model.config.window - 1)
    other = upstream_logits(dataclasses.replace(model, config=broken), _ids(model))
    result = compare("exact", other, oracle_logits("upstream", "F16"), exact=True)
    assert result.rms_relative > 2 * INTEGER_BOUND
