"""Speculative decoding in the session, against a model whose drafts are right but where told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fake_model import VOCAB, FakeModel, draft_limits, expected_next, limits
from glimmer_ops.session import Sampling, Session, Speculation

BLOCKS = (2, 3, 5, 8)


def text(n, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def plain_text(ids, n, lim, seed=0):
    """The n tokens that plain decoding gives after ids."""
    ids = list(ids)
    for _ in range(n):
        ids.append(expected_next(ids, lim, seed))
    return ids[-n:] if n else []


def new(page_seed=7, draft=None, **overrides):
    model = FakeModel(limits(draft=draft or draft_limits(), **overrides))
    return Session(model, page_seed, draft=True), model


def state(session, slots=range(3)):
    lengths = []
    for slot in slots:
        try:
            lengths.append(session.length(slot))
        except ValueError:
            lengths.append(None)
    kinds = ("global", "sliding", "draft_global", "draft_sliding")
    tables = [session._session.table(kind).tolist() for kind in kinds]
    return lengths, tables, session.pages_in_use()


def mistakes(rate, seed=0):
    """A fixed choice of (slot, position) pairs."""
    chosen = np.random.default_rng(seed).random((3, 200)) < rate
    return lambda slot, pos: bool(chosen[slot, pos])


def simulate(first, n, block, wrong):
    """passes_by_accepted, passes and drafted of n tokens after position `first`."""
    counts, passes, drafted, pos, left = [0] * 8, 0, 0, first, n
    while left:
        rows = min(block, left)
        right = 0
        while right < rows - 1 and not wrong(0, pos + 1 + right):
            right += 1
        passes, drafted = passes + 1, drafted + rows - 1
        if rows > 1:
            counts[right] += 1
        pos, left = pos + right + 1, left - right - 1
    return counts, passes, drafted


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("rate", [0.0, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("block", BLOCKS)
def test_text_is_plain_decodings_and_counts_are_right(block, rate, seed):
    session, model = new()
    model.mistake = mistakes(rate)
    slot, ids = session.open(), text(20)
    n = 96 - 20 + 1  # to the last position
    result = session.generate(slot, ids, n, Sampling(seed=seed), speculation=Speculation(block))
    assert result.ids == plain_text(ids, n, session.limits, seed)
    assert session.length(slot) == 96 and result.stop_reason == "length"
    counts, passes, drafted = simulate(19, n, block, model.mistake)
    stats = result.speculation
    assert stats.passes_by_accepted == counts
    assert (stats.passes, stats.drafted) == (passes, drafted)
    assert stats.accepted == n - passes
    assert stats.tokens_per_pass == n / passes
    assert sum(stats.passes_by_block) == passes
    methods = [name for name, _ in model.calls if name != "copy_page"]
    assert methods.count("target_decode") == passes
    assert methods.count("draft_forward") == sum(counts)


def test_every_number_of_accepted_drafts_occurs():
    seen = np.zeros(8, int)
    for seed in range(6):
        session, model = new()
        model.mistake = mistakes(0.15, seed)
        session_ids = text(20, seed)
        result = session.generate(session.open(), session_ids, 70, speculation=Speculation(8))
        seen += result.speculation.passes_by_accepted
    assert (seen > 0).all(), seen


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_blocks_chosen_as_it_goes(rate):
    session, model = new()
    model.mistake = mistakes(rate)
    ids = text(10)
    result = session.generate(session.open(), ids, 80, speculation=Speculation())
    assert result.ids == plain_text(ids, 80, session.limits)
    stats = result.speculation
    assert stats.passes_by_block[1] >= 2 and stats.passes + stats.accepted == 80
    assert stats.seconds_by_block[1] > 0
    slot = session.open()
    again = session.generate(slot, ids, 80, speculation=Speculation())
    assert again.ids == result.ids
    # What passes cost is known from before.
    costs = again.speculation.seconds_by_block
    assert all(costs[b] > 0 for b, n in enumerate(stats.passes_by_block) if n)


@pytest.mark.parametrize("page_seed", [None, 1])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_afterwards_the_session_is_as_after_plain_decoding(rate, page_seed):
    for n in range(1, 40):
        session, model = new(page_seed)
        model.mistake = mistakes(rate)
        plain, _ = new(page_seed)
        ids = text(13)
        for s, how in ((session, Speculation(8)), (plain, None)):
            s.generate(s.open(), ids, 80, callback=stop_after(n), speculation=how)
        assert session.length(0) == plain.length(0) == 13 + n - 1
        used, expected = (page_table(s) >= 0 for s in (session, plain))
        # A block that ended early had gone ahead, and the window with it.
        assert (used == expected)[0::2].all() and (used <= expected).all()
        if rate == 1.0:
            assert session.pages_in_use() == plain.pages_in_use()


def stop_after(n):
    """A callback that ends decoding at the n-th token."""
    left = iter(range(n - 1, -1, -1))
    return lambda id_: next(left) > 0


def page_table(session):
    kinds = ("global", "sliding", "draft_global", "draft_sliding")
    return np.stack([session._session.table(kind) for kind in kinds])


def test_a_prompt_of_one_token():
    session, _ = new()
    result = session.generate(session.open(), [5], 40, speculation=Speculation(8))
    assert result.ids == plain_text([5], 40, session.limits)
    assert result.prefill_tokens == 0


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_stop_token_inside_a_block(stop_at):
    session, _ = new()
    slot, ids = session.open(), text(20)
    expected = plain_text(ids, 40, session.limits)
    stop = expected[stop_at]
    first = expected.index(stop)
    result = session.generate(slot, ids, 40, stop_ids=[stop], speculation=Speculation(8))
    assert result.ids == expected[: first + 1] and result.stop_reason == "stop_id"
    assert session.length(slot) == 20 + first
    assert result.speculation.passes + result.speculation.accepted == first + 1
    more = session.generate(slot, [stop], 20, speculation=Speculation(5))
    assert more.ids == plain_text([*ids, *result.ids], 20, session.limits)


@pytest.mark.parametrize("n", range(1, 12))
def test_a_callback_may_stop_or_fail_inside_a_block(n):
    session, _ = new()
    ids = text(20)
    expected = plain_text(ids, 40, session.limits)
    for fails in (False, True):
        slot, seen = session.open(), []

        def callback(id_, seen=seen, fails=fails):
            seen.append(id_)
            if len(seen) == n and fails:
                raise KeyError("enough")
            return len(seen) < n

        if fails:
            with pytest.raises(KeyError):
                session.generate(slot, ids, 40, callback=callback, speculation=Speculation(8))
        else:
            result = session.generate(slot, ids, 40, callback=callback, speculation=Speculation(8))
            assert result.stop_reason == "callback" and result.ids == expected[:n]
        assert seen == expected[:n] and session.length(slot) == 20 + n - 1
        more = session.generate(slot, [seen[-1]], 20, speculation=Speculation(8))
        assert more.ids == plain_text([*ids, *seen], 20, session.limits)
        session.close(slot)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_callback_may_truncate_the_slot(goes_on):
    session, _ = new()
    slot, ids = session.open(), text(20)

    def callback(id_):
        session.truncate(slot, 15)
        return goes_on

    result = session.generate(slot, ids, 20, callback=callback, speculation=Speculation(8))
    assert len(result.ids) == (20 if goes_on else 1)
    assert session.length(slot) == 15
    more = session.generate(slot, [3], 20, speculation=Speculation(8))
    assert more.ids == plain_text([*ids[:15], 3], 20, session.limits)


@pytest.mark.parametrize("scarce", ["target", "draft", "both"])
@pytest.mark.parametrize("n", range(25, 33))
def test_scarce_pages_shorten_blocks_and_never_fail_what_plain_decoding_does_not(n, scarce):
    # Pages for exactly the positions that plain decoding writes up to a stop token.
    pages = -(-(10 + n - 1) // 4)
    many = {"global_pages": 72}
    few = {"global_pages": pages}
    session, _ = new(
        **(many if scarce == "draft" else few),
        draft=draft_limits(**(many if scarce == "target" else few)),
    )
    slot, ids = session.open(), text(10)
    expected = plain_text(ids, n, session.limits)
    how = Speculation(8)
    result = session.generate(slot, ids, 60, callback=stop_after(n), speculation=how)
    assert result.ids == expected and session.length(slot) == 10 + n - 1
    with pytest.raises(RuntimeError, match="global pages: no free page"):
        session.generate(slot, [1], 20, speculation=how)


def test_a_draft_cache_that_is_full_is_an_error_that_names_it():
    session, _ = new(draft=draft_limits(global_pages=5))
    with pytest.raises(RuntimeError, match="draft global pages: no free page"):
        session.generate(session.open(), text(10), 40, speculation=Speculation(8))


def test_room_is_what_the_next_step_has_pages_for():
    session, _ = new(global_pages=10)
    a, b = session.open(), session.open()
    session.prefill(a, text(9), 9, [])
    assert session.room(a) == 40 - 9
    session.share(a, b, 9)
    assert session.room(b) == 3 + 6 * 4  # one of the 7 free pages copies the shared one
    session.prefill(b, text(20, 1), 10, [])
    assert session.room(a) == 3 + 1 * 4
    session.prefill(b, text(5, 2), 5, [])
    assert session.room(b) == 9 * 4 - 34
    session, _ = new()
    session.prefill(session.open(), text(90), 12, [])
    assert session.room(0) == 96 - 90  # positions, where pages are not scarce


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_several_slots_speculate_in_one_step(rate):
    session, model = new()
    model.mistake = mistakes(rate)
    slots = [session.open() for _ in range(3)]
    ids = [text(6 + 9 * s, s) for s in slots]
    sampling = [Sampling(seed=s) for s in slots]
    for slot in slots:
        session.prefill(slot, ids[slot][:-1], 12, [])
    blocks = [[8, 5, 3], [1, 8, 7], [4, 1, 8], [1, 1, 1], [2, 8, 6]]
    for step in range(10):
        order = np.random.default_rng(step).permutation(3).tolist()
        results = session.speculate(
            order,
            [ids[s][-1] for s in order],
            [blocks[step % 5][s] for s in order],
            [sampling[s] for s in order],
        )
        for s, tokens in zip(order, results, strict=True):
            most = blocks[step % 5][s]
            assert len(tokens) == most if rate == 0 else 1 <= len(tokens) <= most
            assert tokens == plain_text(ids[s], len(tokens), session.limits, s)
            ids[s] += tokens
            assert session.length(s) == len(ids[s]) - 1


def test_shared_prefixes_are_not_written_by_either():
    session, model = new()
    model.mistake = mistakes(0.4)
    a, ids = session.open(), text(23)
    session.prefill(a, ids[:-1], 12, [])
    b = session.open()
    session.share(a, b, 22)
    for slot, seed in ((a, 0), (b, 5), (a, 0), (b, 5)):
        how = Sampling(seed=seed)
        length = session.length(slot)
        result = session.generate(slot, ids[-1:], 12, how, speculation=Speculation(8))
        assert result.ids == plain_text(ids, 12, session.limits, seed)
        session.truncate(slot, length)


def test_a_rolled_back_slot_speculates_again():
    session, model = new()
    model.mistake = mistakes(0.2)
    slot, ids = session.open(), text(40)
    session.prefill(slot, ids, 12, [])
    for length in (40, 33, 30, 36, 30):
        if length > session.length(slot):
            session.prefill(slot, ids[session.length(slot) : length], 3, [])
        session.truncate(slot, length)
        prefix = ids[:length]
        result = session.generate(slot, [4], 8, speculation=Speculation(5))
        assert result.ids == plain_text([*prefix, 4], 8, session.limits)
        session.truncate(slot, length)


@pytest.mark.parametrize("method", ["draft_forward", "target_decode", "draft_prefill"])
def test_a_pass_that_fails_leaves_no_trace(method):
    session, model = new()
    slot, ids = session.open(), text(21)
    session.prefill(slot, ids[:-1], 12, [])
    before = state(session)
    model.fail_on = (method, 1)
    with pytest.raises(RuntimeError, match=f"{method} broke"):
        session.speculate([slot], ids[-1:], [8], Sampling())
    assert state(session) == before
    assert session.speculate([slot], ids[-1:], [8], Sampling()) == [
        plain_text(ids, 8, session.limits)
    ]


def test_a_prefill_whose_injection_fails_is_undone():
    session, model = new()
    slot, ids = session.open(), text(30)
    model.fail_on = ("draft_prefill", 2)
    with pytest.raises(RuntimeError, match="draft_prefill broke"):
        session.prefill(slot, ids, 12)
    assert session.length(slot) == 0 and not any(session.pages_in_use().values())


def test_drafts_that_are_not_tokens_are_refused():
    session, model = new()
    slot = session.open()
    session.prefill(slot, text(5), 12, [])
    model.draft_forward = lambda ids, *rest: [-1] * len(ids)
    with pytest.raises(RuntimeError, match=r"draft: row 0 of slot 0: expected an id in \[0, 13\)"):
        session.speculate([slot], [1], [4], Sampling())
    model.draft_forward = lambda ids, *rest: [0]
    with pytest.raises(RuntimeError, match="draft: expected 4 ids, found 1"):
        session.speculate([slot], [1], [4], Sampling())


def test_plain_calls_keep_the_draft_cache_too():
    session, model = new()
    slot, ids = session.open(), text(9)
    session.prefill(slot, ids, 4, [])
    session.forward([(slot, 3), (-1, 0), (slot, 4)], positions=[10, 0, 9])
    ids += [4, 3]
    for token in (7, 8, 2):
        session.decode([-1, slot], [0, token], Sampling())
        ids.append(token)
    result = session.generate(slot, [1], 20, speculation=Speculation(8))
    assert result.ids == plain_text([*ids, 1], 20, session.limits)
    assert result.speculation.accepted == 20 - result.speculation.passes > 10


def test_a_session_without_a_draft_runs_the_plain_methods():
    model = FakeModel(limits(draft=draft_limits()))
    session = Session(model)
    session.generate(session.open(), text(5), 5)
    assert {name for name, _ in model.calls} == {"embed", "forward", "decode"}
    assert set(session.pages_in_use()) == {"global", "sliding"}


def test_bad_arguments():
    session, _ = new()
    a, b = session.open(), session.open()
    how = Sampling()

    def refused(match, slots, ids, blocks, sampling=how):
        before = state(session)
        with pytest.raises(ValueError, match=match):
            session.speculate(slots, ids, blocks, sampling)
        assert state(session) == before

    refused(r"anchors\[1\]: slot: expected an open slot, found 2", [a, 2], [0, 0], [2, 2])
    refused(r"anchors\[0\]: slot: expected a value in \[0, 2\], found -1", [-1], [0], [2])
    refused(r"anchors\[1\]: expected distinct slots, found 0 twice", [a, a], [0, 0], [2, 2])
    refused(r"anchors\[0\]: block: expected a value in \[1, 8\], found 9", [a], [0], [9])
    refused(r"anchors\[0\]: block: expected a value in \[1, 8\], found 0", [a], [0], [0])
    refused(
        "rows: expected a value in .1, 16., found 17", [a, b, session.open()], [0] * 3, [8, 8, 1]
    )
    refused(r"ids\[0\]: expected a token id", [a], [VOCAB], [2])
    refused("anchors: expected a value in .1, 16., found 0", [], [], [])
    refused("temperature", [a], [0], [2], Sampling(temperature=-1))
    refused("slots: expected as many", [a], [0], [2, 2])
    session.prefill(a, text(90), 12, [])
    refused(r"anchors\[0\]: block: expected at most 6 tokens", [a], [0], [7])
    in_range = r"speculation: block: expected a value in \[2, 8\], found "
    for block, match in (
        (1, in_range + "1"),
        (9, in_range + "9"),
        (-3, in_range + "-3"),
        (0, "block: expected at least 2, found 0"),
        (2.5, "block: expected an integer"),
    ):
        with pytest.raises(ValueError, match=match):
            session.generate(b, [1], 5, speculation=Speculation(block))
    plain = Session(FakeModel(limits(draft=draft_limits())))
    slot = plain.open()
    with pytest.raises(ValueError, match="speculation: expected a session with a draft"):
        plain.generate(slot, [1], 5, speculation=Speculation())
    with pytest.raises(ValueError, match="block: expected 1 in a session without a draft, found 4"):
        plain.speculate([slot], [1], [4], how)
    with pytest.raises(ValueError, match="kind: expected one of a session with a draft"):
        plain._session.table("draft_global")
    with pytest.raises(ValueError, match="draft: expected a model exported with a draft model"):
        Session(FakeModel(limits()), draft=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"block_size": 1}, r"draft.block_size: expected a value in \[2, 16\], found 1"),
        ({"block_size": 17}, "draft.block_size"),
        ({"mask_token_id": VOCAB}, r"draft.mask_token_id: expected a value in \[0, 12\], found 13"),
        ({"sliding_layers": []}, "draft.n_layers"),
        ({"sliding_layers": [2]}, r"draft.sliding_layers\[0\]"),
        ({"global_pages": 0}, "draft.global_pages"),
        ({"sliding_pages": 0}, "draft.sliding_pages"),
        ({"sliding_layers": [0]}, "draft.window: expected 0"),
    ],
)
def test_bad_draft_limits(change, match):
    with pytest.raises(ValueError, match=match):
        limits(draft=draft_limits(**change))


class Machine(RuleBasedStateMachine):
    """Random calls on two slots, beside the token lists that they must hold."""

    def __init__(self):
        super().__init__()
        self.session, self.model = new()
        self.model.mistake = mistakes(0.25, 3)
        self.ids = {self.session.open(): [] for _ in range(2)}

    @rule(slot=st.integers(0, 1), n=st.integers(1, 15), chunk=st.integers(1, 12))
    def prefill(self, slot, n, chunk):
        n = min(n, 96 - len(self.ids[slot]))
        if n:
            new_ids = text(n, len(self.ids[slot]))
            self.session.prefill(slot, new_ids, chunk, [])
            self.ids[slot] += new_ids

    @rule(slot=st.integers(0, 1), block=st.integers(1, 8), first=st.integers(0, VOCAB - 1))
    def speculate(self, slot, block, first):
        block = min(block, 96 - len(self.ids[slot]))
        if block:
            (tokens,) = self.session.speculate([slot], [first], [block], Sampling())
            ids = [*self.ids[slot], first]
            assert tokens == plain_text(ids, len(tokens), self.session.limits)
            self.ids[slot] = ids + tokens[:-1]

    @rule(slot=st.integers(0, 1), back=st.integers(1, 16))
    def truncate(self, slot, back):
        length = max(0, len(self.ids[slot]) - back)
        try:
            self.session.truncate(slot, length)
        except ValueError as error:  # only the last 16 positions ever reached are always there
            assert "which were freed" in str(error)
        else:
            del self.ids[slot][length:]

    @precondition(lambda self: self.ids[0])
    @rule(back=st.integers(0, 3))
    def share(self, back):
        self.session.close(1)
        assert self.session.open() == 1
        n, self.ids[1] = max(0, len(self.ids[0]) - back), []
        try:
            self.session.share(0, 1, n)
        except ValueError as error:  # after a truncation, as above
            assert "which were freed" in str(error)
        else:
            self.ids[1] = self.ids[0][:n]

    @invariant()
    def lengths(self):
        for slot, ids in self.ids.items():
            assert self.session.length(slot) == len(ids)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
