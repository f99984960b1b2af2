"""What an exported program (.pte) holds, read without running it.

One reading serves `inspect`, `profile` and `diff`: every instruction of every method with its op,
its layer and its weights. A layer is known by the names of the weights and pools that an
instruction uses (blk_<i>_..., pools.k_<i>, and with draft_ before them those of the draft model),
whatever the backend; a delegate call is one instruction.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ._files import check_not_special
from .gguf import QTYPES

EMBED, HEAD, UNKNOWN = "embed", "head", "-"
_LAYER_WEIGHT = re.compile(r"(?:^|[._])blk_(\d+)_(.+)$")
_POOL = re.compile(r"(?:^|\.)(?:draft_)?[kv]_(\d+)$")
_MAX_CONSTANT = 4096  # elements of a constant tensor that are read


@dataclass(frozen=True)
class Tensor:
    """dtype by torch's name; with `dynamic`, every size is an upper bound."""

    dtype: str
    sizes: tuple[int, ...]
    nbytes: int
    dynamic: bool = False

    def __str__(self) -> str:
        bound = "≤" if self.dynamic else ""
        return f"{self.dtype}[{', '.join(f'{bound}{n}' for n in self.sizes)}]"


@dataclass(frozen=True)
class Weight:
    """An external constant. role: its name without the layer. layer: None outside layers."""

    name: str
    role: str
    layer: int | None
    qtype: str
    tensor: Tensor

    @property
    def draft(self) -> bool:
        """Whether it is the draft model's own."""
        return self.name.split(".", 1)[-1].startswith("draft_")


@dataclass(frozen=True)
class Pool:
    """A mutable buffer. layer: None for one that is no layer's K or V pool."""

    name: str
    layer: int | None
    tensor: Tensor

    @property
    def draft(self) -> bool:
        """Whether it is of the draft model's layers."""
        return self.name.split(".", 1)[-1].startswith("draft_")


@dataclass(frozen=True)
class Instruction:
    """One instruction: op is a kernel's name or the kind of the instruction.

    chain, index: its place, as events of the runtime name it. layer: an index, "embed" before the
    first layer, "head" after the last, "-" where nothing tells. delegate: the backend's id.
    """

    op: str
    chain: int
    index: int
    layer: int | str = UNKNOWN
    weights: tuple[Weight, ...] = ()
    pools: tuple[Pool, ...] = ()
    delegate: str = ""

    @property
    def name(self) -> str:
        return self.delegate or self.op.removeprefix("glimmer::")

    @property
    def role(self) -> str:
        """What the instruction does in its layer, by the weights it reads."""
        return "+".join(w.role for w in self.weights)

    @property
    def gathers(self) -> bool:
        """Whether it reads only the rows that its input names."""
        return self.op == "glimmer::kquant_embedding"

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a call with one row reads."""
        rows = (w.tensor.sizes[0] if self.gathers else 1 for w in self.weights)
        return sum(w.tensor.nbytes // n for w, n in zip(self.weights, rows, strict=True) if n)


@dataclass
class Method:
    """A method with instructions. arenas: planned bytes; methods share the one of the pools."""

    name: str
    inputs: list[str | Tensor] = field(default_factory=list)
    outputs: list[str | Tensor] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    arenas: list[int] = field(default_factory=list)
    delegates: Counter[str] = field(default_factory=Counter)  # calls by backend id

    @property
    def calls(self) -> Counter[str]:
        return Counter(i.op for i in self.instructions)

    @property
    def layers(self) -> list[int]:
        return sorted({i.layer for i in self.instructions if isinstance(i.layer, int)})

    @property
    def per_layer(self) -> float | None:
        """Instructions a layer: the mean distance between one attention and the next."""
        at = [i for i, x in enumerate(self.instructions) if x.op == "glimmer::sdpa"]
        return (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a call with one row reads."""
        return sum(i.weight_bytes for i in self.instructions)

    def by_place(self) -> dict[tuple[int, int], Instruction]:
        return {(i.chain, i.index): i for i in self.instructions}


@dataclass
class Program:
    """methods: those with instructions. constants: the values of those without."""

    path: Path
    methods: list[Method]
    constants: dict[str, Any]
    weights: dict[str, Weight]
    pools: dict[str, Pool]

    @property
    def weights_id(self) -> str | None:
        """16 hex digits, or None for a program that names no weights."""
        value = self.constants.get("get_weights_id")
        return f"{value % (1 << 64):016x}" if type(value) is int else None

    def method(self, name: str) -> Method | None:
        return next((m for m in self.methods if m.name == name), None)


def _deserialize(path: Path) -> Any:
    from executorch.exir._serialize._program import deserialize_pte_binary

    check_not_special(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) < 8 or data[4:6] != b"ET":
        raise ValueError(f"{path}: expected an ExecuTorch program, found no ET header")
    try:
        return deserialize_pte_binary(data).program
    except Exception as error:  # flatbuffers raises whatever a damaged table leads to
        raise ValueError(f"{path}: damaged ExecuTorch program: {error}") from error


def _tensor(value: Any) -> Tensor:
    from executorch.exir.schema import TensorShapeDynamism
    from executorch.exir.tensor import get_scalar_type, num_bytes_from_shape_and_dtype

    dtype = get_scalar_type(value.scalar_type)
    return Tensor(
        str(dtype).removeprefix("torch."),
        tuple(value.sizes),
        num_bytes_from_shape_and_dtype(value.sizes, dtype),
        value.shape_dynamism != TensorShapeDynamism.STATIC,
    )


def _spec(value: Any) -> str | Tensor:
    return _tensor(value) if type(value).__name__ == "Tensor" else type(value).__name__.lower()


def _external(value: Any) -> bool:
    from executorch.exir.schema import TensorDataLocation

    return value.extra_tensor_info.location == TensorDataLocation.EXTERNAL


def _buffer_name(value: Any) -> str:
    """The name of a weight or pool, or "" for any other value."""
    info = getattr(value, "extra_tensor_info", None)
    return info.fully_qualified_name or "" if info is not None else ""


def _weight(values: list[Any]) -> Weight:
    """The weight values[0]; in a schema its GGUF type is the string that follows it."""
    tensor, key = _tensor(values[0]), _buffer_name(values[0])
    name = key.split(".", 1)[-1]
    match = _LAYER_WEIGHT.search(name)
    following = getattr(values[1], "string_val", "") if len(values) > 1 else ""
    qtype = following if following in QTYPES else {"float32": "F32"}.get(tensor.dtype, tensor.dtype)
    layer = int(match[1]) if match else None
    return Weight(key, match[2] if match else name, layer, qtype, tensor)


def _pool(value: Any) -> Pool:
    name = _buffer_name(value)
    match = _POOL.search(name)
    return Pool(name, int(match[1]) if match else None, _tensor(value))


def _instruction(plan: Any, chain: int, index: int, call: Any) -> tuple[Instruction, int | None]:
    """An instruction without its layer, and the layer that its own weights and pools tell."""
    kind = type(call).__name__
    op = plan.operators[call.op_index].name if kind == "KernelCall" else kind
    delegate = plan.delegates[call.delegate_index].id if kind == "DelegateCall" else ""
    args = [plan.values[a].val for a in getattr(call, "args", ())]
    named = [i for i, value in enumerate(args) if _buffer_name(value)]
    weights = tuple(_weight(args[i : i + 2]) for i in named if _external(args[i]))
    pools = tuple(_pool(args[i]) for i in named if not _external(args[i]))
    layers = [w.layer for w in weights if w.layer is not None]
    layers += [p.layer for p in pools if p.layer is not None]
    # A sandwich tail ends one layer and norms the next one's input.
    layer = min(layers) if layers else None
    return Instruction(op, chain, index, UNKNOWN, weights, pools, delegate), layer


def _place(instructions: list[Instruction], own: list[int | None]) -> list[Instruction]:
    """Gives every instruction its layer; one that tells none has that of the one before."""
    told = [i for i, layer in enumerate(own) if layer is not None]
    embeds = any(w.role == "token_embd" for i in instructions for w in i.weights)
    placed: list[Instruction] = []
    current: int | str = EMBED if told or embeds else UNKNOWN
    for i, (instruction, layer) in enumerate(zip(instructions, own, strict=True)):
        if layer is not None:
            current = layer
        elif told and i > told[-1]:
            current = HEAD
        fields = vars(instruction) | {"layer": current}
        placed.append(Instruction(**fields))
    return placed


def _method(plan: Any) -> Method:
    method = Method(plan.name, arenas=list(plan.non_const_buffer_sizes)[1:])
    method.inputs = [_spec(plan.values[i].val) for i in plan.inputs]
    method.outputs = [_spec(plan.values[i].val) for i in plan.outputs]
    found = [
        _instruction(plan, c, i, instruction.instr_args)
        for c, chain in enumerate(plan.chains)
        for i, instruction in enumerate(chain.instructions)
    ]
    method.instructions = _place([f[0] for f in found], [f[1] for f in found])
    method.delegates = Counter(i.delegate for i in method.instructions if i.delegate)
    return method


def _constant(program: Any, value: Any) -> Any:
    """A constant method's value: a number, a bool, a string, a list, or a tensor's description."""
    for name in ("int_val", "double_val", "bool_val", "string_val"):
        if hasattr(value, name):
            return getattr(value, name)
    if type(value).__name__ != "Tensor":
        return type(value).__name__.lower()
    tensor = _tensor(value)
    data = program.constant_buffer[value.data_buffer_idx].storage if value.data_buffer_idx else b""
    known = hasattr(np, tensor.dtype) and tensor.nbytes <= min(len(data), 8 * _MAX_CONSTANT)
    if not known:
        return str(tensor)
    array = np.frombuffer(data[: tensor.nbytes], getattr(np, tensor.dtype))
    return array.reshape(tensor.sizes).tolist()


def _collect(program: Program, method: Method, values: list[Any]) -> None:
    """Adds a method's weights and pools; those that no kernel names (a delegate's) come last."""
    for instruction in method.instructions:
        program.weights |= {w.name: w for w in instruction.weights}
        program.pools |= {p.name: p for p in instruction.pools}
    for value in filter(_buffer_name, values):
        if _external(value):
            program.weights.setdefault(_buffer_name(value), _weight([value]))
        else:
            program.pools.setdefault(_buffer_name(value), _pool(value))


def read_program(path: Path) -> Program:
    """Reads a .pte file. ValueError, naming the file, for one that is none or is damaged."""
    raw = _deserialize(path)
    program = Program(path, [], {}, {}, {})
    try:
        for plan in raw.execution_plan:
            method = _method(plan)
            if method.instructions:
                program.methods.append(method)
            elif plan.outputs:
                program.constants[plan.name] = _constant(raw, plan.values[plan.outputs[0]].val)
            _collect(program, method, [v.val for v in plan.values])
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: damaged ExecuTorch program: {error}") from error
    return program
