"""Data files (.ptd): the checks of runtime/flat_tensor.cpp, then a real load and two steps."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from . import SEEDS, Target
from ._bytes import edge, overwrite
from ._bytes import mutate as mutate_bytes

HEADER = 48  # bytes of the FlatTensor header and of what precedes it


def _tables_end(data: bytes) -> int:
    """Where the flatbuffer ends: its offset and size are in the header."""
    offset, size = struct.unpack_from("<QQ", data, 16)
    return max(HEADER, min(len(data), offset + size))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A field of the header or of a flatbuffer table: an edge, a step away, or another's value."""
    if len(data) < HEADER or rng.random() < 0.1:
        return mutate_bytes(data, rng)
    end = _tables_end(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        size = rng.choice((1, 2, 4, 4, 4, 8))
        at = rng.randrange(0, end - size + 1, size)
        old = int.from_bytes(data[at : at + size], "little")
        step = old + rng.choice((-8, -4, -2, -1, 1, 2, 4, 8))
        moved = step % (1 << 8 * size)
        other = rng.randrange(0, end - size + 1, size)
        choices = (edge(rng, size), moved.to_bytes(size, "little"), data[other : other + size])
        data = overwrite(data, at, rng.choice(choices))
    return data


def load_and_step(folder: Path) -> None:
    from glimmer_ops.session import Sampling, Session

    session = Session.load(folder)
    slot = session.open()
    session.prefill(slot, [1, 2, 3])
    session.decode([slot], [4], Sampling())


def prepare(folder: Path) -> Callable[[bytes], None]:
    shutil.copy(SEEDS / "pte" / "toy.pte", folder / "model.pte")

    def read(data: bytes) -> None:
        # Not in place: an earlier session may still map the file
        (folder / "next").write_bytes(data)
        os.replace(folder / "next", folder / "model.ptd")
        load_and_step(folder)

    return read


def make_seeds() -> dict[str, bytes]:
    import tempfile

    from runtime.toy_program import export_toy

    with tempfile.TemporaryDirectory() as folder:
        export_toy(Path(folder))
        return {"toy.ptd": Path(folder, "model.ptd").read_bytes()}


TARGET = Target(
    instrument=("glimmer_ops.session",),
    prepare=prepare,
    refusals=lambda: (ValueError, RuntimeError),
    mutate=mutate,
    make_seeds=make_seeds,
)
