"""`glimmer inspect`: its figures are those of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glimmer_ops.inspect import describe, ranges
from glimmer_ops.program import HEAD, read_program
from runtime.toy_program import export_toy
from support.cli import refused


@pytest.fixture
def folder(exported) -> Path:
    return exported("Q4_K_M")


@pytest.fixture
def copy(folder, tmp_path: Path) -> Path:
    for name in ("model.pte", "model.ptd"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


def test_program_as_json(glimmer, folder, tiny_gguf) -> None:
    model = tiny_gguf("Q4_K_M")
    status, out, err = glimmer("inspect", folder, "--json", "--gguf", model.path)
    assert status == 0, err
    d = json.loads(out)
    methods = {m["name"]: m for m in d["methods"]}
    assert methods["embed_text"]["inputs"] == ["int64[≤128]"]
    assert methods["embed_text"]["outputs"] == ["float32[≤128, ≤512]"]
    assert methods["forward_from_embeddings"]["inputs"][3:] == ["int32[4, 16]"] * 2 + ["int64[≤16]"]
    decode = methods["decode"]
    assert decode["instructions"] == 71 and decode["instructions_per_layer"] == 11
    assert decode["ops"]["glimmer::kquant_linear"] == 36
    assert [g["layers"] for g in decode["layers"]] == ["embed", "0", "1-5", "head"]
    assert decode["layers"][2]["ops"]["kquant_linear"] == 6
    assert decode["layers"][3]["ops"] == {"kquant_logits": 1, "sample": 1}

    # All but the norms of Q and K, whose gains are folded into the attention scale
    read = [t for n, t in model.tensors.items() if "_q_norm" not in n and "_k_norm" not in n]
    nbytes = sum(t.nbytes for t in read)
    assert d["weights"]["bytes"] == nbytes and d["weights"]["tensors"] == len(read)
    for qtype, found in d["weights"]["by_type"].items():
        mine = [t.nbytes for t in read if t.qtype == qtype]
        assert found == {"tensors": len(mine), "bytes": sum(mine)}
    embedding = model.tensors["token_embd.weight"]
    one_row = nbytes - embedding.nbytes + embedding.nbytes // 1024
    assert d["weights"]["read_per_decode_token"] == one_row
    assert d["gguf"]["resident_ratio"] == nbytes / model.nbytes
    assert d["data_file"]["verdict"] == "holds every weight of the program"
    assert d["data_file"]["weights_id"] == d["weights"]["id"]
    assert int(d["weights"]["id"], 16) == d["constants"]["get_weights_id"] % (1 << 64)
    assert d["constants"]["get_sliding_layers"] == [int(s) for s in model.config.sliding]
    kinds = {p["kind"]: p for p in d["pools"]}
    assert kinds["global"]["layers"] == "1, 5" and kinds["sliding"]["layers"] == "0, 2-4"
    pages = d["constants"]["get_global_pages"]
    assert kinds["global"]["tensor"] == f"float32[{pages}, 2, 64, 128]"
    assert kinds["global"]["bytes"] == 4 * pages * 2 * 64 * 128 * 4


def test_every_part_has_a_table(glimmer, folder, tiny_gguf) -> None:
    path = tiny_gguf("Q4_K_M").path
    status, out, err = glimmer("inspect", folder, "--gguf", path)
    assert status == 0, err
    for text in ("int32[4, 16]", "kquant_swiglu", "Q6_K", "read a decoded token", "sliding"):
        assert text in out
    out = glimmer("inspect", path)[1]
    for text in ("head_dim", "Q4_K: 0-1, 3-4; Q6_K: 2, 5", "tokenizer", "usable", "sGsssG"):
        assert text in out


def test_gguf_as_json(glimmer, tiny_gguf) -> None:
    model = tiny_gguf("Q4_K_M")
    d = json.loads(glimmer("inspect", model.path, "--json")[1])
    assert d["tensors"] == len(model.tensors) and d["tensor_bytes"] == model.nbytes
    assert d["by_role"]["attn_v"] == {"Q4_K": "0-1, 3-4", "Q6_K": "2, 5"}
    assert d["by_role"]["output"] == {"Q5_K": ""}
    assert d["config"]["window"] == model.config.window
    assert d["tokenizer"]["tokens"] == 1024 and d["tokenizer"]["verdict"] == "usable"


def test_data_file_alone(glimmer, folder) -> None:
    d = json.loads(glimmer("inspect", folder / "model.ptd", "--json")[1])
    program = read_program(folder / "model.pte")
    assert d["tensors"] == {name: w.tensor.nbytes for name, w in program.weights.items()}
    assert d["tensor_bytes"] <= d["bytes"]
    assert "all 75" in glimmer("inspect", folder / "model.ptd")[1]


def test_missing_and_foreign_data_files_are_told(copy, exported) -> None:
    (copy / "model.ptd").write_bytes((exported("F16") / "model.ptd").read_bytes())
    found = describe(copy)["data_file"]
    assert found["verdict"].startswith("lacks 75 weights of the program, the first weights_")
    assert found["weights_id"] != describe(copy)["weights"]["id"]
    (copy / "model.ptd").unlink()
    assert describe(copy)["data_file"] == {"path": None, "verdict": "missing"}


@pytest.mark.parametrize("size", [0, 10, 60, 1000, 5000])
def test_truncated_data_files_are_refused(glimmer, copy, size) -> None:
    file = copy / "model.ptd"
    file.write_bytes(file.read_bytes()[:size])
    refused(glimmer("inspect", copy), "model.ptd")
    if size >= 10:  # less does not tell what it is
        refused(glimmer("inspect", file), "model.ptd")


def test_refusals(glimmer, folder, tiny_gguf, tmp_path: Path) -> None:
    path = tiny_gguf("Q4_K_M").path
    refused(glimmer("inspect", tmp_path), "model.pte: expected a .gguf, .pte or .ptd file")
    refused(glimmer("inspect", path, "--gguf", path), "--gguf: expected a program to compare with")
    refused(glimmer("inspect", folder, "--gguf", folder / "model.pte"), "model.pte")
    for data in (b"", b"GGUF", b"\x00" * 4 + b"ET12" + b"\x00" * 60):
        file = tmp_path / "junk"
        file.write_bytes(data)
        refused(glimmer("inspect", file), "junk")


def test_program_of_stock_operators(glimmer, tmp_path: Path) -> None:
    export_toy(tmp_path / "toy")
    status, out, err = glimmer("inspect", tmp_path / "toy", "--json")
    assert status == 0, err
    d = json.loads(out)
    assert d["weights"]["id"] == "0000000000001234"
    assert d["constants"]["get_sliding_layers"] == [1, 0]
    assert {p["kind"]: p["layers"] for p in d["pools"]} == {"sliding": "0", "global": "1"}
    assert glimmer("inspect", tmp_path / "toy")[0] == 0


def test_layers_follow_the_names_of_weights(folder) -> None:
    """A sandwich tail belongs to the layer that it ends; what follows the last one is the head."""
    program = read_program(folder / "model.pte")
    for method in program.methods:
        for i in method.instructions:
            layers = {w.layer for w in i.weights} - {None}
            assert not layers or i.layer == min(layers)
    forward = program.method("forward_from_embeddings")
    assert [i.layer for i in forward.instructions[-3:]] == [5, HEAD, HEAD]
    assert forward.instructions[-3].role == "post_ffw_norm+output_norm"


def test_ranges() -> None:
    assert ranges([5, 1, 2, 0]) == "0-2, 5"
    assert ranges([]) == ""
