"""Loading the library: twice, as a second copy, against another executorch, on a forced ISA."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import glimmer_ops
from glimmer_ops import _native


def _library() -> Path:
    """The shared library that this process has loaded."""
    with open("/proc/self/maps") as maps:
        return Path(next(m.split()[-1] for m in maps if m.rstrip().endswith("libglimmer_ops.so")))


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env
    )


CALL = (
    "import torch, glimmer_ops\n"
    "print(torch.ops.glimmer.rms_norm(torch.ones(1, 4), None, 0.0).sum().item())"
)


@pytest.mark.report("R1")
@pytest.mark.parametrize("order", ["first", "last"])
def test_second_copy_is_harmless(tmp_path: Path, order: str) -> None:
    """Two copies of the library in one process: executorch aborts on a name registered twice."""
    copy = tmp_path / "libglimmer_ops_copy.so"
    shutil.copy(_library(), copy)
    root = Path(_native.executorch_root())
    load = (
        "import ctypes\n"
        f"ctypes.CDLL({str(root / 'lib' / 'libexecutorch.so')!r}, ctypes.RTLD_GLOBAL)\n"
        f"ctypes.CDLL({str(copy)!r}); ctypes.CDLL({str(copy)!r})\n"
    )
    result = _python(load + CALL if order == "first" else CALL + "\n" + load)
    assert result.returncode == 0, result.stderr
    assert "4.0" in result.stdout


def test_import_is_quiet() -> None:
    result = _python("import glimmer_ops")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_version_mismatch_is_a_clear_error() -> None:
    with pytest.raises(ImportError, match=r"built for executorch 1\.5\.1, found executorch 9\.9"):
        _native.check_executorch("1.5.1", "9.9")


def test_version_mismatch_stops_the_import() -> None:
    code = (
        "import importlib.metadata as m\n"
        "real = m.version\n"
        "m.version = lambda n: '0.9' if n == 'executorch' else real(n)\n"
        "import glimmer_ops"
    )
    result = _python(code)
    assert result.returncode == 1
    assert "ImportError: glimmer_ops was built for executorch" in result.stderr


@pytest.mark.report("R3")
def test_namespace_taken_by_another_library() -> None:
    code = "import torch\nlib = torch.library.Library('glimmer', 'DEF')\nimport glimmer_ops"
    result = _python(code)
    assert result.returncode == 1
    assert "namespace 'glimmer' is already defined" in result.stderr


@pytest.mark.parametrize("isa", glimmer_ops.isas())
def test_isa_from_the_environment(isa: str) -> None:
    result = _python("import glimmer_ops; print(glimmer_ops.isa())", GLIMMER_CPU_ISA=isa)
    assert result.stdout.strip() == isa


def test_unknown_isa_is_a_clear_error() -> None:
    """From every op, and from the command line in one line."""
    message = r"GLIMMER_CPU_ISA: expected auto or one that this CPU has \(.*\), found 'sse9'"
    result = _python(CALL, GLIMMER_CPU_ISA="sse9")
    assert result.returncode == 1
    assert re.search("ValueError: rms_norm: " + message, result.stderr)
    command = "import sys; sys.argv = ['glimmer', 'ops']; import glimmer_ops.cli as c; c.main()"
    result = _python(command, GLIMMER_CPU_ISA="sse9")
    assert result.returncode == 1
    assert re.fullmatch("error: " + message, result.stderr.strip())


def test_non_contiguous_and_foreign_dtypes_are_refused_by_name() -> None:
    x = torch.ones(4, 8)
    with pytest.raises(ValueError, match="rms_norm: x: expected a contiguous tensor"):
        torch.ops.glimmer.rms_norm(x.t(), None, 0.0)
    with pytest.raises(ValueError, match="rms_norm: x: expected a dtype of"):
        torch.ops.glimmer.rms_norm(x.double(), None, 0.0)


def test_out_variant_resizes() -> None:
    out = torch.empty(0)
    torch.ops.glimmer.rms_norm.out(torch.ones(2, 4), None, 0.0, out=out)
    assert torch.equal(out, torch.ones(2, 4))


def test_a_mix_of_real_and_meta_tensors_is_refused() -> None:
    """torch would answer with the fake's uninitialised memory."""
    with pytest.raises(ValueError, match="rms_norm: expected tensors on one device"):
        torch.ops.glimmer.rms_norm(torch.ones(2, 4), torch.empty(4, device="meta"), 0.0)


@pytest.mark.report("R3")
def test_import_twice_defines_the_ops_once() -> None:
    """Again by name, and again from scratch after the package was forgotten: an error, no crash."""
    again = "import importlib, glimmer_ops, sys\nimportlib.import_module('glimmer_ops')\n" + CALL
    result = _python(again)
    assert (result.returncode, result.stdout.strip()) == (0, "4.0"), result.stderr
    forget = (
        "for m in [m for m in sys.modules if m.startswith('glimmer_ops')]: del sys.modules[m]\n"
        "import glimmer_ops"
    )
    result = _python(again + "\n" + forget)
    assert result.returncode == 1
    assert "namespace 'glimmer' is already defined" in result.stderr
