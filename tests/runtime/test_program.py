"""Real .pte and .ptd files through the session: results, shared pools, and damaged files."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

import toy_program
from glimmer_ops.session import Sampling, Session, Speculation, load_program, program_digest
from toy_program import (
    BLOCK,
    CHUNK,
    DIM,
    DRAFT_PAGES,
    DRAFT_WINDOW,
    MAX_SEQ,
    PAGE,
    SLIDING,
    VOCAB,
    WINDOW,
    export_toy,
)

WEIGHTS_ID = 0xFEDC_0000_0000_0012  # does not fit a signed 64-bit integer


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    return folder, export_toy(folder, WEIGHTS_ID)


def text(n, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def expected(model, ids):
    """Logits after each of ids, from the weights directly."""
    weights = getattr(model, model.weights_name).layers.double()
    out = torch.zeros(len(ids), VOCAB, dtype=torch.float64)
    for i in range(len(ids)):
        for layer, sliding in enumerate(SLIDING):
            first = max(0, i - WINDOW + 1) if sliding else 0
            for j in range(first, i + 1):
                out[i] += ids[j] * weights[layer, j]
    return out.numpy()


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def copy_of(toy, tmp_path):
    shutil.copytree(toy[0], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("chunk", [1, 3, CHUNK])
@pytest.mark.parametrize("page_seed", [None, 4])
def test_prefill(toy, chunk, page_seed):
    session = Session(load_program(toy[0]), page_seed)
    for slot in (session.open(), session.open()):
        ids = text(50, slot)
        close(session.prefill(slot, ids, chunk, range(50)), expected(toy[1], ids))
        assert session.length(slot) == 50


def test_constants_and_pools(toy):
    session = Session.load(toy[0] / "model.pte", toy[0] / "model.ptd")
    lim = session.limits
    assert (lim.vocab_size, lim.max_seq_len, lim.max_chunk) == (VOCAB, MAX_SEQ, CHUNK)
    assert (lim.page_size, lim.window, lim.sliding_layers) == (PAGE, WINDOW, list(SLIDING))
    pool = session.pool(1, "v")
    assert pool.shape == (toy_program.GLOBAL_PAGES, 1, PAGE, DIM) and pool.dtype == torch.float32
    slot = session.open()
    session.prefill(slot, [3, 7])
    page = session.global_table()[slot, 0]
    assert session.pool(1, "k")[page, 0, :2].tolist() == [[3.0, -3.0], [7.0, -7.0]]


def test_pool_view_outlives_the_session(toy):
    session = Session.load(toy[0])
    pool = session.pool(0, "k")
    del session
    pool.fill_(1.0)
    assert pool.sum() == pool.numel()


def test_methods_share_their_pools(toy):
    """Prefill writes what decode reads, and the other way round."""
    session = Session(load_program(toy[0]), 9)
    slot, ids = session.open(), text(20)
    session.prefill(slot, ids[:-1], 8, [])
    current = ids[-1]
    for step in range(12):
        if step % 3:
            want = expected(toy[1], ids)[-1]
            got = session.decode([slot], [current], Sampling(seed=step))[0]
            assert got == (np.argmax(want) + step * len(ids)) % VOCAB
            current = got
        else:
            close(session.forward([(slot, current)], [0])[0], expected(toy[1], ids)[-1])
            current = step % VOCAB
        ids.append(current)


def test_nan_in_unwritten_pages_has_no_effect(toy):
    session = Session.load(toy[0])
    for layer in range(2):
        for part in "kv":
            session.pool(layer, part).fill_(float("nan"))
    slot, ids = session.open(), text(30)
    close(session.prefill(slot, ids, 7, range(30)), expected(toy[1], ids))


def test_share_copies_real_pages(toy):
    session = Session.load(toy[0])
    a, b, ids = session.open(), session.open(), text(18)
    session.prefill(a, ids, 8, [])
    session.share(a, b, 18)
    for slot, tail in ((a, [1, 2, 3]), (b, [4, 5, 6])):
        close(session.prefill(slot, tail, 8, range(3)), expected(toy[1], ids + tail)[-3:])
    close(session.forward([(a, 9)], [0]), expected(toy[1], ids + [1, 2, 3, 9])[-1:])


def test_decode_of_both_slots_and_rollback(toy):
    session = Session.load(toy[0])
    slots, ids = [session.open(), session.open()], [text(9, 1), text(14, 2)]
    for slot in slots:
        session.prefill(slot, ids[slot], 8, [])
    rows = [0, 1, 0, 1, 1]
    got = session.decode(rows, [1, 2, 3, 4, 5], Sampling())
    tails = [[1], [2], [1, 3], [2, 4], [2, 4, 5]]
    for slot, tail, following in zip(rows, tails, got, strict=True):
        assert following == np.argmax(expected(toy[1], ids[slot] + tail)[-1])
    session.truncate(1, 15)
    close(session.forward([(1, 8)], [0])[0], expected(toy[1], [*ids[1], 2, 8])[-1])


def test_generate_and_interrupt(toy):
    session = Session.load(toy[0])
    slot, ids = session.open(), text(10)
    result = session.generate(slot, ids, 20, chunk=4)
    everything = list(ids)
    for got in result.ids:
        assert got == np.argmax(expected(toy[1], everything)[-1])
        everything.append(got)
    with pytest.raises(KeyboardInterrupt):
        session.generate(slot, [1], 20, callback=ctypes.pythonapi.PyErr_SetInterrupt)
    assert session.length(slot) == 30
    close(session.forward([(slot, 2)], [0])[0], expected(toy[1], [*everything[:-1], 1, 2])[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_pools(tmp_path, dtype):
    model = export_toy(tmp_path, dtype=dtype)
    session = Session.load(tmp_path)
    assert session.pool(0, "k").dtype == dtype
    a, b, ids = session.open(), session.open(), text(18)
    close(session.prefill(a, ids, 8, range(18)), expected(model, ids))  # small integers are exact
    session.share(a, b, 18)
    close(session.prefill(b, [3], 8), expected(model, [*ids, 3])[-1:])


def test_weights_inside_the_program(tmp_path):
    model = export_toy(tmp_path, weights_id=None, data=False)
    assert not (tmp_path / "model.ptd").exists()
    session = Session.load(tmp_path)
    close(session.prefill(session.open(), [1, 2], 8, [0, 1]), expected(model, [1, 2]))


# --- bad files ------------------------------------------------------------------------------------


def test_weights_of_another_program(toy, tmp_path):
    export_toy(tmp_path, weights_id=0x77)
    found = r"model.ptd: holds weights 0000000000000077, expected fedc000000000012"
    with pytest.raises(ValueError, match=found):
        load_program(toy[0] / "model.pte", tmp_path / "model.ptd")
    with pytest.raises(ValueError, match="weights fedc000000000012, expected 0000000000000077"):
        load_program(tmp_path / "model.pte", toy[0] / "model.ptd")


def test_weights_without_id(toy, tmp_path):
    export_toy(tmp_path, weights_id=None)
    with pytest.raises(ValueError, match="holds weights 'weights.layers', expected fedc0000"):
        load_program(toy[0] / "model.pte", tmp_path / "model.ptd")
    with pytest.raises(ValueError, match="model.pte: expected a constant get_weights_id"):
        load_program(tmp_path)


def test_missing_files(toy, tmp_path):
    with pytest.raises(ValueError, match="model.pte: expected a file, found none"):
        load_program(tmp_path)
    with pytest.raises(ValueError, match="nowhere.ptd: expected a file, found none"):
        load_program(toy[0], tmp_path / "nowhere.ptd")
    shutil.copy(toy[0] / "model.pte", tmp_path)
    with pytest.raises(ValueError, match="with weights fedc000000000012, found none"):
        load_program(tmp_path)


@pytest.mark.parametrize("name", ["model.pte", "model.ptd"])
@pytest.mark.parametrize("kept", [0, 1, 63, 64, 200, 0.3, 0.7, 0.95, -1])
def test_truncated_files(toy, tmp_path, name, kept):
    folder = copy_of(toy, tmp_path)
    size = os.path.getsize(folder / name)
    length = int(kept * size) if isinstance(kept, float) else kept if kept >= 0 else size - 1
    os.truncate(folder / name, length)
    if kept == -1 and name == "model.pte":  # the last bytes may be padding
        os.truncate(folder / name, size - 64)
    with pytest.raises(ValueError, match=name):
        load_program(folder)


@pytest.mark.parametrize("name", ["model.pte", "model.ptd"])
@pytest.mark.parametrize("content", [b"x" * 5000, b"\0" * 5000, b"GGUF" + b"\3" * 4000])
def test_other_files(toy, tmp_path, name, content):
    folder = copy_of(toy, tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: expected an ExecuTorch .*another kind of file"):
        load_program(folder)


def test_swapped_files(toy, tmp_path):
    with pytest.raises(ValueError, match="model.ptd: expected an ExecuTorch program"):
        load_program(toy[0] / "model.ptd", toy[0] / "model.pte")
    with pytest.raises(ValueError, match="model.pte: expected an ExecuTorch data file"):
        load_program(toy[0] / "model.pte", toy[0] / "model.pte")


@pytest.mark.parametrize("name", ["model.pte", "model.ptd"])
def test_damaged_tables(toy, tmp_path, name):
    """A flatbuffer with its header intact and garbage behind it."""
    folder = copy_of(toy, tmp_path)
    data = bytearray((folder / name).read_bytes())
    data[64:220] = b"\xff" * 156
    (folder / name).write_bytes(bytes(data))
    with pytest.raises(ValueError, match=f"{name}: is damaged"):
        load_program(folder)


@pytest.mark.parametrize("pattern", [0x01, 0x80, 0xFF])
def test_every_damaged_byte_of_the_data_files_tables(toy, tmp_path, pattern):
    """ExecuTorch itself follows the tables of a .ptd unchecked, out of the file if they say so."""
    folder = copy_of(toy, tmp_path)
    data = (folder / "model.ptd").read_bytes()
    refused = 0
    for i in range(256):
        damaged = bytearray(data)
        damaged[i] ^= pattern
        (folder / "damaged.ptd").write_bytes(bytes(damaged))
        try:
            load_program(folder, folder / "damaged.ptd")
        except (ValueError, RuntimeError):
            refused += 1
    assert refused > 100


def test_a_segment_that_ends_behind_the_file(toy, tmp_path):
    """Every 64-bit size of the tables, one after the other, made far too large."""
    folder = copy_of(toy, tmp_path)
    data = (folder / "model.ptd").read_bytes()
    weights = getattr(toy[1], toy[1].weights_name)
    sizes = {b.numel() * b.element_size() for b in weights.buffers()}
    tables = data[: len(data) - max(sizes)]
    found = 0
    for size in sizes:
        at = tables.find(struct.pack("<Q", size), 64)
        while at >= 0:
            damaged = data[:at] + struct.pack("<Q", 1 << 40) + data[at + 8 :]
            (folder / "damaged.ptd").write_bytes(damaged)
            with pytest.raises(ValueError, match="damaged.ptd: is damaged"):
                load_program(folder, folder / "damaged.ptd")
            found += 1
            at = tables.find(struct.pack("<Q", size), at + 1)
    assert found > 0


# --- programs that are not ours -------------------------------------------------------------------


def test_pools_that_are_not_shared(tmp_path):
    export_toy(tmp_path, share=False)
    with pytest.raises(RuntimeError, match="pools.k_0: expected one pool for all methods"):
        load_program(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"without": "decode"}, RuntimeError, "expected a method decode"),
        ({"without": "get_slots"}, RuntimeError, "constant get_slots cannot be read"),
        ({"get_slots": 3}, RuntimeError, r"page tables \[slots, max_pages\] = \[3, 16\]"),
        ({"get_n_layers": 3}, RuntimeError, "get_sliding_layers: expected 3 entries, found 2"),
        ({"get_global_pages": 31}, RuntimeError, r"pools.k_1: expected .* \[31, kv_heads, 4"),
        ({"get_max_prefill_chunk": 0}, ValueError, "max_chunk: expected"),
        ({"get_vocab_size": 1.5}, RuntimeError, "constant get_vocab_size: expected an int"),
    ],
)
def test_programs_that_are_not_ours(tmp_path, changes, error, message):
    export_toy(tmp_path, **changes)
    with pytest.raises(error, match=message):
        load_program(tmp_path)


def test_a_constant_may_be_a_tensor_and_outputs_are_checked(tmp_path):
    export_toy(tmp_path, get_window=torch.tensor([WINDOW]), get_vocab_size=VOCAB + 1)
    session = Session.load(tmp_path)
    slot = session.open()
    with pytest.raises(
        RuntimeError, match=r"forward_from_embeddings: expected output float32\[1, 12\], found"
    ):
        session.prefill(slot, [1], 1)
    assert session.length(slot) == 0 and session.pages_in_use()["global"] == 0


def test_a_method_that_fails_says_why(tmp_path):
    """max_chunk promises more than the program takes: ExecuTorch refuses the input."""
    export_toy(tmp_path, get_max_prefill_chunk=CHUNK + 1)
    session = Session.load(tmp_path)
    slot = session.open()
    with pytest.raises(RuntimeError, match=r"embed_text failed \(Error::.*\): .*9"):
        session.prefill(slot, [1] * 9, 9)
    assert session.length(slot) == 0
    session.prefill(slot, [1] * 9, 8)


SILENT = """
import sys
from glimmer_ops.session import Session, Speculation, set_threads
session = Session.load(sys.argv[1])
set_threads(2)
session.prefill(session.open(), [1, 2, 3])
for bad in ("/nowhere.pte", sys.argv[1] + "/model.ptd"):
    try:
        Session.load(bad)
    except ValueError:
        pass
"""


def test_executorch_prints_nothing(toy):
    done = subprocess.run(
        [sys.executable, "-c", SILENT, str(toy[0])], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


BOTH_ORDERS = """
import sys
from pathlib import Path
if sys.argv[2] == "before":
    import executorch.extension.pybindings.portable_lib
from glimmer_ops.session import Session
session = Session.load(sys.argv[1])
slot = session.open()
session.prefill(slot, [1, 2, 3])
from executorch.runtime import Runtime
program = Runtime.get().load_program(
    Path(sys.argv[1], "model.pte"), data_path=Path(sys.argv[1], "model.ptd")
)
assert "decode" in program.method_names
session.prefill(slot, [1, 2, 3])
assert session.length(slot) == 6
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_beside_executorchs_own_bindings(toy, order):
    """Operators are registered once, whoever comes first."""
    subprocess.run([sys.executable, "-c", BOTH_ORDERS, str(toy[0]), order], check=True)


def test_data_file_without_a_layout_is_refused(toy, tmp_path):
    """The format allows it; ExecuTorch would follow the missing layout."""
    folder = copy_of(toy, tmp_path)
    data = bytearray((folder / "model.ptd").read_bytes())
    tables, size = struct.unpack_from("<QQ", data, 16)
    # The only table of four fields with a key, no segment and a layout: size, table, 4, 0, 8
    vtable = bytes.fromhex("0a00 0e00 0400 0000 0800")
    assert data.count(vtable, tables, tables + size) == 1
    at = data.index(vtable, tables) + 8
    data[at : at + 2] = bytes(2)
    (folder / "model.ptd").write_bytes(data)
    with pytest.raises(ValueError, match="model.ptd: is damaged: weights_.* has no shape"):
        load_program(folder)


def test_a_program_that_differs_from_its_checksum_is_refused(toy, tmp_path):
    folder = copy_of(toy, tmp_path)
    pte, checksum = folder / "model.pte", folder / "model.sha256"
    checksum.write_text(program_digest(pte))
    Session.load(folder)
    data = bytearray(pte.read_bytes())
    for at in range(0, len(data), 97):
        data[at] ^= 1
        pte.write_bytes(data)
        with pytest.raises(ValueError, match=r"model.pte: is damaged: it differs .* model.sha256"):
            Session.load(folder)
        data[at] ^= 1
    pte.write_bytes(data)
    checksum.write_text("")
    with pytest.raises(ValueError, match="differs from its checksum"):
        Session.load(pte, folder / "model.ptd")
    checksum.unlink()
    Session.load(folder)


def test_data_file_with_a_field_outside_of_its_table_is_refused(toy, tmp_path):
    """The version of the format, which only ExecuTorch reads, 64 KB further on."""
    folder = copy_of(toy, tmp_path)
    data = bytearray((folder / "model.ptd").read_bytes())
    (root,) = struct.unpack_from("<I", data, 0)
    (back,) = struct.unpack_from("<i", data, root)
    struct.pack_into("<H", data, root - back + 4, 0xFFF8)
    (folder / "model.ptd").write_bytes(data)
    with pytest.raises(ValueError, match="model.ptd: is damaged: a field lies outside"):
        load_program(folder)


# --- programs with a draft model ------------------------------------------------------------------


def test_a_draft(tmp_path):
    model = export_toy(tmp_path, draft=True)
    limits = load_program(tmp_path).limits
    assert (limits.draft.block_size, limits.draft.mask_token_id) == (BLOCK, VOCAB - 1)
    assert limits.draft.window == DRAFT_WINDOW + 1  # a query sees so many keys, itself included
    plain = Session.load(tmp_path)
    ids = [1, 2, 3, 4, 5, 6, 7]
    expected_ids = plain.generate(plain.open(), ids, 50).ids
    assert expected_ids[0] == np.argmax(expected(model, ids)[-1])
    session = Session.load(tmp_path, draft=True)
    for block in (2, BLOCK, None):
        slot = session.open()
        result = session.generate(slot, ids, 50, chunk=3, speculation=Speculation(block))
        assert result.ids == expected_ids
        session.close(slot)
    assert session.pool(0, "k", draft=True).shape[0] == DRAFT_PAGES
    with pytest.raises(ValueError, match=r"layer: expected a value in \[0, 1\), found 1"):
        session.pool(1, "k", draft=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(
            ({"without": method}, RuntimeError, f"expected a method {method}")
            for method in ("target_forward_from_embeddings", "target_decode", "draft_prefill",
                           "draft_forward")
        ),
        ({"without": "get_block_size"}, RuntimeError, "constant get_block_size cannot be read"),
        ({"get_block_size": 0}, RuntimeError, "get_block_size: expected at least 2, found 0"),
        ({"get_block_size": 1}, ValueError, "draft.block_size: expected"),
        ({"get_block_size": 17}, ValueError, "draft.block_size: expected"),
        ({"get_mask_token_id": VOCAB}, ValueError, "draft.mask_token_id: expected"),
        ({"get_draft_sliding_window": -3}, ValueError, "draft.window: expected"),
        ({"get_draft_sliding_layers": torch.tensor([1, 1])}, RuntimeError, "draft_k_1"),
        ({"get_draft_sliding_pages": 19}, RuntimeError, r"draft_k_0: expected .* \[19, kv_heads"),
        ({"share": False}, RuntimeError, "expected one pool for all methods"),
    ],
)  # fmt: skip
def test_drafts_that_are_not_ours(tmp_path, changes, error, message):
    export_toy(tmp_path, draft=True, **changes)
    with pytest.raises(error, match=message):
        load_program(tmp_path)
