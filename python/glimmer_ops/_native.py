"""Loads the compiled library and calls its kernels on torch CPU tensors.

The library is built against one exact executorch: another one may lay out its C++ types otherwise,
so a mismatch is an ImportError rather than a crash in a kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# The order of glimmer::DType in kernels/include/glimmer/tensor.h.
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def check_executorch(built_for: str, installed: str) -> None:
    """Raises ImportError when the installed executorch is not the one the library was built for."""
    if built_for != installed:
        raise ImportError(
            f"glimmer_ops was built for executorch {built_for}, found executorch {installed}: "
            f"install executorch=={built_for} or rebuild glimmer_ops"
        )


def executorch_root() -> str:
    """The folder of the installed executorch package."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("glimmer_ops needs executorch, which is not installed")
    return next(iter(spec.submodule_search_locations))


def _load() -> Any:
    # Loaded first, so that our library finds them wherever the package lies.
    folder = Path(executorch_root()) / "lib"
    runtimes = [folder / name for name in ("libexecutorch.so", "libexecutorch_etdump.so")]
    installed = metadata.version("executorch")
    from ._build import EXECUTORCH_VERSION  # type: ignore[import-not-found]  # written by CMake

    check_executorch(EXECUTORCH_VERSION, installed)
    try:
        for runtime in filter(Path.exists, runtimes):
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        from . import _C  # type: ignore[attr-defined]
    except (ImportError, OSError) as error:
        raise ImportError(
            f"glimmer_ops could not link to executorch {installed} ({error}): "
            "rebuild glimmer_ops against the installed executorch"
        ) from error
    return _C


_C = _load()


def isas() -> list[str]:
    """ISAs this machine can run, weakest first: "scalar", then "avx2", "avx512" where present."""
    return _C.isas()


def compiled_isas() -> list[str]:
    """ISAs this build has kernels for, whether or not this machine can run them."""
    return _C.compiled_isas()


def isa() -> str:
    """The ISA whose kernels run; GLIMMER_CPU_ISA or `set_isa` choose it, else the best one."""
    return _C.isa()


def check_isa() -> None:
    """Raises ValueError when GLIMMER_CPU_ISA names no ISA of this machine; every op does so too."""
    if _C.isa_error():
        raise ValueError(_C.isa_error())


def set_isa(name: str) -> None:
    """Selects an ISA of `isas()`, or "auto". Raises ValueError for one this machine lacks."""
    _C.set_isa(name)


def exact_mode() -> bool:
    """Whether K-quant matmuls keep float activations (exact) instead of int8 ones (default)."""
    return _C.exact()


def set_exact(exact: bool) -> None:
    """Selects the exact path of every K-quant matmul in this process; initially GLIMMER_EXACT=1."""
    _C.set_exact(exact)


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    before = isa()
    set_isa(name)
    try:
        yield
    finally:
        set_isa(before)


@contextlib.contextmanager
def use_exact(exact: bool = True) -> Iterator[None]:
    before = exact_mode()
    set_exact(exact)
    try:
        yield
    finally:
        set_exact(before)


@contextlib.contextmanager
def poison_scratch() -> Iterator[None]:
    """Fills the kernels' working memory with NaN each time they take some, while open."""
    _C.set_poison_scratch(True)
    try:
        yield
    finally:
        _C.set_poison_scratch(False)


def cpu_ops() -> list[str]:
    """Names of the ops that have a CPU kernel."""
    return _C.op_names()


def _pack(op: str, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype not in _DTYPE_CODES:
        expected = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"{op}: {name}: expected a dtype of {expected}, found {value.dtype}")
    if not value.is_contiguous():
        raise ValueError(
            f"{op}: {name}: expected a contiguous tensor, found shape {tuple(value.shape)} "
            f"with strides {value.stride()}"
        )
    return (value.data_ptr(), _DTYPE_CODES[value.dtype], tuple(value.shape))


Allocator = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def call(
    op: str,
    names: Sequence[str],
    args: Sequence[Any],
    empty: Allocator | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs op's CPU kernel. Mutated arguments change in place; outputs are what `empty` makes.

    Raises ValueError naming the argument, what was expected and what was found.
    """
    packed = [_pack(op, n, a) for n, a in zip(names, args, strict=True)]
    outs = _outputs(op, packed, empty or _empty)
    _C.run(op, packed, [_pack(op, "out", o) for o in outs])
    return outs


def _outputs(op: str, packed: Sequence[Any], empty: Allocator) -> tuple[torch.Tensor, ...]:
    return tuple(empty(sizes, DTYPES[code]) for code, sizes in _C.infer(op, packed))


class Timer:
    """Times op's CPU kernel in C++ on sets of arguments that take turns; outs holds the results.

    Raises ValueError as `call` does. The ISA and path are those selected when it runs.
    """

    def __init__(self, op: str, names: Sequence[str], arg_sets: Sequence[Sequence[Any]]) -> None:
        self._kept = arg_sets  # the C++ side has only their addresses
        packed = [[_pack(op, n, a) for n, a in zip(names, s, strict=True)] for s in arg_sets]
        self.outs = [_outputs(op, p, _empty) for p in packed]
        self._timer = _C.Timer(op, packed, [[_pack(op, "out", o) for o in s] for s in self.outs])

    def run(self, start: int, warm: int, calls: int) -> int:
        """Nanoseconds of `calls` calls from set `start` on, after `warm` untimed calls."""
        return self._timer.run(start, warm, calls)
