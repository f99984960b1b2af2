"""Tiny GGUF files and their exports, made once a run; the thread pool; the command line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glimmer_ops import cli
from glimmer_ops.gguf import GGUFDraft, GGUFModel, load, load_draft
from glimmer_ops.lowering import ExportOptions, from_gguf, to_executorch
from glimmer_ops.synth import synth
from glimmer_ops.synth_draft import synth_pair
from glimmer_ops.tokenizer import Tokenizer

Pair = tuple[GGUFModel, GGUFDraft]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GGUFModel]:
    """tiny_gguf("Q4_K_M"): a loaded synthetic file of that quantisation."""
    folder = tmp_path_factory.mktemp("gguf")

    @functools.cache
    def make(quant: str) -> GGUFModel:
        return load(synth(folder / f"tiny-{quant}.gguf", "tiny", quant))

    return make


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[[str], GGUFModel]
) -> Callable[..., Path]:
    """exported("Q4_K_M", kv_dtype="f32", ...): the folder of such an export."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(quant: str, **options: object) -> Path:
        model = tiny_gguf(quant)
        defaults = {"max_seq_len": 1024, "slots": 4, "max_chunk": 128, "kv_dtype": "f32"}
        name = "-".join([quant, *(f"{k}={v}" for k, v in options.items())])
        settings = ExportOptions(**(defaults | options))  # type: ignore[arg-type]
        return to_executorch(from_gguf(model), folder / name, settings, Tokenizer.from_gguf(model))

    return make


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """tiny_pair("Q4_K_M"): a loaded target and its draft, which disagree on every eighth token."""
    folder = tmp_path_factory.mktemp("pairs")

    @functools.cache
    def make(quant: str, error_rate: float | None = 0.125) -> Pair:
        files = (folder / f"{part}-{quant}-{error_rate}.gguf" for part in ("target", "draft"))
        target, draft = files
        synth_pair(target, draft, "tiny", quant, error_rate=error_rate)
        return load(target), load_draft(draft)

    return make


@pytest.fixture(scope="session")
def exported_pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair: Callable[..., Pair]
) -> Callable[[str], Path]:
    """exported_pair("Q4_K_M"): the folder of an export of that pair."""
    folder = tmp_path_factory.mktemp("speculating")

    @functools.cache
    def make(quant: str) -> Path:
        target, draft = tiny_pair(quant)
        settings = ExportOptions(max_seq_len=640, slots=3, max_chunk=128, kv_dtype="f16")
        tokenizer = Tokenizer.from_gguf(target)
        return to_executorch(from_gguf(target, draft), folder / quant, settings, tokenizer)

    return make


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the size of the thread pool that kernels run on, and restores it."""
    from executorch.extension.pybindings import portable_lib

    def resize(count: int) -> None:
        portable_lib._unsafe_reset_threadpool(count)
        assert portable_lib._threadpool_get_thread_count() == count

    before = portable_lib._threadpool_get_thread_count()
    yield resize
    resize(before)


@pytest.fixture
def glimmer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """glimmer("ops"): (exit status, stdout, stderr) of a command, run in this process."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["glimmer", *map(str, args)])
        capsys.readouterr()
        try:
            cli.main()
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call
