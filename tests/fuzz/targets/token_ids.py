"""`--tokens @FILE`: text with token ids."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from . import Target
from ._bytes import mutate as mutate_bytes

WORDS = [b"0", b"-1", b"+1", b"1e3", b"0x10", b"9" * 30, b"9" * 5000, "٣".encode(), "²".encode()]
WORDS += [b"1_0", b",", b"\n", b"\xff", b"\0", b" "]


def mutate(data: bytes, rng: random.Random) -> bytes:
    words = data.split()
    if not words or rng.random() < 0.3:
        return mutate_bytes(data, rng)
    words.insert(rng.randrange(len(words) + 1), rng.choice(WORDS))
    return rng.choice((b" ", b",", b"\n", b"")).join(words)


def prepare(folder: Path) -> Callable[[bytes], None]:
    from glimmer_ops.run import parse_ids

    path = folder / "ids"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        ids = parse_ids(f"@{path}")
        assert all(type(i) is int and i >= 0 for i in ids)

    return read


TARGET = Target(
    instrument=("glimmer_ops.run",),
    prepare=prepare,
    refusals=lambda: (ValueError,),
    mutate=mutate,
    make_seeds=lambda: {"ids": b"1, 2 3\n40"},
    named="--tokens",
)
