"""Muse Glimmer GGUF files: untrusted bytes in, a checked model description out.

Nothing is decoded here: a tensor is a name, a shape and a byte range, and its bytes are mapped
only when asked for. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import numpy.typing as npt

from ._files import check_not_special
from .config import ModelConfig, sliding_layers

ARCHITECTURE = "muse-glimmer"
DEFAULT_PERIOD = 4  # of the global layers, where the file says nothing

# Weight type -> (weights a block, bytes a block)
QTYPES: dict[str, tuple[int, int]] = {
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_0": (32, 34),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F32": (1, 4),
}
FLOAT_QTYPES = ("F32", "F16", "BF16")

# Bounds on what a header may claim. The official file has 731 tensors, some 40 keys, about 200,000
# tokens and a header of about 12 MB.
MAX_HEADER_BYTES = 1 << 27
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 16
MAX_ARRAY = 1 << 22

_IGNORED = frozenset({"rope_freqs.weight"})
_GATE_ALIAS = ".attn_output_gate."
_GATE = ".attn_gate."


class GGUFError(ValueError):
    """The file is not a Muse Glimmer model that can be run; the message says why."""


def row_bytes(k: int, qtype: str) -> int:
    """Bytes of one row of `k` weights; ValueError where k is not a multiple of the block size."""
    block, size = QTYPES[qtype]
    if k % block:
        raise ValueError(f"row length: expected a multiple of {block} for {qtype}, found {k}")
    return k // block * size


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file: where its bytes are and what they mean.

    `shape` is row-major, (N, K) or (D,); `offset` is absolute in the file; rows lie one after
    another without padding.
    """

    name: str
    qtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int

    def raw(self) -> npt.NDArray[np.uint8]:
        """The encoded rows, uint8 [N, row_bytes] (N = 1 for a 1-D tensor), mapped from the file.

        Each call makes its own copy-on-write map of this tensor's bytes: nothing is read until
        touched, and the file never changes. Raises GGUFError where the file has become shorter.
        """
        rows = self.shape[0] if len(self.shape) == 2 else 1
        try:
            return np.memmap(
                self.path,
                dtype=np.uint8,
                mode="c",
                offset=self.offset,
                shape=(rows, self.nbytes // rows),
            )
        except (OSError, ValueError) as error:
            raise GGUFError(f"{self.path}: tensor {self.name}: cannot map: {error}") from error

    def float32(self) -> npt.NDArray[np.float32]:
        """The values of an F32, F16 or BF16 tensor as a new float32 array of `shape`."""
        if self.qtype not in FLOAT_QTYPES:
            raise GGUFError(
                f"{self.path}: tensor {self.name}: expected F32, F16 or BF16, found {self.qtype}"
            )
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.nbytes)
        except OSError as error:
            raise GGUFError(f"{self.path}: tensor {self.name}: cannot read: {error}") from error
        if len(data) != self.nbytes:
            raise GGUFError(
                f"{self.path}: tensor {self.name}: expected {self.nbytes} bytes, found {len(data)}"
            )
        if self.qtype == "F32":
            values = np.frombuffer(data, "<f4").astype(np.float32)
        elif self.qtype == "F16":
            values = np.frombuffer(data, "<f2").astype(np.float32)
        else:
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        return values.reshape(self.shape)


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
                f"{self._path}: key {_show(key)}: expected UTF-8 text, found {error}"
            ) from error
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


@dataclasses.dataclass(frozen=True)
class GGUFModel:
    """A checked file: `tensors` holds every tensor of the model under its canonical name."""

    path: str
    config: ModelConfig
    tensors: dict[str, GGUFTensor]
    metadata: Metadata

    @property
    def nbytes(self) -> int:
        """Encoded bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def load(path: str | os.PathLike[str]) -> GGUFModel:
    """Read and check the header of a Muse Glimmer GGUF file.

    Only the header and the query and key norms are read. The file's name plays no part.

    Raises:
        GGUFError: for everything that is wrong with the file, naming the file and the key or
            tensor, what was expected and what was found.
    """
    name = os.fspath(path)
    check_not_special(name, GGUFError)
    try:
        return _load(name)
    except OSError as error:
        raise GGUFError(f"{name}: cannot read: {error.strerror or error}") from error
    except GGUFError as error:
        text = str(error)
        named = text.startswith((name, os.path.abspath(name)))
        raise GGUFError(text if named else f"{name}: {text}") from error
    except (ArithmeticError, LookupError, ValueError, RecursionError) as error:
        # KeyError's text is the repr of its message
        reason = error.args[0] if isinstance(error, KeyError) else str(error)
        raise GGUFError(f"{name}: malformed GGUF header: {reason}"[:600]) from error


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> row-major shape of every tensor of a model, in the order of the layers."""
    dim, ffn = config.dim, config.ffn_dim
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, dim)}
    layer = {
        "attn_norm": (dim,),
        "attn_q": (q_rows, dim),
        "attn_k": (kv_rows, dim),
        "attn_v": (kv_rows, dim),
        "attn_gate": (q_rows, dim),
        "attn_output": (dim, q_rows),
        "attn_q_norm": (config.head_dim,),
        "attn_k_norm": (config.head_dim,),
        "post_attention_norm": (dim,),
        "ffn_norm": (dim,),
        "ffn_gate": (ffn, dim),
        "ffn_up": (ffn, dim),
        "ffn_down": (dim, ffn),
        "post_ffw_norm": (dim,),
    }
    for i in range(config.n_layers):
        shapes.update({f"blk.{i}.{name}.weight": shape for name, shape in layer.items()})
    shapes["output_norm.weight"] = (dim,)
    shapes["output.weight"] = (config.vocab_size, dim)
    return shapes


# --- parsing -------------------------------------------------------------------------------------


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
        self.infos = [_TensorInfo.parse(field) for field in fields]


@dataclasses.dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]  # row-major
    type_id: int
    offset: int  # from the start of the tensor data

    @staticmethod
    def parse(field: gguf.ReaderField) -> _TensorInfo:
        _, name, n_dims, dims, type_id, offset = field.parts
        if int(n_dims[0]) > 4:
            raise GGUFError(
                f"tensor {_show(bytes(name).decode('utf-8'))}: expected at most 4 dimensions, "
                f"found {n_dims[0]}"
            )
        return _TensorInfo(
            bytes(name).decode("utf-8"),
            tuple(int(d) for d in reversed(dims)),
            int(type_id[0]),
            int(offset[0]),
        )


def _show(name: str) -> str:
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


# --- checking ------------------------------------------------------------------------------------


def _load(path: str) -> GGUFModel:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise GGUFError("expected a regular file")
    if status.st_size < 24:
        raise GGUFError(f"header: truncated: needs 24 bytes or more, the file has {status.st_size}")
    reader = _HeaderReader(path)
    metadata = _metadata(path, reader)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture != ARCHITECTURE:
        found = "nothing" if architecture is None else _text(architecture)
        raise GGUFError(f"key general.architecture: expected {ARCHITECTURE}, found {found}")
    parts = metadata.get("split.count", 0)
    if not isinstance(parts, int) or parts not in (0, 1):
        raise GGUFError(f"key split.count: expected one file, found {_text(parts)} parts")
    if reader.alignment % 8:
        raise GGUFError(
            f"key general.alignment: expected a multiple of 8, found {reader.alignment}"
        )

    infos = _canonical(reader.infos)
    config = _config(metadata, infos)
    tensors = _check_tensors(
        path, config, infos, int(reader.data_offset), int(reader.alignment), status.st_size
    )
    config = dataclasses.replace(
        config,
        q_scale=_uniform(tensors, config.n_layers, "attn_q_norm"),
        k_scale=_uniform(tensors, config.n_layers, "attn_k_norm"),
    )
    _validate(config)
    return GGUFModel(str(Path(path).absolute()), config, tensors, metadata)


def _canonical(infos: list[_TensorInfo]) -> dict[str, _TensorInfo]:
    tensors: dict[str, _TensorInfo] = {}
    for info in infos:
        if info.name in _IGNORED:
            continue
        name = info.name.replace(_GATE_ALIAS, _GATE)
        if name in tensors:
            raise GGUFError(
                f"tensor {_show(info.name)}: duplicate (the file also holds "
                f"{_show(tensors[name].name)})"
            )
        tensors[name] = info
    return tensors


def _config(metadata: Metadata, infos: dict[str, _TensorInfo]) -> ModelConfig:
    """Everything but the QK scales, which tensors hold."""
    n_layers = _int(metadata, "block_count", 1)
    if n_layers > len(infos):
        raise GGUFError(
            f"key {ARCHITECTURE}.block_count: expected at most the number of tensors "
            f"({len(infos)}), found {n_layers}"
        )
    head_dim = _int(metadata, "attention.key_length", 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _full(key) in metadata and _int(metadata, key, 1) != head_dim:
            raise GGUFError(
                f"key {_full(key)}: expected attention.key_length ({head_dim}), "
                f"found {_int(metadata, key, 1)}"
            )
    scaling = metadata.get(_full("rope.scaling.type"), "none")
    if not isinstance(scaling, str) or scaling != "none":
        raise GGUFError(f"key {_full('rope.scaling.type')}: expected none, found {_text(scaling)}")
    # RoPE runs on sliding layers only, so a base of their own replaces the general one
    theta = _float(metadata, "rope.freq_base")
    if _full("rope.freq_base_swa") in metadata:
        theta = _float(metadata, "rope.freq_base_swa")
    config = ModelConfig(
        dim=_int(metadata, "embedding_length", 1),
        n_layers=n_layers,
        n_heads=_int(metadata, "attention.head_count", 1),
        n_kv_heads=_int(metadata, "attention.head_count_kv", 1),
        head_dim=head_dim,
        ffn_dim=_int(metadata, "feed_forward_length", 1),
        vocab_size=_vocab_size(metadata, infos),
        eps=_float(metadata, "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        window=_int(metadata, "attention.sliding_window", 0),
        sliding=_sliding(metadata, n_layers),
        soft_cap=_float(metadata, "final_logit_softcapping"),
        logit_scale=_float(metadata, "logit_scale"),
        q_scale=1.0,
        k_scale=1.0,
        context_length=_int(metadata, "context_length", 1),
    )
    _validate(config)
    return config


def _validate(config: ModelConfig) -> None:
    try:
        config.validate()
    except ValueError as error:
        raise GGUFError(f"model: {error}") from error


def _full(key: str) -> str:
    return f"{ARCHITECTURE}.{key}"


def _required(metadata: Metadata, key: str) -> Any:
    if _full(key) not in metadata:
        raise GGUFError(f"key {_full(key)}: missing")
    return metadata[_full(key)]


def _kind(value: object) -> str:
    """A metadata value in words: bounded, whatever the file holds."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype}"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    return _show(str(value)) if isinstance(value, (int, float)) else repr(value)[:96]


def _text(value: object) -> str:
    """A text as it is, anything else in words."""
    return _show(value) if isinstance(value, str) else _kind(value)


def _int(metadata: Metadata, key: str, low: int) -> int:
    value = _required(metadata, key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << 31:
        raise GGUFError(
            f"key {_full(key)}: expected an integer of {low} to {(1 << 31) - 1}, "
            f"found {_kind(value)}"
        )
    return value


def _float(metadata: Metadata, key: str) -> float:
    value = _required(metadata, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GGUFError(f"key {_full(key)}: expected a number, found {_kind(value)}")
    if not (value > 0 and value < float("inf")):
        raise GGUFError(f"key {_full(key)}: expected a finite positive number, found {value}")
    return float(value)


def _vocab_size(metadata: Metadata, infos: dict[str, _TensorInfo]) -> int:
    info = infos.get("token_embd.weight")
    if info is None:
        raise GGUFError("tensor token_embd.weight: missing")
    if len(info.shape) != 2:
        raise GGUFError(
            f"tensor token_embd.weight: expected 2 dimensions, found shape {list(info.shape)}"
        )
    if _full("vocab_size") not in metadata:
        return info.shape[0]
    size = _int(metadata, "vocab_size", 1)
    if size != info.shape[0]:
        raise GGUFError(
            f"key {_full('vocab_size')}: expected the rows of token_embd.weight "
            f"({info.shape[0]}), found {size}"
        )
    return size


def _sliding(metadata: Metadata, n_layers: int) -> tuple[bool, ...]:
    key = _full("attention.sliding_window_pattern")
    if key not in metadata:
        return sliding_layers(n_layers, DEFAULT_PERIOD)
    value = metadata[key]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
        if value.size != n_layers:
            raise GGUFError(f"key {key}: expected {n_layers} entries, found {value.size}")
        flags = value.view(np.uint8) if value.dtype == np.bool_ else value
        for i, flag in enumerate(flags.tolist()):
            if flag not in (0, 1):
                raise GGUFError(f"key {key}[{i}]: expected 0 or 1, found {flag}")
        return tuple(bool(flag) for flag in flags.tolist())
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return sliding_layers(n_layers, value)
    raise GGUFError(
        f"key {key}: expected {n_layers} flags or a positive period, found {_kind(value)}"
    )


def _check_tensors(
    path: str,
    config: ModelConfig,
    infos: dict[str, _TensorInfo],
    data_offset: int,
    alignment: int,
    file_size: int,
) -> dict[str, GGUFTensor]:
    shapes = expected_tensors(config)
    missing = [name for name in shapes if name not in infos]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise GGUFError(f"tensor {missing[0]}: missing{more}")
    extra = [_show(info.name) for name, info in infos.items() if name not in shapes]
    if extra:
        more = f" and {len(extra) - 8} more" if len(extra) > 8 else ""
        raise GGUFError(f"unexpected tensors: {', '.join(extra[:8])}{more}")

    absolute = str(Path(path).absolute())
    tensors: dict[str, GGUFTensor] = {}
    for name, shape in shapes.items():
        info = infos[name]
        qtype = _qtype(info)
        if info.shape != shape:
            raise GGUFError(
                f"tensor {info.name}: expected shape {list(shape)}, found {list(info.shape)}"
            )
        if len(shape) == 1 and qtype not in FLOAT_QTYPES:
            raise GGUFError(f"tensor {info.name}: expected F32, F16 or BF16, found {qtype}")
        block, size = QTYPES[qtype]
        if shape[-1] % block:
            raise GGUFError(
                f"tensor {info.name}: expected rows of a multiple of {block} weights for "
                f"{qtype}, found {shape[-1]}"
            )
        nbytes = size * (shape[-1] // block) * (shape[0] if len(shape) == 2 else 1)
        if info.offset % alignment:
            raise GGUFError(
                f"tensor {info.name}: expected an offset aligned to {alignment}, "
                f"found {info.offset}"
            )
        offset = data_offset + info.offset
        if offset + nbytes > file_size:
            raise GGUFError(
                f"tensor {info.name}: ends at byte {offset + nbytes}, beyond the end of the file "
                f"({file_size})"
            )
        tensors[name] = GGUFTensor(name, qtype, shape, absolute, offset, nbytes)

    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.offset + before.nbytes > after.offset:
            raise GGUFError(
                f"tensor {after.name}: overlaps tensor {before.name} (starts at byte "
                f"{after.offset}, {before.name} ends at {before.offset + before.nbytes})"
            )
    return tensors


def _qtype(info: _TensorInfo) -> str:
    try:
        qtype = gguf.GGMLQuantizationType(info.type_id).name
    except ValueError:
        qtype = f"unknown type {info.type_id}"
    if qtype not in QTYPES:
        raise GGUFError(
            f"tensor {_show(info.name)}: expected one of the types {', '.join(QTYPES)}, "
            f"found {qtype}"
        )
    return qtype


def _uniform(tensors: dict[str, GGUFTensor], n_layers: int, kind: str) -> float:
    """The one value that every entry of a QK norm holds in every layer.

    The architecture has a single scale, folded into these gains by the converter; a file whose
    gains differ needs a weighted norm, which no official file has.
    """
    scale = float(tensors[f"blk.0.{kind}.weight"].float32()[0])
    for i in range(n_layers):
        tensor = tensors[f"blk.{i}.{kind}.weight"]
        values = tensor.float32()
        # NaN compares unequal to itself and so is refused as well
        wrong = np.flatnonzero(~(values == np.float32(scale)))
        if wrong.size:
            raise GGUFError(
                f"tensor {tensor.name}: expected {scale} in every entry of every layer, "
                f"found {values[wrong[0]]} at {wrong[0]}"
            )
    if not (scale > 0 and np.isfinite(scale)):
        raise GGUFError(f"tensor blk.0.{kind}.weight: expected positive values, found {scale}")
    return scale
