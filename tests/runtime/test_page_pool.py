"""PagePool: allocation, window-based freeing, rollback, sharing, and a model-based random test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glimmer_ops._native import _C
from glimmer_ops.session import ROLLBACK, sliding_pages


def make(pages=16, slots=2, max_pages=32, **kw):
    return _C.PagePool(pages, slots, max_pages, **kw)


def grow(pool, slot, n, chunk=None):
    """Appends n committed tokens."""
    while n > 0:
        step = min(n, chunk or n)
        assert pool.reserve(slot, pool.length(slot), step) == []
        pool.commit(slot, step)
        n -= step


def logical(pool, slot):
    return np.flatnonzero(pool.table()[slot] >= 0).tolist()


def state(pool, slots=2):
    return (
        pool.table().tolist(),
        [pool.length(s) for s in range(slots)],
        pool.free_pages(),
        pool.used_pages(),
    )


def test_fresh_pool():
    pool = make()
    table = pool.table()
    assert table.shape == (2, 32) and table.dtype == np.int32 and (table == -1).all()
    assert (pool.free_pages(), pool.used_pages()) == (16, 0)


def test_pages_are_handed_out_in_order():
    pool = make()
    grow(pool, 0, 64 * 3)
    grow(pool, 1, 65)
    assert pool.table()[0, :4].tolist() == [0, 1, 2, -1]
    assert pool.table()[1, :3].tolist() == [3, 4, -1]


@pytest.mark.parametrize(("n", "pages"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_reserve_allocates_what_the_positions_touch(n, pages):
    pool = make()
    pool.reserve(0, 0, n)
    assert pool.used_pages() == pages


def test_reserve_twice_takes_no_more_pages():
    pool = make()
    pool.reserve(0, 0, 100)
    before = state(pool)
    assert pool.reserve(0, 0, 100) == []
    assert state(pool) == before


def test_seed_shuffles_reproducibly():
    def order(seed):
        pool = make(seed=seed)
        grow(pool, 0, 64 * 16)
        return pool.table()[0, :16].tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != list(range(16))
    assert sorted(order(1)) == list(range(16))


def test_out_of_pages_names_the_numbers_and_changes_nothing():
    pool = make(pages=4)
    grow(pool, 0, 64 * 3)
    before = state(pool)
    with pytest.raises(RuntimeError, match=r"needs 2 .*\[0, 64\].*found 1 free of 4"):
        pool.reserve(1, 0, 65)
    assert state(pool) == before
    grow(pool, 1, 64)
    assert pool.free_pages() == 0


@pytest.mark.parametrize("window", [1, 7, 64, 100, 129])
@pytest.mark.parametrize("page_size", [4, 64])
def test_commit_frees_a_page_exactly_when_no_rollback_can_see_it(window, page_size):
    pool = make(pages=400, max_pages=400, page_size=page_size, window=window)
    for length in range(1, 3 * page_size + window + ROLLBACK + 5):
        grow(pool, 0, 1)
        for page in range(-(-length // page_size)):
            last = (page + 1) * page_size - 1
            # the contract, and what it means: the earliest query a rollback can ask for
            freed = last <= length - window - ROLLBACK
            oldest_visible = (length - ROLLBACK) - window + 1
            assert freed == (last < oldest_visible)
            assert (page in logical(pool, 0)) == (not freed), (length, page)


def test_global_pool_frees_nothing():
    pool = make(pages=32)
    grow(pool, 0, 64 * 32, chunk=64)
    assert pool.used_pages() == 32


def test_truncate_drops_pages_past_the_position():
    pool = make()
    grow(pool, 0, 200)
    pool.truncate(0, 128)
    assert logical(pool, 0) == [0, 1] and pool.length(0) == 128
    pool.truncate(0, 65)
    assert logical(pool, 0) == [0, 1]
    pool.truncate(0, 0)
    assert pool.used_pages() == 0 and pool.length(0) == 0


def test_truncate_drops_reserved_pages():
    pool = make()
    grow(pool, 0, 64)
    pool.reserve(0, 64, 16)
    pool.truncate(0, 64)
    assert logical(pool, 0) == [0]


@pytest.mark.report("D1")
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_sixteen_positions_back_are_always_possible(chunk):
    for length in range(ROLLBACK, 90):
        pool = make(pages=60, max_pages=60, page_size=4, window=9)
        grow(pool, 0, length, chunk)
        pool.truncate(0, length - ROLLBACK)
        visible = range(max(0, length - ROLLBACK - 9 + 1) // 4, -(-(length - ROLLBACK) // 4))
        assert set(visible) <= set(logical(pool, 0))
        grow(pool, 0, ROLLBACK, chunk)


@pytest.mark.report("D1")
def test_truncate_refuses_when_the_window_is_gone():
    pool = make(pages=60, max_pages=60, page_size=4, window=9)
    grow(pool, 0, 100, 10)
    first = logical(pool, 0)[0] * 4
    oldest = first + 9 - 1  # its window starts at the first position kept
    before = state(pool)
    assert not pool.can_truncate(0, oldest - 1)
    with pytest.raises(ValueError, match=f"back from 100 to {oldest - 1}.*before {first},.*freed"):
        pool.truncate(0, oldest - 1)
    assert state(pool) == before
    assert pool.can_truncate(0, oldest)
    pool.truncate(0, oldest)
    assert pool.length(0) == oldest
    pool.truncate(0, 0)  # an empty sequence needs nothing
    assert pool.used_pages() == 0


def test_share_references_pages_and_copies_on_write():
    pool = make()
    grow(pool, 0, 100)
    pool.share(0, 1, 100)
    assert pool.used_pages() == 2
    assert pool.table()[0, :2].tolist() == pool.table()[1, :2].tolist() == [0, 1]
    assert [pool.refcount(p) for p in (0, 1)] == [2, 2]

    copies = pool.reserve(1, 100, 1)
    assert copies == [(1, 2)]
    assert pool.table()[1, :2].tolist() == [0, 2]
    assert [pool.refcount(p) for p in (0, 1, 2)] == [2, 1, 1]
    assert pool.reserve(0, 100, 1) == []  # the last owner writes in place


def test_share_copies_for_the_source_too():
    pool = make()
    grow(pool, 0, 100)
    pool.share(0, 1, 70)
    assert pool.reserve(0, 100, 1) == [(1, 2)]
    assert pool.reserve(1, 70, 1) == []


def test_share_of_whole_pages_needs_no_copy():
    pool = make()
    grow(pool, 0, 100)
    pool.share(0, 1, 64)
    assert pool.reserve(1, 64, 10) == []
    assert pool.used_pages() == 3


def test_copy_on_write_counts_as_needed_page():
    pool = make(pages=2)
    grow(pool, 0, 100)
    pool.share(0, 1, 100)
    before = state(pool)
    with pytest.raises(RuntimeError, match="needs 1 .*found 0 free of 2"):
        pool.reserve(1, 100, 1)
    assert state(pool) == before
    pool.release(0)
    assert pool.reserve(1, 100, 1) == []


def test_share_of_a_window():
    pool = make(pages=60, max_pages=60, page_size=4, window=9)
    grow(pool, 0, 100, 10)
    first = logical(pool, 0)[0] * 4
    with pytest.raises(ValueError, match="cannot share.*freed"):
        pool.share(0, 1, first + 7)
    assert pool.length(1) == 0
    pool.share(0, 1, first + 8)
    assert pool.length(1) == first + 8
    assert logical(pool, 1)[0] * 4 <= first


def test_shared_pages_survive_the_release_of_the_source():
    pool = make()
    grow(pool, 0, 130)
    pool.share(0, 1, 70)
    pool.release(0)
    assert pool.used_pages() == 2 and pool.table()[1, :2].tolist() == [0, 1]
    pool.release(1)
    assert pool.free_pages() == 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.reserve(2, 0, 1), r"slot: expected a value in \[0, 1\], found 2"),
        (lambda p: p.reserve(-1, 0, 1), r"slot: .*found -1"),
        (lambda p: p.reserve(0, -1, 1), r"first_pos: expected .*\[0, 2047\], found -1"),
        (lambda p: p.reserve(0, 2048, 1), r"first_pos: .*found 2048"),
        (lambda p: p.reserve(0, 0, 0), r"n: expected .*\[1, 2048\], found 0"),
        (lambda p: p.reserve(0, 70, 2**62), r"n: .*found 4611686018427387904"),
        (lambda p: p.reserve(0, 2**63 - 1, 1), r"first_pos: "),
        (lambda p: p.reserve(0, 129, 1), r"first_pos: expected at most 128,"),
        (lambda p: p.commit(0, 29), r"n: expected .*\[0, 28\], found 29"),
        (lambda p: p.commit(0, -1), r"n: .*found -1"),
        (lambda p: p.commit(5, 1), r"slot: .*found 5"),
        (lambda p: p.truncate(0, 101), r"pos: expected .*\[0, 100\], found 101"),
        (lambda p: p.truncate(0, -1), r"pos: .*found -1"),
        (lambda p: p.share(0, 0, 10), r"dst: expected an empty slot, found slot 0 with 100"),
        (lambda p: p.share(1, 1, 0), r"dst: expected another slot than src"),
        (lambda p: p.share(0, 1, 101), r"n_tokens: expected .*\[0, 100\], found 101"),
        (lambda p: p.share(0, 2, 1), r"dst: .*found 2"),
        (lambda p: p.share(-3, 1, 1), r"src: .*found -3"),
        (lambda p: p.release(9), r"slot: .*found 9"),
        (lambda p: p.refcount(16), r"page: .*found 16"),
        (lambda p: p.length(2), r"slot: .*found 2"),
    ],
)
def test_bad_arguments(call, message):
    pool = make()
    grow(pool, 0, 100)
    before = state(pool)
    with pytest.raises(ValueError, match=message):
        call(pool)
    assert state(pool) == before


def test_reserve_of_freed_positions_is_refused():
    pool = make(pages=60, max_pages=60, page_size=4, window=9)
    grow(pool, 0, 100, 10)
    with pytest.raises(ValueError, match="first_pos: expected at least .*found 0"):
        pool.reserve(0, 0, 4)


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"pages": -1}, "pages: "),
        ({"pages": 2**31}, "pages: "),
        ({"slots": 0}, "slots: "),
        ({"max_pages": 0}, "max_pages: "),
        ({"slots": 2**20, "max_pages": 2**20}, "max_pages: "),
        ({"page_size": 0}, "page_size: "),
        ({"window": -1}, "window: "),
    ],
)
def test_bad_shapes(kw, message):
    with pytest.raises(ValueError, match=message):
        make(**kw)


@pytest.mark.parametrize("args", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0), (9, 9, 2**31)])
def test_sliding_pages_bad_arguments(args):
    with pytest.raises(ValueError, match="expected"):
        sliding_pages(*args)


def test_sliding_pages_of_the_model():
    # (2048 + 15) positions kept and a chunk of 512: 2575 of them touch at most 42 pages of 64
    assert sliding_pages(2048, 512, 4) == 4 * 42


@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("window", [1, 5, 9, 16])
@pytest.mark.parametrize("max_chunk", [1, 3, 16, 21])
def test_sliding_pages_suffice_for_every_position_and_chunk(page_size, window, max_chunk):
    """Every chunk from every length, on every alignment, after steps of any smaller size."""
    slots = 2
    enough = sliding_pages(window, max_chunk, slots, page_size)
    longest = window + ROLLBACK + max_chunk + 3 * page_size
    peak = 0
    for start in range(longest):
        for n in {1, max_chunk, max(max_chunk, ROLLBACK)}:
            pool = _C.PagePool(enough, slots, 400, page_size=page_size, window=window)
            for slot in range(slots):
                grow(pool, slot, start, max_chunk)
                pool.reserve(slot, start, n)
            peak = max(peak, pool.used_pages())
            for slot in range(slots):
                pool.commit(slot, n)
    assert peak == enough  # and none too many


class PoolMachine(RuleBasedStateMachine):
    """Random operations against a plain list of tokens a slot.

    Each token is its own object, and `memory` says which one every physical place holds; writing
    goes through the table, so a page with two writers, a missing copy or a page freed too early
    shows as a wrong token at the visible positions.
    """

    SLOTS, PAGES, SIZE, MAX_PAGES = 3, 24, 4, 20
    window = 0

    def __init__(self):
        super().__init__()
        self.pool = _C.PagePool(
            self.PAGES, self.SLOTS, self.MAX_PAGES, page_size=self.SIZE, window=self.window, seed=3
        )
        self.tokens = [[] for _ in range(self.SLOTS)]
        self.high = [0] * self.SLOTS  # the largest length since the slot was empty
        self.memory = {}
        self.next_token = 0

    def write(self, slot, n):
        pos = len(self.tokens[slot])
        before, room = state(self.pool, self.SLOTS), self.pool.room(slot)
        try:
            copies = self.pool.reserve(slot, pos, n)
        except RuntimeError:
            assert n > room and state(self.pool, self.SLOTS) == before
            return
        assert n <= room
        for src, dst in copies:
            for i in range(self.SIZE):
                self.memory[dst, i] = self.memory.get((src, i))
        table = self.pool.table()
        for p in range(pos, pos + n):
            page = table[slot, p // self.SIZE]
            assert self.pool.refcount(page) == 1
            self.memory[page, p % self.SIZE] = self.next_token
            self.tokens[slot].append(self.next_token)
            self.next_token += 1
        self.pool.commit(slot, n)
        self.high[slot] = max(self.high[slot], len(self.tokens[slot]))

    @rule(slot=st.integers(0, SLOTS - 1), n=st.integers(1, 18))
    def append(self, slot, n):
        if len(self.tokens[slot]) + n <= self.SIZE * self.MAX_PAGES:
            self.write(slot, n)

    @rule(slot=st.integers(0, SLOTS - 1), back=st.integers(0, 40))
    def truncate(self, slot, back):
        pos = max(0, len(self.tokens[slot]) - back)
        before = state(self.pool, self.SLOTS)
        guaranteed = self.window == 0 or pos == 0 or pos >= self.high[slot] - ROLLBACK
        try:
            self.pool.truncate(slot, pos)
        except ValueError:
            assert not guaranteed and state(self.pool, self.SLOTS) == before
            return
        del self.tokens[slot][pos:]
        if pos == 0:
            self.high[slot] = 0

    @rule(src=st.integers(0, SLOTS - 1), dst=st.integers(0, SLOTS - 1), back=st.integers(0, 12))
    def share(self, src, dst, back):
        n = len(self.tokens[src]) - back
        if src == dst or self.tokens[dst] or n < 0:
            return
        before = state(self.pool, self.SLOTS)
        guaranteed = self.window == 0 or n == 0 or n >= self.high[src] - ROLLBACK
        try:
            self.pool.share(src, dst, n)
        except ValueError:
            assert not guaranteed and state(self.pool, self.SLOTS) == before
            return
        self.tokens[dst] = self.tokens[src][:n]
        self.high[dst] = self.high[src] if n else 0

    @precondition(lambda self: any(self.tokens))
    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot):
        self.pool.release(slot)
        self.tokens[slot] = []
        self.high[slot] = 0

    @invariant()
    def counts_are_exact(self):
        table = self.pool.table()
        used, counts = np.unique(table[table >= 0], return_counts=True)
        assert self.pool.used_pages() == len(used)
        assert self.pool.free_pages() + self.pool.used_pages() == self.PAGES
        expected = dict(zip(used.tolist(), counts.tolist(), strict=True))
        assert all(self.pool.refcount(p) == expected.get(p, 0) for p in range(self.PAGES))

    @invariant()
    def visible_tokens_are_the_slots_own(self):
        table = self.pool.table()
        for slot, tokens in enumerate(self.tokens):
            assert self.pool.length(slot) == len(tokens)
            first = max(0, len(tokens) - self.window + 1) if self.window else 0
            for p in range(first, len(tokens)):
                page = table[slot, p // self.SIZE]
                assert page >= 0 and self.memory[page, p % self.SIZE] == tokens[p]

    def teardown(self):
        for slot in range(self.SLOTS):
            self.pool.release(slot)
        assert self.pool.free_pages() == self.PAGES


class SlidingPoolMachine(PoolMachine):
    window = 9


RANDOM = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGlobalPool = PoolMachine.TestCase
TestGlobalPool.settings = RANDOM
TestSlidingPool = SlidingPoolMachine.TestCase
TestSlidingPool.settings = RANDOM
