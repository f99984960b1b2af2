"""docs/adding-a-kernel.md, followed to the letter in a copy of the tree."""

from __future__ import annotations

import re

import pytest

from mutation.tree import ROOT, Tree

PAGE = (ROOT / "docs" / "adding-a-kernel.md").read_text()
FILES = dict(re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
[COMMANDS] = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_page_adds_one_contract_and_one_kernel() -> None:
    assert set(FILES) == {"python/glimmer_ops/ops/scale.py", "kernels/cpu/scale.cpp"}
    assert not any((ROOT / file).exists() for file in FILES)
    assert len(COMMANDS.splitlines()) >= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_page_works(tree: Tree) -> None:
    for file, text in FILES.items():
        (tree.path / file).write_text(text)
    try:
        tree.build()
        outputs = {c: tree.run(c) for c in COMMANDS.splitlines()}
    finally:
        for file in FILES:
            (tree.path / file).unlink()
    for command, result in outputs.items():
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        if command.startswith("glimmer"):
            assert "scale" in result.stdout, command
        else:
            # Each of them parametrises over the registry.
            assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 20, result.stdout
