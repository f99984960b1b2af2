"""Mutations that know no format: values at the edge of a type, moved and cut pieces."""

from __future__ import annotations

import random
import struct

EDGES = [0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 1 << 16, (1 << 31) - 1]
EDGES += [1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def edge(rng: random.Random, size: int) -> bytes:
    """A little-endian integer of `size` bytes, mostly a dangerous one."""
    value = rng.choice(EDGES) if rng.random() < 0.8 else rng.getrandbits(64)
    if rng.random() < 0.2:
        value = rng.randrange(64)
    return struct.pack("<Q", value)[:size]


def overwrite(data: bytes, at: int, piece: bytes) -> bytes:
    return data[:at] + piece + data[at + len(piece) :]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flips, edges, a cut, or a piece copied elsewhere."""
    if not data:
        return bytes([rng.randrange(256)])
    at = rng.randrange(len(data))
    kind = rng.randrange(6)
    if kind == 0:
        return overwrite(data, at, bytes([data[at] ^ (1 << rng.randrange(8))]))
    if kind == 1:
        return overwrite(data, at, edge(rng, rng.choice((1, 2, 4, 8))))[: len(data)]
    if kind == 2:
        return data[:at]
    piece = data[at : at + rng.choice((1, 4, 8, 32))]
    to = rng.randrange(len(data))
    if kind == 3:
        return overwrite(data, to, piece)
    if kind == 4:
        return data[:to] + piece + data[to:]
    return data[:at] + data[at + rng.choice((1, 4, 8, 32)) :]
