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
from pathlib import Path
from typing import Any

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir.emit import _emitter
from executorch.exir.schema import EValue, TensorDataLocation

_CHUNK = 8 << 20
Progress = Callable[[int], None]  # told the number of bytes just written


class FileSlice(FileBackedData):
    """`size` bytes of a file from `offset`, read only when they are written out."""

    def __init__(self, path: Path, offset: int, size: int, progress: Progress | None) -> None:
        self._path = str(path)  # the base class opens it
        self._offset = offset
        self._size = size
        self._sha256 = hashlib.sha256(f"{path}:{offset}:{size}".encode()).digest()
        self._finalizer = None
        self._progress = progress

    def _chunks(self, size: int) -> Iterator[bytes]:
        with open(self._path, "rb") as f:
            f.seek(self._offset)
            while size > 0:
                chunk = f.read(min(size, _CHUNK))
                if not chunk:
                    raise OSError(f"{self._path}: ended while its weights were being copied")
                size -= len(chunk)
                yield chunk

    def prefix(self, size: int) -> bytes:
        return b"".join(self._chunks(min(size, self._size)))

    def to_bytes(self) -> bytes:
        return self.prefix(self._size)

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        for chunk in self._chunks(self._size):
            outfile.write(chunk)
            if self._progress:
                self._progress(len(chunk))


class TensorBytes(FileSlice):
    """A tensor's bytes, in memory."""

    def __init__(self, tensor: torch.Tensor, progress: Progress | None) -> None:
        self._bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        super().__init__(Path("memory"), tensor.data_ptr(), self._bytes.nbytes, progress)

    def _chunks(self, size: int) -> Iterator[bytes]:
        for start in range(0, size, _CHUNK):
            yield self._bytes[start : min(start + _CHUNK, size)].tobytes()


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
