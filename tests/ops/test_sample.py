"""sample: the generator's known answers, the rules of top-k and top-p, and the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glimmer_ops import _native
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import generator, randn
from glimmer_ops.ops.sample import philox4x32_10, uniforms

OP = OPS["sample"]


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, seed=0, step=0):
    """Tokens of logits [R, V]; a parameter is one number, or a tensor of R."""
    r = logits.size(0)

    def rows(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(r).contiguous()

    f, i = torch.float32, torch.int64
    args = (
        logits,
        rows(temperature, f),
        rows(top_k, i),
        rows(top_p, f),
        rows(seed, i),
        rows(step, i),
    )
    return _native.call("sample", OP.arg_names, args)[0]


@pytest.fixture(params=_native.isas())
def isa(request):
    with _native.use_isa(request.param):
        yield request.param


# --- Philox ---------------------------------------------------------------------------------------

# Random123's known-answer vectors of philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_reference_philox_known_answers(counter, key, expected):
    assert philox4x32_10(torch.tensor(counter), tuple(key)).tolist() == expected


def test_uniforms_exclude_both_ends():
    u = uniforms(1 << 16, 7, 9)
    assert 0 < u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * (1 / 12) ** 0.5 / 256
    assert torch.equal(u.float().double(), u)


def test_kernel_draws_known_words(isa):
    """Of equal logits the largest word wins; seed, step and block 0 give the first vector."""
    logits, order = torch.zeros(1, 4), [1, 2, 3, 0]  # descending words of the first vector
    for token in order:
        assert sample(logits).item() == token
        logits[0, token] = -torch.inf


@pytest.mark.parametrize(
    "seed, step", [(0, 0), (-1, 5), (2**40 + 3, 2**33 + 1), (-(2**63), 2**63 - 1)]
)
def test_kernel_uses_every_half_of_seed_step_and_id(isa, seed, step):
    v = 4000
    tokens = sample(torch.zeros(8, v), seed=seed, step=torch.arange(8) ^ step)
    expected = [int(uniforms(v, seed, i ^ step).argmax()) for i in range(8)]
    assert tokens.tolist() == expected
    flipped = sample(torch.zeros(8, v), seed=seed ^ (1 << 32), step=torch.arange(8) ^ step)
    assert (flipped != tokens).sum() >= 7


# --- Greedy ---------------------------------------------------------------------------------------


def test_greedy_ties_go_to_the_lowest_id(isa):
    logits = randn(generator("ties"), 64, 5000)
    rows = torch.arange(64)
    logits[rows, 4999 - rows] = 9.0
    logits[rows, 100 + 3 * rows] = 9.0
    expected = torch.minimum(4999 - rows, 100 + 3 * rows)
    assert torch.equal(sample(logits, temperature=0.0), expected)


def test_greedy_ignores_the_other_parameters(isa):
    logits = randn(generator("greedy"), 9, 777)
    tokens = sample(logits, 0.0, top_k=3, top_p=0.1, seed=torch.arange(9), step=5)
    assert torch.equal(tokens, logits.argmax(1))


def test_top_p_0_and_top_k_1_are_greedy(isa):
    logits = randn(generator("one"), 50, 300)
    for rule in ({"top_p": 0.0}, {"top_k": 1}, {"temperature": 1e-38}):
        assert torch.equal(sample(logits, step=torch.arange(50), **rule), logits.argmax(1))


# --- Top-k and top-p against an independent implementation ----------------------------------------


def kept_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Ids that survive top-k then top-p, by softmax and cumulative sum in float64."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    if 0 < top_k < len(logits):
        order = order[:top_k]
    if top_p < 1:
        p = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
        before = np.cumsum(p / p.sum()) - p / p.sum()
        order = order[(before < top_p) | (np.arange(len(order)) == 0)]
    return order


def expected_token(logits, temperature, top_k, top_p, seed, step):
    kept = np.sort(kept_tokens(logits, temperature, top_k, top_p))
    noise = -np.log(-np.log(uniforms(len(logits), seed, step).numpy()))
    return int(kept[np.argmax(logits[kept].astype(np.float64) / temperature + noise[kept])])


@settings(max_examples=150, deadline=None)
@given(
    v=st.integers(1, 400),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.integers(-1, 60),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0, 1.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 2**40),
)
def test_token_matches_independent_rules(v, temperature, top_k, top_p, seed, step):
    logits = 3 * randn(generator(v, top_k, seed), 1, v)
    expected = expected_token(logits[0].numpy(), temperature, top_k, top_p, seed, step)
    for isa in _native.isas():
        with _native.use_isa(isa):
            assert sample(logits, temperature, top_k, top_p, seed, step).item() == expected


@pytest.mark.parametrize("top_k, top_p", [(12, 1.0), (0, 0.8), (12, 0.6)])
def test_support_is_exactly_the_kept_set(isa, top_k, top_p):
    logits = randn(generator("support"), 1, 40)
    tokens = sample(logits.repeat(4000, 1), 1.0, top_k, top_p, 3, torch.arange(4000))
    kept = kept_tokens(logits[0].numpy(), 1.0, top_k, top_p)
    assert 1 < len(kept) < 40
    assert set(tokens.tolist()) == set(kept.tolist())


def test_top_k_keeps_exactly_k_of_tied_logits(isa):
    logits = torch.zeros(600, 50)
    logits[:, 30] = 1.0
    tokens = sample(logits, top_k=4, step=torch.arange(600))
    assert set(tokens.tolist()) == {30, 0, 1, 2}


def test_top_p_keeps_the_crossing_token(isa):
    # Probabilities 1/2, 1/4, 1/8, 1/8: 0.5 is reached by the first alone, a little more is not.
    logits = torch.tensor([[3.0, 2.0, 1.0, 1.0]]).mul(np.log(2.0)).repeat(500, 1)
    for top_p, kept in ((0.49, {0}), (0.51, {0, 1}), (0.74, {0, 1}), (0.76, {0, 1, 2})):
        assert set(sample(logits, top_p=top_p, step=torch.arange(500)).tolist()) == kept


def test_top_p_stops_where_the_mass_is_met_exactly(isa):
    for top_p, kept in ((0.25, {0}), (0.5, {0, 1}), (0.50001, {0, 1, 2})):
        assert (
            set(sample(torch.zeros(500, 4), top_p=top_p, step=torch.arange(500)).tolist()) == kept
        )


def test_top_p_applies_to_what_top_k_left(isa):
    # Four equal tokens of twenty: after top_k = 4 each has 1/4, so 0.7 keeps three of them.
    tokens = sample(torch.zeros(500, 20), top_k=4, top_p=0.7, step=torch.arange(500))
    assert set(tokens.tolist()) == {0, 1, 2}


def test_equal_noise_goes_to_the_lowest_id(isa):
    """Tokens 167 and 18335 draw the same, largest word; a logit's 1e-9 is lost in float32."""
    u = uniforms(20000, 0, 1402)
    assert torch.nonzero(u == u.max()).flatten().tolist() == [167, 18335]
    for larger in (167, 18335):
        logits = torch.zeros(1, 20000)
        logits[0, larger] = 1e-9
        assert sample(logits, step=1402).item() == 167


# --- Distribution ---------------------------------------------------------------------------------


def chi_square(tokens: torch.Tensor, p: np.ndarray) -> float:
    count = np.bincount(tokens.numpy(), minlength=len(p))
    return float(((count - len(tokens) * p) ** 2 / (len(tokens) * p)).sum())


@pytest.mark.parametrize("seed", [0, 123456789012345])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_distribution_is_the_softmax(isa, seed, temperature):
    logits = randn(generator("softmax"), 1, 8)
    p = torch.softmax(logits[0].double() / temperature, 0).numpy()
    tokens = sample(logits.repeat(20000, 1), temperature, seed=seed, step=torch.arange(20000))
    assert chi_square(tokens, p) < 29.9  # 7 degrees of freedom, p = 1e-4
    assert chi_square(tokens, np.full(8, 1 / 8)) > 29.9  # and the test can tell


def test_distribution_over_seeds_and_after_top_p(isa):
    logits = randn(generator("nucleus"), 1, 30)
    kept = kept_tokens(logits[0].numpy(), 1.0, 0, 0.7)
    p = np.exp(logits[0].double().numpy()[kept])
    tokens = sample(logits.repeat(20000, 1), top_p=0.7, seed=torch.arange(20000))
    rank = torch.from_numpy(np.argsort(kept))
    position = torch.searchsorted(torch.from_numpy(np.sort(kept)), tokens)
    assert chi_square(rank[position], p / p.sum()) < len(p) + 4 * (2 * len(p)) ** 0.5 + 8


RULES = {"temperature": 0.8, "top_k": 60, "top_p": 0.9}
DRAWS = 200_000


def exact_distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, filter_at: float | None = None
) -> np.ndarray:
    """Probability of each id in float64: temperature, then top-k, then top-p with the crossing
    token, renormalised. filter_at: the temperature that the filters see instead."""
    z = logits.astype(np.float64)
    z -= z.max()
    order = np.argsort(-z, kind="stable")[:top_k]
    mass = np.cumsum(np.exp(z[order] / (filter_at or temperature)))
    kept = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    p = np.zeros(len(z))
    p[kept] = np.exp(z[kept] / temperature)
    return p / p.sum()


def p_value(count: np.ndarray, p: np.ndarray) -> float:
    """Chance of a chi-square statistic as large as the counts', were p the probabilities: the
    upper incomplete gamma function. 0 when something was drawn that cannot be."""
    if count[p == 0].any():
        return 0.0
    expected = (count.sum() * p)[p > 0]
    statistic, freedom = ((count[p > 0] - expected) ** 2 / expected).sum(), len(expected) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.fixture(scope="module")
def wide_logits() -> torch.Tensor:
    return 1.5 * randn(generator("chi-square"), 1, 300)


def count_draws(logits: torch.Tensor) -> np.ndarray:
    """How often each id comes in DRAWS draws, a step each."""
    count = torch.zeros(logits.size(1), dtype=torch.int64)
    for steps in torch.arange(DRAWS).split(20_000):
        tokens = sample(logits.repeat(len(steps), 1), **RULES, seed=2026, step=steps)
        count += torch.bincount(tokens, minlength=len(count))
    return count.numpy()


@pytest.fixture(scope="module")
def drawn(wide_logits) -> np.ndarray:
    return count_draws(wide_logits)


def test_chi_square_of_temperature_with_top_k_and_top_p(isa, wide_logits):
    p = exact_distribution(wide_logits[0].numpy(), **RULES)
    assert 21 < (p > 0).sum() < RULES["top_k"] and DRAWS * p[p > 0].min() > 100
    assert p_value(count_draws(wide_logits), p) > 1e-3


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.77},
        {"temperature": 0.83},
        {"top_k": 55},
        {"top_k": 300},
        {"top_p": 0.89},
        {"top_p": 0.91},
        {"filter_at": 1.0},
    ],
    ids=lambda wrong: "-".join(f"{k}={v}" for k, v in wrong.items()),
)
def test_the_chi_square_tells_other_rules(wide_logits, drawn, wrong):
    """filter_at 1: top-p before temperature."""
    p = exact_distribution(wide_logits[0].numpy(), **(RULES | wrong))
    assert p_value(drawn, p) < 1e-9


# --- Determinism ----------------------------------------------------------------------------------


def mixed_batch(r: int = 16, v: int = 3000) -> tuple[torch.Tensor, ...]:
    g = generator("mixed")
    return (
        2 * randn(g, r, v),
        torch.rand(r, generator=g) * (torch.arange(r) % 3 != 0),
        torch.randint(-1, 80, (r,), generator=g),
        0.5 + torch.rand(r, generator=g),
        torch.randint(0, 2**62, (r,), generator=g),
        torch.randint(0, 2**20, (r,), generator=g),
    )


def test_rows_do_not_depend_on_the_batch(isa):
    args = mixed_batch()
    whole = sample(*args)
    order = torch.randperm(16, generator=generator("order"))
    for rows in (*(torch.tensor([i]) for i in range(16)), order, order[:5]):
        assert torch.equal(sample(*(a[rows].contiguous() for a in args)), whole[rows])


def test_isas_agree_bit_for_bit():
    # Flat logits leave everything to the noise's bits; 2000 rows find a last-bit difference.
    flat, mixed = torch.zeros(2000, 2048), mixed_batch(200, 3000)
    tokens = []
    for name in _native.isas():
        with _native.use_isa(name):
            tokens.append(torch.cat((sample(flat, step=torch.arange(2000)), sample(*mixed))))
    assert all(torch.equal(t, tokens[0]) for t in tokens)


def test_one_seed_one_sequence(isa):
    logits = randn(generator("sequence"), 64, 500)
    steps = torch.arange(64)
    assert torch.equal(sample(logits, seed=5, step=steps), sample(logits, seed=5, step=steps))
    assert (sample(logits, seed=5, step=steps) != sample(logits, seed=6, step=steps)).any()


def test_shift_of_all_logits_changes_nothing(isa):
    # Multiples of 1/8: the shift is exact in float32.
    logits = (8 * randn(generator("shift"), 100, 200)).round() / 8
    steps = torch.arange(100)
    assert torch.equal(sample(logits + 1000, 0.9, step=steps), sample(logits, 0.9, step=steps))
