"""llama.cpp through its shared libraries: ops by ggml's C API, whole models by libllama's.

Weights are the case's own bytes. They lie in ggml's plain buffer or in one that repacks them for
the CPU, whichever is faster; activations are int8 in groups of 256, as ggml's are. Its threads are
kept between calls and spin while they wait, for milliseconds.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from glimmer_ops.ops._contract import Case, Op

from . import Counterpart, timed
from .llama_lib import Pointer, declare, ggml, missing

# enum ggml_type
TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "I32": 26, "BF16": 30}
USAGE_WEIGHTS = 1  # enum ggml_backend_buffer_usage
NODES = 64  # of a graph


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", Pointer), ("no_alloc", ctypes.c_bool)]


class ThreadpoolParams(ctypes.Structure):
    _fields_ = [
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    ]


@functools.cache
def _api() -> ctypes.CDLL:
    g = ggml()
    p, i, n, f = Pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    size, text = ctypes.c_size_t, ctypes.c_char_p
    for name, result, *arguments in (
        ("ggml_init", p, InitParams),
        ("ggml_free", None, p),
        ("ggml_tensor_overhead", size),
        ("ggml_graph_overhead_custom", size, size, ctypes.c_bool),
        ("ggml_new_tensor_2d", p, p, i, n, n),
        ("ggml_new_tensor_1d", p, p, i, n),
        ("ggml_nbytes", size, p),
        ("ggml_mul_mat", p, p, p, p),
        ("ggml_mul", p, p, p, p),
        ("ggml_silu", p, p, p),
        ("ggml_tanh", p, p, p),
        ("ggml_scale", p, p, p, f),
        ("ggml_rms_norm", p, p, p, f),
        ("ggml_get_rows", p, p, p, p),
        ("ggml_new_graph_custom", p, p, size, ctypes.c_bool),
        ("ggml_build_forward_expand", None, p, p),
        ("ggml_backend_dev_init", p, p, text),
        ("ggml_backend_dev_backend_reg", p, p),
        ("ggml_backend_reg_get_proc_address", p, p, text),
        ("ggml_backend_cpu_buffer_type", p),
        ("ggml_backend_buft_name", text, p),
        ("ggml_backend_alloc_ctx_tensors_from_buft", p, p, p),
        ("ggml_backend_buffer_set_usage", None, p, i),
        ("ggml_backend_buffer_free", None, p),
        ("ggml_backend_dev_supports_op", ctypes.c_bool, p, p),
        ("ggml_backend_tensor_set", None, p, p, size, size),
        ("ggml_backend_tensor_get", None, p, p, size, size),
        ("ggml_backend_graph_compute", i, p, p),
        ("ggml_threadpool_params_default", ThreadpoolParams, i),
    ):
        declare(g, name, result, *arguments)
    return g


def _exported(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the CPU backend, which is loaded by ggml and found by name."""
    g = _api()
    registry = g.ggml_backend_dev_backend_reg(g.cpu_device)
    address = g.ggml_backend_reg_get_proc_address(registry, name.encode())
    if not address:
        raise RuntimeError(f"llama.cpp: its CPU backend has no {name}")
    return ctypes.CFUNCTYPE(result, *arguments)(address)


@functools.cache
def _backend(threads: int) -> Any:
    """A CPU backend with threads of its own; kept for the life of the process."""
    g = _api()
    backend = g.ggml_backend_dev_init(g.cpu_device, None)
    _exported("ggml_backend_set_n_threads", None, Pointer, ctypes.c_int)(backend, threads)
    new_pool = _exported("ggml_threadpool_new", Pointer, ctypes.POINTER(ThreadpoolParams))
    params = g.ggml_threadpool_params_default(threads)
    if params.n_threads != threads:
        raise RuntimeError("llama.cpp: ggml_threadpool_params is not as expected")
    params.poll = 1  # of 100; the default of 50 spins for half a second after the last op
    pool = new_pool(ctypes.byref(params))
    _exported("ggml_backend_cpu_set_threadpool", None, Pointer, Pointer)(backend, pool)
    return backend


def buffer_types() -> list[Any]:
    """ggml's plain CPU buffer, then those that rearrange weights for this CPU."""
    g = _api()
    found = [g.ggml_backend_cpu_buffer_type()]
    getter = _exported("ggml_backend_dev_get_extra_bufts", ctypes.POINTER(Pointer), Pointer)
    extra = getter(g.cpu_device)
    i = 0
    while extra and extra[i]:
        found.append(extra[i])
        i += 1
    return found


class Context:
    """A ggml context and the buffers of its tensors."""

    def __init__(self, tensors: int, graph: bool = False) -> None:
        g = _api()
        size = g.ggml_tensor_overhead() * tensors
        size += g.ggml_graph_overhead_custom(NODES, False) if graph else 0
        self.pointer = g.ggml_init(InitParams(size, None, True))
        self._buffer: Any = None

    def allocate(self, buffer_type: Any) -> bool:
        self._buffer = _api().ggml_backend_alloc_ctx_tensors_from_buft(self.pointer, buffer_type)
        return bool(self._buffer)

    def mark_weights(self) -> None:
        _api().ggml_backend_buffer_set_usage(self._buffer, USAGE_WEIGHTS)

    def free(self) -> None:
        if self._buffer:
            _api().ggml_backend_buffer_free(self._buffer)
        _api().ggml_free(self.pointer)


def _store(tensor: Any, value: torch.Tensor) -> None:
    value = value.contiguous()
    size = _api().ggml_nbytes(tensor)
    if size != value.numel() * value.element_size():
        raise RuntimeError("llama.cpp: a tensor has another size than its bytes")
    _api().ggml_backend_tensor_set(tensor, value.data_ptr(), 0, size)


# What an op is in ggml: its weights as (type, columns, bytes), its inputs, and the graph of both.
Weights = list[tuple[str, int, torch.Tensor]]
# build(context, weights, inputs): the result's node, and the nodes that read the weights.
Build = Callable[[Any, list[Any], list[Any]], tuple[Any, list[Any]]]
Sketch = tuple[Weights, list[torch.Tensor], Build, tuple[int, ...]]


def _linear(x: torch.Tensor, weight: torch.Tensor, qtype: str) -> Sketch:
    def build(c: Any, w: list[Any], x: list[Any]) -> tuple[Any, list[Any]]:
        y = _api().ggml_mul_mat(c, w[0], x[0])
        return y, [y]

    return [(qtype, x.shape[1], weight)], [x], build, (x.shape[0], weight.shape[0])


def _swiglu(
    x: torch.Tensor, gate: torch.Tensor, gate_qtype: str, up: torch.Tensor, up_qtype: str
) -> Sketch:
    def build(c: Any, w: list[Any], x: list[Any]) -> tuple[Any, list[Any]]:
        g = _api()
        products = [g.ggml_mul_mat(c, weight, x[0]) for weight in w]
        return g.ggml_mul(c, g.ggml_silu(c, products[0]), products[1]), products

    k = x.shape[1]
    return [(gate_qtype, k, gate), (up_qtype, k, up)], [x], build, (x.shape[0], gate.shape[0])


def _logits(
    x: torch.Tensor, weight: torch.Tensor, qtype: str, multiplier: float, cap: float
) -> Sketch:
    def build(c: Any, w: list[Any], x: list[Any]) -> tuple[Any, list[Any]]:
        g = _api()
        y = g.ggml_mul_mat(c, w[0], x[0])
        if not cap:
            return g.ggml_scale(c, y, multiplier), [y]
        return g.ggml_scale(c, g.ggml_tanh(c, g.ggml_scale(c, y, multiplier / cap)), cap), [y]

    return [(qtype, x.shape[1], weight)], [x], build, (x.shape[0], weight.shape[0])


def _embedding(ids: torch.Tensor, weight: torch.Tensor, qtype: str) -> Sketch:
    from glimmer_ops.gguf import QTYPES

    block, size = QTYPES[qtype]
    k = weight.shape[1] // size * block

    def build(c: Any, w: list[Any], x: list[Any]) -> tuple[Any, list[Any]]:
        y = _api().ggml_get_rows(c, w[0], x[0])
        return y, [y]

    return [(qtype, k, weight)], [ids.int()], build, (len(ids), k)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Sketch | None:
    if weight is None or weight.dtype != torch.float32:
        return None

    def build(c: Any, w: list[Any], x: list[Any]) -> tuple[Any, list[Any]]:
        y = _api().ggml_mul(c, _api().ggml_rms_norm(c, x[0], eps), w[0])
        return y, []  # a gain is no matrix, and lies in any buffer

    return [("F32", x.shape[-1], weight)], [x], build, tuple(x.shape)


SKETCHES: dict[str, Callable[..., Sketch | None]] = {
    "kquant_linear": _linear,
    "kquant_swiglu": _swiglu,
    "kquant_logits": _logits,
    "kquant_embedding": _embedding,
    "rms_norm": _rms_norm,
}


class Prepared:
    """Graphs of one op, each with weights of its own in one type of buffer."""

    def __init__(self, sketch: Sketch, copies: int, buffer_type: Any, threads: int) -> None:
        self._weights, self._inputs, self._build, self._shape = sketch
        self._backend = _backend(threads)
        self._contexts: list[Context] = []
        self._graphs: list[Any] = []
        self._outs: list[Any] = []
        self.usable = all(self._add(buffer_type) for _ in range(copies))

    def _add(self, buffer_type: Any) -> bool:
        g = _api()
        holder = Context(len(self._weights))
        self._contexts.append(holder)
        tensors = []
        for qtype, columns, data in self._weights:
            rows = data.shape[0] if data.dim() == 2 else 1
            tensors.append(g.ggml_new_tensor_2d(holder.pointer, TYPES[qtype], columns, rows))
        if not holder.allocate(buffer_type):
            return False
        holder.mark_weights()
        work = Context(NODES, graph=True)
        self._contexts.append(work)
        inputs = [self._input(work, t) for t in self._inputs]
        out, readers = self._build(work.pointer, tensors, inputs)
        # A buffer that rearranges weights takes any tensor, and crashes on what it does not know.
        if not all(g.ggml_backend_dev_supports_op(g.cpu_device, node) for node in readers):
            return False
        graph = g.ggml_new_graph_custom(work.pointer, NODES, False)
        g.ggml_build_forward_expand(graph, out)
        if not work.allocate(g.ggml_backend_cpu_buffer_type()):
            return False
        for tensor, (_, _, data) in zip(tensors, self._weights, strict=True):
            _store(tensor, data)
        for tensor, data in zip(inputs, self._inputs, strict=True):
            _store(tensor, data)
        self._graphs.append(graph)
        self._outs.append(out)
        return True

    @staticmethod
    def _input(work: Context, value: torch.Tensor) -> Any:
        kind = TYPES["F32" if value.dtype == torch.float32 else "I32"]
        if value.dim() == 1:
            return _api().ggml_new_tensor_1d(work.pointer, kind, len(value))
        return _api().ggml_new_tensor_2d(work.pointer, kind, value.shape[1], value.shape[0])

    def calls(self) -> list[Callable[[], None]]:
        def call(graph: Any) -> Callable[[], None]:
            def compute() -> None:
                if _api().ggml_backend_graph_compute(self._backend, graph) != 0:
                    raise RuntimeError("llama.cpp: a graph failed")

            return compute

        return [call(graph) for graph in self._graphs]

    def output(self) -> torch.Tensor:
        self.calls()[0]()
        out = torch.empty(self._shape)
        _api().ggml_backend_tensor_get(self._outs[0], out.data_ptr(), 0, out.numel() * 4)
        return out

    def free(self) -> None:
        for context in self._contexts:
            context.free()
        self._contexts.clear()


class LlamaCpp:
    name = "llama.cpp"
    quick = True

    def missing(self) -> str:
        return missing()

    def counterpart(self, op: Op, case: Case, working_set: int, threads: int) -> Counterpart | None:
        make = SKETCHES.get(op.name)
        if make is None or case.dtype != "f32":
            return None
        args = case.make()
        if any(isinstance(a, torch.Tensor) and not a.numel() for a in args):
            return None
        sketch = make(*args)
        if sketch is None or any(q not in TYPES for q, _, _ in sketch[0]):
            return None
        touched = op.cost(*args).bytes
        size = sum(w.numel() * w.element_size() for _, _, w in sketch[0])
        copies = 1 if case.resident else math.ceil(working_set / max(1, touched))
        copies = max(1, min(copies, (4 << 30) // max(1, size)))
        kind = _fastest(sketch, threads)
        prepared = Prepared(sketch, copies, kind, threads)
        buffer = _api().ggml_backend_buft_name(kind).decode()
        return Counterpart(
            self.name,
            timed(list(prepared.calls())),
            prepared.output,
            copies,
            1e-3,  # its int8 activations have one scale for 256 values
            f"ggml, {buffer} buffer",
            prepared.free,
        )

    def model(self, gguf: Path, name: str, tokens: int, threads: int) -> Counterpart | None:
        from .llama_model import counterpart

        return counterpart(self.name, gguf, name, tokens, threads)


def _fastest(sketch: Sketch, threads: int) -> Any:
    """The buffer type in which one set is computed fastest."""
    times = {}
    kinds = buffer_types() if any(w.dim() == 2 for _, _, w in sketch[0]) else buffer_types()[:1]
    for kind in kinds:
        prepared = Prepared(sketch, 1, kind, threads)
        if prepared.usable:
            (call,) = prepared.calls()
            call()
            times[kind] = min(_seconds(call) for _ in range(5))
        prepared.free()
    return min(times, key=lambda k: times[k])


def _seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


PEER = LlamaCpp()
