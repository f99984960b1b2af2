"""Runs Python on the sanitized library: python tests/sanitize.py -m pytest tests/runtime

`cmake -DGLIMMER_SANITIZE=ON -B build/sanitize` and a build come first; `make sanitize` does it all.
The package is laid out again in build/sanitize/site, so that neither an installed one nor its
library is used. A finding ends the process with a report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "sanitize"
SITE = BUILD / "site"
# The finder of an editable install would come before PYTHONPATH.
SITECUSTOMIZE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
"""


def lay_out() -> None:
    shutil.rmtree(SITE, ignore_errors=True)
    package = SITE / "glimmer_ops"
    ignore = shutil.ignore_patterns("*.so", "_build.py", "__pycache__", "lowering", "bench")
    shutil.copytree(ROOT / "python" / "glimmer_ops", package, ignore=ignore)
    for part in ("lowering", "bench"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, package / part, ignore=shutil.ignore_patterns("results"))
    libraries = [*BUILD.glob("*.so"), BUILD / "_build.py"]
    if len(libraries) < 3:
        sys.exit(f"error: {BUILD}: expected a build with GLIMMER_SANITIZE=ON: run `make sanitize`")
    for file in libraries:
        shutil.copy2(file, package)
    (SITE / "sitecustomize.py").write_text(SITECUSTOMIZE)


def runtimes() -> list[str]:
    """The compiler's sanitizer runtimes, which must be loaded first. libstdc++ is among them
    because ASan looks for its functions at the start."""
    compiler = os.environ.get("CXX", "c++")
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [
        subprocess.check_output([compiler, f"-print-file-name={n}"], text=True).strip()
        for n in names
    ]
    missing = [n for n, path in zip(names, found, strict=True) if not Path(path).is_absolute()]
    if missing:
        sys.exit(f"error: {compiler} has no {', '.join(missing)}: expected gcc with sanitizers")
    return [str(Path(path).resolve()) for path in found]


def environment() -> dict[str, str]:
    options = "detect_leaks=0:allocator_may_return_null=1:handle_segv=1"
    return os.environ | {
        "LD_PRELOAD": ":".join(runtimes()),
        "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT / 'tests'}",
        "PYTHONMALLOC": "malloc",  # so that an overflow of Python's own memory is seen too
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main() -> int:
    lay_out()
    return subprocess.run([sys.executable, *sys.argv[1:]], cwd=ROOT, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
