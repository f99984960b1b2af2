"""`glimmer run`: a prompt through an exported model, streamed, with speeds."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.table import Table

from . import _native
from ._files import check_not_special
from .profile import Profile, Recorder, tables, write_etdump, write_trace
from .program import read_program
from .session import (
    Generated,
    Sampling,
    Session,
    Speculation,
    SpeculationStats,
    load_program,
    set_threads,
)
from .tokenizer import StreamDecoder, Tokenizer

Write = Callable[[str], None]
PLAIN_ROUND = 4  # tokens
SHORTEST_MEASURED = 16  # tokens of a text whose speed is set beside plain decoding's


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
    profile: Path | None = None
    speculate: bool = False
    block_length: int | None = None


def parse_ids(text: str) -> list[int]:
    """Token ids of "1,2,3", "1 2 3" or "@FILE" with such a text."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--tokens: {text[1:]}: cannot be read: {error}") from error
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isdecimal():
            raise ValueError(f"--tokens: expected ids separated by commas, found {word[:96]!r}")
        if len(word) > 18:
            raise ValueError(f"--tokens: expected 64-bit ids, found {len(word)} digits")
    return [int(word) for word in words]


def load_tokenizer(model: Path, tokenizer: Path | None = None) -> Tokenizer | None:
    """The given tokenizer.json, else what the export wrote beside the model, if it did."""
    if tokenizer is not None:
        return Tokenizer.from_file(tokenizer)
    if not (model / "tokenizer.json").exists():
        return None
    bos_id, eos_ids = _special_ids(model / "generation_config.json")
    return Tokenizer.from_file(model / "tokenizer.json", bos_id=bos_id, eos_ids=eos_ids)


def _special_ids(path: Path) -> tuple[int | None, list[int]]:
    """bos_token_id and eos_token_id (an id, or a list of ids) of a generation_config.json."""
    check_not_special(path)
    try:
        config = json.loads(path.read_text())
        bos, eos = config["bos_token_id"], config["eos_token_id"]
        eos = eos if isinstance(eos, list) else [eos]
        valid = all(type(i) is int for i in eos) and (bos is None or type(bos) is int)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    if not valid:
        raise ValueError(f"{path}: expected integer ids, found bos {bos} and eos {eos}")
    return bos, eos


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


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when it is whole."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as f:
            yield f
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write_logits(request: Request, session: Session, ids: list[int]) -> None:
    assert request.logits is not None
    slot = session.open()
    rows = session.prefill(slot, ids, request.chunk, range(len(ids)))
    session.close(slot)
    with _replacing(request.logits) as f:
        np.save(f, rows)


def _check(request: Request) -> None:
    if request.logits is None and request.max_new_tokens == 0:
        raise ValueError("nothing to do: expected --max-new-tokens above 0 or --logits")
    for name, path in (("logits", request.logits), ("profile", request.profile)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"--{name}: expected a file in an existing folder, found {path}")
    if request.profile is not None and request.logits is not None:
        raise ValueError("--profile: expected a run without --logits, found both")
    if request.block_length is not None and not request.speculate:
        raise ValueError("--block-length: expected --speculate too")


def _check_draft(request: Request, limits: Any) -> None:
    if not request.speculate:
        return
    if limits.draft is None:
        raise ValueError(
            f"--speculate: expected a model with a draft, as `glimmer export --draft-gguf` writes "
            f"it, found none in {request.model}"
        )
    length, most = request.block_length, limits.draft.block_size
    if length is not None and not 2 <= length <= most:
        raise ValueError(f"--block-length: expected 2 to {most}, found {length}")


def run(request: Request, write: Write) -> list[Table]:
    """Streams the continuation to `write`, then the speeds; returns the tables of a profile.

    ValueError for bad input.
    """
    _check(request)
    set_threads(request.threads or len(os.sched_getaffinity(0)))
    model = load_program(request.model, trace="times" if request.profile else "")
    _check_draft(request, model.limits)
    session = Session(model, draft=request.speculate)
    tokenizer = load_tokenizer(request.model, request.tokenizer)
    ids = _prompt_ids(request, tokenizer)
    recorder = None
    if request.profile:
        recorder = Recorder(model, whole=request.profile.suffix == ".etdp")
    with _native.use_exact(request.exact or _native.exact_mode()):
        if request.logits is not None:
            _write_logits(request, session, ids)
        if request.max_new_tokens > 0:
            result = _generate(request, session, tokenizer, ids, write, recorder)
    return _write_profile(request, recorder, result) if recorder else []


def _write_profile(request: Request, recorder: Recorder, result: Generated) -> list[Table]:
    assert request.profile is not None
    pte = request.model / "model.pte" if request.model.is_dir() else request.model
    profile = Profile(read_program(pte))
    with _replacing(request.profile) as f:
        if request.profile.suffix == ".etdp":
            write_etdump(profile, recorder, f)
        else:
            with io.TextIOWrapper(f, encoding="utf-8", write_through=True) as text:
                write_trace(profile, recorder, text)
    for name in ("prefill", "decode"):
        profile.phases[name].tokens = getattr(result, f"{name}_tokens")
        profile.phases[name].wall = getattr(result, f"{name}_seconds")
    if result.speculation:
        _split_decode(profile, result.speculation)
    return tables(profile)


def _split_decode(profile: Profile, stats: SpeculationStats) -> None:
    """Decoding's wall time without the draft's, which is a phase of its own."""
    decode, draft = profile.phases["decode"], profile.phases["draft"]
    decode.wall = stats.verify_seconds
    draft.tokens, draft.wall = stats.drafted, draft.method_ns / 1e9


def _prefill_recorded(
    request: Request, session: Session, slot: int, ids: list[int], recorder: Recorder
) -> tuple[int, float]:
    """What `generate` does first, a step at a time; returns tokens and seconds."""
    chunk = session.limits.max_chunk if request.chunk is None else request.chunk
    seconds = 0.0
    for begin in range(0, len(ids), max(chunk, 1)):
        started = time.perf_counter()
        session.prefill(slot, ids[begin : begin + max(chunk, 1)], chunk, [])
        seconds += time.perf_counter() - started
        recorder.step()
    return len(ids), seconds


def _generate(
    request: Request,
    session: Session,
    tokenizer: Tokenizer | None,
    ids: list[int],
    write: Write,
    recorder: Recorder | None = None,
) -> Generated:
    stream = StreamDecoder(tokenizer) if tokenizer and not request.ids_only else None
    stop_ids = sorted(tokenizer.eos_ids) if tokenizer else []

    def emit(token: int) -> None:
        if recorder:
            recorder.step()
        write(stream.feed([token]) if stream else f"{token} ")

    if stream and request.prompt is not None:
        write(request.prompt)
    sampling = Sampling(request.temperature, request.top_k, request.top_p, request.seed)
    slot = session.open()
    tokens, seconds = 0, 0.0
    if recorder:
        tokens, seconds = _prefill_recorded(request, session, slot, ids[:-1], recorder)
        ids = ids[-1:]
    speculation = Speculation(request.block_length) if request.speculate else None
    result = session.generate(
        slot, ids, request.max_new_tokens, sampling, stop_ids, request.chunk, emit, speculation
    )
    if recorder:
        result = dataclasses.replace(result, prefill_tokens=tokens, prefill_seconds=seconds)
    write((stream.finish() if stream else "") + "\n")
    if not request.ids_only:
        write(speeds(result))
    if result.speculation and not request.ids_only:
        # Further steps would be part of the profile, and few tokens are no measure.
        measured = not recorder and result.decode_tokens >= SHORTEST_MEASURED
        plain = plain_token(session, slot, result.ids[-1], sampling) if measured else None
        write(speculated(result, plain))
    return result


def plain_token(session: Session, slot: int, last_id: int, sampling: Sampling) -> float:
    """Seconds a token of plain decoding takes behind what the slot holds, by the same loop: the
    median of rounds of four tokens, for about a second."""
    length = min(session.length(slot), session.limits.max_seq_len - PLAIN_ROUND)
    times: list[float] = []
    started = time.perf_counter()
    while not times or (time.perf_counter() - started < 1 and len(times) < 100):
        session.truncate(slot, length)
        result = session.generate(slot, [last_id], PLAIN_ROUND, sampling)
        times.append(result.decode_seconds / result.decode_tokens)
    return statistics.median(times)


def speculated(result: Generated, plain: float | None) -> str:
    """Two lines: what was accepted, and the speed beside plain decoding of `plain` s a token."""
    stats = result.speculation
    assert stats is not None
    lengths = ", ".join(f"{n} of {b}" for b, n in enumerate(stats.passes_by_block) if n)
    accepted = ", ".join(f"{k}: {n}" for k, n in enumerate(stats.passes_by_accepted) if n)
    speed = plain * result.decode_tokens / result.decode_seconds if plain else 0.0
    beside = f"; {speed:.2f} x the speed of plain decoding" if plain else ""
    return (
        f"speculation: {stats.passes} passes (blocks: {lengths}); {stats.accepted} of "
        f"{stats.drafted} drafts accepted (passes by number accepted: {accepted or 'none'})\n"
        f"{stats.tokens_per_pass:.2f} tokens a pass, {stats.accepted_per_pass:.2f} drafts accepted "
        f"a drafting pass{beside}\n"
    )


def speeds(result: Generated) -> str:
    """One line: tokens and rates of prefill and decode."""
    parts = [
        f"{name} {tokens} tokens, {tokens / seconds:.1f} tok/s" if tokens else f"{name} 0 tokens"
        for name, tokens, seconds in (
            ("prefill", result.prefill_tokens, result.prefill_seconds),
            ("decode", result.decode_tokens, result.decode_seconds),
        )
    ]
    return "; ".join(parts) + "\n"
