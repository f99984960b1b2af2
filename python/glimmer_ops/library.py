"""Defines `torch.ops.glimmer.*` from the op registry: schema, fake and CPU kernel of every op.

Each op has a functional form and an `.out` form of the same arguments, which ExecuTorch calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _native
from .ops import OPS
from .ops._contract import Op


def _define_namespace() -> torch.library.Library:
    try:
        return torch.library.Library("glimmer", "DEF")
    except RuntimeError as error:
        raise ImportError(
            "the torch.library namespace 'glimmer' is already defined in this process: "
            "is another copy of glimmer_ops imported?"
        ) from error


_LIBRARY = _define_namespace()


def _functional(op: Op) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        outs = _native.call(op.name, op.arg_names, args)
        return outs[0] if op.returns == 1 else outs

    return call


def _check_out(op: Op, name: str, out: torch.Tensor, dtype: torch.dtype) -> None:
    if out.dtype != dtype:
        raise ValueError(f"{op.name}: {name}: expected {dtype}, found {out.dtype}")
    if not out.is_contiguous():
        raise ValueError(
            f"{op.name}: {name}: expected a contiguous tensor, found shape {tuple(out.shape)} "
            f"with strides {out.stride()}"
        )


def _out(op: Op) -> Callable[..., Any]:
    def call(*args: Any, **outs: torch.Tensor) -> Any:
        unchecked = iter(outs.items())

        def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            _check_out(op, *next(unchecked), dtype)
            return torch.empty(shape, dtype=dtype)

        values = _native.call(op.name, op.arg_names, args, empty)
        for out, value in zip(outs.values(), values, strict=True):
            out.resize_(value.shape).copy_(value)
        return tuple(outs.values()) if op.returns > 1 else next(iter(outs.values()))

    return call


def _fake(op: Op) -> Callable[..., Any]:
    """The op's fake, which must not answer for a mix of real and meta tensors."""

    def call(*args: Any) -> Any:
        devices = {a.device for a in args if isinstance(a, torch.Tensor)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"{op.name}: expected tensors on one device, found {names}")
        return op.fake(*args)

    return call


def _register(op: Op) -> None:
    _LIBRARY.define(op.schema)
    _LIBRARY.define(op.out_schema)
    torch.library.register_fake(f"glimmer::{op.name}", _fake(op), lib=_LIBRARY)
    if op.name in _native.cpu_ops():
        _LIBRARY.impl(op.name, _functional(op), "CPU")
        _LIBRARY.impl(f"{op.name}.out", _out(op), "CPU")


for _op in OPS.values():
    _register(_op)
