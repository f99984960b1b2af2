"""GGUF files: header, configuration, tokenizer and the fused graph of what is accepted."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import Target
from ._bytes import edge
from ._bytes import mutate as mutate_bytes

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
KINDS = [*range(13), 13, 255]
TENSOR_TYPES = [0, 1, 2, 8, 12, 13, 14, 30, 31, 0xFFFF]


@dataclass
class Key:
    name: bytes
    kind: int
    payload: bytes  # of an array: item kind, count, items


@dataclass
class Tensor:
    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Document:
    """A file in parts; counts and the number of dimensions may lie when it is written."""

    version: int
    counts: list[int]
    keys: list[Key] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise ValueError("truncated")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def string(self) -> bytes:
        return self.take(self.number(8))

    def payload(self, kind: int) -> bytes:
        begin = self.at
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            item, count = self.number(4), self.number(8)
            if item == STRING:
                for _ in range(count):
                    self.string()
            else:
                self.take(SCALAR_BYTES[item] * count)
        else:
            self.take(SCALAR_BYTES[kind])
        return self.data[begin : self.at]


def parse(data: bytes) -> Document:
    """ValueError or KeyError when it is not even roughly a GGUF file."""
    c = _Cursor(data)
    if c.take(4) != b"GGUF":
        raise ValueError("magic")
    document = Document(c.number(4), [c.number(8), c.number(8)])
    for _ in range(document.counts[1]):
        name, kind = c.string(), c.number(4)
        document.keys.append(Key(name, kind, c.payload(kind)))
    for _ in range(document.counts[0]):
        name, n_dims = c.string(), c.number(4)
        if n_dims > 8:
            raise ValueError("dimensions")
        dims = [c.number(8) for _ in range(n_dims)]
        document.tensors.append(Tensor(name, dims, c.number(4), c.number(8)))
    c.at = min(len(data), c.at + -c.at % 32)
    document.data = data[c.at :]
    return document


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def serialise(document: Document) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", document.version, *document.counts)]
    for key in document.keys:
        parts += [_string(key.name), struct.pack("<I", key.kind), key.payload]
    for t in document.tensors:
        parts += [_string(t.name), struct.pack("<I", len(t.dims))]
        parts += [struct.pack("<Q", d) for d in t.dims]
        parts.append(struct.pack("<IQ", t.kind, t.offset))
    head = b"".join(parts)
    return head + bytes(-len(head) % 32) + document.data


# --- mutations -----------------------------------------------------------------------------------


def _number(rng: random.Random, old: int) -> int:
    if rng.random() < 0.4:
        return max(0, old + rng.choice((-32, -8, -1, 1, 8, 32)))
    return int.from_bytes(edge(rng, 8), "little")


def _counts(document: Document, rng: random.Random) -> None:
    i = rng.randrange(2)
    document.counts[i] = _number(rng, document.counts[i])


def _key_value(document: Document, rng: random.Random) -> None:
    key = rng.choice(document.keys)
    if key.kind == STRING:
        text = mutate_bytes(key.payload[8:], rng)
        length = len(text) if rng.random() < 0.8 else _number(rng, len(text))
        key.payload = struct.pack("<Q", length) + text
    elif key.kind == ARRAY:
        key.payload = _array(key.payload, rng)
    else:
        value = edge(rng, len(key.payload))
        if key.kind in (6, 12) and rng.random() < 0.5:
            number = rng.choice((0.0, -1.0, float("inf"), float("nan"), 1e-45, 1e30))
            value = struct.pack("<f" if key.kind == 6 else "<d", number)
        key.payload = value


def _array(payload: bytes, rng: random.Random) -> bytes:
    item, count = struct.unpack_from("<IQ", payload)
    body = payload[12:]
    kind = rng.randrange(4)
    if kind == 0:
        count = _number(rng, count)
    elif kind == 1:
        item = rng.choice(KINDS)
    elif item == STRING and kind == 2:
        c, strings = _Cursor(body), []
        while c.at < len(body) and len(strings) < count:
            strings.append(c.string())
        if strings:
            i, j = rng.randrange(len(strings)), rng.randrange(len(strings))
            strings[i] = strings[j] if rng.random() < 0.5 else mutate_bytes(strings[i], rng)
        body, count = b"".join(map(_string, strings)), len(strings)
    else:
        body = mutate_bytes(body, rng)
    return struct.pack("<IQ", item, count) + body


def _key_kind(document: Document, rng: random.Random) -> None:
    key = rng.choice(document.keys)
    key.kind = rng.choice(KINDS)
    if key.kind in SCALAR_BYTES and rng.random() < 0.8:
        key.payload = edge(rng, SCALAR_BYTES[key.kind])
    elif key.kind == STRING:
        key.payload = _string(b"none")


def _key_list(document: Document, rng: random.Random) -> None:
    i, j = rng.randrange(len(document.keys)), rng.randrange(len(document.keys))
    key = document.keys[i]
    kind = rng.randrange(4)
    if kind == 0:
        document.keys.insert(j, Key(key.name, key.kind, key.payload))
    elif kind == 1 and len(document.keys) > 1:
        document.keys.pop(i)
    elif kind == 2:
        document.keys[j].kind, document.keys[j].payload = key.kind, key.payload
    else:
        names = (b"general.alignment", b"split.count", b"muse-glimmer.rope.freq_base_swa")
        value = int.from_bytes(edge(rng, 4), "little") if rng.random() < 0.5 else 8
        document.keys.insert(j, Key(rng.choice(names), 4, struct.pack("<I", value)))
    if rng.random() < 0.9:
        document.counts[1] = len(document.keys)


def _tensor(document: Document, rng: random.Random) -> None:
    tensor = rng.choice(document.tensors)
    kind = rng.randrange(5)
    if kind == 0 and tensor.dims:
        i = rng.randrange(len(tensor.dims))
        tensor.dims[i] = _number(rng, tensor.dims[i])
    elif kind == 1:
        tensor.kind = rng.choice(TENSOR_TYPES)
    elif kind == 2:
        tensor.offset = rng.choice((_number(rng, tensor.offset), document.tensors[0].offset))
    elif kind == 3:
        tensor.dims = [_number(rng, 1) for _ in range(rng.randrange(7))]
    else:
        tensor.name = mutate_bytes(tensor.name, rng)


def _tensor_list(document: Document, rng: random.Random) -> None:
    i, j = rng.randrange(len(document.tensors)), rng.randrange(len(document.tensors))
    t = document.tensors[i]
    if rng.random() < 0.5:
        document.tensors.insert(j, Tensor(t.name, list(t.dims), t.kind, t.offset))
    elif len(document.tensors) > 1:
        document.tensors.pop(i)
    if rng.random() < 0.9:
        document.counts[0] = len(document.tensors)


def _data(document: Document, rng: random.Random) -> None:
    document.data = mutate_bytes(document.data, rng)


def _version(document: Document, rng: random.Random) -> None:
    document.version = rng.choice((0, 1, 2, 3, 4, 0x03000000, 0xFFFFFFFF))


MUTATIONS = [_counts, _key_value, _key_value, _key_kind, _key_list, _tensor, _tensor]
MUTATIONS += [_tensor_list, _data, _version]


def mutate(data: bytes, rng: random.Random) -> bytes:
    try:
        document = parse(data)
        if rng.random() < 0.15 or not document.keys or not document.tensors:
            return mutate_bytes(data, rng)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            rng.choice(MUTATIONS)(document, rng)
        return serialise(document)
    except (ValueError, KeyError, struct.error):  # a mutant of a mutant
        return mutate_bytes(data, rng)


# --- target --------------------------------------------------------------------------------------


def prepare(folder: Path) -> Callable[[bytes], None]:
    from glimmer_ops.gguf import load
    from glimmer_ops.lowering import from_gguf
    from glimmer_ops.tokenizer import Tokenizer

    path = folder / "input.gguf"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        model = load(path)
        for key in model.metadata:
            model.metadata[key]
        tokenizer = Tokenizer.from_gguf(model)
        if tokenizer is not None:
            tokenizer.decode(tokenizer.encode("The quick"))
        from_gguf(model)

    return read


def make_seeds() -> dict[str, bytes]:
    small = {"dim": 16, "layers": 2, "heads": 2, "head_dim": 4, "ffn": 8, "vocab": 12}
    blocks = {"dim": 256, "layers": 1, "heads": 1, "head_dim": 2, "ffn": 8, "vocab": 12}
    return {
        "floats.gguf": _seed(small, ("F32", "F16", "BF16"), tokens=True),
        "blocks.gguf": _seed(blocks, ("Q4_K", "Q5_K", "Q6_K"), tokens=False),
    }


def _seed(size: dict[str, int], types: tuple[str, ...], tokens: bool) -> bytes:
    """A model that is accepted, with the fewest bytes."""
    from glimmer_ops.config import ModelConfig, sliding_layers
    from glimmer_ops.gguf import expected_tensors

    config = ModelConfig(
        size["dim"], size["layers"], size["heads"], 1, size["head_dim"], size["ffn"], size["vocab"],
        1e-5, 5e5, 4, sliding_layers(size["layers"], 4), 20.0, 1.0, 1.0, 1.0, 64,
    )  # fmt: skip
    keys = _keys(config) + (_tokenizer(config.vocab_size) if tokens else [])
    return whole(keys, expected_tensors(config), types)


def whole(keys: list[Key], shapes: dict[str, tuple[int, ...]], types: tuple[str, ...]) -> bytes:
    """A file of these keys and of tensors of zeros, and of ones where they are norms."""
    import gguf as package

    from glimmer_ops.gguf import QTYPES

    document = Document(3, [0, 0], keys)
    for i, (name, shape) in enumerate(shapes.items()):
        qtype = types[i % len(types)] if len(shape) == 2 else "F32"
        if shape[-1] % QTYPES[qtype][0]:
            qtype = "F16"
        block, width = QTYPES[qtype]
        values = np.ones(shape, np.float32).tobytes()
        content = values if len(shape) == 1 else bytes(int(np.prod(shape)) // block * width)
        dims = [int(n) for n in reversed(shape)]
        kind = package.GGMLQuantizationType[qtype].value
        document.tensors.append(Tensor(name.encode(), dims, kind, len(document.data)))
        document.data += content + bytes(-len(content) % 32)
    document.counts = [len(document.tensors), len(document.keys)]
    return serialise(document)


def _keys(config) -> list[Key]:
    numbers = {"vocab_size": config.vocab_size}
    floats = {"final_logit_softcapping": config.soft_cap, "logit_scale": config.logit_scale}
    return common_keys("muse-glimmer", config, numbers, floats)


def common_keys(
    architecture: str, config, numbers: dict[str, int], floats: dict[str, float]
) -> list[Key]:
    """What a target and a draft both have, and these."""
    numbers = numbers | {
        "context_length": config.context_length,
        "block_count": config.n_layers,
        "embedding_length": config.dim,
        "feed_forward_length": config.ffn_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.window,
    }
    floats = floats | {
        "attention.layer_norm_rms_epsilon": config.eps,
        "rope.freq_base": config.rope_theta,
    }
    prefix = f"{architecture}.".encode()
    flags = bytes(config.sliding)
    keys = [Key(b"general.architecture", STRING, _string(architecture.encode()))]
    keys += [Key(prefix + n.encode(), 4, struct.pack("<I", v)) for n, v in numbers.items()]
    keys += [Key(prefix + n.encode(), 6, struct.pack("<f", v)) for n, v in floats.items()]
    pattern = struct.pack("<IQ", 7, len(flags)) + flags
    return [*keys, Key(prefix + b"attention.sliding_window_pattern", ARRAY, pattern)]


def _tokenizer(size: int) -> list[Key]:
    tokens = [b"t", b"h", b"e", b"th", b"the", b"<|end|>"]
    tokens += [b"x%d" % i for i in range(size - len(tokens))]
    kinds = [3 if t.startswith(b"<") else 1 for t in tokens]

    def strings(items: list[bytes]) -> bytes:
        return struct.pack("<IQ", STRING, len(items)) + b"".join(map(_string, items))

    name = b"tokenizer.ggml."
    return [
        Key(name + b"model", STRING, _string(b"gpt2")),
        Key(name + b"pre", STRING, _string(b"llama4")),
        Key(name + b"tokens", ARRAY, strings(tokens)),
        Key(name + b"token_type", ARRAY, struct.pack(f"<IQ{size}i", 5, size, *kinds)),
        Key(name + b"merges", ARRAY, strings([b"t h", b"th e"])),
        Key(name + b"eos_token_id", 4, struct.pack("<I", 5)),
    ]


def _refusals() -> tuple[type[Exception], ...]:
    from glimmer_ops.gguf import GGUFError
    from glimmer_ops.tokenizer import TokenizerError

    return GGUFError, TokenizerError


TARGET = Target(
    instrument=(
        "glimmer_ops._gguf_header",
        "glimmer_ops.gguf",
        "glimmer_ops.config",
        "glimmer_ops.tokenizer",
        "gguf",
    ),
    prepare=prepare,
    refusals=_refusals,
    mutate=mutate,
    make_seeds=make_seeds,
    named="input.gguf",
)
