"""to_executorch: the fused graph -> model.pte and model.ptd.

Backend-independent: what the methods take and return, how the pools are sized, what the constant
methods say, and how the files come to exist whole or not at all.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, export

from glimmer_ops.config import DraftConfig, ModelConfig
from glimmer_ops.session import program_digest, sliding_pages
from glimmer_ops.tokenizer import Tokenizer

from .dflash import DRAFT_METHODS
from .graph import KV_DTYPES, METHODS, PAGE_SIZE, FusedModel, PoolPages, make_pools

MAX_DECODE_ROWS = 16
WEIGHTS_FILE = "model"  # executorch appends .ptd
PROGRAM, CHECKSUM = "model.pte", "model.sha256"
FILES = ("model.ptd", "tokenizer.json", "generation_config.json", CHECKSUM, PROGRAM)
BACKENDS = ("cpu",)  # each a module beside this one, with write() and verify()
ByteProgress = Callable[[int, int], None]  # bytes written, bytes in all


def default_max_seq_len(config: ModelConfig, draft: DraftConfig | None = None) -> int:
    return min(16384, _context_length(config, draft))


def _context_length(config: ModelConfig, draft: DraftConfig | None) -> int:
    return min(config.context_length, draft.context_length if draft else config.context_length)


@dataclass(frozen=True)
class ExportOptions:
    """What an export fixes.

    max_seq_len: positions per sequence. slots: sequences at once. max_chunk: tokens per prefill
    call, at most max_seq_len. kv_dtype: f16, bf16 or f32. pages: pages of each global layer's pool;
    None for enough to fill every slot. all_logits: lets every row of a chunk have logits, for
    proofs.
    """

    backend: str = "cpu"
    max_seq_len: int = 16384
    slots: int = 4
    max_chunk: int = 512
    kv_dtype: str = "f16"
    pages: int | None = None
    all_logits: bool = False

    @property
    def chunk(self) -> int:
        return min(self.max_chunk, self.max_seq_len)

    @property
    def max_pages(self) -> int:
        return -(-self.max_seq_len // PAGE_SIZE)

    @property
    def global_pages(self) -> int:
        return self.slots * self.max_pages if self.pages is None else self.pages

    @property
    def max_rows(self) -> int:
        return self.chunk if self.all_logits else MAX_DECODE_ROWS

    def validate(self, config: ModelConfig, draft: DraftConfig | None = None) -> None:
        """Raises ValueError naming the option, what was expected and what was found."""

        def expect(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}: expected {expected}, found {getattr(self, name)}")

        expect(self.backend in BACKENDS, "backend", f"one of {', '.join(BACKENDS)}")
        expect(self.kv_dtype in KV_DTYPES, "kv_dtype", f"one of {', '.join(KV_DTYPES)}")
        low, high = PAGE_SIZE, _context_length(config, draft)
        in_context = f"{low} to {high} (the model's context)"
        expect(low <= self.max_seq_len <= high, "max_seq_len", in_context)
        expect(1 <= self.slots <= 1024, "slots", "1 to 1024")
        low, high = MAX_DECODE_ROWS, 65536
        expect(low <= self.max_chunk <= high, "max_chunk", f"{low} to {high}")
        if self.pages is not None:
            most = self.slots * self.max_pages
            expect(1 <= self.pages <= most, "pages", f"1 to {most}, which fill every slot")


def _constants(model: FusedModel, options: ExportOptions) -> dict[str, Any]:
    """The constant methods: upstream runners' names where they have one, ours for the rest."""
    c, pages = model.config, _pages(model, options)
    unsigned = int(model.id, 16)
    constants = {
        "get_vocab_size": c.vocab_size,
        "get_max_seq_len": options.max_seq_len,
        "get_max_prefill_chunk": options.chunk,
        "get_n_layers": c.n_layers,
        "get_max_rows": options.max_rows,
        "get_slots": options.slots,
        "get_page_size": PAGE_SIZE,
        "get_global_pages": pages.of_global,
        "get_sliding_pages": pages.of_sliding,
        "get_window": c.window if any(c.sliding) else 0,
        "get_sliding_layers": torch.tensor(c.sliding, dtype=torch.int64),
        "get_weights_id": unsigned - (1 << 64) if unsigned >> 63 else unsigned,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": False,
        "enable_dynamic_shape": True,
        "use_sampling": True,
        "has_vision_encoder": False,
    }
    return constants | (_draft_constants(model.draft, pages) if model.draft else {})


def _draft_constants(draft: DraftConfig, pages: PoolPages) -> dict[str, Any]:
    return {
        "get_block_size": draft.block_size,
        "get_mask_token_id": draft.mask_token_id,
        "get_n_target_layers": len(draft.target_layers),
        "get_target_layers": torch.tensor(draft.target_layers, dtype=torch.int64),
        "get_draft_sliding_window": draft.window if any(draft.sliding) else 0,
        "get_draft_sliding_layers": torch.tensor(draft.sliding, dtype=torch.int64),
        "get_draft_global_pages": pages.draft_global,
        "get_draft_sliding_pages": pages.draft_sliding,
    }


def _sliding_pages(window: int, sliding: tuple[bool, ...], options: ExportOptions) -> int:
    """Pages that suffice for sliding layers where a query sees `window` keys, itself included."""
    if not any(sliding):
        return 1
    return min(
        sliding_pages(window, options.chunk, options.slots), options.slots * options.max_pages
    )


def _pages(model: FusedModel, options: ExportOptions) -> PoolPages:
    c, d = model.config, model.draft
    sliding = _sliding_pages(c.window, c.sliding, options)
    if d is None:
        return PoolPages(options.global_pages, sliding)
    all_global = 1 if all(d.sliding) else options.global_pages
    draft_sliding = _sliding_pages(d.window + 1, d.sliding, options)  # its window is inclusive
    return PoolPages(options.global_pages, sliding, all_global, draft_sliding)


def export_methods(model: FusedModel, options: ExportOptions) -> dict[str, ExportedProgram]:
    """Every method of the fused graph as an exported program with dynamic T and R.

    Example sizes are at least 2: torch.export takes 0 and 1 for constants.
    """
    c, d = model.config, model.draft
    pools = make_pools(c, d, _pages(model, options), KV_DTYPES[options.kv_dtype])
    pooled = model.with_pools(pools)
    t_chunk = {0: Dim("T", min=1, max=options.chunk)}
    t_rows = {0: Dim("T", min=1, max=MAX_DECODE_ROWS)}
    rows = {0: Dim("R", min=0, max=options.max_rows)}
    ids = torch.arange(3)
    tables = [torch.zeros(options.slots, options.max_pages, dtype=torch.int32) for _ in range(2)]
    where = (ids.clone(), torch.zeros(3, dtype=torch.int64), *tables)
    sampling = (torch.zeros(3), ids.clone(), torch.ones(3), ids.clone())
    calls: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
        "embed_text": ((ids,), (t_chunk,)),
        "forward_from_embeddings": (
            (torch.zeros(3, c.dim), *where, torch.arange(2)),
            (t_chunk, t_chunk, t_chunk, None, None, rows),
        ),
        "decode": ((ids, *where, *sampling), (t_rows, t_rows, t_rows, None, None, *[t_rows] * 4)),
    }
    methods = dict(METHODS)
    if d is not None:
        methods |= DRAFT_METHODS
        for name in ("forward_from_embeddings", "decode"):
            calls[f"target_{name}"] = calls[name]
        taps = torch.zeros(3, len(d.target_layers) * c.dim)
        calls["draft_prefill"] = ((taps, *where), (t_chunk, t_chunk, t_chunk, None, None))
        args, dynamic = calls["decode"]
        calls["draft_forward"] = ((*args, ids.clone()), (*dynamic, t_rows))
    programs = {}
    with torch.no_grad():
        for name, (args, dynamic) in calls.items():
            method = pooled.method(methods[name])
            programs[name] = export(method, args, dynamic_shapes=dynamic, strict=False)
    return programs


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, and generation_config.json with its ids, as Hugging Face names them."""
    tokenizer.save(folder / "tokenizer.json")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    (folder / "generation_config.json").write_text(json.dumps(ids) + "\n")


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, found the file {out}")
    for name in FILES:
        if (out / name).is_dir():
            raise ValueError(f"out: expected a file or nothing at {out / name}, found a folder")


def _publish(staging: Path, out: Path) -> None:
    """Moves the finished files to out: at once when it is new, else one by one, the .pte last."""
    staging.chmod(0o755)  # mkdtemp made it private
    if not out.exists():
        os.rename(staging, out)
        return
    for name in FILES:
        if (staging / name).exists():
            os.replace(staging / name, out / name)
        else:  # of an earlier export
            (out / name).unlink(missing_ok=True)


def to_executorch(
    model: FusedModel,
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
    tokenizer: Tokenizer | None = None,
    progress: ByteProgress | None = None,
) -> Path:
    """Writes model.pte and model.ptd, and the tokenizer's files if given, into out; returns out.

    They appear only when they are whole and have been loaded once; on any failure nothing is left.
    In a folder that has an export already its files are replaced; the runtime refuses a mix of two.
    Raises ValueError for options that the model does not admit.
    """
    if options is None:
        options = ExportOptions(max_seq_len=default_max_seq_len(model.config, model.draft))
    options.validate(model.config, model.draft)
    backend = importlib.import_module(f"{__package__}.{options.backend}")
    out = Path(out)
    _check_out(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    total = sum(w.data.nbytes for w in model.weights.values())
    written = 0

    def report(n: int) -> None:
        nonlocal written
        written += n
        if progress:
            progress(written, total)

    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        programs = export_methods(model, options)
        backend.write(programs, model, _constants(model, options), staging, report)
        (staging / CHECKSUM).write_text(program_digest(staging / PROGRAM))
        if tokenizer:
            _write_tokenizer(tokenizer, staging)
        backend.verify(staging)
        _publish(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out
