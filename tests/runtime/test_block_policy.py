"""The chosen block lengths against the best fixed one, for made-up costs and acceptances."""

from __future__ import annotations

import numpy as np
import pytest

from glimmer_ops._native import _C

MAX = 16
# Seconds of a pass by its length, in plain steps: memory-bound, compute-bound, and one with a step.
COSTS = {
    "flat": lambda b: 1.0 if b == 1 else 1.15 + 0.01 * b,
    "linear": lambda b: 1.0 if b == 1 else 1.0 + 0.3 * b,
    "stairs": lambda b: 1.0 if b == 1 else 1.3 + (0 if b <= 4 else 1.0 if b <= 8 else 4.0),
}


def expected(p, block):
    return sum(p**k for k in range(block))


def rates(cost, p):
    """Tokens a second by block length."""
    return {b: expected(p, b) / cost(b) for b in range(1, MAX + 1)}


def run(policy, cost, p, tokens, seed=0, noise=0.0):
    """Passes until `tokens` came of them; returns (tokens a second, block lengths)."""
    g, blocks, got, seconds = np.random.default_rng(seed), [], 0, 0.0
    while got < tokens:
        block = policy.choose(MAX)
        assert 1 <= block <= MAX
        accepted = 0
        while accepted < block - 1 and g.random() < p:
            accepted += 1
        taken = cost(block) * (1 + noise * g.exponential())
        policy.observe(block, accepted, taken)
        blocks.append(block)
        got, seconds = got + accepted + 1, seconds + taken
    return got / seconds, blocks


@pytest.mark.parametrize("p", [0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("cost", COSTS)
def test_nearly_as_fast_as_the_best_fixed_length(cost, p):
    found, _ = run(_C.BlockPolicy(MAX), COSTS[cost], p, 3000)
    assert found >= 0.9 * max(rates(COSTS[cost], p).values())


@pytest.mark.parametrize("cost", COSTS)
def test_noise_on_the_costs_does_not_mislead(cost):
    found, _ = run(_C.BlockPolicy(MAX), COSTS[cost], 0.8, 3000, noise=0.3)
    assert found >= 0.85 * max(rates(COSTS[cost], 0.8).values()) / 1.3


@pytest.mark.parametrize("cost", COSTS)
def test_switches_off_when_drafts_do_not_pay(cost):
    found, blocks = run(_C.BlockPolicy(MAX), COSTS[cost], 0.02, 2000)
    assert found >= 0.95  # of plain decoding
    assert np.mean(np.array(blocks[100:]) == 1) > 0.85


def test_tries_again_and_comes_back():
    policy = _C.BlockPolicy(MAX)
    _, blocks = run(policy, COSTS["flat"], 0.0, 600)
    assert np.median(blocks[-100:]) == 1
    probes = np.flatnonzero(np.array(blocks) > 1)
    assert len(probes) > 5 and np.diff(probes).max() <= 257
    found, blocks = run(policy, COSTS["flat"], 0.9, 3000, seed=1)
    assert found >= 0.8 * max(rates(COSTS["flat"], 0.9).values())
    assert np.median(blocks[-50:]) >= 8


def test_follows_a_change_of_acceptance():
    policy = _C.BlockPolicy(MAX)
    run(policy, COSTS["linear"], 0.95, 1500)
    _, blocks = run(policy, COSTS["linear"], 0.5, 600, seed=2)
    rate = rates(COSTS["linear"], 0.5)
    assert rate[int(np.median(blocks[-60:]))] >= 0.9 * max(rate.values())


def test_costs_are_the_least_of_the_last_four():
    policy = _C.BlockPolicy(MAX)
    assert policy.cost(1) == policy.cost(9) == 0
    policy.observe(1, 0, 1.0)
    policy.observe(5, 0, 3.0)
    assert policy.cost(5) == 1  # one measurement is not believed
    policy.observe(5, 4, 2.0)
    policy.observe(5, 4, 9.0)
    assert [policy.cost(b) for b in (1, 2, 4, 5, 16)] == [1, 1, 1, 2, 2]  # as the next shorter
    for _ in range(4):
        policy.observe(5, 4, 2.5)
    measured = [0.0] * (MAX + 1)
    measured[1], measured[5] = 1.0, 2.5
    assert policy.measured() == measured


def test_another_text_keeps_the_costs():
    policy = _C.BlockPolicy(MAX)
    run(policy, COSTS["linear"], 0.9, 300)
    measured = policy.measured()
    assert policy.tokens(2) > 1.8
    policy.restart()
    assert policy.measured() == measured and policy.tokens(2) == 1.75


def test_lengths_are_tried_from_short_to_long_and_no_further_than_they_pay():
    policy = _C.BlockPolicy(MAX)
    _, blocks = run(policy, COSTS["stairs"], 0.78, 200)  # 6 rows and more cost too much
    assert blocks[:8] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert set(blocks) <= {1, 2, 3, 4, 6}


def test_expected_tokens_approach_what_was_seen():
    policy = _C.BlockPolicy(8)
    for _ in range(100):
        policy.observe(8, 3, 1.0)
    assert policy.tokens(1) == 1
    assert policy.tokens(4) == pytest.approx(4, abs=0.1)
    assert policy.tokens(8) == pytest.approx(4, abs=0.15)


def test_begins_with_plain_passes_to_compare_with():
    policy = _C.BlockPolicy(MAX)
    for _ in range(2):
        assert policy.choose(MAX) == 1
        policy.observe(1, 0, 1.0)
    assert policy.choose(MAX) > 1


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_stays_within_the_limit(limit):
    policy = _C.BlockPolicy(MAX)
    for _ in range(50):
        block = policy.choose(limit)
        assert 1 <= block <= limit
        policy.observe(block, block - 1, 1.0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="max_block: expected a value in .2, "):
        _C.BlockPolicy(1)
    policy = _C.BlockPolicy(4)
    with pytest.raises(ValueError, match="block: expected a value in .1, 4., found 5"):
        policy.observe(5, 0, 1.0)
    with pytest.raises(ValueError, match="accepted: expected a value in .0, 1., found 2"):
        policy.observe(2, 2, 1.0)
