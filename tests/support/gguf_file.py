"""A writer of GGUF files that can write anything, and the check that a bad one is refused."""

from __future__ import annotations

import random
import struct
import time

import gguf
import numpy as np
import pytest

from glimmer_ops.gguf import GGUFError

U8, I8, U32, I32, F32, BOOL, STR, ARR, U64, F64 = 0, 1, 4, 5, 6, 7, 8, 9, 10, 12
FORMATS = {U8: "<B", I8: "<b", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", F64: "<d"}


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, item):
    if kind == STR:
        return string(item)
    return struct.pack(FORMATS[kind], item)


def array(kind, items):
    return struct.pack("<IQ", kind, len(items)) + b"".join(value(kind, item) for item in items)


def encode_key(name, kind, item):
    body = array(*item) if kind == ARR and isinstance(item, tuple) else item
    if kind != ARR:
        body = value(kind, item)
    return string(name) + struct.pack("<I", kind) + body


def build(keys, tensors, offsets=None, counts=None, alignment=32, version=3):
    """A file of keys {name: (kind, item)}, an array's item being (kind, items) or raw bytes, and of
    tensors [name, row-major shape, type, bytes or None for zeros]; the rest may lie."""
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)
    for name, (kind, item) in keys.items():
        head += encode_key(name, kind, item)
    data = b""
    for name, shape, qtype, content in tensors:
        type_id = qtype if isinstance(qtype, int) else gguf.GGMLQuantizationType[qtype].value
        if content is None:
            block, size = gguf.GGML_QUANT_SIZES.get(type_id, (1, 4))
            content = bytes(int(np.prod(shape)) // block * size)
        offset = (offsets or {}).get(name, len(data))
        head += string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", d) for d in reversed(shape))
        head += struct.pack("<IQ", type_id, offset)
        data += content + bytes(-len(content) % alignment)
    return head + bytes(-len(head) % alignment) + data


def refuse(load, path, words):
    """Asserts that load(path) is refused at once, in one line that names the file and matches."""
    start = time.process_time()
    with pytest.raises(GGUFError, match=words) as caught:
        load(path)
    assert time.process_time() - start < 2
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 900


def load_or_refuse(load, path):
    """Any error but a GGUFError is a fault."""
    try:
        model = load(path)
    except GGUFError:
        return
    for tensor in model.tensors.values():
        assert tensor.raw().nbytes == tensor.nbytes


def flip_header_bits(load, path, size, count):
    """Loads the file with one bit of its first `size` bytes flipped, `count` times."""
    data, rng = path.read_bytes(), random.Random(0)
    with open(path, "r+b", buffering=0) as file:
        for _ in range(count):
            at = rng.randrange(size)
            file.seek(at)
            file.write(bytes([data[at] ^ (1 << rng.randrange(8))]))
            load_or_refuse(load, path)
            file.seek(at)
            file.write(data[at : at + 1])
