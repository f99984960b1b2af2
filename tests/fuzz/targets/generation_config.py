"""generation_config.json: the ids that begin and end a turn."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from . import SEEDS, Target
from ._json import mutate


def prepare(folder: Path) -> Callable[[bytes], None]:
    from glimmer_ops.run import load_tokenizer

    shutil.copy(SEEDS / "tokenizer_json" / "tokenizer.json", folder)

    def read(data: bytes) -> None:
        (folder / "generation_config.json").write_bytes(data)
        load_tokenizer(folder)

    return read


TARGET = Target(
    instrument=("glimmer_ops.run",),
    prepare=prepare,
    refusals=lambda: (ValueError,),
    mutate=mutate,
    make_seeds=lambda: {
        "list.json": b'{"bos_token_id": 0, "eos_token_id": [1, 2]}',
        "one.json": b'{"bos_token_id": null, "eos_token_id": 1}',
    },
    named=".json",  # an id that the tokenizer lacks is refused in the name of tokenizer.json
)
