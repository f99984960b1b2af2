"""A copy of this checkout that can be changed, built and run, away from the one under test."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIP = shutil.ignore_patterns(
    ".*", "build", "dist", "out", "__pycache__", "*.so", "*.egg-info", "*.gguf", "*.pte", "*.ptd"
)

# Run by every Python of the copy before anything else: an editable install of this package would
# otherwise win over PYTHONPATH.
SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "importlib" in getattr(f, "__module__", "")]
"""


class Tree:
    """The copy at `path`. isas: the ISAs that its kernels are compiled for."""

    def __init__(self, path: Path, isas: list[str]) -> None:
        self.path = path
        self.isas = isas
        shutil.copytree(ROOT, path, ignore=SKIP)
        # A second package of the wheel lies elsewhere in the sources.
        project = (ROOT / "pyproject.toml").read_text()
        for package, source in re.findall(r'^"(glimmer_ops/\w+)" = "(\w+)"$', project, re.M):
            link = path / "python" / package
            shutil.rmtree(link, ignore_errors=True)  # what copying a link to it has left
            link.symlink_to(path / source)
        (path / "python" / "sitecustomize.py").write_text(SITECUSTOMIZE)
        _checked(self.configure("build", isas))

    def configure(self, folder: str, isas: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs CMake for a build in `folder` in which a change costs one compilation and a link."""
        pybind11 = _checked(self.run("python -m pybind11 --cmakedir"))
        return self._run(
            "cmake",
            *("-S", ".", "-B", folder, "-G", "Ninja"),
            f"-DCMAKE_PREFIX_PATH={pybind11.strip()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DGLIMMER_ISAS={';'.join(isas)}",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
            "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF",
            "-DCMAKE_LINK_DEPENDS_NO_SHARED=ON",
        )

    def build(self) -> None:
        """Compiles what changed. AssertionError, with the compiler's words, when that fails."""
        _checked(self._run("ninja", "-C", "build"))
        package = self.path / "python" / "glimmer_ops"
        for built in ("build/_*.so", "build/libglimmer_ops.so", "build/_build.py"):
            for file in self.path.glob(built):
                # A new inode: whoever has mapped the old file keeps it.
                (package / file.name).unlink(missing_ok=True)
                shutil.copy2(file, package)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs `glimmer ...`, `python ...` or a pytest node on the copy."""
        program, *args = shlex.split(command)
        if program == "glimmer":
            args = ["-m", "glimmer_ops", *args]
        elif program != "python":
            args = ["-m", "pytest", "-q", "-x", program, *args]
        return self._run(sys.executable, *args)

    def _run(self, *args: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONPATH": str(self.path / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in ("GLIMMER_CPU_ISA", "GLIMMER_EXACT"):
            environment.pop(name, None)
        return subprocess.run(args, cwd=self.path, env=environment, capture_output=True, text=True)


def _checked(result: subprocess.CompletedProcess[str]) -> str:
    """What a command printed. AssertionError, with its own words, when it failed."""
    assert result.returncode == 0, f"{result.args}: {result.stdout}{result.stderr}"
    return result.stdout
