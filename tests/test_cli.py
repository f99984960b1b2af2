"""The command line: what it prints, and one clear line for every failure."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from glimmer_ops.lowering.export import FILES
from support.cli import refused


def test_ops_lists_every_op(glimmer) -> None:
    status, out, _ = glimmer("ops")
    assert status == 0
    for name in ("rms_norm", "sdpa", "kquant_linear", "sample"):
        assert name in out


def test_check_one_op(glimmer) -> None:
    status, out, _ = glimmer("check", "--op", "rms_norm", "--backend", "cpu")
    assert status == 0
    assert re.search(r"\d+ passed, 0 failed", out)


def test_check_refuses_unknown_names(glimmer) -> None:
    refused(glimmer("check", "--op", "softmax"), "--op: expected one of", "'softmax'")
    refused(glimmer("check", "--backend", "tpu"), "--backend: expected one of", "'tpu'")
    refused(glimmer("check", "--op", "rms_norm", "--case", "x"), "no case has the id 'x'")


def test_synth_export_run_inspect(glimmer, tmp_path: Path) -> None:
    """The whole journey through the commands of the README."""
    file, folder = tmp_path / "tiny.gguf", tmp_path / "tiny"
    assert glimmer("synth", "--preset", "tiny", "--out", file)[0] == 0
    status, _, err = glimmer(
        "export", "--gguf", file, "--out", folder, "--max-seq-len", 256, "--max-chunk", 32
    )
    assert status == 0, err
    assert {p.name for p in folder.iterdir()} == set(FILES)
    status, out, err = glimmer("run", "--model", folder, "--prompt", "Hello", "--max-new-tokens", 8)
    assert status == 0, err
    assert out.startswith("Hello")
    assert re.search(r"prefill \d+ tokens, [\d.]+ tok/s; decode \d+ tokens, [\d.]+ tok/s", out)
    rows = tmp_path / "rows"
    args = ("--tokens", "1,2,3,4,5", "--max-new-tokens", 4, "--ids-only", "--logits", rows)
    status, out, err = glimmer("run", "--model", folder, *args)
    assert status == 0, err
    assert re.fullmatch(r"(\d+ ){1,4}\n", out)
    logits = np.load(rows)
    assert logits.shape == (5, 1024) and logits.dtype == np.float32
    assert "kquant_linear" in glimmer("inspect", folder)[1]
    assert "Q4_K" in glimmer("inspect", file)[1]


def test_greedy_ids_do_not_depend_on_the_chunk(glimmer, exported) -> None:
    folder = exported("Q4_K_M")
    args = ("--model", folder, "--tokens", " ".join(map(str, range(50))), "--ids-only")
    outs = {glimmer("run", *args, "--chunk", c, "--max-new-tokens", 24)[1] for c in (1, 7, 16)}
    assert len(outs) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens", ""), ("ids: expected at least one token",)),
        (("--tokens", "1,x"), ("--tokens: expected ids", "'x'")),
        (("--tokens", "1,1024"), ("1024",)),
        (("--tokens", "9" * 5000), ("--tokens: expected 64-bit ids", "5000 digits")),
        ((), ("expected one of --prompt and --tokens",)),
        (("--tokens", "1", "--chunk", "0"), ("chunk",)),
        (("--tokens", "1", "--chunk", "129"), ("chunk", "129")),
        (("--tokens", "1", "--temperature", "-1"), ("temperature",)),
        (("--tokens", "1", "--top-p", "nan"), ("top_p",)),
        (("--tokens", "1", "--temperature", "1e300"), ("temperature: expected a finite float32",)),
        (("--tokens", "1", "--seed", "9" * 30), ("seed: expected a 64-bit integer",)),
        (("--tokens", "1", "--max-new-tokens", "0"), ("nothing to do",)),
        (("--tokens", "1", "--logits", "/nonexistent/x.npy"), ("--logits: expected a file",)),
        (("--tokens", "@/nonexistent/ids"), ("--tokens: /nonexistent/ids: cannot be read",)),
        (("--prompt", "\udcff"), ("text: expected valid Unicode",)),
        (("--prompt", "x", "--tokenizer", "/nonexistent.json"), ("/nonexistent.json",)),
        (("--tokens", " ".join(["1"] * 1025)), ("1024",)),
    ],
)
def test_run_refuses(glimmer, exported, args, words) -> None:
    refused(glimmer("run", "--model", exported("Q4_K_M"), *args), *words)


def test_run_refuses_another_models_weights(glimmer, exported, tmp_path: Path) -> None:
    for name in FILES:
        source = exported("Q6_K" if name == "model.ptd" else "Q4_K_M")
        (tmp_path / name).write_bytes((source / name).read_bytes())
    result = glimmer("run", "--model", tmp_path, "--tokens", "1")
    refused(result, "model.ptd", "holds weights", "expected")


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"bos_token_id": "a", "eos_token_id": 1}', '{"bos_token_id": 1}']
)
def test_run_refuses_a_damaged_generation_config(glimmer, exported, tmp_path, text) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes((exported("Q4_K_M") / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(text)
    result = glimmer("run", "--model", tmp_path, "--tokens", "1", "--max-new-tokens", "1")
    refused(result, "generation_config.json")


def test_one_eos_id_need_not_be_a_list(glimmer, exported, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes((exported("Q4_K_M") / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": null, "eos_token_id": 7}')
    status, _, err = glimmer("run", "--model", tmp_path, "--tokens", "1", "--max-new-tokens", "1")
    assert status == 0, err


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_synth_leaves_nothing(tmp_path: Path, signal_: int) -> None:
    command = [sys.executable, "-m", "glimmer_ops", "synth", "--preset", "mid"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "x.gguf")], stderr=-1, text=True)
    while not list(tmp_path.iterdir()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal_)
    _, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[signal_]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_logits_that_cannot_be_written_leave_nothing(glimmer, exported, tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    args = ("--tokens", "1,2", "--max-new-tokens", 0, "--logits", target)
    result = glimmer("run", "--model", exported("Q4_K_M"), *args)
    refused(result, "--logits: expected a file in an existing folder", "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_run_refuses_what_is_no_model(glimmer, tmp_path: Path) -> None:
    refused(glimmer("run", "--model", tmp_path, "--tokens", "1"), "model.pte")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--max-seq-len", 8192), ("max_seq_len: expected 64 to 4096", "8192")),
        (("--kv-dtype", "f8"), ("kv_dtype: expected one of", "f8")),
        (("--slots", 0), ("slots: expected",)),
        (("--max-chunk", 1), ("max_chunk: expected",)),
        (("--pages", 0), ("pages: expected",)),
        (("--pages", 10**14), ("pages: expected 1 to",)),
        (("--max-seq-len", 0), ("max_seq_len: expected",)),
        (("--backend", "tpu"), ("backend: expected one of", "tpu")),
    ],
)
def test_export_refuses_and_leaves_nothing(glimmer, tiny_gguf, tmp_path, args, words) -> None:
    out = tmp_path / "model"
    refused(glimmer("export", "--gguf", tiny_gguf("Q4_K_M").path, "--out", out, *args), *words)
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_a_truncated_gguf(glimmer, tiny_gguf, tmp_path: Path) -> None:
    data = Path(tiny_gguf("Q4_K_M").path).read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(data[: len(data) // 2])
    refused(glimmer("export", "--gguf", file, "--out", tmp_path / "model"), "cut.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["cut.gguf"]


def test_export_that_fails_midway_leaves_nothing(
    glimmer, tiny_gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glimmer_ops.lowering import cpu

    def fail(folder: Path) -> None:
        assert (folder / "model.ptd").exists()
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(cpu, "verify", fail)
    result = glimmer("export", "--gguf", tiny_gguf("F16").path, "--out", tmp_path / "model")
    refused(result, "disk on fire")
    assert list(tmp_path.iterdir()) == []


def test_synth_refuses(glimmer, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    refused(glimmer("synth", "--preset", "huge", "--out", out), "preset", "'huge'")
    refused(glimmer("synth", "--preset", "tiny", "--quant", "Q2_K", "--out", out), "'Q2_K'")
    refused(glimmer("synth", "--preset", "tiny", "--out", tmp_path / "no" / "x.gguf"))
    assert list(tmp_path.iterdir()) == []


def test_inspect_refuses(glimmer, tmp_path: Path) -> None:
    refused(glimmer("inspect", tmp_path / "none.gguf"), "none.gguf")
    junk = tmp_path / "junk.pte"
    junk.write_bytes(b"\0" * 100)
    refused(glimmer("inspect", junk), "junk.pte")


@pytest.mark.timeout(60)
def test_pipes_are_refused_not_waited_for(glimmer, exported, tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to never returns."""
    folder = tmp_path / "model"
    shutil.copytree(exported("Q4_K_M"), folder)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    run = ("run", "--model", folder, "--tokens", "1", "--max-new-tokens", 1)
    refused(glimmer("inspect", pipe), "pipe: expected a regular file")
    refused(
        glimmer("export", "--gguf", pipe, "--out", tmp_path / "out"), "pipe: expected a regular"
    )
    refused(glimmer(*run, "--tokenizer", pipe), "pipe: expected a regular file")
    refused(
        glimmer("bench", "--op", "rms_norm", "--compare", pipe), "pipe: expected a regular file"
    )
    for name in ("generation_config.json", "model.ptd", "model.pte", "model.sha256"):
        kept = (folder / name).rename(tmp_path / name)
        os.mkfifo(folder / name)
        refused(glimmer(*run), f"{name}: expected a regular file")
        kept.replace(folder / name)


def test_inspect_refuses_a_damaged_program(glimmer, exported, tmp_path: Path) -> None:
    """Every 97th byte flipped: a table, or an error that names the file."""
    data = (exported("Q4_K_M") / "model.pte").read_bytes()
    file = tmp_path / "damaged.pte"
    count = 0
    for at in range(40, 6000, 97):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
        result = glimmer("inspect", file)
        if result[0] != 0:
            refused(result, "damaged.pte")
            count += 1
    assert count > 5


def test_command_in_a_process_of_its_own(exported) -> None:
    """Nothing but the answer on stdout and nothing on stderr, from a cold start."""
    command = [sys.executable, "-m", "glimmer_ops", "run", "--model", str(exported("Q4_K_M"))]
    args = ["--tokens", "5,6,7", "--max-new-tokens", "3", "--ids-only"]
    result = subprocess.run(command + args, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"(\d+ ){1,3}\n", result.stdout)
    assert result.stderr == ""
