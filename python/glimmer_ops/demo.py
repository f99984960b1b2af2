"""The main job on any machine, with nothing downloaded: GGUF -> .pte -> tokens, judged.

Every position's logits are compared with upstream's eager model in float32 on the same file, for
the exact path and for the default one with int8 activations.
"""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from . import _native
from .gguf import load
from .oracle import upstream_logits
from .run import Request
from .run import run as run_model
from .session import Session
from .synth import synth
from .tokenizer import Tokenizer

POSITIONS = 240
CHUNK = 16
EXACT_BOUND = 5e-4  # max |difference| of logits capped at ±20
INTEGER_BOUND = 2e-2  # rms of the difference over rms of the logits
PROMPT = "The quick brown fox jumps over the lazy dog, and then"


@dataclass(frozen=True)
class Comparison:
    """How one path's logits differ from the oracle's, over all positions."""

    path: str
    max_abs: float
    rms_relative: float
    argmax_equal: int
    positions: int
    passed: bool


def compare(path: str, ours: np.ndarray, oracle: np.ndarray, exact: bool) -> Comparison:
    difference = ours.astype(np.float64) - oracle
    max_abs = float(np.abs(difference).max())
    rms = float(np.sqrt(np.mean(difference**2) / np.mean(oracle.astype(np.float64) ** 2)))
    equal = int((ours.argmax(-1) == oracle.argmax(-1)).sum())
    passed = max_abs <= EXACT_BOUND and equal == len(ours) if exact else rms <= INTEGER_BOUND
    return Comparison(path, max_abs, rms, equal, len(ours), bool(passed))


def _logits(model: Path, ids: list[int], exact: bool) -> np.ndarray:
    session = Session.load(model)
    slot = session.open()
    with _native.use_exact(exact):
        return session.prefill(slot, ids, CHUNK, range(len(ids)))


def demo(out: Path, quant: str, console: Console) -> bool:
    """Runs the whole job in folder `out`, prints it, and says whether every comparison passed."""
    from .lowering import ExportOptions, from_gguf, to_executorch

    out.mkdir(parents=True, exist_ok=True)
    file, folder = out / f"tiny-{quant}.gguf", out / f"tiny-{quant}"
    started = time.perf_counter()

    def step(text: str) -> None:
        console.print(f"[{time.perf_counter() - started:5.1f} s] {text}", markup=False)

    synth(file, "tiny", quant)
    model = load(file)
    step(f"{file}: {file.stat().st_size / 1e6:.1f} MB, {model.config.n_layers} layers")
    options = ExportOptions(max_seq_len=1024, max_chunk=128, kv_dtype="f32")
    with contextlib.redirect_stdout(io.StringIO()):
        to_executorch(from_gguf(model), folder, options, Tokenizer.from_gguf(model))
    step(f"{folder}: model.pte and model.ptd")

    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.config.vocab_size, POSITIONS).tolist()
    oracle = upstream_logits(model, ids)
    step(f"upstream eager, float32: {POSITIONS} positions, window {model.config.window}")
    results = [
        compare(name, _logits(folder, ids, exact), oracle, exact)
        for name, exact in (("exact", True), ("int8 activations", False))
    ]
    step(f"ours on the ExecuTorch runtime ({_native.isa()})\n")

    run_model(
        Request(model=folder, prompt=PROMPT, max_new_tokens=48, temperature=0.8, seed=1),
        write=lambda text: console.print(text, end="", markup=False, soft_wrap=True),
    )
    console.print()
    console.print(_table(results))
    passed = all(r.passed for r in results)
    console.print("verdict: " + ("equal to upstream within the bounds" if passed else "FAILED"))
    return passed


def _table(results: list[Comparison]) -> Table:
    table = Table("path", "max |diff|", "rms relative", "argmax equal", "bound", "verdict")
    for r in results:
        bound = f"max {EXACT_BOUND:g}" if r.path == "exact" else f"rms {INTEGER_BOUND:g}"
        verdict = "pass" if r.passed else "FAIL"
        equal = f"{r.argmax_equal}/{r.positions}"
        table.add_row(r.path, f"{r.max_abs:.1e}", f"{r.rms_relative:.1e}", equal, bound, verdict)
    return table
