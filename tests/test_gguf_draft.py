"""The loader of draft models' files: every spelling of a good one, every way one can be bad."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glimmer_ops.config import DraftConfig, check_draft
from glimmer_ops.gguf import (
    QTYPES,
    GGUFDraft,
    GGUFError,
    GGUFModel,
    expected_draft_tensors,
    load,
    load_draft,
    load_either,
)
from glimmer_ops.synth import PRESETS
from glimmer_ops.synth_draft import DRAFT_PRESETS
from support import gguf_file
from support.gguf_file import ARR, BOOL, F32, F64, I8, I32, STR, U8, U32, U64, array

ARCH = "dflash"
MASK = "tokenizer.ggml.mask_token_id"
PATTERN, WINDOW = "attention.sliding_window_pattern", "attention.sliding_window"
DIM, LAYERS, HEADS, KV, HEAD_DIM, FFN = 256, 3, 4, 2, 64, 512
SLIDING, TAPS = (True, False, True), (1, 4)
CONFIG = DraftConfig(
    DIM, LAYERS, HEADS, KV, HEAD_DIM, FFN, 1e-5, 5e5, 40, SLIDING, 8, TAPS, 15, 4096
)
refuse = functools.partial(gguf_file.refuse, load_draft)


def full(key):
    absolute = key.startswith(("general.", "split.", "tokenizer."))
    return key if absolute else f"{ARCH}.{key}"


def base_keys():
    keys = {
        "general.architecture": (STR, ARCH),
        "context_length": (U32, 4096),
        "block_count": (U32, LAYERS),
        "embedding_length": (U32, DIM),
        "feed_forward_length": (U32, FFN),
        "attention.head_count": (U32, HEADS),
        "attention.head_count_kv": (U32, KV),
        "attention.key_length": (U32, HEAD_DIM),
        "attention.value_length": (U32, HEAD_DIM),
        "attention.layer_norm_rms_epsilon": (F32, 1e-5),
        WINDOW: (U32, 40),
        PATTERN: (ARR, (BOOL, SLIDING)),
        "rope.freq_base": (F32, 5e5),
        "block_size": (U32, 8),
        "target_layers": (ARR, (I32, TAPS)),
        MASK: (U32, 15),
    }
    return {full(name): item for name, item in keys.items()}


def base_tensors():
    """[name, row-major shape, type name, bytes or None for zeros]"""
    shapes = expected_draft_tensors(CONFIG)
    return [[n, shape, "F32" if len(shape) == 1 else "Q4_K", None] for n, shape in shapes.items()]


def build(keys=None, tensors=None, **parts):
    keys = base_keys() if keys is None else keys
    return gguf_file.build(keys, base_tensors() if tensors is None else tensors, **parts)


def header_size():
    shapes = expected_draft_tensors(CONFIG).values()
    return len(build()) - sum(n[0] * (n[1] // 256 * 144 if len(n) == 2 else 4) for n in shapes)


@pytest.fixture
def write(tmp_path):
    def write(data=None, **parts):
        path = tmp_path / "some-other-model-q8_0.gguf"  # names mean nothing
        path.write_bytes(build(**parts) if data is None else data)
        return path

    return write


def with_keys(**changes):
    """Keys by name with "__" for "."; None leaves one out."""
    keys = base_keys()
    for name, item in changes.items():
        name = full(name.replace("__", "."))
        if item is None:
            del keys[name]
        else:
            keys[name] = item
    return {"keys": keys}


def with_key(name, kind, item):
    return {"keys": base_keys() | {full(name): (kind, item)}}


def with_tensor(name, index, item):
    tensors = base_tensors()
    for tensor in tensors:
        if tensor[0] == name:
            tensor[index] = item
    return {"tensors": tensors}


# --- good files ----------------------------------------------------------------------------------


def test_hyper_parameters_and_tensors(write):
    path = write()
    draft = load_draft(path)
    config = draft.config
    assert config == DraftConfig(**vars(CONFIG) | {"eps": np.float32(1e-5).item()})
    assert config.attn_scale == 1 / 8
    assert draft.path == str(path)
    shapes = {name: tensor.shape for name, tensor in draft.tensors.items()}
    assert list(shapes) == [name for name, *_ in base_tensors()]
    assert len(shapes) == 3 + 11 * LAYERS
    assert shapes["fc.weight"] == (DIM, 2 * DIM)
    assert shapes["enc.output_norm.weight"] == shapes["output_norm.weight"] == (DIM,)
    assert shapes["blk.2.attn_q.weight"] == (256, DIM)
    assert shapes["blk.2.attn_v.weight"] == (128, DIM)
    assert shapes["blk.0.attn_k_norm.weight"] == (HEAD_DIM,)
    assert shapes["blk.0.ffn_down.weight"] == (DIM, FFN)
    assert draft.nbytes == sum(t.nbytes for t in draft.tensors.values())
    assert draft.metadata["dflash.block_size"] == 8


def test_official_shape():
    config = DRAFT_PRESETS["30b"]
    config.validate()
    check_draft(config, PRESETS["30b"])
    shapes = expected_draft_tensors(config)
    assert shapes["fc.weight"] == (6656, 33280) and len(shapes) == 58
    assert config.target_layers == (2, 14, 26, 38, 50) and config.window == 2048


@pytest.mark.parametrize(
    ("changes", "window", "sliding"),
    [
        ({}, 40, SLIDING),
        ({PATTERN: (ARR, (U8, [1, 0, 1]))}, 40, SLIDING),
        ({PATTERN: (ARR, (I32, [1, 0, 1]))}, 40, SLIDING),
        ({PATTERN: None}, 40, (True,) * 3),
        ({PATTERN: None, WINDOW: None}, 0, (False,) * 3),
        ({PATTERN: (ARR, (BOOL, [0] * 3)), WINDOW: None}, 0, (False,) * 3),
        ({PATTERN: (ARR, (BOOL, [0] * 3)), WINDOW: (U32, 0)}, 0, (False,) * 3),
    ],
)
def test_layer_kinds(write, changes, window, sliding):
    config = load_draft(write(**with_keys(**changes))).config
    assert (config.window, config.sliding) == (window, sliding)


@pytest.mark.parametrize("kind", [U8, I8, I32, U32, U64])
def test_every_type_of_integer_is_a_layer(write, kind):
    draft = load_draft(write(**with_key("target_layers", ARR, (kind, TAPS))))
    assert draft.config.target_layers == TAPS
    assert all(type(layer) is int for layer in draft.config.target_layers)


def test_optional_keys_and_ignored_tensors(write):
    tensors = base_tensors()[::-1] + [["rope_freqs.weight", (64,), "F32", None]]
    parts = with_keys(attention__value_length=None, general__name=(STR, "x"))
    draft = load_draft(write(tensors=tensors, **parts))
    assert list(draft.tensors) == [name for name, *_ in base_tensors()]


@pytest.mark.parametrize("qtype", QTYPES)
def test_every_weight_type_maps_its_own_bytes(write, qtype):
    block, size = QTYPES[qtype]
    data = np.random.default_rng(0).integers(0, 256, DIM * 2 * DIM // block * size, np.uint8)
    tensors = base_tensors()
    tensors[0][2:] = [qtype, data.tobytes()]
    tensor = load_draft(write(tensors=tensors)).tensors["fc.weight"]
    assert (tensor.qtype, tensor.shape) == (qtype, (DIM, 2 * DIM))
    np.testing.assert_array_equal(tensor.raw().ravel(), data)


def test_qk_gains_differ_by_dimension(write):
    gains = np.linspace(0.5, 2, HEAD_DIM, dtype=np.float32)
    path = write(**with_tensor("blk.1.attn_q_norm.weight", 3, gains.tobytes()))
    np.testing.assert_array_equal(
        load_draft(path).tensors["blk.1.attn_q_norm.weight"].float32(), gains
    )


# --- which kind of file --------------------------------------------------------------------------


def test_each_loader_refuses_the_others_file(write, tiny_gguf):
    target = tiny_gguf("Q4_K_M").path
    refuse(target, "architecture: expected dflash, found muse-glimmer, a target model")
    draft = write()
    words = "architecture: expected muse-glimmer, found dflash, a draft model"
    gguf_file.refuse(load, draft, words)
    assert isinstance(load_either(draft), GGUFDraft)
    assert isinstance(load_either(target), GGUFModel)
    llama = write(**with_key("general.architecture", STR, "llama"))
    refuse(llama, "architecture: expected dflash, found llama$")
    gguf_file.refuse(load_either, llama, "architecture: expected muse-glimmer, found llama$")


def test_no_key_is_taken_from_another_architecture(write):
    keys = {k.replace(ARCH, "muse-glimmer"): v for k, v in base_keys().items()}
    refuse(write(keys=keys | {"general.architecture": (STR, ARCH)}), "dflash.block_count: missing")


# --- bad metadata --------------------------------------------------------------------------------

OPTIONAL = {WINDOW, PATTERN, "attention.value_length"}


@pytest.mark.parametrize(
    "key", [k for k in base_keys() if k.removeprefix(f"{ARCH}.") not in OPTIONAL]
)
def test_a_missing_key_is_named(write, key):
    keys = base_keys()
    del keys[key]
    missing = "expected dflash, found nothing" if key.startswith("general") else "missing"
    refuse(write(keys=keys), f"key {key}: {missing}")


BAD_KEYS = [
    ("general.alignment", U32, 4, "general.alignment: expected a multiple of 8, found 4"),
    ("split.count", U32, 4, "split.count: expected one file, found 4 parts"),
    ("block_count", U32, 0, "block_count: expected an integer of 1 to .*, found 0"),
    ("block_count", U32, 1 << 30, "block_count: expected at most the number of tensors .36."),
    ("block_count", STR, "3", "block_count: expected an integer .*, found '3'"),
    ("embedding_length", U32, 512, r"fc.weight: expected shape \[512, 1024\], found \[256, 512\]"),
    ("feed_forward_length", U32, 256, r"blk.0.ffn_gate.weight: expected shape \[256, 256\]"),
    ("attention.head_count", U32, 6, r"blk.0.attn_q.weight: expected shape \[384, 256\]"),
    ("attention.head_count", U32, 3, r"n_heads: expected a multiple of n_kv_heads \(2\), found 3"),
    ("attention.head_count_kv", U32, 4, r"blk.0.attn_k.weight: expected shape \[256, 256\]"),
    ("attention.key_length", U32, 32, "value_length: expected attention.key_length .32., found 64"),
    ("attention.value_length", U32, 32, r"value_length: expected .*\(64\), found 32"),
    ("rope.dimension_count", U32, 32, "rope.dimension_count: expected .*64.*found 32"),
    ("rope.scaling.type", STR, "yarn", "rope.scaling.type: expected none, found yarn"),
    ("rope.freq_base", F32, -1.0, "freq_base: expected a finite positive number, found -1.0"),
    ("rope.freq_base", F64, float("inf"), "freq_base: expected a finite positive number"),
    ("attention.layer_norm_rms_epsilon", F32, float("nan"), "epsilon: expected a finite positive"),
    ("context_length", U32, 0, "context_length: expected an integer of 1"),
    ("block_size", U32, 1, "block_size: expected an integer of 2 to 16, found 1"),
    ("block_size", U32, 17, "block_size: expected an integer of 2 to 16, found 17"),
    ("block_size", BOOL, 1, "block_size: expected an integer of 2 to 16, found True"),
    ("block_size", ARR, (U32, [8]), "block_size: .*found an array of 1 uint32"),
    ("target_layers", U32, 1, "target_layers: expected 1 to 64 layers, found 1"),
    ("target_layers", ARR, (I32, []), "target_layers: .*, found an array of 0 int32"),
    ("target_layers", ARR, (I32, range(65)), "target_layers: .*, found an array of 65 int32"),
    ("target_layers", ARR, (F32, [1, 4]), "target_layers: .*, found an array of 2 float32"),
    ("target_layers", ARR, (BOOL, [0, 1]), "target_layers: .*, found an array of 2 bool"),
    ("target_layers", ARR, (STR, ["1"]), "target_layers: .*, found an array of 1 strings"),
    ("target_layers", ARR, (I32, [4, 1]), r"target_layers: expected ascending .*\[4, 1\]"),
    ("target_layers", ARR, (I32, [1, 1]), r"target_layers: expected ascending .*\[1, 1\]"),
    (
        "target_layers",
        ARR,
        (I32, [-1, 1]),
        r"target_layers\[0\]: expected an integer of at least 0, found -1",
    ),
    ("target_layers", ARR, (I32, [1, 2, 3]), r"fc.weight: expected shape \[256, 768\]"),
    (MASK, I32, -1, "mask_token_id: expected an integer of 0 to .*, found -1"),
    (MASK, STR, "<mask>", "mask_token_id: expected an integer .*, found '<mask>'"),
    (MASK, U64, 1 << 31, "mask_token_id: expected an integer .*, found 2147483648"),
    (WINDOW, U32, 0, "window: expected at least 1 where a layer is sliding, found 0"),
    (WINDOW, U32, 7, r"window: expected at least block_size \(8\), found 7"),
    (WINDOW, F32, 40.0, "sliding_window: expected an integer .*, found 40.0"),
    (PATTERN, ARR, (BOOL, [1, 1]), "pattern: expected 3 entries, found 2"),
    (PATTERN, ARR, (U32, [0, 1, 2]), r"pattern\[2\]: expected 0 or 1, found 2"),
    (PATTERN, ARR, (F32, [1.0] * 3), "pattern: expected 3 flags, found an array of 3 float32"),
    (PATTERN, U32, 4, "pattern: expected 3 flags, found 4"),
]


@pytest.mark.parametrize(("key", "kind", "item", "words"), BAD_KEYS)
def test_a_bad_key_is_named_with_what_was_found(write, key, kind, item, words):
    refuse(write(**with_key(key, kind, item)), words)


def test_sliding_layers_need_a_window(write):
    refuse(write(**with_keys(**{WINDOW: None})), "window: expected at least 1")


def test_odd_head_dim_is_refused(write):
    odd = {f"attention__{key}": (U32, 63) for key in ("key_length", "value_length")}
    refuse(write(**with_keys(**odd)), "head_dim: expected an even number, found 63")


# --- bad tensors ---------------------------------------------------------------------------------

NAMES = [t[0] for t in base_tensors() if ".2." in t[0] or "blk" not in t[0]]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(write, name):
    refuse(write(tensors=[t for t in base_tensors() if t[0] != name]), f"tensor {name}: missing")


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_is_named(write, name):
    shape = next(t[1] for t in base_tensors() if t[0] == name)
    wrong = (shape[0] + 1, *shape[1:])
    words = rf"tensor {name}: expected shape \[{shape[0]}.*found \[{wrong[0]}"
    refuse(write(**with_tensor(name, 1, wrong)), words)


@pytest.mark.parametrize(
    ("name", "index", "item", "words"),
    [
        ("fc.weight", 2, "Q3_K", "tensor fc.weight: expected one of the types Q4_K.*, found Q3_K"),
        ("fc.weight", 2, 999, "tensor fc.weight: .*found unknown type 999"),
        ("fc.weight", 1, (1, 1, 1, DIM, 2 * DIM), "fc.weight: expected at most 4 dimensions"),
        ("fc.weight", 1, (DIM * 2 * DIM,), "fc.weight: expected shape .256, 512., found .131072."),
        ("enc.output_norm.weight", 2, "Q4_K", "enc.output_norm.weight: expected F32, F16 or BF16"),
        ("blk.1.attn_k.weight", 0, "blk.1.attn_v.weight", "blk.1.attn_v.weight: duplicate"),
        ("blk.1.attn_k.weight", 0, "", "tensor blk.1.attn_k.weight: missing"),
    ],
)
def test_a_bad_tensor_is_named(write, name, index, item, words):
    refuse(write(**with_tensor(name, index, item)), words)


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output.weight",
        "blk.0.attn_gate.weight",
        "blk.0.post_ffw_norm.weight",
        "blk.3.attn_q.weight",
        "fc.bias",
    ],
)
def test_what_a_draft_does_not_have_is_unexpected(write, name):
    extra = [[name, (16, DIM), "Q4_K", None]]
    refuse(write(tensors=base_tensors() + extra), f"unexpected tensors: {name}$")


def test_unprintable_and_long_names_are_shown_safely(write):
    extra = [["evil\n\x1b[2Jname", (1,), "F32", None], ["x" * 5000, (1,), "F32", None]]
    refuse(write(tensors=base_tensors() + extra), r"unexpected tensors: 'evil\\n\\x1b\[2Jname'")


def test_rows_that_are_no_multiple_of_the_block_are_refused(write):
    parts = with_keys(feed_forward_length=(U32, 320))
    tensors = base_tensors()
    for tensor in tensors:
        tensor[1] = tuple(320 if n == FFN and tensor[0] != "fc.weight" else n for n in tensor[1])
    words = "blk.0.ffn_down.weight: expected rows of a multiple of 256 weights for Q4_K, found 320"
    refuse(write(tensors=tensors, **parts), words)


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (1 << 40, "output_norm.weight: ends at byte .* beyond the end of the file"),
        (2**64 - 32, "output_norm.weight: ends at byte .* beyond the end of the file"),
        (33, "output_norm.weight: expected an offset aligned to 32, found 33"),
        (0, "overlaps tensor"),
    ],
)
def test_bad_offsets_are_named(write, offset, words):
    refuse(write(offsets={"output_norm.weight": offset}), words)


# --- bad headers ---------------------------------------------------------------------------------


def test_truncations_are_refused(write):
    data, size = build(), header_size()
    path = write(data)
    cuts = {*range(0, size, 29), *range(size - 40, size + 40), len(data) - 1}
    for cut in sorted(cuts, reverse=True):
        os.truncate(path, cut)
        with pytest.raises(GGUFError):
            load_draft(path)


def test_missing_and_special_files(tmp_path):
    refuse(tmp_path / "absent.gguf", "cannot read: No such file")
    refuse(tmp_path, "expected a regular file")
    os.mkfifo(tmp_path / "fifo")
    refuse(tmp_path / "fifo", "expected a regular file")


@pytest.mark.parametrize("count", [1 << 24, 1 << 33, 1 << 62, 2**64 - 1])
def test_huge_counts_fail_fast(write, count):
    refuse(write(build(counts=(count, len(base_keys())))), "tensor count|truncated|malformed")
    refuse(write(build(counts=(len(base_tensors()), count))), "key count|truncated|malformed")
    taps = array(I32, TAPS)
    taps = taps[:4] + count.to_bytes(8, "little") + taps[12:]
    refuse(write(**with_key("target_layers", ARR, taps)), "arrays of at most|truncated|malformed")


def test_an_array_of_a_million_layers_is_refused_in_one_short_line(write):
    refuse(write(**with_key("target_layers", ARR, (I32, range(1 << 20)))), "array of 1048576 int32")


def test_byte_flips_in_the_header_raise_nothing_else(write):
    path = write(build())
    gguf_file.flip_header_bits(load_draft, path, header_size(), 400)
    assert load_draft(path).config.n_layers == LAYERS


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    gguf_file.load_or_refuse(load_draft, write(bytes(data)))
