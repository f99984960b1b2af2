"""The GGUF loader: every spelling of a good file, and every way a file can be bad."""

import dataclasses
import functools
import os
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glimmer_ops import synth
from glimmer_ops.config import ModelConfig
from glimmer_ops.gguf import QTYPES, GGUFError, load
from support import gguf_file
from support.gguf_file import ARR, BOOL, F32, F64, I32, STR, U8, U32, U64, encode_key, string

ARCH = "muse-glimmer"
DIM, LAYERS, HEADS, KV, HEAD_DIM, FFN, VOCAB = 256, 6, 2, 1, 128, 512, 16
SLIDING = (True, False, True, True, True, False)  # counted backward with period 4


def base_keys():
    keys = {
        "general.architecture": (STR, ARCH),
        "context_length": (U32, 4096),
        "block_count": (U32, LAYERS),
        "embedding_length": (U32, DIM),
        "feed_forward_length": (U32, FFN),
        "vocab_size": (U32, VOCAB),
        "attention.head_count": (U32, HEADS),
        "attention.head_count_kv": (U32, KV),
        "attention.key_length": (U32, HEAD_DIM),
        "attention.value_length": (U32, HEAD_DIM),
        "attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "attention.sliding_window": (U32, 40),
        "attention.sliding_window_pattern": (ARR, (BOOL, SLIDING)),
        "rope.freq_base": (F32, 5e5),
        "final_logit_softcapping": (F32, 20.0),
        "logit_scale": (F32, 1.0),
    }
    return {k if k.startswith("general.") else f"{ARCH}.{k}": v for k, v in keys.items()}


def base_tensors():
    """[name, row-major shape, type name, bytes or None for zeros]"""
    config = ModelConfig(
        DIM, LAYERS, HEADS, KV, HEAD_DIM, FFN, VOCAB, 1e-5, 5e5, 40, SLIDING, 20.0, 1.0, 1.0, 1.0, 9
    )
    tensors = []
    for name, shape in synth.expected_tensors(config).items():
        qtype = "F32" if len(shape) == 1 else "Q4_K"
        data = None
        if "attn_q_norm" in name:
            data = np.full(shape, 3.87, np.float32).tobytes()
        elif "attn_k_norm" in name:
            data = np.ones(shape, np.float32).tobytes()
        tensors.append([name, shape, qtype, data])
    return tensors


def build(keys=None, tensors=None, **parts):
    keys = base_keys() if keys is None else keys
    return gguf_file.build(keys, base_tensors() if tensors is None else tensors, **parts)


def header_size():
    return len(build()) - sum(
        -(-int(np.prod(s)) // QTYPES[q][0] * QTYPES[q][1] // 32) * 32
        for _, s, q, _ in base_tensors()
    )


@pytest.fixture
def write(tmp_path):
    def write(data=None, **parts):
        path = tmp_path / "some-other-model-q8_0.gguf"  # names mean nothing
        path.write_bytes(build(**parts) if data is None else data)
        return path

    return write


refuse = functools.partial(gguf_file.refuse, load)


def with_key(name, kind, item):
    keys = base_keys()
    keys[name if name.startswith(("general.", "split.")) else f"{ARCH}.{name}"] = (kind, item)
    return {"keys": keys}


def without_key(name):
    keys = base_keys()
    del keys[f"{ARCH}.{name}"]
    return {"keys": keys}


def with_tensor(name, index, item):
    tensors = base_tensors()
    for tensor in tensors:
        if tensor[0] == name:
            tensor[index] = item
    return {"tensors": tensors}


# --- good files ----------------------------------------------------------------------------------


def test_hyper_parameters_and_tensors(write):
    model = load(write())
    config = model.config
    assert (config.dim, config.n_layers, config.n_heads, config.n_kv_heads) == (256, 6, 2, 1)
    assert (config.head_dim, config.ffn_dim, config.vocab_size) == (128, 512, 16)
    assert config.eps == pytest.approx(1e-5) and config.post_eps == 1e-8
    assert (config.rope_theta, config.window, config.soft_cap) == (5e5, 40, 20.0)
    assert (config.logit_scale, config.context_length) == (1.0, 4096)
    assert config.sliding == SLIDING
    assert config.q_scale == pytest.approx(3.87) and config.k_scale == 1.0
    assert config.attn_scale == pytest.approx(3.87 / 128**0.5)
    assert list(model.tensors) == [name for name, *_ in base_tensors()]
    q = model.tensors["blk.3.attn_q.weight"]
    assert (q.shape, q.qtype, q.nbytes) == ((256, 256), "Q4_K", 256 * 144)
    assert model.nbytes == sum(t.nbytes for t in model.tensors.values())
    assert model.metadata["general.architecture"] == ARCH


def test_two_loads_agree(write):
    path = write()
    first, second = load(path), load(str(path))
    assert first.config == second.config and first.tensors == second.tensors


def test_official_shape_is_read_from_its_metadata():
    config = synth.PRESETS["30b"]
    config.validate()
    assert [i for i, kind in enumerate(config.sliding) if not kind] == list(range(3, 52, 4))
    assert config.attn_scale == pytest.approx(0.34206, rel=1e-4)


PATTERNS = {
    "bools": (ARR, (BOOL, SLIDING)),
    "u8 flags": (ARR, (U8, [int(s) for s in SLIDING])),
    "i32 flags": (ARR, (I32, [int(s) for s in SLIDING])),
    "u32 period": (U32, 4),
    "i32 period": (I32, 4),
    "absent": None,
}


@pytest.mark.parametrize("spelling", PATTERNS)
@pytest.mark.parametrize("gate", ["attn_gate", "attn_output_gate"])
def test_every_spelling_gives_the_same_model(write, spelling, gate):
    plain = load(write())
    keys = base_keys()
    if PATTERNS[spelling] is None:
        del keys[f"{ARCH}.attention.sliding_window_pattern"]
    else:
        keys[f"{ARCH}.attention.sliding_window_pattern"] = PATTERNS[spelling]
    tensors = base_tensors()
    for tensor in tensors:
        tensor[0] = tensor[0].replace("attn_gate", gate)
    model = load(write(keys=keys, tensors=tensors))
    assert model.config == plain.config
    assert list(model.tensors) == list(plain.tensors)
    assert {n: t.qtype for n, t in model.tensors.items()} == {
        n: t.qtype for n, t in plain.tensors.items()
    }


def test_a_period_counts_backward_from_the_last_layer(write):
    model = load(write(**with_key("attention.sliding_window_pattern", U32, 3)))
    assert model.config.sliding == (True, True, False, True, True, False)


def test_rope_freqs_is_ignored_and_order_does_not_matter(write):
    tensors = base_tensors()[::-1] + [["rope_freqs.weight", (64,), "F32", None]]
    model = load(write(tensors=tensors))
    assert len(model.tensors) == len(base_tensors())


def test_vocab_size_comes_from_the_embedding_where_no_key_tells_it(write):
    assert load(write(**without_key("vocab_size"))).config.vocab_size == VOCAB


def test_rope_base_of_sliding_layers_wins(write):
    model = load(write(**with_key("rope.freq_base_swa", F32, 1e4)))
    assert model.config.rope_theta == 1e4


def test_alignment_key_is_honoured(write):
    keys = {**base_keys(), "general.alignment": (U32, 256)}
    model = load(write(keys=keys, alignment=256))
    assert all(t.offset % 256 == 0 for t in model.tensors.values())


@pytest.mark.parametrize("qtype", QTYPES)
def test_every_weight_type_maps_its_own_bytes(write, qtype):
    block, size = QTYPES[qtype]
    data = np.random.default_rng(0).integers(0, 256, 512 * 256 // block * size, np.uint8)
    tensors = base_tensors()
    for tensor in tensors:
        if tensor[0] == "blk.1.ffn_up.weight":
            tensor[2:] = [qtype, data.tobytes()]
    path = write(tensors=tensors)
    tensor = load(path).tensors["blk.1.ffn_up.weight"]
    raw = tensor.raw()
    assert raw.shape == (512, 256 // block * size) and raw.dtype == np.uint8
    np.testing.assert_array_equal(raw.ravel(), data)
    # copy-on-write: neither the file nor a second map changes
    raw[:] = 0
    np.testing.assert_array_equal(tensor.raw().ravel(), data)
    assert load(path).tensors["blk.1.ffn_up.weight"].raw().tobytes() == data.tobytes()


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16"])
def test_norms_of_every_float_type_become_float32(write, qtype):
    gains = np.linspace(-2, 2, DIM).astype(np.float32)
    gains = (gains.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in bf16
    if qtype == "F16":
        gains = gains.astype(np.float16).astype(np.float32)
        data = gains.astype(np.float16).tobytes()
    elif qtype == "BF16":
        data = (gains.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        data = gains.tobytes()
    tensors = base_tensors()
    for tensor in tensors:
        if tensor[0] == "output_norm.weight":
            tensor[2:] = [qtype, data]
    tensor = load(write(tensors=tensors)).tensors["output_norm.weight"]
    got = tensor.float32()
    assert got.dtype == np.float32 and got.shape == (DIM,)
    np.testing.assert_array_equal(got, gains)
    assert tensor.raw().shape == (1, tensor.nbytes)


def test_float32_of_a_quantised_tensor_is_refused(write):
    tensor = load(write()).tensors["output.weight"]
    with pytest.raises(GGUFError, match="output.weight: expected F32, F16 or BF16, found Q4_K"):
        tensor.float32()


def test_a_file_that_shrinks_after_loading_is_refused_by_name(write):
    path = write()
    model = load(path)
    os.truncate(path, model.tensors["output.weight"].offset + 8)
    for call in (model.tensors["output.weight"].raw, model.tensors["output_norm.weight"].float32):
        if call.__name__ == "float32":
            os.truncate(path, 100)
        with pytest.raises(GGUFError, match="output.*weight"):
            call()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_keeps_nothing_of_the_file_mapped(write):
    path = write()
    model = load(path)
    assert str(path) not in Path("/proc/self/maps").read_text()
    raw = model.tensors["output.weight"].raw()
    assert str(path) in Path("/proc/self/maps").read_text()
    del raw


def test_a_vocabulary_of_200k_tokens_loads_quickly(write):
    keys = base_keys()
    tokens = [f"token{i}" for i in range(202048)]
    keys["tokenizer.ggml.tokens"] = (ARR, (STR, tokens))
    keys["tokenizer.ggml.token_type"] = (ARR, (I32, [1] * len(tokens)))
    keys["tokenizer.ggml.merges"] = (ARR, (STR, ["a b"] * 400_000))
    path = write(keys=keys)
    start = time.process_time()
    model = load(path)
    assert model.metadata["tokenizer.ggml.tokens"] == tokens
    assert model.metadata["tokenizer.ggml.token_type"].sum() == len(tokens)
    assert len(model.metadata["tokenizer.ggml.merges"]) == 400_000
    assert time.process_time() - start < 3


# --- bad metadata --------------------------------------------------------------------------------

REQUIRED = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "attention.sliding_window",
    "final_logit_softcapping",
    "logit_scale",
    "context_length",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(write, key):
    refuse(write(**without_key(key)), f"key {ARCH}.{key}: missing")


BAD_KEYS = [
    ("general.architecture", STR, "llama", "general.architecture: expected muse-glimmer, found ll"),
    ("general.alignment", U32, 48, "alignment"),
    ("general.alignment", U32, 0, "alignment"),
    ("general.alignment", U32, 4, "general.alignment: expected a multiple of 8, found 4"),
    ("general.alignment", STR, "32", "alignment"),
    ("general.architecture", ARR, (U32, [1, 2]), "expected muse-glimmer, found an array of 2"),
    ("rope.scaling.type", ARR, (U32, [1, 2]), "type: expected none, found an array of 2 uint32"),
    ("split.count", U32, 4, "split.count: expected one file"),
    ("split.count", ARR, (U32, [0, 1]), "split.count: expected one file, found an array of 2"),
    ("block_count", U32, 0, "block_count: expected an integer of 1 to .*, found 0"),
    ("block_count", I32, -6, "block_count: expected an integer .*, found -6"),
    ("block_count", U32, 5, "sliding_window_pattern: expected 5 entries, found 6"),
    ("block_count", U32, 2**31 - 1, "block_count: expected at most the number of tensors"),
    ("block_count", U64, 2**63, "block_count: expected an integer"),
    ("block_count", F32, 6.0, "block_count: expected an integer .*, found 6.0"),
    ("block_count", BOOL, 1, "block_count: expected an integer .*, found True"),
    ("block_count", STR, "6", "block_count: expected an integer .*, found '6'"),
    ("attention.head_count", ARR, (U32, [2] * 6), "head_count: .*, found an array of 6 uint32"),
    ("attention.head_count", U32, 3, r"blk.0.attn_q.weight: expected shape \[384, 256\]"),
    ("attention.head_count_kv", U32, 3, r"n_heads: expected a multiple of n_kv_heads \(3\)"),
    ("attention.key_length", U32, 127, "value_length: expected attention.key_length .127."),
    ("attention.value_length", U32, 64, r"value_length: expected .*\(128\), found 64"),
    ("rope.dimension_count", U32, 64, "rope.dimension_count: expected .*128.*found 64"),
    ("rope.scaling.type", STR, "yarn", "rope.scaling.type: expected none, found yarn"),
    ("vocab_size", U32, 17, r"vocab_size: expected the rows of token_embd.weight \(16\), found 17"),
    ("attention.layer_norm_rms_epsilon", F32, 0.0, "epsilon: expected a finite positive"),
    ("attention.layer_norm_rms_epsilon", F32, float("nan"), "epsilon: expected a finite positive"),
    ("rope.freq_base", F32, float("inf"), "freq_base: expected a finite positive"),
    ("rope.freq_base", BOOL, 1, "freq_base: expected a number, found True"),
    ("logit_scale", F32, -1.0, "logit_scale: expected a finite positive number, found -1.0"),
    ("final_logit_softcapping", STR, "20", "softcapping: expected a number, found '20'"),
    ("attention.sliding_window", U32, 0, "window: expected at least 1"),
    ("attention.sliding_window_pattern", ARR, (BOOL, SLIDING[:5]), "expected 6 entries, found 5"),
    ("attention.sliding_window_pattern", ARR, (BOOL, SLIDING + (True,)), "6 entries, found 7"),
    ("attention.sliding_window_pattern", ARR, (U32, [0, 1, 2, 1, 1, 0]), r"\[2\]: expected 0 or 1"),
    ("attention.sliding_window_pattern", ARR, (BOOL, [0, 1, 1, 1, 7, 0]), r"\[4\]: expected 0 or"),
    ("attention.sliding_window_pattern", ARR, (F32, [1.0] * 6), "an array of 6 float32"),
    ("attention.sliding_window_pattern", U32, 0, "positive period, found 0"),
    ("attention.sliding_window_pattern", BOOL, 1, "positive period, found True"),
    ("attention.sliding_window_pattern", STR, "4", "positive period, found '4'"),
]


@pytest.mark.parametrize(("key", "kind", "item", "words"), BAD_KEYS)
def test_a_bad_key_is_named_with_what_was_found(write, key, kind, item, words):
    refuse(write(**with_key(key, kind, item)), words)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (5, "unexpected tensors: blk.5.attn_norm.weight"),
        (7, r"tensor blk.6.attn_norm.weight: missing \(and 13 more\)"),
    ],
)
def test_tensors_must_be_those_of_block_count_layers(write, count, words):
    keys = {**base_keys(), f"{ARCH}.block_count": (U32, count)}
    del keys[f"{ARCH}.attention.sliding_window_pattern"]
    refuse(write(keys=keys), words)


def test_no_key_is_taken_from_another_architecture(write):
    keys = {k.replace(ARCH, "llama"): v for k, v in base_keys().items()}
    refuse(write(keys=keys), f"key {ARCH}.block_count: missing")


def test_odd_head_dim_is_refused(write):
    keys = base_keys()
    for key in ("key_length", "value_length"):
        keys[f"{ARCH}.attention.{key}"] = (U32, 127)
    refuse(write(keys=keys), "head_dim: expected an even number, found 127")


# --- bad tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [t[0] for t in base_tensors() if ".2." in t[0] or "blk" not in t[0]]
)
def test_a_missing_tensor_is_named(write, name):
    tensors = [t for t in base_tensors() if t[0] != name]
    refuse(write(tensors=tensors), f"tensor {name}: missing")


@pytest.mark.parametrize("kind", ["attn_q_norm", "attn_k_norm"])
def test_missing_qk_norms_are_named(write, kind):
    tensors = [t for t in base_tensors() if kind not in t[0]]
    refuse(write(tensors=tensors), rf"tensor blk.0.{kind}.weight: missing \(and 5 more\)")


@pytest.mark.parametrize(
    "name", [t[0] for t in base_tensors() if ".2." in t[0] or "blk" not in t[0]]
)
def test_a_wrong_shape_is_named(write, name):
    shape = next(t[1] for t in base_tensors() if t[0] == name)
    wrong = (shape[0] + 1, *shape[1:])
    words = f"tensor {name}: expected shape .*found .{wrong[0]}"
    if name == "token_embd.weight":
        words = "vocab_size: expected the rows of token_embd.weight .17., found 16"
    refuse(write(**with_tensor(name, 1, wrong)), words)


@pytest.mark.parametrize(
    ("name", "index", "item", "words"),
    [
        ("output.weight", 2, "Q3_K", "tensor output.weight: expected one of the types Q4_K.* Q3_K"),
        ("output.weight", 2, "IQ4_NL", "tensor output.weight: .*found IQ4_NL"),
        ("output.weight", 2, 999, "tensor output.weight: .*found unknown type 999"),
        (
            "output_norm.weight",
            2,
            "Q4_K",
            "output_norm.weight: expected F32, F16 or BF16, found Q4",
        ),
        ("output_norm.weight", 1, (1, DIM), r"expected shape \[256\], found \[1, 256\]"),
        ("token_embd.weight", 1, (VOCAB * DIM,), "token_embd.weight: expected 2 dimensions"),
        ("output.weight", 1, (1, 1, 1, VOCAB, DIM), "output.weight: expected at most 4 dimensions"),
        ("blk.4.attn_k.weight", 0, "blk.4.attn_v.weight", "blk.4.attn_v.weight: duplicate"),
        ("blk.4.attn_k.weight", 0, "blk.4.attn_k.bias", "tensor blk.4.attn_k.weight: missing"),
        ("blk.4.attn_k.weight", 0, "", "tensor blk.4.attn_k.weight: missing"),
    ],
)
def test_a_bad_tensor_is_named(write, name, index, item, words):
    refuse(write(**with_tensor(name, index, item)), words)


def test_unexpected_tensors_are_listed(write):
    extra = [[f"blk.0.extra{i}.weight", (DIM,), "F32", None] for i in range(20)]
    path = write(tensors=base_tensors() + extra)
    refuse(path, "unexpected tensors: blk.0.extra0.weight, .*extra7.weight and 12 more")


def test_unprintable_and_long_names_are_shown_safely(write):
    extra = [["evil\n\x1b[2Jname", (1,), "F32", None], ["x" * 5000, (1,), "F32", None]]
    refuse(write(tensors=base_tensors() + extra), r"unexpected tensors: 'evil\\n\\x1b\[2Jname'")


def test_both_gate_spellings_of_one_layer_are_a_duplicate(write):
    extra = [["blk.2.attn_output_gate.weight", (256, DIM), "Q4_K", None]]
    refuse(
        write(tensors=base_tensors() + extra),
        r"blk.2.attn_output_gate.weight: duplicate \(the file also holds blk.2.attn_gate.weight\)",
    )


@pytest.mark.parametrize(("qtype", "dim", "block"), [("Q4_K", 320, 256), ("Q8_0", 272, 32)])
def test_rows_that_are_no_multiple_of_the_block_are_refused(write, qtype, dim, block):
    keys = base_keys()
    keys[f"{ARCH}.embedding_length"] = (U32, dim)
    tensors = base_tensors()
    for tensor in tensors:
        tensor[1] = tuple(dim if d == DIM and "ffn" not in tensor[0] else d for d in tensor[1])
        if tensor[0] == "token_embd.weight":
            tensor[1:3] = [(VOCAB, dim), qtype]
        elif len(tensor[1]) == 2:
            tensor[2] = "F16"
    refuse(
        write(keys=keys, tensors=tensors),
        f"token_embd.weight: expected rows of a multiple of {block} weights for {qtype}, "
        f"found {dim}",
    )


@pytest.mark.parametrize("layer", [0, 3, 5])
@pytest.mark.parametrize("kind", ["attn_q_norm", "attn_k_norm"])
@pytest.mark.parametrize("bad", [1.25, float("nan")])
def test_uneven_qk_norms_are_refused(write, layer, kind, bad):
    gains = np.full(HEAD_DIM, 3.87 if kind == "attn_q_norm" else 1.0, np.float32)
    gains[77] = bad
    path = write(**with_tensor(f"blk.{layer}.{kind}.weight", 3, gains.tobytes()))
    refuse(path, f"blk.{layer}.{kind}.weight: expected .* of every layer, found {bad} at 77")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_qk_scale_must_be_finite_and_positive(write, value):
    tensors = base_tensors()
    for tensor in tensors:
        if "attn_k_norm" in tensor[0]:
            tensor[3] = np.full(HEAD_DIM, value, np.float32).tobytes()
    refuse(write(tensors=tensors), "attn_k_norm.weight: expected")


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (1 << 40, "output.weight: ends at byte .* beyond the end of the file"),
        (2**64 - 32, "output.weight: ends at byte .* beyond the end of the file"),
        (33, "output.weight: expected an offset aligned to 32, found 33"),
        (0, "overlaps tensor"),
    ],
)
def test_bad_offsets_are_named(write, offset, words):
    refuse(write(offsets={"output.weight": offset}), words)


def test_last_tensor_one_byte_short(write):
    data = build()
    path = write(data[: len(data) - 32])
    refuse(path, "output.weight: ends at byte .* beyond the end of the file")


# --- bad headers ---------------------------------------------------------------------------------


def test_every_truncation_is_refused(write, tmp_path):
    data = build()
    size = header_size()
    path = write(data)
    cuts = {*range(0, 400), *range(400, size, 13), *range(size - 40, size + 40)}
    cuts |= {len(data) - 1 - 9973 * i for i in range(0, (len(data) - size) // 9973, 4)}
    for cut in sorted(cuts, reverse=True):
        os.truncate(path, cut)
        with pytest.raises(GGUFError):
            load(path)


def test_empty_missing_and_special_files(tmp_path):
    empty = tmp_path / "empty.gguf"
    empty.touch()
    refuse(empty, "truncated")
    refuse(tmp_path / "absent.gguf", "cannot read: No such file")
    refuse(tmp_path, "expected a regular file")
    os.mkfifo(tmp_path / "fifo")
    refuse(tmp_path / "fifo", "expected a regular file")


def test_other_formats_versions_and_byte_orders(write):
    data = build()
    refuse(write(b"GGML" + data[4:]), "magic")
    refuse(write(build(version=1)), "version 1")
    refuse(write(build(version=77)), "version 77")
    big = b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + data[24:]
    refuse(write(big), "byte order: expected little-endian, found big-endian")


HUGE = [1 << 16 | 1, 1 << 24, 1 << 33, 1 << 62, 2**63, 2**64 - 1]


@pytest.mark.parametrize("count", HUGE)
def test_huge_counts_fail_fast(write, count):
    good = build()
    refuse(write(build(counts=(count, len(base_keys())))), "tensor count|truncated|malformed")
    refuse(write(build(counts=(len(base_tensors()), count))), "key count|truncated|malformed")
    for kind in (STR, U8, I32, F64):
        keys = base_keys()
        keys["tokenizer.ggml.tokens"] = (ARR, struct.pack("<IQ", kind, count) + b"abcd" * 8)
        # The smallest count fits a file of this size: what follows the array is then misread
        words = "arrays of at most|truncated|malformed" if count > 1 << 17 else "header|key|tensor"
        refuse(write(keys=keys), words)
    at = good.index(b"general.architecture") - 8
    refuse(write(good[:at] + struct.pack("<Q", count) + good[at + 8 :]), "truncated|at most|malf")
    at = good.index(b"output.weight") + len(b"output.weight") + 4
    refuse(write(good[:at] + struct.pack("<Q", count) + good[at + 8 :]), "output.weight: expected")


@pytest.mark.parametrize("count", [1 << 40, 1 << 62])
def test_huge_counts_fail_fast_in_a_file_that_is_long_enough(write, count):
    """Zeros to 32 GB (sparse): lengths that the file could hold are bounded all the same."""
    for data in (
        b"GGUF" + struct.pack("<IQQ", 3, count, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, count),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", ARR, STR, count),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IQ", STR, 1 << 34),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 34),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 15, 0),
    ):
        path = write(data)
        os.truncate(path, 1 << 35)
        refuse(path, "at most|missing|general.architecture|duplicate|Duplicate")


def test_nested_arrays_are_refused_without_recursion(write):
    nested = struct.pack("<IQ", ARR, 1) * 50_000 + struct.pack("<IQ", U8, 0)
    refuse(write(keys={**base_keys(), "deep": (ARR, nested)}), "arrays of ARRAY are not supported")


def test_bad_value_types_duplicate_keys_and_bad_text(write):
    one_more = build(counts=(len(base_tensors()), len(base_keys()) + 1))
    odd = string("odd") + struct.pack("<I", 77)
    refuse(write(one_more[:24] + odd + one_more[24:]), "77 is not a valid GGUFValueType")
    extra = encode_key(f"{ARCH}.block_count", U32, 9)
    refuse(write(one_more[:24] + extra + one_more[24:]), f"Duplicate {ARCH}.block_count")
    refuse(write(keys={b"\xff\xfe": (U32, 1), **base_keys()}), "utf-8")
    refuse(write(**with_key("general.architecture", STR, b"\xff")), "general.architecture: expec")


def test_byte_flips_in_the_header_raise_nothing_else(write):
    path = write(build())
    gguf_file.flip_header_bits(load, path, header_size(), 700)
    assert load(path).config.n_layers == LAYERS


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.integers(0, header_size() - 1), st.binary(min_size=1, max_size=9)),
        min_size=1,
        max_size=4,
    )
)
def test_overwritten_header_bytes_raise_nothing_else(write, patches):
    data = bytearray(build())
    for at, patch in patches:
        data[at : at + len(patch)] = patch
    gguf_file.load_or_refuse(load, write(bytes(data)))


# --- config --------------------------------------------------------------------------------------

GOOD = synth.PRESETS["tiny"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 0}, "dim: expected an integer of at least 1, found 0"),
        ({"n_layers": True}, "n_layers: expected an integer"),
        ({"head_dim": 127}, "head_dim: expected an even number, found 127"),
        ({"n_heads": 7}, r"n_heads: expected a multiple of n_kv_heads \(2\), found 7"),
        ({"window": 0}, "window: expected at least 1"),
        ({"window": -1}, "window: expected an integer of at least 0, found -1"),
        ({"sliding": (True,)}, r"sliding: expected n_layers \(6\) entries, found 1"),
        ({"sliding": (1,) * 6}, r"sliding\[0\]: expected a bool, found 1"),
        ({"eps": 0.0}, "eps: expected a finite positive number, found 0.0"),
        ({"rope_theta": float("inf")}, "rope_theta: expected a finite positive number"),
        ({"soft_cap": float("nan")}, "soft_cap: expected a finite positive number"),
        ({"q_scale": "3.87"}, "q_scale: expected a number, found '3.87'"),
        ({"context_length": 2.5}, "context_length: expected an integer"),
    ],
)
def test_config_validation_names_the_field(changes, words):
    GOOD.validate()
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(GOOD, **changes).validate()


def test_a_model_of_global_layers_needs_no_window():
    dataclasses.replace(GOOD, sliding=(False,) * 6, window=0).validate()
