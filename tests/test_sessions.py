"""Sessions on an exported program: the same sequence has the same logits however it is computed.

For steps of at most 16 rows "the same" means equal bits; larger chunks are held to the
teacher-forced bound. Pools start full of NaN, so whatever was never written must not matter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import glimmer_ops
from glimmer_ops.session import Sampling, Session, load_program

N = 150
LARGE_CHUNK_BOUND = 3e-2


@pytest.fixture(params=["int8", "exact"])
def path(request):
    with glimmer_ops.use_exact(request.param == "exact"):
        yield request.param


@pytest.fixture
def session(exported, path):
    return _new(exported("Q4_K_M"))


def _new(folder, page_seed: int | None = None) -> Session:
    session = Session(load_program(folder), page_seed)
    _poison(session)
    return session


def _poison(session: Session) -> None:
    for layer in range(session.limits.n_layers):
        for part in "kv":
            session.pool(layer, part).fill_(float("nan"))


def _ids(seed: int, n: int = N) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1024, n).tolist()


def _logits(session: Session, ids: list[int], chunk: int) -> np.ndarray:
    slot = session.open()
    rows = session.prefill(slot, ids, chunk, range(len(ids)))
    session.close(slot)
    return rows


def _rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


@pytest.fixture
def alone(exported, path):
    """alone(seed): logits of that sequence, one token at a time, in a session of its own."""
    return lambda seed, n=N: _logits(_new(exported("Q4_K_M")), _ids(seed, n), 1)


@pytest.mark.parametrize("chunk", [7, 16])
def test_small_chunks_have_equal_bits(session, alone, chunk: int) -> None:
    assert np.array_equal(_logits(session, _ids(0), chunk), alone(0))


@pytest.mark.parametrize("chunk", [63, 64, 65, 39, 40, 41, 128])
def test_large_chunks(session, alone, chunk: int) -> None:
    """Around the page of 64, around the window of 40, and the largest."""
    assert session.limits.window == 40 and session.limits.max_chunk == 128
    assert _rms(_logits(session, _ids(0), chunk), alone(0)) <= LARGE_CHUNK_BOUND


@pytest.mark.parametrize("isa", glimmer_ops.isas())
def test_every_isa(exported, path, isa: str) -> None:
    with glimmer_ops.use_isa(isa):
        one = _logits(_new(exported("Q4_K_M")), _ids(3, 70), 1)
        assert np.array_equal(_logits(_new(exported("Q4_K_M")), _ids(3, 70), 16), one)


@pytest.mark.parametrize("page_seed", [1, 2])
def test_random_page_order(exported, alone, page_seed: int) -> None:
    session = _new(exported("Q4_K_M"), page_seed)
    other = session.open()
    session.prefill(other, _ids(9, 70))
    assert np.array_equal(_logits(session, _ids(0), 16), alone(0))
    table = session.global_table()
    assert sorted(table[table >= 0]) != table[table >= 0].tolist()


def test_thread_count(exported, path) -> None:
    from glimmer_ops.session import set_threads, threads

    before = threads()
    try:
        results = []
        for n in (1, 2, 3):
            set_threads(n)
            results.append(_logits(_new(exported("Q4_K_M")), _ids(4, 100), 16))
    finally:
        set_threads(before)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.report("C1")
def test_two_interleaved_slots(session, alone) -> None:
    slots = [session.open(), session.open()]
    rows: list[list[np.ndarray]] = [[], []]
    for start in range(0, N, 10):
        for i, slot in enumerate(slots):
            part = _ids(i)[start : start + 10]
            rows[i].append(session.prefill(slot, part, 10, range(len(part))))
    for i in range(2):
        assert np.array_equal(np.concatenate(rows[i]), alone(i))


def test_two_slots_and_padding_rows_in_one_forward(session, alone) -> None:
    """Different progress, mixed order, padding rows in between."""
    a, b = session.open(), session.open()
    rng = np.random.default_rng(5)
    want = {a: _ids(0), b: _ids(1)}
    got: dict[int, list[np.ndarray]] = {a: [], b: []}
    while any(len(got[s]) < N for s in want):
        tokens, at = [], dict.fromkeys(want, 0)
        budget = {a: int(rng.integers(0, 8)), b: int(rng.integers(1, 7))}
        while any(at[s] < budget[s] for s in want):
            slot = (a, b, -1)[rng.integers(0, 3)]
            if slot == -1:
                tokens.append((-1, int(rng.integers(0, 1024))))
            elif at[slot] < budget[slot]:
                position = len(got[slot]) + at[slot]
                at[slot] += 1
                if position < N:
                    tokens.append((slot, want[slot][position]))
            if len(tokens) == 16:
                break
        if not any(s >= 0 for s, _ in tokens):
            continue
        rows = [i for i, (s, _) in enumerate(tokens) if s >= 0]
        for i, logits in zip(rows, session.forward(tokens, rows), strict=True):
            got[tokens[i][0]].append(logits)
    assert np.array_equal(np.stack(got[a]), alone(0))
    assert np.array_equal(np.stack(got[b]), alone(1))


@pytest.mark.parametrize("prefix", [30, 64, 100])
def test_shared_prefix_then_divergence(session, alone, exported, prefix: int) -> None:
    """Copy on write: both continue as if the other did not exist."""
    first, second = session.open(), session.open()
    common = _ids(0)[:prefix]
    session.prefill(first, common, 16)
    before = session.pages_in_use()["global"]
    session.share(first, second, prefix)
    assert session.pages_in_use()["global"] == before
    tail = _ids(2, N - prefix)
    second_rows = session.prefill(second, tail, 16, range(len(tail)))
    first_rows = session.prefill(first, _ids(0)[prefix:], 16, range(N - prefix))
    assert np.array_equal(first_rows, alone(0)[prefix:])
    whole = _logits(_new(exported("Q4_K_M")), common + tail, 1)
    assert np.array_equal(second_rows, whole[prefix:])


@pytest.mark.report("D1", "D4")
@pytest.mark.parametrize(("at", "back"), [(20, 5), (64, 1), (66, 16), (130, 16)])
def test_truncate_and_go_on(session, alone, at: int, back: int) -> None:
    """As if the rejected tokens had never been: also where the window has moved on."""
    slot = session.open()
    session.prefill(slot, _ids(0)[: at - back], 16)
    session.prefill(slot, _ids(8, back), 16)  # the draft to be rejected
    session.truncate(slot, at - back)
    rows = session.prefill(slot, _ids(0)[at - back :], 16, range(N - at + back))
    assert np.array_equal(rows, alone(0)[at - back :])


@pytest.mark.report("C1", "S7")
def test_freed_pages_full_of_nan(session, alone) -> None:
    """What a closed sequence leaves behind does not reach the next one."""
    slot = session.open()
    session.prefill(slot, _ids(6))
    session.close(slot)
    _poison(session)
    assert np.array_equal(_logits(session, _ids(0), 16), alone(0))


def test_sliding_pools_do_not_grow_and_freed_pages_may_hold_nan(session) -> None:
    """A long run holds a bounded number of sliding pages; freed ones are poisoned on the way."""
    limits = session.limits
    slot, most = session.open(), 0
    ids = _ids(11, 1000)
    for start in range(0, 1000, 50):
        logits = session.prefill(slot, ids[start : start + 50], 50)
        assert np.isfinite(logits).all()
        most = max(most, session.pages_in_use()["sliding"])
        held = set(session.sliding_table()[slot].tolist()) - {-1}
        for layer in range(limits.n_layers):
            if limits.sliding_layers[layer]:
                for page in set(range(limits.sliding_pages)) - held:
                    session.pool(layer, "k")[page].fill_(float("nan"))
                    session.pool(layer, "v")[page].fill_(float("nan"))
    assert most <= -(-(limits.window + 50 + 16) // 64) + 1
    assert limits.sliding_pages < -(-1000 // 64) * limits.slots


@pytest.mark.report("D6")
def test_verification_rows_equal_single_steps(session) -> None:
    """decode() of several rows of one slot gives the ids that one row at a time gives."""
    slot = session.open()
    session.prefill(slot, _ids(0)[:-1], 16)
    ids = [_ids(0)[-1]]
    for _ in range(12):
        ids += session.decode([slot], [ids[-1]], Sampling(0.8, 40, 0.95, seed=3))
    session.truncate(slot, N - 1)
    rows = session.decode([slot] * 12, ids[:12], Sampling(0.8, 40, 0.95, seed=3))
    assert rows == ids[1:13]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generated_text_does_not_depend_on_chunk_or_neighbours(session, temperature) -> None:
    sampling = Sampling(temperature, seed=1)
    texts = []
    for chunk in (1, 7, 16):
        slot = session.open()
        texts.append(session.generate(slot, _ids(0), 40, sampling, chunk=chunk).ids)
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) > 4


def test_decode_samples_from_the_logits_of_forward(session) -> None:
    """The two methods share pools and arithmetic: greedy decode is the argmax of the logits."""
    slot = session.open()
    logits = session.prefill(slot, _ids(0), 16)
    session.truncate(slot, N - 1)
    assert session.decode([slot], [_ids(0)[-1]], Sampling()) == [int(logits[0].argmax())]


def test_batched_slots_decode_as_alone(session, exported) -> None:
    """Four sequences of different lengths stepping together, each as by itself."""
    lengths, sampling = (5, 64, 97, 30), Sampling(0.7, seed=9)
    alone = []
    for i, n in enumerate(lengths):
        single = _new(exported("Q4_K_M"))
        alone.append(single.generate(single.open(), _ids(i, n), 20, sampling).ids)
    slots = [session.open() for _ in lengths]
    for i, n in enumerate(lengths):
        session.prefill(slots[i], _ids(i, n)[:-1], rows=[])
    ids = [_ids(i, n)[-1] for i, n in enumerate(lengths)]
    together: list[list[int]] = [[] for _ in lengths]
    for _ in range(20):
        ids = session.decode(slots, ids, sampling)
        for i, token in enumerate(ids):
            together[i].append(token)
    assert together == alone


def test_usable_after_every_refusal(session, alone) -> None:
    slot = session.open()
    session.prefill(slot, _ids(0)[:100], 16)
    with pytest.raises(ValueError, match="1024"):
        session.prefill(slot, [5, 1024])
    with pytest.raises(ValueError, match="slot"):
        session.prefill(99, [1])
    with pytest.raises(ValueError, match="max_seq_len"):
        session.prefill(slot, [1] * 1000)
    with pytest.raises(ValueError, match="16"):
        session.decode([slot] * 17, [1] * 17, Sampling())
    with pytest.raises(ValueError, match="temperature"):
        session.decode([slot], [1], Sampling(temperature=-1.0))
    assert session.length(slot) == 100
    rows = session.prefill(slot, _ids(0)[100:], 16, range(50))
    assert np.array_equal(rows, alone(0)[100:])


def test_pages_run_out_before_anything_is_launched(exported, path) -> None:
    session = _new(exported("Q4_K_M", pages=3))
    a, b = session.open(), session.open()
    session.prefill(a, _ids(0, 128))
    session.prefill(b, _ids(1, 60))
    with pytest.raises(RuntimeError, match="page"):
        session.prefill(b, _ids(2, 10))
    assert session.length(b) == 60
    session.close(a)
    session.prefill(b, _ids(2, 10))
    assert session.length(b) == 70


@pytest.mark.report("D8")
def test_non_finite_weights_are_reported_not_sampled(tiny_gguf, tmp_path) -> None:
    """A NaN scale in one super-block of the head: an error with a name, and a usable session."""
    from pathlib import Path

    from glimmer_ops.gguf import load
    from glimmer_ops.lowering import ExportOptions, from_gguf, to_executorch
    from glimmer_ops.lowering import cpu as cpu_lowering

    source = tiny_gguf("Q4_K_M")
    data = bytearray(Path(source.path).read_bytes())
    offset = source.tensors["output.weight"].offset
    data[offset : offset + 2] = b"\x00\x7e"  # d of the first super-block: NaN
    file = tmp_path / "nan.gguf"
    file.write_bytes(data)
    original, cpu_lowering.verify = cpu_lowering.verify, lambda folder: None
    try:
        options = ExportOptions(max_seq_len=256, max_chunk=32)
        folder = to_executorch(from_gguf(load(file)), tmp_path / "nan", options)
    finally:
        cpu_lowering.verify = original
    session = Session.load(folder)
    slot = session.open()
    with pytest.raises(RuntimeError, match="not finite"):
        session.prefill(slot, [1, 2, 3])
    with pytest.raises(RuntimeError, match="NaN"):
        session.decode([slot], [1], Sampling())
    assert session.length(slot) == 0
    assert torch.isfinite(session.pool(0, "k")).all()
