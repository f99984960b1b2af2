"""Draft models' files: header, configuration, and the fused graph with a target that they fit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from . import Target, gguf


def prepare(folder: Path) -> Callable[[bytes], None]:
    from glimmer_ops.config import check_draft
    from glimmer_ops.gguf import GGUFError, load, load_draft
    from glimmer_ops.lowering import from_gguf

    targets = {}
    for name, data in gguf.make_seeds().items():
        (folder / name).write_bytes(data)
        model = load(folder / name)
        targets[model.config.dim] = model
    path = folder / "input.gguf"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        draft = load_draft(path)
        for key in draft.metadata:
            draft.metadata[key]
        target = targets.get(draft.config.dim, model)
        try:
            check_draft(draft.config, target.config)
        except ValueError as error:
            raise GGUFError(f"{path}: {error}") from error
        from_gguf(target, draft)

    return read


def make_seeds() -> dict[str, bytes]:
    """Drafts for the targets of the gguf target's seeds."""
    from glimmer_ops.config import DraftConfig

    small = DraftConfig(16, 2, 2, 1, 4, 8, 1e-5, 5e5, 4, (True, False), 2, (0, 1), 11, 64)
    blocks = DraftConfig(256, 1, 1, 1, 2, 8, 1e-5, 5e5, 4, (True,), 4, (0,), 3, 64)
    return {
        "floats.gguf": _seed(small, ("F32", "F16", "BF16")),
        "blocks.gguf": _seed(blocks, ("Q4_K", "Q5_K", "Q6_K")),
    }


def _seed(config, types: tuple[str, ...]) -> bytes:
    from glimmer_ops.gguf import expected_draft_tensors

    keys = gguf.common_keys("dflash", config, {"block_size": config.block_size}, {})
    taps = config.target_layers
    layers = struct.pack(f"<IQ{len(taps)}i", 5, len(taps), *taps)
    mask = struct.pack("<I", config.mask_token_id)
    keys += [
        gguf.Key(b"dflash.target_layers", gguf.ARRAY, layers),
        gguf.Key(b"tokenizer.ggml.mask_token_id", 4, mask),
    ]
    return gguf.whole(keys, expected_draft_tensors(config), types)


def _refusals() -> tuple[type[Exception], ...]:
    from glimmer_ops.gguf import GGUFError

    return (GGUFError,)


TARGET = Target(
    instrument=("glimmer_ops._gguf_header", "glimmer_ops.gguf", "glimmer_ops.config", "gguf"),
    prepare=prepare,
    refusals=_refusals,
    mutate=gguf.mutate,
    make_seeds=make_seeds,
    named="input.gguf",
)
