"""Measures a whole exported model: prefill, decode, load time and memory.

Rows of op "model": prefill-64 and prefill-512 (as far as the export's sequences go), each in chunks
of the export's size and with the logits of the last position; decode, one step of one sequence that
starts behind 64 tokens. With a draft model also verify-2 … verify-16, one speculative pass with a
block of so many tokens behind the same 64, and speculate, 32 tokens with blocks chosen as it goes:
both beside plain decoding, so that 1 / ratio of a pass is the tokens that it must give to pay, and
the ratio of speculate is the speed-up on this text. bytes: weights that the forward reads, each
once a chunk, and the keys and values that are visible; of the embedding only the rows. flops: of
the matmuls. load_s and peak_rss are those of a fresh process that loads, prefills and decodes;
peak_rss counts the mapped weights that were touched.

Gate: logits are finite, and those of a prompt have the same bits in one chunk as in two; a
speculated text is plain decoding's; with the GGUF file, if its weights fit into memory in float32,
logits also agree with upstream's eager model.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from glimmer_ops import _native
from glimmer_ops.backends import BACKENDS
from glimmer_ops.gguf import QTYPES
from glimmer_ops.gguf import load as load_gguf
from glimmer_ops.ops import OPS
from glimmer_ops.ops._contract import Cost
from glimmer_ops.program import read_program
from glimmer_ops.session import Generated, Sampling, Session, Speculation, SpeculationStats

from . import fresh
from .measure import Party, Settings, figures, peer_row, rounds
from .peers import Counterpart, Peer
from .probes import Probe, probe_of
from .probes.cpu import available_memory
from .report import Row, provenance

if TYPE_CHECKING:
    from .command import Request, Say

PROMPTS = (fresh.PROMPT, 512)
BLOCKS = (2, 4, 8, 16)
SPECULATED = 32  # tokens
PLAIN = "plain decoding"
RMS_BOUND = 3e-2  # of int8 activations against float32 ones, see docs/numerics.md


@dataclass(frozen=True)
class Reading:
    """What one forward of a program reads and computes.

    weights: bytes, each once. row_macs, head_macs: multiplications of a row in the layers' matmuls,
    and of a row with logits in the head. kv: bytes of a position's keys and values in a layer.
    """

    weights: int
    row_macs: int
    head_macs: int
    kv: int


def reading(path: Path, name: str = "forward_from_embeddings") -> Reading:
    """From the program's plan. ValueError for a file that is none."""
    method = read_program(path).method(name)
    if method is None:
        raise ValueError(f"{path}: expected a method {name}")
    used = (w for i in method.instructions if not i.gathers for w in i.weights)
    weights = {w.name: w.tensor.nbytes for w in used}
    macs = head = kv = 0
    for instruction in method.instructions:
        for pool in instruction.pools:
            pages, _, page_size, _ = pool.tensor.sizes
            kv = max(kv, 2 * pool.tensor.nbytes // (pages * page_size))
        for weight in (w for w in instruction.weights if len(w.tensor.sizes) == 2):
            if instruction.gathers:
                continue
            block, size = QTYPES[weight.qtype]
            count = weight.tensor.nbytes // size * block
            if instruction.name == "kquant_logits":
                head = count
            else:
                macs += count
    return Reading(sum(weights.values()), macs, head, kv)


def visible_keys(begin: int, end: int, limits: Any) -> int:
    """Positions that tokens [begin, end) see, summed over layers, each once."""
    layers = [
        end - max(0, begin - limits.window + 1) if sliding else end
        for sliding in limits.sliding_layers
    ]
    return sum(layers)


@dataclass
class Workload:
    """Timed calls of one kind on a session. run: as of `Timer`. tokens: of a call. plain: what a
    speculative one is measured beside. gate: "pass", or why it gets no figure."""

    name: str
    run: Callable[[int, int, int], int]
    tokens: int
    bytes: int
    flops: int
    close: Callable[[], None] = lambda: None
    plain: Counterpart | None = None
    stats: SpeculationStats | None = None
    gate: str = "pass"


def prefill(session: Session, length: int, needs: Reading) -> Workload:
    limits = session.limits
    ids = fresh.prompt(length, limits.vocab_size)

    def run(start: int, warm: int, calls: int) -> int:
        total = 0
        for i in range(warm + calls):
            slot = session.open()
            begin = time.perf_counter_ns()
            session.prefill(slot, ids)
            total += time.perf_counter_ns() - begin if i >= warm else 0
            session.close(slot)
        return total

    starts = range(0, length, limits.max_chunk)
    keys = sum(visible_keys(s, min(s + limits.max_chunk, length), limits) for s in starts)
    moved = len(starts) * needs.weights + keys * needs.kv
    flops = 2 * (length * needs.row_macs + needs.head_macs)
    return Workload(f"prefill-{length}", run, length, moved, flops)


def decode(session: Session, needs: Reading) -> Workload:
    limits = session.limits
    ids = fresh.prompt(fresh.PROMPT, limits.vocab_size)
    sampling = Sampling()
    state = {"slot": -1, "id": 0}

    def restart() -> None:
        if state["slot"] >= 0:
            session.close(state["slot"])
        state["slot"] = session.open()
        session.prefill(state["slot"], ids, rows=[])

    def step() -> None:
        (state["id"],) = session.decode([state["slot"]], [state["id"]], sampling)

    def run(start: int, warm: int, calls: int) -> int:
        total = 0
        for i in range(warm + calls):
            if state["slot"] < 0 or session.length(state["slot"]) >= limits.max_seq_len:
                restart()
            begin = time.perf_counter_ns()
            step()
            total += time.perf_counter_ns() - begin if i >= warm else 0
        return total

    keys = visible_keys(fresh.PROMPT, fresh.PROMPT + 1, limits)
    moved = needs.weights + keys * needs.kv
    flops = 2 * (needs.row_macs + needs.head_macs)
    return Workload("decode", run, 1, moved, flops, lambda: session.close(state["slot"]))


class Pass:
    """One pass over a block behind the prompt, again and again; a block of 1 is plain decoding."""

    def __init__(self, session: Session, block: int) -> None:
        self._session, self._block, self._slot = session, block, session.open()
        self._ids = fresh.prompt(fresh.PROMPT + 1, session.limits.vocab_size)
        session.prefill(self._slot, self._ids[:-1], rows=[])

    def run(self, start: int, warm: int, calls: int) -> int:
        total = 0
        for i in range(warm + calls):
            begin = time.perf_counter_ns()
            self._session.speculate([self._slot], self._ids[-1:], [self._block], Sampling())
            total += time.perf_counter_ns() - begin if i >= warm else 0
            self._session.truncate(self._slot, fresh.PROMPT)
        return total

    def close(self) -> None:
        self._session.close(self._slot)


def verify(plain: Session, drafting: Session, block: int, path: Path) -> Workload:
    needs = [reading(path, m) for m in ("target_decode", "draft_forward", "draft_prefill")]
    limits = plain.limits
    keys = visible_keys(fresh.PROMPT, fresh.PROMPT + block, limits)
    moved = sum(r.weights for r in needs) + keys * needs[0].kv
    flops = 2 * block * sum(r.row_macs + r.head_macs for r in needs)
    ours, theirs = Pass(drafting, block), Pass(plain, 1)
    note = "verify-N is a pass of N rows beside a step of one: 1 / ratio is the tokens that pay"
    beside = Counterpart(PLAIN, theirs.run, torch.Tensor, note=note, close=theirs.close)
    return Workload(f"verify-{block}", ours.run, block, moved, flops, ours.close, beside)


def speculate(plain: Session, drafting: Session) -> Workload:
    ids = fresh.prompt(fresh.PROMPT, plain.limits.vocab_size)

    def generate(session: Session, how: Speculation | None) -> Generated:
        slot = session.open()
        try:
            return session.generate(slot, ids, SPECULATED, speculation=how)
        finally:
            session.close(slot)

    def run(session: Session, how: Speculation | None) -> Callable[[int, int, int], int]:
        return lambda start, warm, calls: sum(
            int(generate(session, how).decode_seconds * 1e9) for _ in range(warm + calls)
        )

    expected = generate(plain, None)
    generate(drafting, Speculation())  # learns what passes cost
    found = generate(drafting, Speculation())
    beside = Counterpart(PLAIN, run(plain, None), torch.Tensor)
    work = Workload("speculate", run(drafting, Speculation()), SPECULATED, 0, 0, plain=beside)
    work.stats = found.speculation
    work.gate = "pass" if found.ids == expected.ids else "the text differs from plain decoding's"
    return work


def gate(session: Session, gguf: Path | None, exact: bool) -> str:
    """ "pass", or what is wrong with the model's logits."""
    limits = session.limits
    ids = fresh.prompt(16, limits.vocab_size)
    whole, parts = (_logits(session, ids, chunk) for chunk in (16, 7))
    if not np.isfinite(whole).all():
        return "logits are not finite"
    if not np.array_equal(whole, parts):
        return "logits depend on the chunk"
    if gguf is None:
        return "pass"
    return _against_upstream(whole[-1], ids, gguf, exact)


def _logits(session: Session, ids: Sequence[int], chunk: int) -> np.ndarray:
    slot = session.open()
    try:
        return session.prefill(slot, ids, min(chunk, session.limits.max_chunk))
    finally:
        session.close(slot)


def _dense_bytes(gguf: Path) -> int:
    return sum(4 * math.prod(t.shape) for t in load_gguf(gguf).tensors.values())


def fits_densely(gguf: Path) -> bool:
    """Whether upstream's eager float32 model of a file fits into the memory at hand, twice."""
    return 2 * _dense_bytes(gguf) < available_memory()


def _against_upstream(last: np.ndarray, ids: Sequence[int], gguf: Path, exact: bool) -> str:
    if not fits_densely(gguf):
        return "pass"
    from glimmer_ops.oracle import upstream_logits

    expected = upstream_logits(load_gguf(gguf), ids)[-1]
    rms = float(np.sqrt(np.mean((last - expected) ** 2) / np.mean(expected**2)))
    bound = 1e-3 if exact else RMS_BOUND
    if rms <= bound:
        return "pass"
    return f"logits differ from upstream's by {rms:.1e} > {bound:.0e} rms"


def fresh_process(model: Path, threads: int) -> tuple[float, int]:
    """(seconds to load, peak resident bytes) of a process that loads, prefills and decodes."""
    command = [sys.executable, "-m", fresh.__name__, str(model), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"{model}: a process of its own failed: {lines[-1]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result["load_s"], result["peak_rss"]


def bench_model(request: Request, say: Say) -> Iterator[Row]:
    """Rows of a model folder, at each number of threads; with peers a row for each."""
    from .command import chosen_peers, pool_of, thread_counts

    assert request.model is not None
    rivals = chosen_peers(request.vs)
    if rivals and request.gguf is None:
        raise ValueError("--vs: expected --gguf, the model's file, for the peers of a model")
    needs = reading(request.model / "model.pte" if request.model.is_dir() else request.model)
    settings = Settings(samples=5, seconds=5.0) if request.quick else Settings(samples=15)
    if request.samples is not None:
        settings = replace(settings, samples=request.samples, seconds=60.0)
    source = provenance()
    probe = probe_of("cpu")
    for count in thread_counts(request.threads):
        with pool_of(count):
            session = Session.load(request.model)
            load_s, peak_rss = fresh_process(request.model, count)
            verdict = gate(session, request.gguf, _native.exact_mode())
            base = Row("model", "cpu", "", threads=count, variant=_variant(), gate=verdict)
            base = replace(base, load_s=load_s, peak_rss=peak_rss, **source)
            chosen = replace(settings, threads=count)
            for work in _workloads(request.model, session, needs, request.case):
                say(f"{request.model} {work.name}, {count} threads")
                yield from _rows(request, base, work, chosen, probe, rivals, say)


def _variant() -> str:
    """The name of the CPU backend's variant that the process runs."""
    known = BACKENDS["cpu"].variants(OPS["kquant_linear"])
    found = [v for v in known if (v.isa, v.exact) == (_native.isa(), _native.exact_mode())]
    return found[0].name


def _case_names(limits: Any) -> list[str]:
    names = [f"prefill-{n}" for n in PROMPTS if n < limits.max_seq_len]
    names.append("decode")
    if limits.draft:
        names += [f"verify-{b}" for b in BLOCKS if b <= limits.draft.block_size]
        names.append("speculate")
    return names


def _workloads(
    path: Path, session: Session, needs: Reading, case: str | None
) -> Iterator[Workload]:
    """All of them, or the one of that name, each when its turn comes: decode takes a slot."""
    names = _case_names(session.limits)
    if case not in (None, *names):
        raise ValueError(f"--case: expected one of {', '.join(names)}, found '{case}'")
    program = path / "model.pte" if path.is_dir() else path
    drafting: Session | None = None
    for name in names if case is None else [case]:
        kind, _, number = name.partition("-")
        if kind in ("verify", "speculate") and drafting is None:
            drafting = Session.load(path, draft=True)
        if kind == "decode":
            yield decode(session, needs)
        elif kind == "prefill":
            yield prefill(session, int(number), needs)
        elif drafting is not None:
            whole = kind == "speculate"
            yield (
                speculate(session, drafting)
                if whole
                else verify(session, drafting, int(number), program)
            )


def _rows(
    request: Request,
    base: Row,
    work: Workload,
    settings: Settings,
    probe: Probe | None,
    rivals: Sequence[Peer],
    say: Say,
) -> list[Row]:
    base = replace(base, case=work.name, m=work.tokens, bytes=work.bytes, flops=work.flops)
    if work.gate != "pass":
        base = replace(base, gate=work.gate)
    if not base.passed:
        return [base]
    found = [work.plain] if work.plain else []
    for rival in rivals if not work.plain else ():
        assert request.gguf is not None
        other = rival.model(request.gguf, work.name, work.tokens, settings.threads)
        if other is None:
            say(f"{work.name}: {rival.name} has no counterpart")
        else:
            found.append(other)
    theirs = [Party(p.run, p.sets) for p in found]
    taken = rounds(Party(work.run, 1), theirs, probe, settings)
    in_cache = probe is not None and work.bytes < probe.working_set
    integer = not _native.exact_mode()
    cost = Cost(work.bytes, work.flops)
    row = replace(base, working_set=work.bytes, **figures(cost, taken, integer, in_cache))
    if not work.name.startswith("verify"):  # where tokens depend on the text
        row = replace(row, tok_s=work.tokens / (row.ms_median or math.inf) * 1e3)
    if work.stats:
        row = replace(
            row,
            tokens_per_pass=work.stats.tokens_per_pass,
            accepted_per_pass=work.stats.accepted_per_pass,
        )
    for close in (work.close, *(other.close for other in found)):
        close()
    pairs = zip(found, taken.peers, strict=True)
    return [peer_row(row, other, samples) for other, samples in pairs] or [row]
