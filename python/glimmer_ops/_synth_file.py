"""Writing synthetic GGUF files chunk by chunk: in bounded memory, and whole or not at all."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from .gguf import QTYPES, row_bytes
from .kquant_encode import encode

Progress = Callable[[int, int], None]
Plan = list[tuple[str, tuple[int, ...], str]]
Rows = Callable[[int, int], torch.Tensor]  # (start, stop) -> float32 [stop - start, K]
Bytes = npt.NDArray[np.uint8]

GROUP = 16  # chunks of computed rows begin at a multiple of it
_CHUNK = 1 << 22  # weights drawn and encoded at a time: 16 MB of fp32


def generator(seed: int, *key: int) -> np.random.Generator:
    """An independent stream for each key, so that no draw depends on another's order."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, spawn_key=key)))


def normal(rows: int, k: int, std: float, seed: int, *key: int) -> torch.Tensor:
    """float32 [rows, k] of N(0, std²)."""
    weights = generator(seed, *key).standard_normal((rows, k), dtype=np.float32)
    weights *= np.float32(std)
    return torch.from_numpy(weights)


def uniform_gains(
    size: int, centre: float, spread: float, draw: np.random.Generator
) -> npt.NDArray:
    """float32 [size], uniform in centre ± spread."""
    unit = draw.random(size, dtype=np.float32) * 2 - 1
    return (centre + spread * unit).astype(np.float32)


@dataclass(frozen=True)
class Filling:
    """How the tensors of a file get their weights.

    std(name, K) is that of a matrix, gains(name, size, generator) gives a norm's gains in float32.
    `matrices` and `norms` hold those that are computed instead. repeat: draw only the first chunk
    of a matrix; the rows after it repeat its rows with their super-blocks reordered. stream: set
    apart from other files of the same seed.
    """

    seed: int
    std: Callable[[str, int], float]
    gains: Callable[[str, int, np.random.Generator], npt.NDArray[np.float32]]
    repeat: bool = False
    stream: tuple[int, ...] = ()
    matrices: Mapping[str, Rows] = field(default_factory=dict)
    norms: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def chunks(
        self, drawer: ThreadPoolExecutor, index: int, name: str, shape: tuple[int, ...], qtype: str
    ) -> Iterator[Bytes]:
        """The encoded bytes of tensor number `index`; the next chunk is drawn on `drawer`."""
        key = (*self.stream, index)
        if len(shape) == 1:
            gains = self.norms.get(name)
            if gains is None:
                gains = self.gains(name, shape[0], generator(self.seed, *key))
            return iter([gains.view(np.uint8)])
        rows = max(_CHUNK // shape[1], 1)
        computed = self.matrices.get(name)
        if computed is not None:
            return _encoded(drawer, computed, shape[0], max(rows // GROUP, 1) * GROUP, qtype)
        std = self.std(name, shape[1])

        def draw(start: int, stop: int) -> torch.Tensor:
            return normal(stop - start, shape[1], std, self.seed, *key, start // rows)

        if self.repeat and shape[0] > rows:
            base = next(_encoded(drawer, draw, rows, rows, qtype))
            return _repeated(base, shape, qtype, self.seed, key)
        return _encoded(drawer, draw, shape[0], rows, qtype)


def _encoded(
    drawer: ThreadPoolExecutor, draw: Rows, n: int, rows: int, qtype: str
) -> Iterator[Bytes]:
    """Encoded chunks of `rows` of n rows; the next one is drawn while this one is encoded."""
    spans = [(start, min(start + rows, n)) for start in range(0, n, rows)]
    pending = drawer.submit(draw, *spans[0])
    for i in range(len(spans)):
        weights = pending.result()
        if i + 1 < len(spans):
            pending = drawer.submit(draw, *spans[i + 1])
        yield encode(weights, qtype).numpy()


def _repeated(
    base: Bytes, shape: tuple[int, ...], qtype: str, seed: int, key: tuple[int, ...]
) -> Iterator[Bytes]:
    """The rows of `base`, then the same with their super-blocks reordered, and so on."""
    (n, k), rows = shape, len(base)
    yield base
    block, size = QTYPES[qtype]
    groups = base.reshape(rows, k // 256, 256 // block * size)
    for repeat, start in enumerate(range(rows, n, rows), 1):
        order = generator(seed, *key, repeat).permutation(groups.shape[1])
        yield groups[: min(rows, n - start), order].reshape(-1, base.shape[1])


def nbytes(shape: tuple[int, ...], qtype: str) -> int:
    return math.prod(shape[:-1]) * row_bytes(shape[-1], qtype)


def plan_bytes(tensors: Plan) -> int:
    """Encoded bytes of the tensors of a plan, without header and padding."""
    return sum(nbytes(shape, qtype) for _, shape, qtype in tensors)


def check_place(path: Path, size: int) -> None:
    """Raises OSError where a file of `size` bytes cannot come to lie at `path`."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file name, found a folder")
    free = shutil.disk_usage(path.absolute().parent).free
    if free < size:
        raise OSError(f"{path}: expected {size} bytes of free space, found {free}")


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A hidden file beside `path` to write to: it takes the name at the end, or is removed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write(
    path: Path,
    architecture: str,
    add_keys: Callable[[gguf.GGUFWriter], None],
    tensors: Plan,
    filling: Filling,
    report: Callable[[int], None],
    rename: Callable[[str], str] = str,
) -> None:
    """Writes a file; report(n) is told of every n bytes of tensors, rename(name) spells a name."""
    writer = gguf.GGUFWriter(path, architecture)
    try:
        add_keys(writer)
        for name, shape, qtype in tensors:
            writer.add_tensor_info(
                rename(name),
                shape,
                np.dtype(np.float32),
                nbytes(shape, qtype),
                raw_dtype=gguf.GGMLQuantizationType[qtype],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer, tensors, filling, report)
        writer.close()
    finally:
        # A failed flush inside close must not keep the partial file alive
        with contextlib.suppress(OSError):
            writer.close()


def _write_tensors(
    writer: gguf.GGUFWriter, tensors: Plan, filling: Filling, report: Callable[[int], None]
) -> None:
    # GGUFWriter.write_tensor_data wants a whole tensor at once (the head has 925 MB), so chunks go
    # to its file directly, padded as it pads.
    assert writer.fout is not None
    file = writer.fout[0]
    with ThreadPoolExecutor(1) as drawer:
        for index, (name, shape, qtype) in enumerate(tensors):
            writer.write_padding(file, file.tell())
            for chunk in filling.chunks(drawer, index, name, shape, qtype):
                chunk.tofile(file)
                report(chunk.nbytes)
        writer.write_padding(file, file.tell())


def counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    """report(n) of `write` that tells `progress` (bytes written, bytes in all)."""
    done = 0

    def report(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, total)

    return report
