"""Every op as a program of its own on the stock ExecuTorch runtime: same bits as eager."""

from __future__ import annotations

import warnings

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
from executorch.exir.passes import MemoryPlanningPass
from executorch.runtime import Runtime

from glimmer_ops.ops import OPS
from support.rows import row_count


def _module(op, args):
    """A module that calls op: mutated arguments are its buffers, other tensors its inputs."""
    inputs = [
        i
        for i, (n, a) in enumerate(zip(op.arg_names, args, strict=True))
        if isinstance(a, torch.Tensor) and n not in op.mutates
    ]

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in op.mutates:
                self.register_buffer(name, torch.zeros_like(args[op.arg_names.index(name)]))

        def forward(self, *values):
            full = list(args)
            for name in op.mutates:
                full[op.arg_names.index(name)] = getattr(self, name)
            for i, v in zip(inputs, values, strict=True):
                full[i] = v
            return getattr(torch.ops.glimmer, op.name)(*full)

    return Call(), inputs


def _program(op, args):
    module, inputs = _module(op, args)
    t = torch.export.Dim("T", min=1, max=64)
    shapes = tuple({0: t} if op.arg_names[i] in op.rows else None for i in inputs)
    values = tuple(args[i] for i in inputs)
    exported = torch.export.export(module, values, dynamic_shapes=(shapes,), strict=False)
    planning = MemoryPlanningPass(share_mutable_buffers=True, alloc_graph_input=False)
    config = ExecutorchBackendConfig(memory_planning_pass=planning, emit_mutable_buffer_names=True)
    program = to_edge(exported).to_executorch(config)
    return Runtime.get().load_program(program.buffer), inputs


def _example(op):
    for case in op.all_cases():
        args = case.make()
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        named = dict(zip(op.arg_names, args, strict=True))
        small = all(0 < a.numel() < 1 << 18 for a in tensors) and 2 <= row_count(op, args) <= 64
        rows = [named[n] for n in op.rows if named[n] is not None]
        equal = all(r.shape[0] == row_count(op, args) for r in rows)
        if not case.error and not case.slow and small and equal:
            return args
    raise AssertionError(f"{op.name}: no case is small enough")


@pytest.mark.report("R2")
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_runs_on_the_stock_runtime(op) -> None:
    args = _example(op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program, inputs = _program(op, args)
    method = program.load_method("forward")
    for name in op.mutates:
        method._method.get_attribute(name).copy_(args[op.arg_names.index(name)])
    got = method.execute(tuple(args[i] for i in inputs))
    got = [g.clone() for g in got]
    mutated = {n: method._method.get_attribute(n).clone() for n in op.mutates}
    want = getattr(torch.ops.glimmer, op.name)(*args)  # mutates args last
    want = want if isinstance(want, tuple) else (want,)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
    for name, value in mutated.items():
        expected = args[op.arg_names.index(name)]
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
