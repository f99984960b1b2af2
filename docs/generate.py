"""Rewrites what is generated in README.md and docs/: all between `<!-- begin NAME -->` and its end.

python docs/generate.py             the tables that follow from the code
python docs/generate.py --measure   and the measured ones, in some minutes
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs")]

from glimmer_ops import matrix  # noqa: E402
from mutation import faults  # noqa: E402

Generators = Mapping[str, Callable[[], str]]

TABLES: dict[str, Generators] = {
    "README.md": {"matrix": matrix.markdown},
    "docs/numerics.md": {"faults": faults.table},
}


def measured() -> dict[str, Generators]:
    import measure

    return {"docs/numerics.md": measure.TABLES}


def block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.S)


def current(text: str, name: str) -> str:
    """What `text` holds between the markers of `name`. ValueError when they are not there once."""
    found = block(name).findall(text)
    if len(found) != 1:
        raise ValueError(f"expected the markers of '{name}' once, found them {len(found)} times")
    match = block(name).search(text)
    assert match
    return match.group(0)[len(match.group(1)) : -len(match.group(2))].strip("\n")


def rewrite(text: str, name: str, content: str) -> str:
    current(text, name)
    return block(name).sub(lambda m: f"{m.group(1)}\n{content}\n\n{m.group(2)}", text)


def main() -> None:
    wanted = [TABLES, measured()] if "--measure" in sys.argv[1:] else [TABLES]
    for tables in wanted:
        for file, generators in tables.items():
            path = ROOT / file
            for name, generate in generators.items():
                content = generate()  # may take minutes
                path.write_text(rewrite(path.read_text(), name, content))
                print(f"{file}: {name}")


if __name__ == "__main__":
    main()
