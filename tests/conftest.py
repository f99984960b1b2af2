"""Tiny GGUF files and their exports, made once a run; the thread pool; the command line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glimmer_ops import cli
from glimmer_ops.gguf import GGUFModel, load
from glimmer_ops.lowering import ExportOptions, from_gguf, to_executorch
from glimmer_ops.synth import synth
from glimmer_ops.tokenizer import Tokenizer


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
