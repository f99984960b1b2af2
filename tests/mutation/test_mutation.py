"""Every fault of `faults` is caught by what it names, planted alone in a copy of the tree."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from glimmer_ops.ops import OPS
from mutation.faults import FAULTS, Fault
from mutation.tree import ROOT, Tree


@contextlib.contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    file = root / fault.file
    text = file.read_text()
    file.write_text(text.replace(fault.old, fault.new))
    try:
        yield
    finally:
        file.write_text(text)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    """A change of the kernels that moves a fault's place must move the fault."""
    found = (ROOT / fault.file).read_text().count(fault.old)
    assert found == 1, (
        f"tests/mutation/faults.py: '{fault.id}': expected its text once in {fault.file}, found it "
        f"{found} times: say where the fault would be now"
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_what_catches_a_fault_exists(fault: Fault) -> None:
    if fault.caught_by.startswith("glimmer check"):
        *_, op, _, case = fault.caught_by.split()
        assert case in [c.id for c in OPS[op].all_cases()]
    else:
        file, test = fault.caught_by.split("::")
        assert f"def {test.split('[')[0]}(" in (ROOT / file).read_text()


# Runs several `glimmer` commands in one process: the exit status says whether one failed.
MANY = """
import sys
from glimmer_ops.cli import app
sys.exit(any([app(c.split()[1:], standalone_mode=False) for c in sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # builds everything
def test_nothing_fails_without_a_fault(tree: Tree) -> None:
    commands = {f.caught_by for f in FAULTS}
    checks = sorted(c for c in commands if c.startswith("glimmer "))
    result = tree.run(shlex.join(["python", "-c", MANY, *checks]))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("passed, 0 failed") == len(checks)
    result = tree.run(" ".join(sorted(commands.difference(checks))))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_only_the_chosen_isas_are_built(tree: Tree) -> None:
    found = tree.run("python -c 'from glimmer_ops import _native; print(*_native.isas())'")
    assert found.stdout.split() == tree.isas, found
    refused = tree.configure("build/refused", ["scalar", "mmx"])
    assert refused.returncode != 0
    assert "GLIMMER_ISAS: expected some of scalar" in refused.stderr and "'mmx'" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_a_fault_is_caught(tree: Tree, fault: Fault) -> None:
    have = {*tree.isas, "vector"} if len(tree.isas) > 1 else {"scalar"}
    if fault.isa not in have:
        pytest.skip(f"this machine has no {fault.isa} instructions")
    with planted(fault, tree.path):
        tree.build()
        result = tree.run(fault.caught_by)
    # 1 is a failed check or test; a crash or a usage error would be another.
    assert result.returncode == 1, f"{fault.id}: {result.returncode}: {result.stdout[-2000:]}"
    assert "FAIL" in result.stdout, result.stdout + result.stderr
