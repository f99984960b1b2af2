"""Loads a model in a process of its own and runs it once: seconds and peak memory as JSON."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

from glimmer_ops.session import Session, set_threads

PROMPT = 64  # tokens, before 8 are decoded


def prompt(length: int, vocab_size: int) -> list[int]:
    """Random ids, the same every time."""
    return np.random.default_rng(0).integers(0, vocab_size, length).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("threads", type=int)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    start = time.perf_counter()
    session = Session.load(arguments.model)
    load_s = time.perf_counter() - start
    length = min(PROMPT, session.limits.max_seq_len - 9)
    session.generate(session.open(), prompt(length, session.limits.vocab_size), 8)
    unit = 1 if sys.platform == "darwin" else 1024
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(json.dumps({"load_s": load_s, "peak_rss": peak_rss}))


if __name__ == "__main__":
    main()
