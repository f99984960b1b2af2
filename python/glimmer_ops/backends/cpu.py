"""The CPU backend: C++ kernels, one compiled variant per ISA, exact and integer paths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _native
from ..ops._contract import Op
from ._backend import Allocator, Variant


class CpuTimer:
    def __init__(self, op: Op, arg_sets: Sequence[Sequence[Any]], variant: Variant) -> None:
        self._variant = variant
        with self._selected():
            self._timer = _native.Timer(op.name, op.arg_names, arg_sets)
        self.outs = self._timer.outs

    def run(self, start: int, warm: int, calls: int) -> int:
        with self._selected():
            return self._timer.run(start, warm, calls)

    @contextlib.contextmanager
    def _selected(self) -> Iterator[None]:
        with _native.use_isa(self._variant.isa), _native.use_exact(self._variant.exact):
            yield


class Cpu:
    name = "cpu"

    def supports(self, op: Op) -> bool:
        return op.name in _native.cpu_ops()

    def compiled(self, op: Op) -> list[Variant]:
        if op.integer_nmse is None:
            return [Variant(isa, isa=isa) for isa in _native.compiled_isas()]
        return [
            Variant(f"{isa}-{'exact' if exact else 'int8'}", exact, isa)
            for isa in _native.compiled_isas()
            for exact in (True, False)
        ]

    def variants(self, op: Op) -> list[Variant]:
        return [v for v in self.compiled(op) if v.isa in _native.isas()]

    def run(
        self, op: Op, args: Sequence[Any], variant: Variant, empty: Allocator | None = None
    ) -> tuple[torch.Tensor, ...]:
        with _native.use_isa(variant.isa), _native.use_exact(variant.exact):
            return _native.call(op.name, op.arg_names, args, empty)

    def poison_scratch(self) -> AbstractContextManager[None]:
        return _native.poison_scratch()

    def timer(self, op: Op, arg_sets: Sequence[Sequence[Any]], variant: Variant) -> CpuTimer:
        return CpuTimer(op, arg_sets, variant)


BACKEND = Cpu()
