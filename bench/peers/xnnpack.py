"""XNNPACK through ExecuTorch: a linear with 8-bit dynamic activations and 4-bit weights.

The weights are those of the case, quantised anew to 4 bits in groups of 32 with float scales: not
K-quants, and as many bits as Q4_K has. A program is loaded as often as sets must take turns, since
each load packs the weights into memory of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch

from glimmer_ops.ops._contract import Case, Op
from glimmer_ops.ops._kquant import dequantize

from . import Counterpart, timed

GROUP = 32
MOST_ROWS = 512


@functools.lru_cache(maxsize=1)
def _program(key: tuple[str, int, int, int], weight: Callable[[], torch.Tensor]) -> bytes:
    """A .pte of x · Wᵀ for 1 to 512 rows. key: what tells one weight from another."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    dense = weight()
    linear = torch.nn.Linear(dense.shape[1], dense.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(dense, requires_grad=False)
    quantize_(
        linear,
        Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            weight_granularity=PerGroup(GROUP),
        ),
    )
    rows = {"input": {0: torch.export.Dim("M", min=1, max=MOST_ROWS)}}
    example = (torch.randn(2, dense.shape[1]),)
    exported = torch.export.export(linear, example, dynamic_shapes=rows, strict=True)
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    program = lowered.to_executorch()
    plan = program.executorch_program.execution_plan[0]
    if plan.operators or len(plan.delegates) != 1:
        raise RuntimeError("xnnpack: the linear was not lowered whole")
    return bytes(program.buffer)


class Hashed:
    """A function that equals any other of its kind, so that the key alone identifies a program."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def __call__(self) -> torch.Tensor:
        return self._make()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed)

    def __hash__(self) -> int:
        return 0


class Xnnpack:
    name = "xnnpack"
    quick = False

    def missing(self) -> str:
        return ""

    def model(self, gguf: Path, name: str, tokens: int, threads: int) -> Counterpart | None:
        return None

    def counterpart(self, op: Op, case: Case, working_set: int, threads: int) -> Counterpart | None:
        if op.name != "kquant_linear" or case.dtype != "f32":
            return None
        x, weight, qtype = case.make()
        if not 1 <= x.shape[0] <= MOST_ROWS or x.shape[1] % GROUP or not weight.numel():
            return None
        from executorch.runtime import Runtime

        checksum = int(weight.view(-1)[:: max(1, weight.numel() // 4096)].long().sum())
        key = (qtype, weight.shape[0], x.shape[1], checksum)
        data = _program(key, Hashed(lambda: dequantize(weight, qtype)))
        copies = max(1, math.ceil(working_set / len(data)))
        programs = [Runtime.get().load_program(data) for _ in range(copies)]
        methods = [p.load_method("forward") for p in programs]

        def call(method: object) -> Callable[[], torch.Tensor]:
            return lambda: method.execute([x])[0]  # type: ignore[attr-defined]

        calls = [call(m) for m in methods]

        def close() -> None:
            calls.clear()
            methods.clear()
            programs.clear()

        note = "8-bit activations, weights quantised anew to 4 bits in groups of 32, not K-quants"
        run = timed(list(calls))
        return Counterpart(self.name, run, calls[0], copies, 3e-2, note, close)


PEER = Xnnpack()
