"""Decoding sessions: sequences that share a model's paged KV cache.

A `Session` runs an exported program, or any `_C.Model`, for up to `limits.slots` sequences at once.
It owns the page tables and gives every token its position. A step that fails is undone: lengths
and tables are as before, and the session stays usable.

Errors: ValueError names the bad argument, what was expected and what was found; RuntimeError is a
lack of slots or pages, or a failure of the model (an operator's error, logits that are not finite).
A session serves one call at a time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ._files import check_not_special
from ._native import _C

PAGE_SIZE: int = _C.PAGE_SIZE
ROLLBACK: int = _C.ROLLBACK
MAX_DECODE_ROWS: int = _C.MAX_DECODE_ROWS


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    temperature: 0 takes the most probable token, ties to the lowest id. top_k: number of tokens
    kept, 0 for all. top_p: probability mass kept, in (0, 1]. seed: with the token's position it
    determines the draw, whatever the batching.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def _native(self) -> Any:
        return _C.SamplingParams(
            temperature=float(self.temperature),
            top_k=_int("top_k", self.top_k),
            top_p=float(self.top_p),
            seed=_int("seed", self.seed),
        )


@dataclass(frozen=True)
class Speculation:
    """How `Session.generate` speculates; the text is the same as without.

    block: tokens of a block, 2 to the draft's block_size; None to choose each from the measured
    cost of passes and the recent acceptance, down to plain decoding where drafts do not pay.
    """

    block: int | None = None

    def _native(self) -> int:
        if self.block is None:
            return 0
        block = _int("speculation: block", self.block)
        if block == 0:  # which means None to the session
            raise ValueError("speculation: block: expected at least 2, found 0")
        return block


@dataclass(frozen=True)
class SpeculationStats:
    """What came of it.

    passes: steps of the target; each gave one token and the accepted drafts. drafted, accepted:
    tokens. passes_by_block: by the length of the block, 0 to block_size; 1 is plain decoding.
    passes_by_accepted: of the passes with drafts, by how many were accepted. seconds_by_block: the
    least of the last few passes of each length, 0 where there was none. *_seconds: in all.
    """

    passes: int
    drafted: int
    accepted: int
    passes_by_block: list[int]
    passes_by_accepted: list[int]
    seconds_by_block: list[float]
    draft_seconds: float
    verify_seconds: float
    inject_seconds: float

    @property
    def accepted_per_pass(self) -> float:
        """Over the passes with drafts; 0 when there was none."""
        drafting = sum(self.passes_by_accepted)
        return self.accepted / drafting if drafting else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return (self.passes + self.accepted) / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Generated:
    """What `Session.generate` returns.

    ids: every sampled id, a stop id included. stop_reason: "length", "stop_id" or "callback".
    prefill_* and decode_*: numbers of tokens and wall time in seconds. speculation: None without.
    """

    ids: list[int]
    stop_reason: str
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    speculation: SpeculationStats | None = None


def _int(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected an integer, found {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected a 64-bit integer, found {number}")
    return number


def _ints(name: str, values: Iterable[Any]) -> list[int]:
    return [_int(f"{name}[{i}]", value) for i, value in enumerate(values)]


def sliding_pages(window: int, max_chunk: int, slots: int, page_size: int = PAGE_SIZE) -> int:
    """Physical pages that suffice for the sliding layers of `slots` sequences of any length.

    window: a query sees the keys less than `window` positions behind it. max_chunk: the most
    tokens of one slot in a step. A slot never has more than max_seq_len / page_size pages, so the
    smaller of both suffices. Raises ValueError for a value below 1.
    """
    return _C.sliding_pages(window, max_chunk, slots, page_size)


def threads() -> int:
    """Number of threads of the ExecuTorch pool that runs every kernel of this process."""
    return _C.threads()


def set_threads(n: int) -> None:
    """Sets the size of that pool, 1 to 1024 threads. No model may be running. Raises ValueError."""
    _C.set_threads(_int("threads", n))


@functools.cache
def _load_stock_kernels() -> None:
    """Registers ExecuTorch's own operators, which programs use beside ours, in this process.

    The library is the one that ExecuTorch's Python bindings link to, so importing them before or
    after is fine; importing them for this purpose would take seconds.
    """
    spec = importlib.util.find_spec("executorch")
    assert spec is not None and spec.submodule_search_locations  # _native has checked it
    suffix = "dylib" if sys.platform == "darwin" else "so"
    folder = Path(spec.submodule_search_locations[0], "lib")
    ctypes.CDLL(str(folder / f"libexecutorch_kernels_optimized.{suffix}"))


def program_digest(pte: Path) -> str:
    """What the checksum file beside a program holds: a line that `sha256sum -c` reads."""
    with open(pte, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{digest.hexdigest()}  {pte.name}\n"


def check_program(pte: Path) -> None:
    """Raises ValueError when a program is not the one that its checksum file belongs to.

    ExecuTorch trusts the bytes of a program and crashes on some damaged ones. A program without
    such a file, from another exporter, is not checked.
    """
    checksum = pte.with_suffix(".sha256")
    check_not_special(checksum)
    try:
        if not checksum.exists():
            return
        with open(checksum, "rb") as file:
            expected = file.read(64)
        found = program_digest(pte)
    except OSError as error:
        raise ValueError(f"{pte}: cannot be read: {error}") from error
    if expected != found[:64].encode():
        raise ValueError(f"{pte}: is damaged: it differs from its checksum in {checksum.name}")


def load_program(path: str | Path, data: str | Path | None = None, trace: str = "") -> Any:
    """Loads an exported program as a model for `Session`.

    path: a folder with model.pte and model.ptd, or a .pte file. data: its .ptd file, if not the
    folder's. trace: "times" to have every instruction timed (see `profile`), "outputs" to have its
    outputs copied (see `diff`), "" for neither, which costs nothing. A .sha256 file beside the
    .pte, as exports write it, is checked. Raises ValueError naming the file that is missing,
    damaged, truncated or another program's, and RuntimeError for a program without the expected
    methods and pools.
    """
    _load_stock_kernels()
    pte = Path(path)
    if pte.is_dir():
        folder, pte = pte, pte / "model.pte"
        if data is None and (folder / "model.ptd").exists():
            data = folder / "model.ptd"
    check_not_special(pte)
    if data is not None:
        check_not_special(data)
    check_program(pte)
    return _C.load_program(str(pte), "" if data is None else str(data), trace)


class Session:
    """Sequences ("slots") decoded with one model. See the module for errors.

    model: what `load_program` returns, or a `_C.Model`. page_seed: hand pages out in a random,
    reproducible order; results do not depend on it. draft: also keep the cache of the model's
    DFlash draft model, for `speculate`; it costs a percent or two of a step. ValueError when the
    model has none.
    """

    def __init__(self, model: Any, page_seed: int | None = None, draft: bool = False) -> None:
        self._session = _C.Session(model, page_seed, draft)

    @classmethod
    def load(cls, path: str | Path, data: str | Path | None = None, draft: bool = False) -> Session:
        """A session on an exported program; arguments and errors as for `load_program`."""
        return cls(load_program(path, data), draft=draft)

    @property
    def limits(self) -> Any:
        """vocab_size, max_seq_len, max_chunk, max_rows, slots, page_size, global_pages,
        sliding_pages, window, sliding_layers (0 or 1 a layer), n_layers, max_pages; draft: None or
        block_size, mask_token_id and the same of its layers."""
        return self._session.limits

    def open(self) -> int:
        """Takes a free slot with an empty sequence. Raises RuntimeError when all are open."""
        return self._session.open()

    def close(self, slot: int) -> None:
        """Gives a slot and its pages back."""
        self._session.close(_int("slot", slot))

    def length(self, slot: int) -> int:
        """Number of tokens of a slot's sequence."""
        return self._session.length(_int("slot", slot))

    def room(self, slot: int) -> int:
        """The most tokens that the slot's next step has positions and free pages for."""
        return self._session.room(_int("slot", slot))

    def prefill(
        self,
        slot: int,
        ids: Sequence[int],
        chunk: int | None = None,
        rows: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Appends tokens to a slot.

        ids: at least one. chunk: tokens a forward, 1 to limits.max_chunk (the default). rows:
        indices into ids whose logits are wanted, in any order; by default the last, [] for none.
        Returns float32 [len(rows), vocab_size].

        When it fails, the slot is rolled back to where it was; if the sliding window no longer
        allows that, the slot keeps the chunks that succeeded, as `length` tells.
        """
        return self._session.prefill(
            _int("slot", slot),
            _ints("ids", ids),
            self.limits.max_chunk if chunk is None else _int("chunk", chunk),
            None if rows is None else _ints("rows", rows),
        )

    def forward(
        self,
        tokens: Sequence[tuple[int, int]],
        rows: Sequence[int] = (),
        positions: Sequence[int] | None = None,
    ) -> np.ndarray:
        """One step over several slots.

        tokens: pairs (slot, id), 1 to limits.max_chunk of them, slots mixed at will; slot -1 is a
        padding row, without effect. Each slot's tokens continue its sequence, in this order or at
        `positions`, one a token, which must be a permutation of those. rows: indices into tokens
        whose logits are wanted. Returns float32 [len(rows), vocab_size].
        """
        return self._session.forward(
            _ints("slots", (t[0] for t in tokens)),
            _ints("ids", (t[1] for t in tokens)),
            _ints("rows", rows),
            None if positions is None else _ints("positions", positions),
        )

    def decode(
        self, slots: Sequence[int], ids: Sequence[int], sampling: Sampling | Sequence[Sampling]
    ) -> list[int]:
        """One step of 1 to 16 rows; returns the next id sampled after each.

        slots, ids: one a row; slot -1 is a padding row, whose result means nothing. Several rows of
        one slot continue it one after the other: drafts to verify, of which `truncate` takes back
        the rejected ones. sampling: one for all rows, or one a row.
        """
        each = [sampling] * len(ids) if isinstance(sampling, Sampling) else sampling
        return self._session.decode(
            _ints("slots", slots), _ints("ids", ids), [s._native() for s in each]
        )

    def speculate(
        self,
        slots: Sequence[int],
        ids: Sequence[int],
        blocks: Sequence[int],
        sampling: Sampling | Sequence[Sampling],
    ) -> list[list[int]]:
        """One speculative step over distinct slots.

        slots, ids: each slot's last token, not yet part of its sequence. blocks: rows to verify of
        each, 1 (plain decoding) to limits.draft.block_size, 16 in all: the draft model names
        block - 1 tokens, the target samples at every one of them, and those that it agrees with
        are accepted. sampling: one for all slots, or one each.

        Returns for each slot the tokens that `decode`, one at a time, would sample: as many as
        were accepted and one more, which is not yet part of the sequence.
        """
        each = [sampling] * len(ids) if isinstance(sampling, Sampling) else sampling
        return self._session.speculate(
            _ints("slots", slots),
            _ints("ids", ids),
            _ints("blocks", blocks),
            [s._native() for s in each],
        )

    def generate(
        self,
        slot: int,
        ids: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
        chunk: int | None = None,
        callback: Callable[[int], bool | None] | None = None,
        speculation: Speculation | None = None,
    ) -> Generated:
        """Appends ids to a slot, then decodes.

        max_new_tokens: 1 to what max_seq_len leaves room for. stop_ids: decoding ends after one of
        them. callback: called with each id as it is sampled; returning False ends decoding.
        speculation: draft and verify several tokens a step, in a session with `draft`; the slot may
        then be ahead of the callback, and is taken back to it when decoding ends there.

        The last sampled id is not yet part of the sequence: begin the next call's ids with it.
        After KeyboardInterrupt or another error the slot holds what was decoded before (a prefill
        that did not end is rolled back, see `prefill`).
        """
        values = self._session.generate(
            _int("slot", slot),
            _ints("ids", ids),
            _int("max_new_tokens", max_new_tokens),
            (sampling or Sampling())._native(),
            _ints("stop_ids", stop_ids),
            self.limits.max_chunk if chunk is None else _int("chunk", chunk),
            callback,
            None if speculation is None else speculation._native(),
        )
        stats = values.pop("speculation")
        return Generated(**values, speculation=SpeculationStats(**stats) if stats else None)

    def truncate(self, slot: int, length: int) -> None:
        """Rolls a slot back to `length` tokens.

        The last 16 positions of the longest length reached are always possible. Raises ValueError
        when the sliding window at `length` needs keys that were freed.
        """
        self._session.truncate(_int("slot", slot), _int("length", length))

    def share(self, src: int, dst: int, n: int) -> None:
        """Starts the empty slot dst with the first n tokens of src, without copying or computing.

        Both keep their own continuation. Raises ValueError when dst is not empty, src is shorter,
        or the sliding window at n needs keys that src no longer holds.
        """
        self._session.share(_int("src", src), _int("dst", dst), _int("n", n))

    def global_table(self) -> np.ndarray:
        """int32 [slots, max_pages]: the physical page of each logical page, or -1. A copy."""
        return self._session.table("global")

    def sliding_table(self) -> np.ndarray:
        """As `global_table`, for the sliding layers."""
        return self._session.table("sliding")

    def pages_in_use(self) -> dict[str, int]:
        """Physical pages taken, by kind: {"global": n, "sliding": n}, and of a draft's cache
        "draft_global" and "draft_sliding"."""
        kinds = ["global", "sliding"]
        if self._session.drafts:
            kinds += ["draft_global", "draft_sliding"]
        return {kind: self._session.pages_in_use(kind) for kind in kinds}

    def pool(self, layer: int, part: str, draft: bool = False) -> torch.Tensor:
        """The K or V pool of a layer: [pages, kv_heads, page_size, head_dim], writable, no copy.

        part: "k" or "v". draft: a layer of the draft model. dtype: the program's KV dtype (float32,
        float16 or bfloat16).
        """
        view = torch.from_numpy(self._session.pool(_int("layer", layer), part, draft))
        return view.view(torch.bfloat16) if view.dtype == torch.uint16 else view
