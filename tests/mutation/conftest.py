"""One copy of the tree, built once, for all tests that change and rebuild it."""

from __future__ import annotations

import pytest

import glimmer_ops
from mutation.tree import Tree


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """As the checkout is; compiled for scalar and this machine's best ISA. Leave it so."""
    best = glimmer_ops.isas()[-1]
    made = Tree(tmp_path_factory.mktemp("mutation") / "tree", list(dict.fromkeys(["scalar", best])))
    made.build()
    return made
