"""Writes the inputs that fuzzing starts from: PYTHONPATH=tests python tests/fuzz/make_seeds.py"""

from __future__ import annotations

from fuzz.targets import SEEDS, names, target

if __name__ == "__main__":
    for name in names():
        (SEEDS / name).mkdir(parents=True, exist_ok=True)
        for file, data in target(name).make_seeds().items():
            (SEEDS / name / file).write_bytes(data)
            print(f"{name}/{file}: {len(data)} bytes")
