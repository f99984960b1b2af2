"""Muse Glimmer GGUF files, the model's and its draft's: untrusted bytes in, a checked model out.

Nothing is decoded here: a tensor is a name, a shape and a byte range, and its bytes are mapped
only when asked for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from ._files import check_not_special
from ._gguf_header import (
    GGUFError,
    Header,
    Keys,
    Metadata,
    TensorInfo,
    in_words,
    read_header,
    show,
    text_or_words,
)
from .config import MAX_BLOCK, DraftConfig, ModelConfig, sliding_layers

__all__ = [
    "ARCHITECTURE",
    "DEFAULT_PERIOD",
    "DRAFT_ARCHITECTURE",
    "FLOAT_QTYPES",
    "QTYPES",
    "GGUFDraft",
    "GGUFError",
    "GGUFModel",
    "GGUFTensor",
    "Metadata",
    "expected_draft_tensors",
    "expected_tensors",
    "load",
    "load_draft",
    "load_either",
    "row_bytes",
]

ARCHITECTURE = "muse-glimmer"
DRAFT_ARCHITECTURE = "dflash"
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

_MAX_TAPS = 64  # layers that a draft may tap: the official one taps 5
_IGNORED = frozenset({"rope_freqs.weight"})
_GATE_ALIAS = ".attn_output_gate."
_GATE = ".attn_gate."
_ROLES = {ARCHITECTURE: "a target model", DRAFT_ARCHITECTURE: "a draft model"}

_Loaded = TypeVar("_Loaded")


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


@dataclasses.dataclass(frozen=True)
class GGUFDraft:
    """A checked draft model's file: no embedding and no output head, which are the target's."""

    path: str
    config: DraftConfig
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
    return _guarded(path, lambda name: _model(name, read_header(name)))


def load_draft(path: str | os.PathLike[str]) -> GGUFDraft:
    """Read and check the header of a DFlash draft model's GGUF file; nothing else is read.

    Whether it fits a target is for `config.check_draft`. Raises GGUFError as `load` does.
    """
    return _guarded(path, lambda name: _draft(name, read_header(name)))


def load_either(path: str | os.PathLike[str]) -> GGUFModel | GGUFDraft:
    """`load` or `load_draft`, as the file's architecture says."""
    return _guarded(path, _either)


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


def expected_draft_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name -> row-major shape of every tensor of a draft model, in the order of their use."""
    dim, ffn = config.dim, config.ffn_dim
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (dim, len(config.target_layers) * dim),
        "enc.output_norm.weight": (dim,),
    }
    layer = {
        "attn_norm": (dim,),
        "attn_q": (q_rows, dim),
        "attn_k": (kv_rows, dim),
        "attn_v": (kv_rows, dim),
        "attn_output": (dim, q_rows),
        "attn_q_norm": (config.head_dim,),
        "attn_k_norm": (config.head_dim,),
        "ffn_norm": (dim,),
        "ffn_gate": (ffn, dim),
        "ffn_up": (ffn, dim),
        "ffn_down": (dim, ffn),
    }
    for i in range(config.n_layers):
        shapes.update({f"blk.{i}.{name}.weight": shape for name, shape in layer.items()})
    shapes["output_norm.weight"] = (dim,)
    return shapes


# --- checking ------------------------------------------------------------------------------------


def _guarded(path: str | os.PathLike[str], read: Callable[[str], _Loaded]) -> _Loaded:
    """What `read` gives; whatever it raises becomes a GGUFError that names the file."""
    name = os.fspath(path)
    check_not_special(name, GGUFError)
    try:
        return read(name)
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


def _either(path: str) -> GGUFModel | GGUFDraft:
    header = read_header(path)
    found = header.metadata.get("general.architecture")
    is_draft = isinstance(found, str) and found == DRAFT_ARCHITECTURE
    return _draft(path, header) if is_draft else _model(path, header)


def _model(path: str, header: Header) -> GGUFModel:
    _check_header(header, ARCHITECTURE)
    infos = _canonical(header.infos)
    config = _config(header.metadata, infos)
    tensors = _check_tensors(path, header, infos, expected_tensors(config))
    config = dataclasses.replace(
        config,
        q_scale=_uniform(tensors, config.n_layers, "attn_q_norm"),
        k_scale=_uniform(tensors, config.n_layers, "attn_k_norm"),
    )
    _validate(config)
    return GGUFModel(str(Path(path).absolute()), config, tensors, header.metadata)


def _draft(path: str, header: Header) -> GGUFDraft:
    _check_header(header, DRAFT_ARCHITECTURE)
    infos = _by_name(header.infos, lambda name: name)
    config = _draft_config(header.metadata, infos)
    tensors = _check_tensors(path, header, infos, expected_draft_tensors(config))
    return GGUFDraft(str(Path(path).absolute()), config, tensors, header.metadata)


def _check_header(header: Header, architecture: str) -> None:
    found = header.metadata.get("general.architecture")
    if not isinstance(found, str) or found != architecture:
        shown = "nothing" if found is None else text_or_words(found)
        role = f", {_ROLES[found]}" if isinstance(found, str) and found in _ROLES else ""
        raise GGUFError(f"key general.architecture: expected {architecture}, found {shown}{role}")
    parts = header.metadata.get("split.count", 0)
    if not isinstance(parts, int) or parts not in (0, 1):
        raise GGUFError(f"key split.count: expected one file, found {text_or_words(parts)} parts")
    if header.alignment % 8:
        raise GGUFError(
            f"key general.alignment: expected a multiple of 8, found {header.alignment}"
        )


def _canonical(infos: list[TensorInfo]) -> dict[str, TensorInfo]:
    return _by_name(infos, lambda name: name.replace(_GATE_ALIAS, _GATE))


def _by_name(infos: list[TensorInfo], canonical: Callable[[str], str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in _IGNORED:
            continue
        name = canonical(info.name)
        if name in tensors:
            raise GGUFError(
                f"tensor {show(info.name)}: duplicate (the file also holds "
                f"{show(tensors[name].name)})"
            )
        tensors[name] = info
    return tensors


def _config(metadata: Metadata, infos: dict[str, TensorInfo]) -> ModelConfig:
    """Everything but the QK scales, which tensors hold."""
    keys = Keys(metadata, ARCHITECTURE)
    n_layers = _n_layers(keys, infos)
    # RoPE runs on sliding layers only, so a base of their own replaces the general one
    theta = keys.number("rope.freq_base")
    if "rope.freq_base_swa" in keys:
        theta = keys.number("rope.freq_base_swa")
    config = ModelConfig(
        dim=keys.integer("embedding_length", 1),
        n_layers=n_layers,
        n_heads=keys.integer("attention.head_count", 1),
        n_kv_heads=keys.integer("attention.head_count_kv", 1),
        head_dim=_head_dim(keys),
        ffn_dim=keys.integer("feed_forward_length", 1),
        vocab_size=_vocab_size(keys, infos),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        window=keys.integer("attention.sliding_window", 0),
        sliding=_sliding(keys, n_layers),
        soft_cap=keys.number("final_logit_softcapping"),
        logit_scale=keys.number("logit_scale"),
        q_scale=1.0,
        k_scale=1.0,
        context_length=keys.integer("context_length", 1),
    )
    _validate(config)
    return config


def _draft_config(metadata: Metadata, infos: dict[str, TensorInfo]) -> DraftConfig:
    keys = Keys(metadata, DRAFT_ARCHITECTURE)
    n_layers = _n_layers(keys, infos)
    windowed = "attention.sliding_window" in keys
    config = DraftConfig(
        dim=keys.integer("embedding_length", 1),
        n_layers=n_layers,
        n_heads=keys.integer("attention.head_count", 1),
        n_kv_heads=keys.integer("attention.head_count_kv", 1),
        head_dim=_head_dim(keys),
        ffn_dim=keys.integer("feed_forward_length", 1),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base"),
        window=keys.integer("attention.sliding_window", 0) if windowed else 0,
        sliding=_draft_sliding(keys, n_layers, windowed),
        block_size=keys.integer("block_size", 2, MAX_BLOCK),
        target_layers=_target_layers(keys),
        mask_token_id=Keys(metadata, "tokenizer.ggml").integer("mask_token_id", 0),
        context_length=keys.integer("context_length", 1),
    )
    _validate(config)
    return config


def _validate(config: ModelConfig | DraftConfig) -> None:
    try:
        config.validate()
    except ValueError as error:
        raise GGUFError(f"model: {error}") from error


def _n_layers(keys: Keys, infos: dict[str, TensorInfo]) -> int:
    n_layers = keys.integer("block_count", 1)
    if n_layers > len(infos):
        raise GGUFError(
            f"key {keys.full('block_count')}: expected at most the number of tensors "
            f"({len(infos)}), found {n_layers}"
        )
    return n_layers


def _head_dim(keys: Keys) -> int:
    """The one size of a head, all of which RoPE turns as it is."""
    head_dim = keys.integer("attention.key_length", 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if key in keys and keys.integer(key, 1) != head_dim:
            raise GGUFError(
                f"key {keys.full(key)}: expected attention.key_length ({head_dim}), "
                f"found {keys.integer(key, 1)}"
            )
    scaling = keys.value("rope.scaling.type") if "rope.scaling.type" in keys else "none"
    if not isinstance(scaling, str) or scaling != "none":
        raise GGUFError(
            f"key {keys.full('rope.scaling.type')}: expected none, found {text_or_words(scaling)}"
        )
    return head_dim


def _vocab_size(keys: Keys, infos: dict[str, TensorInfo]) -> int:
    info = infos.get("token_embd.weight")
    if info is None:
        raise GGUFError("tensor token_embd.weight: missing")
    if len(info.shape) != 2:
        raise GGUFError(
            f"tensor token_embd.weight: expected 2 dimensions, found shape {list(info.shape)}"
        )
    if "vocab_size" not in keys:
        return info.shape[0]
    size = keys.integer("vocab_size", 1)
    if size != info.shape[0]:
        raise GGUFError(
            f"key {keys.full('vocab_size')}: expected the rows of token_embd.weight "
            f"({info.shape[0]}), found {size}"
        )
    return size


_PATTERN = "attention.sliding_window_pattern"


def _sliding(keys: Keys, n_layers: int) -> tuple[bool, ...]:
    if _PATTERN not in keys:
        return sliding_layers(n_layers, DEFAULT_PERIOD)
    value = keys.value(_PATTERN)
    if _is_flags(value):
        return _flags(keys.full(_PATTERN), value, n_layers)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return sliding_layers(n_layers, value)
    raise GGUFError(
        f"key {keys.full(_PATTERN)}: expected {n_layers} flags or a positive period, "
        f"found {in_words(value)}"
    )


def _draft_sliding(keys: Keys, n_layers: int, windowed: bool) -> tuple[bool, ...]:
    """One window for all layers, or for those that the pattern flags."""
    if _PATTERN not in keys:
        return (windowed,) * n_layers
    value = keys.value(_PATTERN)
    if not _is_flags(value):
        raise GGUFError(
            f"key {keys.full(_PATTERN)}: expected {n_layers} flags, found {in_words(value)}"
        )
    return _flags(keys.full(_PATTERN), value, n_layers)


def _is_flags(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biu"


def _flags(key: str, value: npt.NDArray[np.generic], count: int) -> tuple[bool, ...]:
    if value.size != count:
        raise GGUFError(f"key {key}: expected {count} entries, found {value.size}")
    flags = value.view(np.uint8) if value.dtype == np.bool_ else value
    for i, flag in enumerate(flags.tolist()):
        if flag not in (0, 1):
            raise GGUFError(f"key {key}[{i}]: expected 0 or 1, found {flag}")
    return tuple(bool(flag) for flag in flags.tolist())


def _target_layers(keys: Keys) -> tuple[int, ...]:
    key, value = keys.full("target_layers"), keys.value("target_layers")
    is_integers = isinstance(value, np.ndarray) and value.dtype.kind in "iu"
    if not is_integers or not 1 <= value.size <= _MAX_TAPS:
        raise GGUFError(f"key {key}: expected 1 to {_MAX_TAPS} layers, found {in_words(value)}")
    return tuple(value.tolist())


def _check_tensors(
    path: str,
    header: Header,
    infos: dict[str, TensorInfo],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, GGUFTensor]:
    missing = [name for name in shapes if name not in infos]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise GGUFError(f"tensor {missing[0]}: missing{more}")
    extra = [show(info.name) for name, info in infos.items() if name not in shapes]
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
        if info.offset % header.alignment:
            raise GGUFError(
                f"tensor {info.name}: expected an offset aligned to {header.alignment}, "
                f"found {info.offset}"
            )
        offset = header.data_offset + info.offset
        if offset + nbytes > header.file_size:
            raise GGUFError(
                f"tensor {info.name}: ends at byte {offset + nbytes}, beyond the end of the file "
                f"({header.file_size})"
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


def _qtype(info: TensorInfo) -> str:
    try:
        qtype = gguf.GGMLQuantizationType(info.type_id).name
    except ValueError:
        qtype = f"unknown type {info.type_id}"
    if qtype not in QTYPES:
        raise GGUFError(
            f"tensor {show(info.name)}: expected one of the types {', '.join(QTYPES)}, "
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
