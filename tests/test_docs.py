"""What is generated in README.md and docs/ is what the code gives now, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from glimmer_ops import _native, matrix

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_generated_tables_are_up_to_date(generate) -> None:
    checked = 0
    for file, tables in generate.TABLES.items():
        for name, make in tables.items():
            if name == "matrix" and len(_native.compiled_isas()) < 3:
                continue  # another architecture: the README shows the x86-64 build
            committed = generate.current((ROOT / file).read_text(), name)
            assert committed == make(), f"{file}: '{name}' is out of date: run make docs"
            checked += 1
    assert checked


def test_measured_tables_are_there(generate) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        tables = generate.measured()
    finally:
        sys.path.pop(0)
    for file, generators in tables.items():
        for name in generators:
            assert generate.current((ROOT / file).read_text(), name).count("\n") > 2, name


def test_rewriting_changes_only_what_is_between_the_markers(generate) -> None:
    text = "a\n<!-- begin t -->\nold\n<!-- end t -->\nb\n"
    new = generate.rewrite(text, "t", "| new \\1 |")
    assert new == "a\n<!-- begin t -->\n\n| new \\1 |\n\n<!-- end t -->\nb\n"
    assert generate.current(new, "t") == "| new \\1 |"
    with pytest.raises(ValueError, match="markers of 'u' once, found them 0 times"):
        generate.rewrite(text, "u", "")


def test_the_matrix_does_not_depend_on_this_cpu(monkeypatch) -> None:
    """A machine with scalar kernels alone prints what any other does."""
    before = matrix.markdown()
    monkeypatch.setattr(_native, "isas", lambda: ["scalar"])
    assert matrix.markdown() == before
    assert all(isa in before for isa in _native.compiled_isas())


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!\w+:)([^)#]+)(#[\w-]+)?\)", text):
        file = page.parent / target[0]
        assert file.exists(), target
        if target[1]:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert target[1][1:] in anchors, target
