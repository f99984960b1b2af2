"""Streams weights from where they lie into the .ptd, instead of copying them into the program.

ExecuTorch's emitter copies every constant's bytes into memory before it writes any: twice the
weights at its peak. It does accept file-backed buffers, though only its delegates make them. Inside
`streamed_constants` the emitter receives such a buffer for each of our weights. This replaces a
private method of executorch's emitter, so it checks that the method is the one it knows.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from executorch.exir._serialize._cord import FileBackedData
from executorch.exir.emit import _emitter
from executorch.exir.schema import EValue, TensorDataLocation

from .graph import Weight

Progress = Callable[[int], None]  # told the number of bytes just written


class WeightBytes(FileBackedData):
    """A weight as ExecuTorch's serialiser takes file-backed data, read only as it is written out.

    name: its key; equal names are the same data, of which one copy is stored.
    """

    def __init__(self, name: str, weight: Weight, progress: Progress | None = None) -> None:
        self._weight = weight
        self._size = weight.data.nbytes
        self._sha256 = hashlib.sha256(name.encode()).digest()
        self._finalizer = None
        self._progress = progress

    def prefix(self, size: int) -> bytes:
        data = b""
        for chunk in self._weight.chunks():
            data += chunk
            if len(data) >= size:
                break
        return data[:size]

    def to_bytes(self) -> bytes:
        return b"".join(self._weight.chunks())

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        for chunk in self._weight.chunks():
            outfile.write(chunk)
            if self._progress:
                self._progress(len(chunk))


def _check_emitter() -> None:
    expected = ["self", "spec", "constant_tag"]
    found = list(inspect.signature(_emitter._Emitter._tensor_spec_to_evalue).parameters)
    if found != expected or not hasattr(_emitter._Emitter, "_save_new_const_tensor"):
        raise RuntimeError(
            "executorch's emitter is not the one that weight streaming knows: expected "
            f"_tensor_spec_to_evalue{tuple(expected)}, found {tuple(found)}"
        )


@contextlib.contextmanager
def streamed_constants(data: Mapping[str, FileBackedData]) -> Iterator[None]:
    """Within it, external constants of the named buffers are emitted as `data` says, unread."""
    _check_emitter()
    original = _emitter._Emitter._tensor_spec_to_evalue

    def emit(self: Any, spec: Any, constant_tag: str | None = None) -> Any:
        info = spec.extra_tensor_info
        external = info is not None and info.location == TensorDataLocation.EXTERNAL
        if not (spec.const and external and info.fully_qualified_name in data):
            return original(self, spec, constant_tag)
        source = data[info.fully_qualified_name]
        if spec.nbytes() != len(source):
            raise ValueError(
                f"{info.fully_qualified_name}: expected {spec.nbytes()} bytes, found {len(source)}"
            )
        digest = source.sha256().hex()
        index = self.program_state.external_constant_hash.get(digest, -1)
        if index == -1:
            index = self._save_new_const_tensor(spec, source, digest, None, constant_tag)
        else:
            self._save_to_external_constant_map(info.fully_qualified_name, index, constant_tag)
        return EValue(_emitter.make_tensor_value(index, None, spec))

    _emitter._Emitter._tensor_spec_to_evalue = emit
    try:
        yield
    finally:
        _emitter._Emitter._tensor_spec_to_evalue = original
