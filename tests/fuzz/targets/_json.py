"""Mutations of JSON text that keep it JSON."""

from __future__ import annotations

import json
import random
from typing import Any

from ._bytes import EDGES
from ._bytes import mutate as mutate_bytes


def _leaf(rng: random.Random) -> Any:
    leaves = [None, True, "", "x", "\u0120", -1, 0.5, 1e400, [], {}, [0], "a" * 200]
    return rng.choice([*leaves, rng.choice(EDGES)])


def _change(value: Any, rng: random.Random) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.randrange(8)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return value | {rng.choice([*value, "extra"]): value[key]}
        return value | {key: _change(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        i, j = rng.randrange(len(value)), rng.randrange(len(value))
        kind = rng.randrange(8)
        if kind == 0:
            return value[:i] + value[i + 1 :]
        if kind == 1:
            return [*value[:j], value[i], *value[j:]]
        return [*value[:i], _change(value[i], rng), *value[i + 1 :]]
    return _leaf(rng)


def mutate(data: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(data)
        if rng.random() < 0.15:
            return mutate_bytes(data, rng)
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = _change(value, rng)
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
