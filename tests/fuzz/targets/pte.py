"""Programs (.pte) beside the checksum of the one that was exported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from . import SEEDS, Target
from ._bytes import mutate
from .ptd import load_and_step


def prepare(folder: Path) -> Callable[[bytes], None]:
    from glimmer_ops.session import program_digest

    shutil.copy(SEEDS / "pte" / "toy.pte", folder / "model.pte")
    shutil.copy(SEEDS / "ptd" / "toy.ptd", folder / "model.ptd")
    (folder / "model.sha256").write_text(program_digest(folder / "model.pte"))

    def read(data: bytes) -> None:
        (folder / "next").write_bytes(data)
        os.replace(folder / "next", folder / "model.pte")
        load_and_step(folder)

    return read


def make_seeds() -> dict[str, bytes]:
    import tempfile

    from runtime.toy_program import export_toy

    with tempfile.TemporaryDirectory() as folder:
        export_toy(Path(folder))
        return {"toy.pte": Path(folder, "model.pte").read_bytes()}


TARGET = Target(
    instrument=("glimmer_ops.session",),
    prepare=prepare,
    refusals=lambda: (ValueError,),
    mutate=mutate,
    make_seeds=make_seeds,
    named="model.pte",
)
