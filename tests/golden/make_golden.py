"""Writes the golden logits: what llama.cpp gives for synthetic files that a seed determines.

    make peers && python tests/golden/make_golden.py

A file holds the GGUF's sha256, the token ids, and the logits of every position for a sample of the
vocabulary. llama.cpp runs on the CPU with its default f16 cache, one token a call.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np

from glimmer_ops.bench.peers.llama_model import Model
from glimmer_ops.synth import PRESETS, synth

QUANTS = ("F16", "Q4_K_M")
POSITIONS = 240  # six windows of the tiny preset
COLUMNS = 48  # of the vocabulary


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def llama_logits(path: Path, ids: list[int]) -> np.ndarray:
    """float32 [len(ids), vocab_size]"""
    model = Model(path, positions=256, batch=1, threads=1)
    rows = []
    for token in ids:
        model.forward([token])
        rows.append(model.logits().numpy())
    model.close()
    return np.stack(rows)


def main() -> None:
    vocab = PRESETS["tiny"].vocab_size
    rng = np.random.default_rng(11)
    ids = rng.integers(0, vocab, POSITIONS)
    columns = np.sort(rng.choice(vocab, COLUMNS, replace=False))
    with tempfile.TemporaryDirectory() as folder:
        for quant in QUANTS:
            path = synth(Path(folder, f"{quant}.gguf"), "tiny", quant)
            out = Path(__file__).with_name(f"tiny-{quant}.npz")
            np.savez_compressed(
                out,
                sha256=sha256(path),
                ids=ids.astype(np.int32),
                columns=columns.astype(np.int32),
                logits=llama_logits(path, ids.tolist())[:, columns],
            )
            print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
