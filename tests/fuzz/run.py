"""Fuzzes every target, one after another: python tests/fuzz/run.py [--target gguf] [--seconds 60]

A target fails on an exception that is not a refusal, on an unclear refusal, a crash, an input that
takes more than 10 s, or memory that a small file should not need. The input is kept in build/fuzz,
and `--replay FILE` runs it again. What was found interesting stays there for the next run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from fuzz.targets import SEEDS, names  # noqa: E402

OUT = TESTS.parent / "build" / "fuzz"
START = 120  # seconds that importing and instrumenting may take beside the run


def command(target: str, *arguments: str) -> list[str]:
    worker = str(Path(__file__).with_name("worker.py"))
    limits = ["-timeout=10", "-rss_limit_mb=3000", "-max_len=65536", "-verbosity=0"]
    return [sys.executable, worker, target, *limits, *arguments]


def fuzz(target: str, seconds: int, runs: int = -1) -> tuple[bool, int, str]:
    """(passed, inputs, log) of one target."""
    corpus = OUT / target
    corpus.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-max_total_time={seconds}",
        f"-runs={runs}",
        "-print_final_stats=1",
        f"-artifact_prefix={OUT / target}-",
        str(corpus),
        str(SEEDS / target),
    ]
    return _run(command(target, *arguments), seconds + START)


def replay(target: str, file: Path) -> tuple[bool, int, str]:
    return _run(command(target, str(file)), START)


def _run(words: list[str], limit: int) -> tuple[bool, int, str]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            words,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        return False, 0, f"no end after {limit} s\n{(error.stdout or b'').decode(errors='replace')}"
    log = done.stdout.decode(errors="replace")
    count = re.search(r"number_of_executed_units: (\d+)", log)
    return done.returncode == 0, int(count[1]) if count else 0, log


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=names())
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--replay", type=Path, help="run one input of --target again")
    options = parser.parse_args()
    if options.replay and not options.target:
        parser.error("--replay: expected --target as well")
    chosen = [options.target] if options.target else names()
    failed = 0
    for name in chosen:
        if options.replay:
            passed, count, log = replay(name, options.replay)
        else:
            passed, count, log = fuzz(name, max(1, options.seconds // len(chosen)))
        print(f"{'pass' if passed else 'FAIL'} {name}: {count} inputs", flush=True)
        if not passed:
            print(log[-4000:])
        failed += not passed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
