"""Session against a model in Python whose logits depend on exactly the tokens it may see."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fake_model import VOCAB, FakeModel, expected_logits, expected_next, limits
from glimmer_ops._native import _C
from glimmer_ops.session import Sampling, Session, set_threads, threads

LAYERS = {"mixed": [1, 0, 1], "global": [0, 0], "sliding": [1, 1]}


def new(page_seed=7, **overrides):
    model = FakeModel(limits(**overrides))
    return Session(model, page_seed), model


def text(n, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def state(session):
    lengths = []
    for slot in range(session.limits.slots):
        try:
            lengths.append(session.length(slot))
        except ValueError:
            lengths.append(None)
    tables = session.global_table().tolist(), session.sliding_table().tolist()
    return lengths, tables, session.pages_in_use()


def check_usable(session, slot, ids):
    """The slot holds exactly ids: the next token's logits say so."""
    assert session.length(slot) == len(ids)
    got = session.forward([(slot, 5)], [0])
    np.testing.assert_array_equal(got[0], expected_logits(ids + [5], session.limits))
    session.truncate(slot, len(ids))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 12])
@pytest.mark.parametrize("page_seed", [None, 1])
def test_prefill_gives_the_same_logits_in_any_chunks(layers, chunk, page_seed):
    session, _ = new(page_seed, sliding_layers=LAYERS[layers])
    slot, ids = session.open(), text(60)
    logits = session.prefill(slot, ids, chunk, rows=range(60))
    assert logits.shape == (60, VOCAB) and logits.dtype == np.float32
    for i in range(60):
        np.testing.assert_array_equal(logits[i], expected_logits(ids[: i + 1], session.limits))
    assert session.length(slot) == 60


def test_prefill_rows():
    session, model = new()
    ids = text(30)
    want = [expected_logits(ids[: i + 1], session.limits) for i in range(30)]
    for rows, expected in ([None, [29]], [[], []], [[29, 3, 3, 0], [29, 3, 3, 0]]):
        slot = session.open()
        got = session.prefill(slot, ids, 8, rows)
        assert got.shape == (len(expected), VOCAB)
        for row, i in zip(got, expected, strict=True):
            np.testing.assert_array_equal(row, want[i])
        session.close(slot)
    forwards = [detail for name, detail in model.calls if name == "forward"]
    assert forwards[:4] == [(8, 0), (8, 0), (8, 0), (6, 1)]
    assert forwards[4:8] == [(8, 0), (8, 0), (8, 0), (6, 0)]


def test_more_rows_than_the_program_gives_repeat_the_chunk():
    session, model = new(max_rows=3)
    ids = text(10)
    got = session.prefill(session.open(), ids, 10, rows=range(8))
    assert [c for c in model.calls if c[0] != "copy_page"] == [
        ("embed", 10), ("forward", (10, 3)), ("forward", (10, 3)), ("forward", (10, 2)),
    ]  # fmt: skip
    for i in range(8):
        np.testing.assert_array_equal(got[i], expected_logits(ids[: i + 1], session.limits))


def test_forward_mixes_slots_and_padding():
    session, _ = new()
    a, b = session.open(), session.open()
    ids = {a: text(20, 1), b: text(9, 2)}
    for slot, prefix in ids.items():
        session.prefill(slot, prefix, 6, [])
    tokens = [(-1, 0), (b, 3), (a, 4), (-1, 7), (a, 5), (b, 6), (a, 1), (-1, 0)]
    got = session.forward(tokens, [6, 1, 5, 2, 4])
    order = [(a, [4, 5, 1]), (b, [3]), (b, [3, 6]), (a, [4]), (a, [4, 5])]
    for row, (slot, tail) in zip(got, order, strict=True):
        np.testing.assert_array_equal(row, expected_logits(ids[slot] + tail, session.limits))
    assert (session.length(a), session.length(b)) == (23, 11)


def test_forward_positions_may_come_in_any_order():
    session, _ = new()
    slot, ids = session.open(), text(8)
    session.prefill(slot, ids, 8, [])
    got = session.forward([(slot, 3), (slot, 1), (slot, 2)], [0, 1, 2], positions=[10, 8, 9])
    for row, tail in zip(got, ([1, 2, 3], [1], [1, 2]), strict=True):
        np.testing.assert_array_equal(row, expected_logits(ids + tail, session.limits))


def test_decode_rows_of_several_slots():
    session, _ = new()
    slots = [session.open() for _ in range(3)]
    ids = [text(5 + 9 * s, s) for s in slots]
    for slot in slots:
        session.prefill(slot, ids[slot], 12, [])
    current = [1, 2, 3]
    for _ in range(30):
        rows = [*slots, -1]
        sampling = [Sampling(seed=s) for s in rows]
        following = session.decode(rows, [*current, 0], sampling)[:3]
        for slot in slots:
            ids[slot].append(current[slot])
            assert following[slot] == expected_next(ids[slot], session.limits, seed=slot)
        current = following


def test_decode_verifies_drafts_and_rolls_back():
    session, _ = new()
    slot, ids = session.open(), text(40)
    session.prefill(slot, ids, 12, [])
    accepted = [5]
    while session.length(slot) < 70:
        right = expected_next(ids + accepted, session.limits)
        drafts = [accepted[-1], right, *text(14, session.length(slot))]
        got = session.decode([slot] * 16, drafts, Sampling())
        for i in range(16):
            assert got[i] == expected_next(ids + drafts[: i + 1], session.limits)
        ids += drafts[:2]  # the anchor and the one right draft
        session.truncate(slot, len(ids))
        accepted = [got[1]]
    check_usable(session, slot, ids)


@pytest.mark.report("D2")
def test_decode_up_to_the_last_position():
    session, _ = new(max_seq_len=94)  # the last page is partly unusable
    slot, ids = session.open(), text(78)
    session.prefill(slot, ids, 12, [])
    session.prefill(slot, text(4), 4, [])
    with pytest.raises(ValueError, match="tokens: expected at most 12 tokens.*found 13"):
        session.decode([slot] * 13, [0] * 13, Sampling())
    assert session.length(slot) == 82
    session.decode([slot] * 12, [0] * 12, Sampling())
    assert session.length(slot) == 94
    with pytest.raises(ValueError, match="tokens: expected at most 0 tokens"):
        session.decode([slot], [0], Sampling())


@pytest.mark.parametrize("n", [22, 24, 25])  # partial pages and whole ones
@pytest.mark.parametrize("first", ["src", "dst"])
def test_share_then_both_go_their_own_way(n, first):
    session, model = new()
    a, b, ids = session.open(), session.open(), text(25)
    session.prefill(a, ids, 12, [])
    used = session.pages_in_use()
    session.share(a, b, n)
    assert session.pages_in_use() == used
    sequences = [(a, ids, [1, 2, 3, 4, 5, 6]), (b, ids[:n], [6, 5, 4, 3, 2, 1])]
    for slot, prefix, tail in sequences if first == "src" else sequences[::-1]:
        got = session.prefill(slot, tail, 4)
        np.testing.assert_array_equal(got[0], expected_logits(prefix + tail, session.limits))
    check_usable(session, a, ids + sequences[0][2])
    copied = [detail[0] for name, detail in model.calls if name == "copy_page"]
    assert sorted(copied) == ([] if n == 24 else ["global", "sliding"])


def test_share_of_a_window_that_is_gone_changes_nothing():
    session, _ = new()
    a, b = session.open(), session.open()
    session.prefill(a, text(60), 12, [])
    before = state(session)
    with pytest.raises(ValueError, match="sliding pages: n_tokens: cannot share 20 .*freed"):
        session.share(a, b, 20)
    assert state(session) == before


def test_close_returns_pages_and_slots():
    session, _ = new()
    for _ in range(3):
        session.prefill(session.open(), text(40), 12)
    with pytest.raises(RuntimeError, match="no free slot: all 3 are open"):
        session.open()
    session.close(1)
    assert session.open() == 1 and session.length(1) == 0
    for slot in range(3):
        session.close(slot)
    assert session.pages_in_use() == {"global": 0, "sliding": 0}


@pytest.mark.report("C1")
def test_sessions_do_not_leak_into_each_other():
    sessions = [new()[0] for _ in range(2)]
    slots = [s.open() for s in sessions]
    ids = [text(3, 1), text(3, 2)]
    for step in range(30):
        for i, session in enumerate(sessions):
            got = session.prefill(slots[i], ids[i][-3:] if step == 0 else [step % VOCAB], 12)
            ids[i] += [] if step == 0 else [step % VOCAB]
            np.testing.assert_array_equal(got[0], expected_logits(ids[i], session.limits))


def test_minimal_sliding_pool_serves_all_slots_to_the_end():
    session, _ = new()
    slots = [session.open() for _ in range(3)]
    ids = [[], [], []]
    for step in range(8):
        for slot in slots:
            part = text(12, 10 * step + slot)
            got = session.prefill(slot, part, 12)
            ids[slot] += part
            np.testing.assert_array_equal(got[0], expected_logits(ids[slot], session.limits))


# --- failures leave everything as before ---------------------------------------------------------


def test_out_of_pages_is_refused_before_any_work():
    session, model = new(global_pages=10)
    a, b, ids = session.open(), session.open(), text(21)
    session.prefill(a, ids, 12, [])
    before, calls = state(session), len(model.calls)
    with pytest.raises(RuntimeError, match="global pages: no free page: slot 1 needs 1 .* 0 free"):
        session.prefill(b, text(17), 4)
    assert state(session) == before and len(model.calls) == calls
    session.prefill(b, ids[:16], 4)
    before = state(session)
    with pytest.raises(RuntimeError, match="global pages: no free page"):
        session.decode([b], [1], Sampling())
    with pytest.raises(RuntimeError, match="global pages: no free page"):
        session.forward([(a, 1)] * 3 + [(b, 1)], [])
    assert state(session) == before
    session.close(a)
    check_usable(session, b, ids[:16])


@pytest.mark.parametrize("method", ["embed", "forward"])
@pytest.mark.parametrize("countdown", [1, 3])
def test_a_failing_prefill_is_rolled_back(method, countdown):
    session, model = new()
    slot, ids = session.open(), text(20)
    session.prefill(slot, ids, 12, [])
    tables_hold = len(ids)
    model.fail_on = (method, countdown)
    with pytest.raises(RuntimeError, match=f"{method} broke"):
        session.prefill(slot, text(12, 3), 4, [])
    assert session.length(slot) == tables_hold
    check_usable(session, slot, ids)
    session.close(slot)
    assert session.pages_in_use() == {"global": 0, "sliding": 0}


def test_a_failing_prefill_keeps_finished_chunks_when_the_window_has_moved_on():
    session, model = new()
    slot, ids = session.open(), text(20)
    session.prefill(slot, ids, 12, [])
    model.fail_on = ("forward", 6)
    more = text(72, 3)
    with pytest.raises(RuntimeError, match="forward broke"):
        session.prefill(slot, more, 12, [])
    check_usable(session, slot, ids + more[:60])


@pytest.mark.parametrize("method", ["embed", "forward", "copy_page"])
def test_a_failing_forward_changes_nothing(method):
    session, model = new()
    a, b, ids = session.open(), session.open(), text(21)
    session.prefill(a, ids, 12, [])
    session.share(a, b, 21)
    before = state(session)
    model.fail_on = (method, 1)
    with pytest.raises(RuntimeError, match=f"{method} broke"):
        session.forward([(a, 1), (b, 2), (b, 3)], [0])
    assert state(session) == before
    check_usable(session, a, ids)
    check_usable(session, b, ids)


def test_a_failing_decode_changes_nothing():
    session, model = new()
    slot, ids = session.open(), text(8)
    session.prefill(slot, ids, 12, [])
    before = state(session)
    model.fail_on = ("decode", 1)
    with pytest.raises(RuntimeError, match="decode broke"):
        session.decode([slot], [1], Sampling())
    assert state(session) == before
    check_usable(session, slot, ids)


@pytest.mark.report("D8")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error(value):
    session, model = new()
    slot, ids = session.open(), text(8)
    session.prefill(slot, ids, 12, [])
    before = state(session)
    logits = model._logits
    model._logits = lambda pos, *a: np.where(
        (pos == 10) & (np.arange(VOCAB) == VOCAB - 1), np.float32(value), logits(pos, *a)
    )
    with pytest.raises(RuntimeError, match=r"logits: row 2 \(slot 0, position 10\) is not finite"):
        session.prefill(slot, [1, 2, 3, 4], 12, rows=[1, 2])
    with pytest.raises(RuntimeError, match=r"logits: row 2 .* is not finite"):
        session.forward([(slot, 1)] * 3, [2, 0])
    assert state(session) == before
    model._logits = logits
    check_usable(session, slot, ids)


def test_decode_reports_the_invalid_id_of_a_row_without_finite_logits():
    session, model = new()
    slot = session.open()
    session.prefill(slot, text(8), 12, [])
    before = state(session)
    model._logits = lambda *a: np.full(VOCAB, np.nan)
    with pytest.raises(RuntimeError, match=r"decode: row 0 of slot 0: .*found -1.*not finite"):
        session.decode([slot], [1], Sampling())
    assert state(session) == before


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("embed", np.zeros((5, 2)), r"embed: expected float32 \[4, dim\]"),
        ("embed", np.zeros(4), "embed: expected"),
        ("forward", np.zeros((2, VOCAB)), r"forward: expected float32 \[1, 13\]"),
        ("forward", np.zeros((1, VOCAB + 1)), "forward: expected"),
    ],
)
def test_a_model_with_wrong_shapes(method, result, message):
    wrong = type("Wrong", (FakeModel,), {method: lambda self, *a: result})
    session = Session(wrong(limits()))
    slot = session.open()
    with pytest.raises(RuntimeError, match=message):
        session.prefill(slot, [1, 2, 3, 4], 12)
    assert session.length(slot) == 0


def test_a_model_without_methods():
    session = Session(_C.Model(limits()))
    with pytest.raises(RuntimeError, match="model: expected a method embed"):
        session.prefill(session.open(), [1], 1)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.prefill(0, [], 4), "ids: expected at least one token, found none"),
        (lambda s: s.prefill(0, [1, VOCAB], 4), r"ids\[1\]: expected .*\[0, 13\), found 13"),
        (lambda s: s.prefill(0, [-1], 4), r"ids\[0\]: .*found -1"),
        (lambda s: s.prefill(0, [1.5], 4), r"ids\[0\]: expected an integer, found 1.5"),
        (lambda s: s.prefill(0, [2**70], 4), r"ids\[0\]: expected a 64-bit integer"),
        (
            lambda s: s.prefill(0, [1] * 77, 4),
            "ids: expected at most 76 .*max_seq_len 96.*found 77",
        ),
        (lambda s: s.prefill(1, [1], 4), "slot: expected an open slot, found 1, which is closed"),
        (lambda s: s.prefill(3, [1], 4), r"slot: expected a value in \[0, 2\], found 3"),
        (lambda s: s.prefill(-1, [1], 4), "slot: .*found -1"),
        (lambda s: s.prefill(0, [1], 0), r"chunk: expected a value in \[1, 12\], found 0"),
        (lambda s: s.prefill(0, [1], 13), "chunk: .*found 13"),
        (lambda s: s.prefill(0, [1, 2], 2, [2]), r"rows\[0\]: expected .*\[0, 1\], found 2"),
        (lambda s: s.prefill(0, [1, 2], 2, [0, -1]), r"rows\[1\]: .*found -1"),
        (lambda s: s.forward([]), r"tokens: expected a value in \[1, 12\], found 0"),
        (lambda s: s.forward([(0, 1)] * 13), "tokens: .*found 13"),
        (lambda s: s.forward([(1, 1)]), r"tokens\[0\]: slot: expected an open slot, found 1"),
        (lambda s: s.forward([(0, 1), (-2, 1)]), r"tokens\[1\]: slot: .*found -2"),
        (lambda s: s.forward([(0, 99)]), r"ids\[0\]: .*found 99"),
        (lambda s: s.forward([(-1, 0)]), "tokens: .*found padding only"),
        (lambda s: s.forward([(0, 1), (-1, 0)], [1]), r"rows\[0\]: .*found padding row 1"),
        (lambda s: s.forward([(0, 1)], [1]), r"rows\[0\]: .*found 1"),
        (lambda s: s.forward([(0, 1)] * 2, [], [20, 20]), r"positions\[1\]: .*20 of slot 0 twice"),
        (
            lambda s: s.forward([(0, 1)] * 2, [], [20, 22]),
            r"positions\[1\]: .*\[20, 21\], found 22",
        ),
        (lambda s: s.forward([(0, 1)], [], [19]), r"positions\[0\]: .*found 19"),
        (
            lambda s: s.forward([(0, 1)], [], []),
            "positions: expected one entry a token, 1, found 0",
        ),
        (lambda s: s.decode([], [], Sampling()), r"tokens: expected a value in \[1, 16\], found 0"),
        (lambda s: s.decode([0] * 17, [1] * 17, Sampling()), "tokens: .*found 17"),
        (
            lambda s: s.decode([0], [1, 2], Sampling()),
            "slots: expected one entry an id, 2, found 1",
        ),
        (lambda s: s.decode([0], [1], []), "sampling: expected one entry a token, 1, found 0"),
        (lambda s: s.decode([0], [1], Sampling(temperature=-1)), r"sampling\[0\].temperature: "),
        (lambda s: s.decode([0], [1], Sampling(temperature=float("nan"))), "temperature: "),
        (lambda s: s.decode([0], [1], Sampling(top_k=-1)), r"sampling\[0\].top_k: .*found -1"),
        (lambda s: s.decode([0], [1], Sampling(top_p=0)), r"top_p: expected .*\(0, 1\]"),
        (lambda s: s.decode([0], [1], Sampling(top_p=1.5)), "top_p: "),
        (lambda s: s.truncate(0, 21), r"length: expected a value in \[0, 20\], found 21"),
        (lambda s: s.truncate(0, -1), "length: .*found -1"),
        (lambda s: s.truncate(2, 0), "slot: expected an open slot, found 2"),
        (lambda s: s.share(0, 1, 3), "dst: expected an open slot, found 1"),
        (lambda s: s.share(0, 0, 3), "dst: expected an empty slot, found slot 0 with 20 tokens"),
        (lambda s: s.close(1), "slot: expected an open slot, found 1"),
        (lambda s: s.length(7), "slot: .*found 7"),
        (lambda s: s.pool(3, "k"), r"layer: expected a value in \[0, 3\), found 3"),
        (lambda s: s.pool(0, "q"), "part: expected 'k' or 'v', found 'q'"),
        (lambda s: s.generate(0, [], 1), "ids: expected at least one token"),
        (lambda s: s.generate(0, [1], 0), r"max_new_tokens: expected .*\[1, 76\], found 0"),
        (lambda s: s.generate(0, [1, 2], 76), r"max_new_tokens: expected .*\[1, 75\], found 76"),
        (lambda s: s.generate(0, [1], 1, chunk=99), "chunk: .*found 99"),
        (lambda s: s.generate(0, [1], 1, Sampling(top_p=2)), "sampling.top_p: "),
    ],
)
def test_bad_arguments(call, message):
    session, model = new()
    session.prefill(session.open(), text(20), 12, [])
    before, calls = state(session), len(model.calls)
    with pytest.raises(ValueError, match=message):
        call(session)
    assert state(session) == before and len(model.calls) == calls
    check_usable(session, 0, text(20))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 0}, "vocab_size: "),
        ({"max_seq_len": 0, "global_pages": 1}, r"max_seq_len: "),
        ({"max_chunk": 97}, r"max_chunk: expected .*\[1, 96\]"),
        ({"max_rows": 13}, "max_rows: "),
        ({"global_pages": 0}, "global_pages: "),
        ({"sliding_pages": 0}, "sliding_pages: "),
        ({"sliding_layers": [0, 2]}, r"sliding_layers\[1\]: .*found 2"),
        ({"sliding_layers": []}, "n_layers: "),
    ],
)
def test_bad_limits(overrides, message):
    with pytest.raises(ValueError, match=message):
        limits(**overrides)


def test_one_session_a_model():
    model = FakeModel(limits())
    session = Session(model)
    with pytest.raises(ValueError, match="model: expected one that no session uses"):
        Session(model)
    del session
    Session(model)


def test_one_call_at_a_time():
    entered, leave = threading.Event(), threading.Event()

    class Slow(FakeModel):
        def embed(self, ids):
            entered.set()
            assert leave.wait(30)
            return super().embed(ids)

    session = Session(Slow(limits()))
    slot = session.open()
    result = []
    worker = threading.Thread(target=lambda: result.append(session.prefill(slot, text(5), 5)))
    worker.start()
    assert entered.wait(30)
    for call in (lambda: session.length(slot), lambda: session.decode([slot], [1], Sampling())):
        with pytest.raises(RuntimeError, match="one call at a time"):
            call()
    leave.set()
    worker.join()
    np.testing.assert_array_equal(result[0][0], expected_logits(text(5), session.limits))
    check_usable(session, slot, text(5))


# --- generate -------------------------------------------------------------------------------------


def greedy(ids, n, lim, seed=0):
    ids = list(ids)
    for _ in range(n):
        ids.append(expected_next(ids, lim, seed))
    return ids[-n:]


@pytest.mark.parametrize("prompt", [1, 2, 30])
def test_generate(prompt):
    session, _ = new()
    slot, ids = session.open(), text(prompt)
    seen = []
    result = session.generate(slot, ids, 20, chunk=7, callback=seen.append)
    assert result.ids == seen == greedy(ids, 20, session.limits)
    assert result.stop_reason == "length"
    assert (result.prefill_tokens, result.decode_tokens) == (prompt - 1, 20)
    assert result.decode_seconds > 0 and (result.prefill_seconds > 0) == (prompt > 1)
    assert session.length(slot) == prompt + 19
    more = session.generate(slot, result.ids[-1:], 5)
    assert more.ids == greedy(ids + result.ids, 5, session.limits)


def test_generate_fills_the_sequence_exactly():
    session, _ = new()
    slot = session.open()
    result = session.generate(slot, text(40), 57)
    assert len(result.ids) == 57 and session.length(slot) == 96


def test_generate_stops():
    session, _ = new()
    ids = text(9)
    want = greedy(ids, 20, session.limits, seed=3)
    stop = want[6]
    first = want.index(stop)
    result = session.generate(session.open(), ids, 20, Sampling(seed=3), stop_ids=[stop, 99])
    assert result.ids == want[: first + 1] and result.stop_reason == "stop_id"

    seen = []
    result = session.generate(
        session.open(),
        ids,
        20,
        Sampling(seed=3),
        callback=lambda i: seen.append(i) or len(seen) < 4,
    )
    assert result.ids == seen == want[:4] and result.stop_reason == "callback"


def test_generate_interrupted_between_steps():
    session, _ = new()
    slot, ids = session.open(), text(9)
    # A C function as callback: only the session's own check can notice the signal
    with pytest.raises(KeyboardInterrupt):
        session.generate(slot, ids, 20, callback=ctypes.pythonapi.PyErr_SetInterrupt)
    check_usable(session, slot, ids)


def test_generate_with_a_failing_callback():
    session, _ = new()
    slot, ids = session.open(), text(9)

    def callback(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.generate(slot, ids, 20, callback=callback)
    check_usable(session, slot, ids)


def test_pool_is_the_models_memory():
    session, model = new()
    session.pool(1, "v")[2, 0, 1] = 42
    assert (model.pools[1, "v"][2, 0, 1] == 42).all()


@pytest.mark.parametrize("n", [1, 3, 2])
def test_threads(n):
    set_threads(n)
    assert threads() == n


@pytest.mark.parametrize("n", [0, -1, 1025, 2**40])
def test_threads_bad_arguments(n):
    with pytest.raises(ValueError, match=r"threads: expected a value in \[1, 1024\], found"):
        set_threads(n)


# --- random sessions ------------------------------------------------------------------------------


class SessionMachine(RuleBasedStateMachine):
    """Random calls; every logit and every sampled id is what a plain list of tokens gives."""

    def __init__(self):
        super().__init__()
        self.session, self.model = new(5, global_pages=40)
        self.ids = {}

    def some_slot(self, data):
        return data.draw(st.sampled_from(sorted(self.ids)))

    @rule()
    def open(self):
        if len(self.ids) < 3:
            self.ids[self.session.open()] = []

    @rule(data=st.data(), n=st.integers(1, 30), chunk=st.integers(1, 12), rows=st.booleans())
    def prefill(self, data, n, chunk, rows):
        if not self.ids:
            return
        slot = self.some_slot(data)
        new_ids = text(n, data.draw(st.integers(0, 5)))
        before = state(self.session)
        if len(self.ids[slot]) + n > 96:
            return
        try:
            got = self.session.prefill(slot, new_ids, chunk, range(n) if rows else None)
        except RuntimeError as error:
            assert "no free page" in str(error) and state(self.session) == before
            return
        start = len(self.ids[slot])
        self.ids[slot] += new_ids
        for row, i in zip(got, range(n) if rows else [n - 1], strict=True):
            want = expected_logits(self.ids[slot][: start + i + 1], self.session.limits)
            np.testing.assert_array_equal(row, want)

    @rule(data=st.data(), n=st.integers(1, 16))
    def decode(self, data, n):
        if not self.ids:
            return
        slots = [self.some_slot(data) for _ in range(n)]
        tokens = text(n, n)
        if any(len(ids) + slots.count(slot) > 96 for slot, ids in self.ids.items()):
            return
        before = state(self.session)
        try:
            got = self.session.decode(slots, tokens, Sampling(seed=1))
        except RuntimeError as error:
            assert "no free page" in str(error) and state(self.session) == before
            return
        for slot, token, following in zip(slots, tokens, got, strict=True):
            self.ids[slot].append(token)
            assert following == expected_next(self.ids[slot], self.session.limits, seed=1)

    @rule(data=st.data(), back=st.integers(0, 40), broken=st.booleans())
    def truncate(self, data, back, broken):
        if not self.ids:
            return
        slot = self.some_slot(data)
        length = max(0, len(self.ids[slot]) - back)
        before = state(self.session)
        try:
            self.session.truncate(slot, length)
        except ValueError:
            assert state(self.session) == before
            return
        del self.ids[slot][length:]

    @rule(data=st.data(), back=st.integers(0, 6))
    def share(self, data, back):
        if len(self.ids) < 2:
            return
        src, dst = self.some_slot(data), self.some_slot(data)
        n = len(self.ids[src]) - back
        if src == dst or self.ids[dst] or n < 0:
            return
        before = state(self.session)
        try:
            self.session.share(src, dst, n)
        except ValueError:
            assert state(self.session) == before
            return
        self.ids[dst] = self.ids[src][:n]

    @rule(data=st.data())
    def close(self, data):
        if self.ids:
            slot = self.some_slot(data)
            self.session.close(slot)
            del self.ids[slot]

    @rule(data=st.data(), method=st.sampled_from(["embed", "forward", "copy_page"]))
    def broken_forward(self, data, method):
        if not self.ids or any(len(ids) > 90 for ids in self.ids.values()):
            return
        before = state(self.session)
        self.model.fail_on = (method, 1)
        try:
            self.session.forward([(slot, 1) for slot in self.ids], [])
        except RuntimeError:
            assert state(self.session) == before
        else:  # nothing was shared: no page to copy
            for ids in self.ids.values():
                ids.append(1)
        self.model.fail_on = None

    @invariant()
    def lengths(self):
        for slot, ids in self.ids.items():
            assert self.session.length(slot) == len(ids)

    def teardown(self):
        for slot in self.ids:
            self.session.close(slot)
        assert self.session.pages_in_use() == {"global": 0, "sliding": 0}


TestRandomSession = SessionMachine.TestCase
TestRandomSession.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
