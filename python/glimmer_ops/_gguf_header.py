"""The header of a GGUF file: untrusted bytes in, checked keys and tensor descriptions out.

Nothing is decoded here. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import gguf
import numpy as np
import numpy.typing as npt

# Bounds on what a header may claim. The official file has 731 tensors, some 40 keys, about 200,000
# tokens and a header of about 12 MB.
MAX_HEADER_BYTES = 1 << 27
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 16
MAX_ARRAY = 1 << 22


class GGUFError(ValueError):
    """The file is not a Muse Glimmer model that can be run; the message says why."""


class Metadata(Mapping[str, Any]):
    """Keys and values of the file: int, float, bool, str, list[str] or a numpy array.

    String arrays are decoded when read, so that a vocabulary costs nothing until it is needed.
    A value that is not valid UTF-8 raises GGUFError naming the file and the key.
    """

    def __init__(self, path: str, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        try:
            if isinstance(value, _Strings):
                return value.decode()
            if isinstance(value, bytes):
                return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(
                f"{self._path}: key {show(key)}: expected UTF-8 text, found {error}"
            ) from error
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class _Strings:
    """A GGUF string array as its bytes: per string a u64 length and the text."""

    def __init__(self, data: bytes, count: int) -> None:
        self.data = data
        self.count = count

    def decode(self) -> list[str]:
        strings = []
        position = 0
        for _ in range(self.count):
            (length,) = _U64.unpack_from(self.data, position)
            position += 8 + length
            strings.append(self.data[position - length : position].decode("utf-8"))
        return strings


_U64 = struct.Struct("<Q")


class _HeaderReader(gguf.GGUFReader):
    """The gguf package's reader with every length checked before it is used.

    The package slices past the end silently, loops over counts that the file states, and makes one
    array per array element, which is slow for a vocabulary. Here an array is one part.
    """

    _limit: int
    _bytes: npt.NDArray[np.uint8]

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> npt.NDArray[Any]:
        if not hasattr(self, "_limit"):
            # The base class maps the file and then calls this: a plain view is faster to slice
            self._bytes = np.asarray(self.data)
            self._limit = min(self._bytes.size, MAX_HEADER_BYTES)
        kind = np.dtype(dtype)
        end = int(offset) + kind.itemsize * int(count)
        if end > self._limit:
            self._too_long(end)
        part = self._bytes[int(offset) : end].view(kind)
        return part.view(kind.newbyteorder(override_order or self.byte_order))

    def _too_long(self, end: int) -> NoReturn:
        if end > self._bytes.size:
            raise GGUFError(
                f"header: truncated: needs {end} bytes or more, the file has {self._bytes.size}"
            )
        raise GGUFError(f"header: expected at most {MAX_HEADER_BYTES} bytes, found {end} or more")

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, int(raw_type))
        item = self._get(orig_offs, np.uint32)
        length = self._get(orig_offs + 4, np.uint64)
        item_type, count = gguf.GGUFValueType(int(item[0])), int(length[0])
        if count > MAX_ARRAY:
            raise GGUFError(f"header: expected arrays of at most {MAX_ARRAY}, found {count}")
        start = int(orig_offs) + 12
        if item_type == gguf.GGUFValueType.STRING:
            data = self._get(start, np.uint8, self._strings_end(start, count) - start)
        elif item_type in self.gguf_scalar_to_np:
            data = self._get(start, self.gguf_scalar_to_np[item_type], count)
        else:
            raise GGUFError(f"header: arrays of {item_type.name} are not supported")
        types = [gguf.GGUFValueType.ARRAY, item_type]
        return 12 + data.nbytes, [item, length, data], [2], types

    def _strings_end(self, position: int, count: int) -> int:
        view = self._bytes.data
        limit = self._limit
        for _ in range(count):
            if position + 8 > limit:
                self._too_long(position + 8)
            (length,) = _U64.unpack_from(view, position)
            position += 8 + length
        if position > limit:
            self._too_long(position)
        return position

    def _build_fields(self, offs: int, count: int) -> int:
        if self.byte_order != "I":
            raise GGUFError("byte order: expected little-endian, found big-endian")
        if count > MAX_KEYS:
            raise GGUFError(f"key count: expected at most {MAX_KEYS}, found {count}")
        return super()._build_fields(offs, int(count))

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[gguf.ReaderField]]:
        if count > MAX_TENSORS:
            raise GGUFError(f"tensor count: expected at most {MAX_TENSORS}, found {count}")
        return super()._build_tensor_info(offs, int(count))

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        # The base class would view the data of every tensor; sizes are checked by name instead
        self.infos = [TensorInfo.parse(field) for field in fields]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # row-major
    type_id: int
    offset: int  # from the start of the tensor data

    @staticmethod
    def parse(field: gguf.ReaderField) -> TensorInfo:
        _, name, n_dims, dims, type_id, offset = field.parts
        if int(n_dims[0]) > 4:
            raise GGUFError(
                f"tensor {show(bytes(name).decode('utf-8'))}: expected at most 4 dimensions, "
                f"found {n_dims[0]}"
            )
        return TensorInfo(
            bytes(name).decode("utf-8"),
            tuple(int(d) for d in reversed(dims)),
            int(type_id[0]),
            int(offset[0]),
        )


def show(name: str) -> str:
    """A name from the file, fit for a message."""
    text = name if name.isprintable() and name else repr(name)
    return text if len(text) <= 96 else text[:96] + "..."


def _metadata(path: str, reader: _HeaderReader) -> Metadata:
    values: dict[str, Any] = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        kind, data = field.types[0], field.parts[field.data[0]]
        if kind == gguf.GGUFValueType.ARRAY:
            if field.types[1] == gguf.GGUFValueType.STRING:
                count = int(field.parts[field.data[0] - 1][0])
                values[key] = _Strings(data.tobytes(), count)
            else:
                values[key] = data.copy()
        elif kind == gguf.GGUFValueType.STRING:
            values[key] = data.tobytes()
        elif kind == gguf.GGUFValueType.BOOL:
            values[key] = bool(data.view(np.uint8)[0])
        else:
            values[key] = data.tolist()[0]
    return Metadata(path, values)


def in_words(value: object) -> str:
    """A metadata value in words: bounded, whatever the file holds."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype}"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    return show(str(value)) if isinstance(value, (int, float)) else repr(value)[:96]


def text_or_words(value: object) -> str:
    """A text as it is, anything else in words."""
    return show(value) if isinstance(value, str) else in_words(value)


class Keys:
    """The keys of a file under one prefix, checked as they are read.

    Every method raises GGUFError, naming the key, for one that is missing or not as expected.
    """

    def __init__(self, metadata: Metadata, prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix

    def full(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.full(key) in self._metadata

    def value(self, key: str) -> Any:
        if key not in self:
            raise GGUFError(f"key {self.full(key)}: missing")
        return self._metadata[self.full(key)]

    def integer(self, key: str, low: int, high: int = (1 << 31) - 1) -> int:
        value = self.value(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise GGUFError(
                f"key {self.full(key)}: expected an integer of {low} to {high}, "
                f"found {in_words(value)}"
            )
        return value

    def number(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise GGUFError(f"key {self.full(key)}: expected a number, found {in_words(value)}")
        if not (value > 0 and value < math.inf):
            raise GGUFError(
                f"key {self.full(key)}: expected a finite positive number, found {value}"
            )
        return float(value)


@dataclasses.dataclass(frozen=True)
class Header:
    """A file's keys and tensor descriptions. `data_offset` is where the tensors' bytes begin."""

    metadata: Metadata
    infos: list[TensorInfo]
    data_offset: int
    alignment: int
    file_size: int


def read_header(path: str) -> Header:
    """Raises GGUFError, OSError, or what the gguf package raises for a malformed header."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise GGUFError("expected a regular file")
    if status.st_size < 24:
        raise GGUFError(f"header: truncated: needs 24 bytes or more, the file has {status.st_size}")
    reader = _HeaderReader(path)
    metadata = _metadata(path, reader)
    return Header(
        metadata, reader.infos, int(reader.data_offset), int(reader.alignment), status.st_size
    )
