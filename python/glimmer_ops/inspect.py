"""`glimmer inspect`: what a GGUF file or an exported program holds, without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from . import gguf


@dataclass
class MethodReport:
    """One method of a program: its instructions in order, and the bytes it plans.

    `arenas` are the planned sizes; methods share the arena that holds the pools.
    """

    name: str
    instructions: list[str] = field(default_factory=list)  # op names, or kinds of instruction
    arenas: list[int] = field(default_factory=list)

    @property
    def calls(self) -> Counter[str]:
        return Counter(self.instructions)

    @property
    def delegates(self) -> int:
        return self.calls["DelegateCall"]

    @property
    def per_layer(self) -> float | None:
        """Instructions a layer: the mean distance between one attention and the next."""
        at = [i for i, name in enumerate(self.instructions) if name == "glimmer::sdpa"]
        return (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else None


@dataclass
class ProgramReport:
    methods: list[MethodReport]
    pools: dict[str, int]  # bytes of each mutable buffer, by name
    constants: dict[str, int]  # bytes of each external weight, by name


def _read_program(path: Path) -> Any:
    from executorch.exir._serialize._program import deserialize_pte_binary

    data = path.read_bytes()
    if len(data) < 8 or data[4:6] != b"ET":
        raise ValueError(f"{path}: expected an ExecuTorch program, found no ET header")
    try:
        return deserialize_pte_binary(data).program
    except Exception as error:  # flatbuffers raises whatever a damaged table leads to
        raise ValueError(f"{path}: damaged ExecuTorch program: {error}") from error


def _tensor_bytes(tensor: Any) -> int:
    from executorch.exir.tensor import get_scalar_type, num_bytes_from_shape_and_dtype

    return num_bytes_from_shape_and_dtype(tensor.sizes, get_scalar_type(tensor.scalar_type))


def _method(plan: Any, pools: dict[str, int], constants: dict[str, int]) -> MethodReport | None:
    from executorch.exir.schema import KernelCall, Tensor, TensorDataLocation

    report = MethodReport(plan.name, arenas=list(plan.non_const_buffer_sizes)[1:])
    for chain in plan.chains:
        for instruction in chain.instructions:
            call = instruction.instr_args
            kernel = isinstance(call, KernelCall)
            name = plan.operators[call.op_index].name if kernel else type(call).__name__
            report.instructions.append(name)
    for value in plan.values:
        tensor = value.val
        info = tensor.extra_tensor_info if isinstance(tensor, Tensor) else None
        if info is None or not info.fully_qualified_name:
            continue
        external = info.location == TensorDataLocation.EXTERNAL
        (constants if external else pools)[info.fully_qualified_name] = _tensor_bytes(tensor)
    return report if report.instructions else None


def program_report(path: Path) -> ProgramReport:
    """Methods, pools and external weights of a .pte. ValueError for a file that is none."""
    program = _read_program(path)
    pools: dict[str, int] = {}
    constants: dict[str, int] = {}
    try:
        reports = [_method(plan, pools, constants) for plan in program.execution_plan]
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: damaged ExecuTorch program: {error}") from error
    return ProgramReport([r for r in reports if r], pools, constants)


def _program_tables(path: Path) -> Iterator[Table]:
    report = program_report(path)
    methods = Table(
        "method", "instructions", "a layer", "delegates", "planned bytes", title=str(path)
    )
    for m in report.methods:
        per_layer = "-" if m.per_layer is None else f"{m.per_layer:g}"
        planned = " + ".join(f"{n:,}" for n in m.arenas)
        methods.add_row(m.name, str(len(m.instructions)), per_layer, str(m.delegates), planned)
    yield methods
    calls = Table("op", *(m.name for m in report.methods))
    for op in sorted({op for m in report.methods for op in m.calls}):
        calls.add_row(op, *(str(m.calls[op]) for m in report.methods))
    yield calls
    sizes = Table("resident", "tensors", "bytes")
    sizes.add_row(
        "weights (.ptd)", str(len(report.constants)), f"{sum(report.constants.values()):,}"
    )
    sizes.add_row("page pools", str(len(report.pools)), f"{sum(report.pools.values()):,}")
    yield sizes


def _gguf_tables(path: Path) -> Iterator[Table]:
    model = gguf.load(path)
    config = Table("hyper-parameter", "value", title=str(path))
    for name, value in vars(model.config).items():
        if name == "sliding":
            letters = "".join("s" if s else "G" for s in value)
            config.add_row("layers (s sliding, G global)", letters)
        else:
            config.add_row(name, f"{value:g}" if isinstance(value, float) else str(value))
    yield config
    types = Table("type", "tensors", "bytes")
    count, size = Counter[str](), Counter[str]()
    for tensor in model.tensors.values():
        count[tensor.qtype] += 1
        size[tensor.qtype] += tensor.nbytes
    for qtype in sorted(count):
        types.add_row(qtype, str(count[qtype]), f"{size[qtype]:,}")
    types.add_row("all", str(count.total()), f"{size.total():,}")
    yield types


def inspect(path: Path) -> Iterator[Table]:
    """Tables that describe a .gguf file, a .pte program or a model folder."""
    if path.is_dir():
        path = path / "model.pte"
    if not path.exists():
        raise ValueError(f"{path}: expected a .gguf, a .pte or a model folder, found nothing")
    with open(path, "rb") as f:
        magic = f.read(4)
    yield from _gguf_tables(path) if magic == b"GGUF" else _program_tables(path)
