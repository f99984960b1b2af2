"""`glimmer run`: a prompt through an exported model, streamed, with speeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import _native
from .session import Sampling, Session
from .tokenizer import StreamDecoder, Tokenizer

Write = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What the command line asked for; see `glimmer run --help`."""

    model: Path
    prompt: str | None = None
    tokens: str | None = None
    tokenizer: Path | None = None
    max_new_tokens: int = 64
    chunk: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    exact: bool = False
    threads: int = 0
    ids_only: bool = False
    logits: Path | None = None


def parse_ids(text: str) -> list[int]:
    """Token ids of "1,2,3", "1 2 3" or "@FILE" with such a text."""
    if text.startswith("@"):
        text = Path(text[1:]).read_text()
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isdecimal():
            raise ValueError(f"--tokens: expected ids separated by commas, found '{word}'")
    return [int(word) for word in words]


def _load_tokenizer(request: Request, session: Session) -> Tokenizer | None:
    path = request.tokenizer or request.model / "tokenizer.json"
    if request.tokenizer is None and not path.exists():
        return None
    ids = {"bos_id": session.bos_id, "eos_ids": session.eos_ids} if not request.tokenizer else {}
    return Tokenizer.from_file(path, **ids)


def _prompt_ids(request: Request, tokenizer: Tokenizer | None) -> list[int]:
    if (request.prompt is None) == (request.tokens is None):
        raise ValueError("expected one of --prompt and --tokens")
    if request.tokens is not None:
        return parse_ids(request.tokens)
    if tokenizer is None:
        raise ValueError(
            f"--prompt: {request.model} has no tokenizer.json: expected --tokenizer or --tokens"
        )
    assert request.prompt is not None
    return tokenizer.encode(request.prompt, bos=tokenizer.bos_id is not None)


def _write_logits(request: Request, session: Session, ids: list[int]) -> None:
    assert request.logits is not None
    slot = session.open()
    rows = session.prefill(slot, ids, chunk=request.chunk, rows=range(len(ids)))
    session.close(slot)
    with open(request.logits, "wb") as f:  # np.save would append .npy to another name
        np.save(f, rows)


def run(request: Request, write: Write) -> None:
    """Streams the continuation to `write`, then the speeds. ValueError for bad input."""
    session = Session.load(request.model, threads=request.threads)
    tokenizer = _load_tokenizer(request, session)
    ids = _prompt_ids(request, tokenizer)
    with _native.use_exact(request.exact or _native.exact_mode()):
        if request.logits is not None:
            _write_logits(request, session, ids)
        _generate(request, session, tokenizer, ids, write)


def _generate(
    request: Request, session: Session, tokenizer: Tokenizer | None, ids: list[int], write: Write
) -> None:
    as_text = tokenizer is not None and not request.ids_only
    stream = StreamDecoder(tokenizer) if as_text and tokenizer else None

    def emit(token: int) -> None:
        write(stream.feed([token]) if stream else f"{token} ")

    if stream and request.prompt is not None:
        write(request.prompt)
    sampling = Sampling(request.temperature, request.top_k, request.top_p, request.seed)
    slot = session.open()
    result = session.generate(
        slot,
        ids,
        max_new_tokens=request.max_new_tokens,
        sampling=sampling,
        stop_ids=session.eos_ids,
        chunk=request.chunk,
        on_token=emit,
    )
    session.close(slot)
    write((stream.finish() if stream else "") + "\n")
    if not request.ids_only:
        write(
            f"prefill {result.prefill_tokens} tokens, {result.prefill_rate:.1f} tok/s; "
            f"decode {len(result.ids)} tokens, {result.decode_rate:.1f} tok/s\n"
        )
