"""A whole model in libllama: prefill and decode on the GGUF file itself.

libllama takes its settings as large structures by value, whose layout changes between versions.
They are passed as they come from the functions that make the defaults, in more room than any of
them needs; the few fields that are set lie at their start, and their defaults are checked first.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..fresh import PROMPT, prompt
from . import Counterpart
from .llama_lib import Pointer, declare, llama

ROOM = 1024  # bytes, of settings
DECODES = 256  # before the sequence is cut back


class Settings(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * ROOM)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", Pointer),
        ("embd", Pointer),
        ("pos", Pointer),
        ("n_seq_id", Pointer),
        ("seq_id", Pointer),
        ("logits", Pointer),
    ]


def _api() -> ctypes.CDLL:
    library = llama()
    p, i, flag, number = Pointer, ctypes.c_int32, ctypes.c_bool, ctypes.c_float
    for name, result, *arguments in (
        ("llama_backend_init", None),
        ("llama_model_default_params", Settings),
        ("llama_context_default_params", Settings),
        ("llama_model_load_from_file", p, ctypes.c_char_p, Settings),
        ("llama_init_from_model", p, p, Settings),
        ("llama_set_n_threads", None, p, i, i),
        ("llama_batch_get_one", Batch, p, i),
        ("llama_decode", i, p, Batch),
        ("llama_get_logits_ith", ctypes.POINTER(number), p, i),
        ("llama_get_memory", p, p),
        ("llama_memory_seq_rm", flag, p, i, i, i),
        ("llama_model_get_vocab", p, p),
        ("llama_vocab_n_tokens", i, p),
        ("llama_free", None, p),
        ("llama_model_free", None, p),
    ):
        declare(library, name, result, *arguments)
    library.llama_backend_init()
    return library


def _context_settings(api: ctypes.CDLL, positions: int, batch: int) -> Settings:
    settings = api.llama_context_default_params()
    first = ctypes.cast(ctypes.byref(settings), ctypes.POINTER(ctypes.c_uint32))
    if list(first[:3]) != [512, 2048, 512]:  # n_ctx, n_batch, n_ubatch
        raise RuntimeError("llama.cpp: llama_context_params is not as expected")
    first[0] = positions
    first[1] = max(batch, 512)
    return settings


class Model:
    """A file loaded by libllama, with one sequence. RuntimeError when it cannot be."""

    def __init__(self, gguf: Path, positions: int, batch: int, threads: int) -> None:
        self._api = _api()
        self._model = self._api.llama_model_load_from_file(
            str(gguf).encode(), self._api.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp: {gguf} cannot be loaded")
        settings = _context_settings(self._api, positions, batch)
        self._context = self._api.llama_init_from_model(self._model, settings)
        if not self._context:
            self._api.llama_model_free(self._model)
            raise RuntimeError(f"llama.cpp: no context for {gguf}")
        self._api.llama_set_n_threads(self._context, threads, threads)
        self._memory = self._api.llama_get_memory(self._context)
        vocab = self._api.llama_model_get_vocab(self._model)
        self.vocab_size = self._api.llama_vocab_n_tokens(vocab)

    def forward(self, ids: list[int]) -> None:
        """Appends tokens; the logits of the last one are computed."""
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama.cpp: a forward failed")

    def logits(self) -> torch.Tensor:
        values = self._api.llama_get_logits_ith(self._context, -1)
        return torch.tensor(values[: self.vocab_size])

    def truncate(self, length: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, -1, length, -1)

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


def counterpart(peer: str, gguf: Path, name: str, tokens: int, threads: int) -> Counterpart:
    decoding = name == "decode"
    model = Model(gguf, PROMPT + max(tokens, DECODES), tokens, threads)
    ids = prompt(max(PROMPT, tokens), model.vocab_size)
    state = {"length": 0}

    def step() -> None:
        model.forward([ids[state["length"] % len(ids)]])
        state["length"] += 1

    def restart() -> None:
        model.truncate(0)
        model.forward(ids[:PROMPT])
        state["length"] = PROMPT

    def run_decode(start: int, warm: int, calls: int) -> int:
        return _timed(step, warm, calls, lambda: _due(state["length"], restart))

    def run_prefill(start: int, warm: int, calls: int) -> int:
        return _timed(lambda: model.forward(ids[:tokens]), warm, calls, lambda: model.truncate(0))

    def _timed(call: Callable[[], None], warm: int, calls: int, before: Callable[[], Any]) -> int:
        total = 0
        for i in range(warm + calls):
            before()
            begin = time.perf_counter_ns()
            call()
            total += time.perf_counter_ns() - begin if i >= warm else 0
        return total

    def _due(length: int, action: Callable[[], None]) -> None:
        if not PROMPT <= length < PROMPT + DECODES - 1:
            action()

    def output() -> torch.Tensor:
        model.truncate(0)
        model.forward(ids[:16])
        state["length"] = 0
        return model.logits()

    run = run_decode if decoding else run_prefill
    note = "libllama on the file itself, its default buffers and f16 cache"
    return Counterpart(peer, run, output, note=note, close=model.close)
