"""sample: the next token of each row, drawn so that one seed gives one sequence on every backend.

logits: float32 [R, V], 1 ≤ V ≤ 2²³. temperature: float32 [R], 0 = argmax. top_k: int64 [R], off
when ≤ 0 or ≥ V. top_p: float32 [R], off when ≥ 1. seed, step: int64 [R]. Returns int64 [R].

Temperature 0 takes the largest logit. Otherwise, in this order, with z_i = (logit_i - max) / t in
float32:

1. top_k keeps exactly k tokens in the order (logit descending, id ascending).
2. top_p keeps the shortest prefix of what is left, in the same order, whose weight reaches
   ⌈P · total / 2²⁴⌉ with P = ⌈top_p · 2²⁴⌉; at least one token. Weights are ⌊2⁴⁰ · exp(z_i)⌋:
   integers, so that sums are exact in any order.
3. The token is the kept one with the largest z_i + G_i, with G_i = -ln(-ln u_i) in float32.

u_i comes from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
key (lo32(seed), hi32(seed)), counter (lo32(i/4), hi32(i/4), lo32(step), hi32(step)), word w of
index i mod 4, u = ((w >> 9) + 1/2) · 2⁻²³, which float32 holds exactly and which is never 0 or 1.
Ties of any kind go to the lowest id. A logit of -inf is never chosen.

Refused with ValueError: logits with NaN or +inf or a row of only -inf; a temperature that is
negative, NaN or infinite; a top_p that is negative or NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ._contract import Case, Cost, Op, generator, nbytes, randn

_MASK = 0xFFFFFFFF


def philox4x32_10(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Ten rounds on counters [..., 4], int64 tensors of 32-bit words; returns the same shape."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2⁶⁴, so that both halves of the 64-bit product are right.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((b >> 32) & _MASK) ^ c1 ^ k0,
            b & _MASK,
            ((a >> 32) & _MASK) ^ c3 ^ k1,
            a & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), -1)


def uniforms(vocab: int, seed: int, step: int) -> torch.Tensor:
    """u of tokens 0 … vocab - 1, float64 [vocab], in (0, 1)."""
    block = torch.arange((vocab + 3) // 4)
    words = [block & _MASK, block >> 32, *(torch.full_like(block, w) for w in _halves(step))]
    random = philox4x32_10(torch.stack(words, -1), _halves(seed)).flatten()[:vocab]
    return ((random >> 9).double() + 0.5) * 2.0**-23


def _halves(value: int) -> tuple[int, int]:
    return value & _MASK, (value >> 32) & _MASK


def fake(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    step: torch.Tensor,
) -> torch.Tensor:
    return logits.new_empty((logits.size(0),), dtype=torch.int64)


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    step: torch.Tensor,
) -> torch.Tensor:
    parameters = zip(*(t.tolist() for t in (temperature, top_k, top_p, seed, step)), strict=True)
    tokens = [_token(row, *p) for row, p in zip(logits, parameters, strict=True)]
    return torch.tensor(tokens, dtype=torch.int64)


def _token(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, seed: int, step: int
) -> int:
    if temperature == 0:
        return int(torch.nonzero(logits == logits.max())[0])
    order = torch.sort(logits, descending=True, stable=True).indices
    z = (logits - logits.max()) / torch.tensor(temperature)  # float32, as the definition says
    kept = order[:top_k] if 0 < top_k < len(logits) else order
    if top_p < 1:
        weights = (z[kept].double().exp() * 2.0**40).long()
        p = -int(-top_p * 2**24 // 1)
        mass = -(-int(weights.sum()) * p // 2**24)
        before = weights.cumsum(0) - weights
        keep = before < mass
        keep[0] = True
        kept = kept[keep]
    noise = -torch.log(-torch.log(uniforms(len(logits), seed, step)))
    value = torch.full_like(noise, -torch.inf)
    value[kept] = z[kept].double() + noise[kept]
    return int(torch.nonzero(value == value.max())[0])


def cost(logits: torch.Tensor, *parameters: torch.Tensor) -> Cost:
    return Cost(bytes=nbytes(logits, *parameters) + 8 * logits.size(0), flops=2 * logits.numel())


def cases() -> Iterator[Case]:
    vocab = 202048
    for r in (1, 16):
        yield Case(f"greedy/{r}x{vocab}", _args(r, vocab, temperature=0.0))
    yield Case(f"plain/2x{vocab}", _args(2, vocab))
    yield Case(f"top-k/2x{vocab}", _args(2, vocab, top_k=40))
    yield Case(f"top-p/2x{vocab}", _args(2, vocab, top_p=0.9))
    yield Case(f"both/2x{vocab}", _args(2, vocab, temperature=0.7, top_k=50, top_p=0.95))
    for v in (1, 2, 3, 5, 127, 1000):
        yield Case(f"plain/16x{v}", _args(16, v))
        yield Case(f"both/16x{v}", _args(16, v, top_k=3, top_p=0.8))
    yield Case("empty", _args(0, 8))
    yield Case("flat", lambda: _with(torch.zeros(16, 5000)))
    yield Case("flat-top-k", lambda: _with(torch.zeros(16, 50), top_k=3))
    yield Case("flat-top-p", lambda: _with(torch.zeros(16, 50), top_p=0.5))
    yield Case("top-p-0", _args(8, 100, top_p=0.0))
    yield Case("top-p-tiny", _args(8, 100, top_p=1e-9))
    yield Case("top-k-1", _args(8, 100, top_k=1))
    yield Case("top-k-all", _args(8, 100, top_k=100))
    yield Case("top-k-huge", _args(8, 100, top_k=2**62))
    yield Case("top-k-off", _args(8, 100, top_k=-1))
    yield Case("cold", _args(8, 100, temperature=1e-38))
    yield Case("hot", _args(8, 100, temperature=1e30))
    yield Case("huge-logits", _args(8, 100, scale=1e38))
    yield Case("mixed-rows", _mixed)
    yield Case("masked", _masked)
    yield Case("greedy-ties", _ties)
    yield Case("seeds-64-bit", _args(4, 64, seed=-(2**62), step=2**40))
    yield from _refusals()


def _with(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
    step: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Arguments with the same parameters for every row but for step, which counts up."""
    r = logits.size(0)
    return (
        logits,
        torch.full((r,), temperature),
        torch.full((r,), top_k),
        torch.full((r,), top_p),
        torch.full((r,), seed),
        step + torch.arange(r),
    )


def _args(r: int, v: int, scale: float = 3.0, **parameters: Any) -> Any:
    def make() -> tuple[torch.Tensor, ...]:
        logits = (randn(generator(r, v, scale), r, v) * scale).clamp(-3e38, 3e38)
        return _with(logits, **parameters)

    return make


def _mixed() -> tuple[torch.Tensor, ...]:
    """Every row with parameters of its own: greedy, plain, top-k, top-p, both."""
    logits, _, _, _, seed, step = _args(5, 1000)()
    temperature = torch.tensor([0.0, 1.0, 0.8, 1.3, 0.6])
    top_k, top_p = torch.tensor([5, 0, 7, 0, 20]), torch.tensor([0.5, 1.0, 1.0, 0.7, 0.9])
    return logits, temperature, top_k, top_p, seed + torch.arange(5), step * 1000


def _masked() -> tuple[torch.Tensor, ...]:
    """All but a few logits are -inf, as under a grammar; one row has a single choice."""
    logits = torch.full((3, 300), -torch.inf)
    logits[0, 17] = -50.0
    logits[1, 5:9] = 1.0
    logits[2, ::7] = 0.0
    return _with(logits, top_k=10, top_p=0.99)


def _ties() -> tuple[torch.Tensor, ...]:
    logits = torch.zeros(3, 100)
    logits[0, [40, 60, 99]] = 2.0
    logits[1] = -0.0
    logits[1, 7] = 0.0
    logits[2, 99] = 1e-30
    return _with(logits, temperature=0.0)


def _refusals() -> Iterator[Case]:
    nan, inf = float("nan"), float("inf")

    def change(index: int, value: Any) -> Any:
        def make() -> tuple[torch.Tensor, ...]:
            args = list(_args(2, 8)())
            if isinstance(value, torch.Tensor):
                args[index] = value
            else:
                args[index][1 if args[index].dim() == 1 else (1, 3)] = value
            return tuple(args)

        return make

    def empty_row() -> tuple[torch.Tensor, ...]:
        args = _args(2, 8)()
        args[0][1] = -inf
        return args

    for case_id, make, error in (
        ("nan", change(0, nan), "logits: row 1 has NaN"),
        ("inf", change(0, inf), "logits: row 1 has +inf"),
        ("only-inf", empty_row, "logits: row 1 has only -inf"),
        ("temperature", change(1, -0.5), "temperature: row 1: expected a finite value >= 0"),
        ("temperature-nan", change(1, nan), "temperature: row 1: expected a finite value >= 0"),
        ("temperature-inf", change(1, inf), "temperature: row 1: expected a finite value >= 0"),
        ("top-p", change(3, -0.1), "top_p: row 1: expected a value >= 0"),
        ("top-p-nan", change(3, nan), "top_p: row 1: expected a value >= 0"),
        ("dtype", change(0, torch.ones(2, 8).half()), "logits: expected float32"),
        ("1d", change(0, torch.ones(8)), "logits: expected 2 dimensions"),
        ("no-columns", change(0, torch.ones(2, 0)), "logits: expected 1 to"),
        ("rows", change(1, torch.ones(3)), "temperature: expected float32[2]"),
        ("top-k-dtype", change(2, torch.ones(2)), "top_k: expected int64[2]"),
        ("top-p-dtype", change(3, torch.ones(2).double()), "top_p: expected"),
        ("seed", change(4, torch.ones(1).long()), "seed: expected int64[2]"),
        ("step", change(5, torch.ones(2, 1).long()), "step: expected int64[2]"),
    ):
        yield Case(f"refuse/{case_id}", make, error=error)


def bench() -> Iterator[Case]:
    """The model's vocabulary; the head has just written the logits, so they are in cache."""
    for r in (1, 16):
        for name, parameters in (
            ("greedy", {"temperature": 0.0}),
            ("top-p", {"top_p": 0.9}),
            ("top-k", {"top_k": 40}),
        ):
            make = _args(r, 202048, **parameters)
            yield Case(f"{name}/{r}x202048", make, resident=True, slow=r == 16)


OP = Op(
    name="sample",
    args=(
        "Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, Tensor step"
    ),
    fake=fake,
    reference=reference,
    cases=cases,
    cost=cost,
    rows=("logits", "temperature", "top_k", "top_p", "seed", "step"),
    dtypes=("f32",),
    bench=bench,
)
