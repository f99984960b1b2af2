"""Tensors in memory whose surroundings are known: guard bytes, odd alignment, unreadable pages.

An arena makes such tensors; a `Call` keeps an op's arguments and outputs in one arena and runs the
op on them as often as wanted. Nothing here knows of a backend but through its `run`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from glimmer_ops.backends import Backend, Variant
from glimmer_ops.check import tensors_of
from glimmer_ops.ops._contract import Op
from support.bits import same_bits

LINE = 64  # bytes; guards are as long, and so is the alignment that tensors have by default
GUARD = 0xA5


class Arena(Protocol):
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of unspecified contents."""
        ...

    def damaged(self) -> list[int]:
        """Which tensors, in the order they were made, have bytes beside them that changed."""
        ...


@dataclass(frozen=True)
class _Place:
    area: torch.Tensor  # uint8
    begin: int
    end: int

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.area[self.begin : self.end].view(dtype).view(tuple(shape))

    def intact(self) -> bool:
        before, after = self.area[: self.begin], self.area[self.end :]
        return bool((before == GUARD).all() and (after == GUARD).all())


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class Guarded:
    """An arena with guard bytes directly before and after every tensor.

    shift(element size) is the distance of a tensor's address from a multiple of LINE.
    """

    def __init__(self, shift: Callable[[int], int]) -> None:
        self.shift = shift
        self._places: list[_Place] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = _nbytes(shape, dtype)
        area = torch.full((size + 4 * LINE,), GUARD, dtype=torch.uint8)
        begin = LINE + -area.data_ptr() % LINE + self.shift(dtype.itemsize)
        self._places.append(_Place(area, begin, begin + size))
        return self._places[-1].tensor(shape, dtype)

    def damaged(self) -> list[int]:
        return [i for i, p in enumerate(self._places) if not p.intact()]


def aligned(element_size: int) -> int:
    return 0


def odd(element_size: int) -> int:
    """An odd multiple of the element size: aligned for one element and no more."""
    return element_size


def sixteen(element_size: int) -> int:
    """Aligned to 16 bytes and no more, as ExecuTorch's planned memory is."""
    return 16


class Paged:
    """An arena whose tensors end where an unreadable page begins, or begin where one ends.

    A read or write out of bounds on that side crashes the process.
    """

    def __init__(self, edge: str) -> None:
        if edge not in ("end", "begin"):
            raise ValueError(f"edge: expected 'end' or 'begin', found '{edge}'")
        self.edge = edge

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size, page = _nbytes(shape, dtype), mmap.PAGESIZE
        room = -(-size // page) * page
        memory = mmap.mmap(-1, room + 2 * page)
        for offset in (0, page + room):
            _forbid(memory, offset)
        begin = page if self.edge == "begin" else page + room - size
        area = torch.frombuffer(memory, dtype=torch.uint8)
        return _Place(area, begin, begin + size).tensor(shape, dtype)

    def damaged(self) -> list[int]:
        return []


def _forbid(memory: mmap.mmap, offset: int) -> None:
    """Takes all rights from one page."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")


def copy_to(arena: Arena, tensor: torch.Tensor) -> torch.Tensor:
    return arena.empty(tensor.shape, tensor.dtype).copy_(tensor)


class Call:
    """An op's arguments and outputs in buffers of an arena, the same ones for every run."""

    def __init__(self, op: Op, arena: Arena, args: Sequence[Any]) -> None:
        self.op, self.arena = op, arena
        self.args = tuple(copy_to(arena, a) if _is_tensor(a) else a for a in args)
        self._names = [n for n, a in zip(op.arg_names, args, strict=True) if _is_tensor(a)]
        self._outs: list[torch.Tensor] = []

    def run(
        self, backend: Backend, variant: Variant, args: Sequence[Any], poison: int = 0xFF
    ) -> dict[str, torch.Tensor]:
        """Copies args into the buffers and runs the op; every byte of an output was `poison`.

        The tensors that the op returned or changed, by name: valid until the next run.
        """
        for buffer, value in zip(self.args, args, strict=True):
            if _is_tensor(value):
                buffer.copy_(value)
        for out in self._outs:  # a call that is refused before it allocates must not write them
            _fill(out, poison)
        made = iter(range(self.op.returns))
        outs = backend.run(
            self.op, self.args, variant, lambda s, d: self._out(next(made), s, d, poison)
        )
        return tensors_of(self.op, self.args, outs)

    def _out(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, poison: int
    ) -> torch.Tensor:
        if index == len(self._outs):
            self._names.append(f"output {index}")
            self._outs.append(self.arena.empty(shape, dtype))
            _fill(self._outs[index], poison)
        return self._outs[index]

    def faults(self, args: Sequence[Any], may_write: Sequence[str]) -> list[str]:
        """What the last run, of args, did to memory that is not in may_write."""
        found = [f"bytes beside {self._names[i]} changed" for i in self.arena.damaged()]
        for name, buffer, value in zip(self.op.arg_names, self.args, args, strict=True):
            if _is_tensor(value) and name not in may_write and not same_bits(buffer, value):
                found.append(f"{name} changed")
        return found

    def written(self, poison: int = 0xFF) -> list[int]:
        """Which outputs hold anything but poison."""
        return [i for i, o in enumerate(self._outs) if (o.view(torch.uint8) != poison).any()]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _fill(tensor: torch.Tensor, byte: int) -> None:
    tensor.view(torch.uint8).fill_(byte)
