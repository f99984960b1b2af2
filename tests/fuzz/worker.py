"""One target in this process, under libFuzzer: worker.py TARGET [libFuzzer's arguments]."""

from __future__ import annotations

import random
import resource
import sys
import tempfile
from pathlib import Path

import atheris

from fuzz.targets import target

MEMORY = 2 << 30  # bytes that reading a file of a few kB may map beyond what the process has


def limit_memory() -> None:
    """So that room for what a header claims is refused by the system, and seen as an error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    t = target(sys.argv[1])
    ram = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=ram if ram.is_dir() else None) as folder:
        with atheris.instrument_imports(include=list(t.instrument)):
            read = t.prepare(Path(folder))
        refusals = t.refusals()

        def once(data: bytes) -> None:
            try:
                read(data)
            except refusals as error:
                text = str(error)
                if t.named not in text or "\n" in text or len(text) > 1200:
                    raise AssertionError(f"unclear: {text[:300]!r}") from error

        def mutator(data: bytes, max_size: int, seed: int) -> bytes:
            return t.mutate(data, random.Random(seed))[:max_size]

        limit_memory()
        atheris.Setup([sys.argv[0], *sys.argv[2:]], once, custom_mutator=mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
