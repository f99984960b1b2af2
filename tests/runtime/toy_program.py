"""Exports a tiny program with the methods, pools and constants of a real one, on stock operators.

Its pools hold the ids of the tokens; the logits of a row are id-weighted sums over the positions it
may see, with one table of weights per layer kind. Its draft model has one sliding layer that holds
ids too, and names the id behind the last, which is right now and then.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path

import torch
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig, to_edge
from executorch.exir.passes import MemoryPlanningPass
from torch.export import Dim, export

VOCAB, DIM, MAX_SEQ, CHUNK, ROWS, SLOTS, PAGE, WINDOW = 11, 2, 64, 8, 3, 2, 4, 6
MAX_PAGES = MAX_SEQ // PAGE
GLOBAL_PAGES, SLIDING_PAGES = SLOTS * MAX_PAGES, 24
SLIDING = (1, 0)  # layer 0 slides
BLOCK, DRAFT_WINDOW, DRAFT_PAGES = 6, 5, 20


class Pools(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for layer, sliding in enumerate(SLIDING):
            for part in "kv":
                shape = (SLIDING_PAGES if sliding else GLOBAL_PAGES, 1, PAGE, DIM)
                self.register_buffer(f"{part}_{layer}", torch.zeros(shape, dtype=dtype))


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("layers", torch.randn(2, MAX_SEQ, VOCAB, generator=generator))


class Toy(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, weights: str) -> None:
        super().__init__()
        self.pools = Pools(dtype)
        self.weights_name = weights
        self.add_module(weights, Weights())

    def embed(self, ids):
        return torch.stack([ids.to(torch.float32), -ids.to(torch.float32)], 1)

    def step(self, x, pos, slot, tables, rows):
        row_pos, row_slot = pos.index_select(0, rows), slot.index_select(0, rows)
        weights = getattr(self, self.weights_name).layers
        j = torch.arange(MAX_SEQ)
        logits = 0.0
        for layer, sliding in enumerate(SLIDING):
            table = tables[sliding].to(torch.int64)
            page, offset = table[slot, pos // PAGE], pos % PAGE
            head = torch.zeros_like(page)
            for part in "kv":
                pool = getattr(self.pools, f"{part}_{layer}")
                pool.index_put_((page, head, offset), x.to(pool.dtype))
            pages = table[row_slot].clamp(min=0)
            keys = getattr(self.pools, f"k_{layer}")[pages].reshape(-1, MAX_SEQ, DIM)[:, :, 0]
            distance = row_pos.unsqueeze(1) - j.unsqueeze(0)
            visible = distance >= 0
            if sliding:
                visible = torch.logical_and(visible, distance < WINDOW)
            ids = torch.where(visible, keys.to(torch.float32), torch.zeros(()))
            logits = logits + ids @ weights[layer]
        return logits


class Method(torch.nn.Module):
    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.pools, self.weights_name = toy.pools, toy.weights_name
        self.add_module(toy.weights_name, getattr(toy, toy.weights_name))

    embed, step = Toy.embed, Toy.step


class EmbedText(torch.nn.Module):
    def forward(self, ids):
        return Toy.embed(self, ids)


class Forward(Method):
    def forward(self, embeds, pos, slot, global_table, sliding_table, rows):
        return self.step(embeds, pos, slot, (global_table, sliding_table), rows)


class Decode(Method):
    def forward(self, ids, pos, slot, global_table, sliding_table, temperature, top_k, top_p, seed):
        rows = torch.arange(ids.shape[0])
        logits = self.step(self.embed(ids), pos, slot, (global_table, sliding_table), rows)
        return torch.remainder(logits.argmax(1) + seed * (pos + 1), VOCAB)


class TargetForward(Forward):
    def forward(self, embeds, pos, slot, global_table, sliding_table, rows):
        logits = self.step(embeds, pos, slot, (global_table, sliding_table), rows)
        return logits, embeds * 2


class TargetDecode(Decode):
    def forward(self, ids, pos, slot, global_table, sliding_table, temperature, top_k, top_p, seed):
        where = (pos, slot, global_table, sliding_table)
        sampled = Decode.forward(self, ids, *where, temperature, top_k, top_p, seed)
        return sampled, self.embed(ids) * 2


class DraftPools(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for part in "kv":
            self.register_buffer(f"draft_{part}_0", torch.zeros(DRAFT_PAGES, 1, PAGE, DIM))


class DraftPrefill(torch.nn.Module):
    def __init__(self, pools: DraftPools) -> None:
        super().__init__()
        self.pools = pools

    def write(self, x, pos, slot, table):
        page, offset = table.to(torch.int64)[slot, pos // PAGE], pos % PAGE
        for pool in (self.pools.draft_k_0, self.pools.draft_v_0):
            pool.index_put_((page, torch.zeros_like(page), offset), x)

    def forward(self, taps, pos, slot, global_table, sliding_table):
        self.write(taps / 2, pos, slot, sliding_table)
        return taps[:, 0] * 0


class DraftForward(DraftPrefill):
    def forward(self, ids, pos, slot, global_table, sliding_table, t, top_k, top_p, seed, step):
        self.write(Toy.embed(self, ids), pos, slot, sliding_table)
        last = self.pools.draft_k_0[sliding_table.to(torch.int64)[slot, step // PAGE]]
        before = last[torch.arange(ids.shape[0]), 0, step % PAGE, 0]
        return torch.remainder(before.to(torch.int64) + 1, VOCAB)


DRAFT_CONSTANTS = {
    "get_block_size": BLOCK,
    "get_mask_token_id": VOCAB - 1,
    "get_draft_sliding_window": DRAFT_WINDOW,
    "get_draft_sliding_layers": torch.tensor([1]),
    "get_draft_global_pages": 1,
    "get_draft_sliding_pages": DRAFT_PAGES,
}
CONSTANTS = {
    "get_vocab_size": VOCAB,
    "get_max_seq_len": MAX_SEQ,
    "get_max_prefill_chunk": CHUNK,
    "get_max_rows": ROWS,
    "get_slots": SLOTS,
    "get_page_size": PAGE,
    "get_global_pages": GLOBAL_PAGES,
    "get_sliding_pages": SLIDING_PAGES,
    "get_window": WINDOW,
    "get_n_layers": len(SLIDING),
    "get_sliding_layers": torch.tensor(SLIDING),
}


def _export(module, args, dims):
    dynamic = tuple({0: dim} if dim is not None else None for dim in dims)
    args = tuple(a.clone() for a in args)  # export merges inputs that are one tensor
    return export(module, args, dynamic_shapes=dynamic, strict=False)


def _draft_programs(toy: Toy, plain: dict, t: Dim, d: Dim) -> dict:
    x, n = torch.zeros(3, DIM), torch.arange(3)
    pools = DraftPools()
    args, dims = plain["decode"]
    where = args[1:5]
    methods = {
        "target_forward_from_embeddings": (TargetForward(toy), *plain["forward_from_embeddings"]),
        "target_decode": (TargetDecode(toy), args, dims),
        "draft_prefill": (DraftPrefill(pools), (x, *where), (t, t, t, None, None)),
        "draft_forward": (DraftForward(pools), (*args, n), (*dims, d)),
    }
    return {name: _export(*method) for name, method in methods.items()}


@functools.cache
def edge_programs(weights: str, dtype: torch.dtype, draft: bool = False):
    """The eager model and its methods in edge dialect: the slow part of an export."""
    toy = Toy(dtype, weights)
    t = Dim("T", min=1, max=CHUNK)
    d = Dim("D", min=1, max=16)
    r = Dim("R", min=0, max=ROWS)
    n, f, x = torch.arange(3), torch.zeros(3), torch.zeros(3, DIM)
    table = torch.zeros((SLOTS, MAX_PAGES), dtype=torch.int32)
    calls = {
        "forward_from_embeddings": ((x, n, n, table, table, n[:2]), (t, t, t, None, None, r)),
        "decode": ((n, n, n, table, table, f, n, f, n), (d, d, d, None, None, d, d, d, d)),
    }
    with torch.no_grad():
        programs = {
            "embed_text": _export(EmbedText(), (n,), (t,)),
            "forward_from_embeddings": _export(Forward(toy), *calls["forward_from_embeddings"]),
            "decode": _export(Decode(toy), *calls["decode"]),
        }
        if draft:
            programs |= _draft_programs(toy, calls, t, d)
    edge = to_edge(programs)
    return toy, {name: edge.exported_program(name) for name in programs}


def export_toy(
    folder: Path,
    weights_id: int | None = 0x1234,
    dtype: torch.dtype = torch.float32,
    share: bool = True,
    without: str = "",
    data: bool = True,
    draft: bool = False,
    **constants,
) -> Toy:
    """Writes model.pte and model.ptd into folder; returns the eager model.

    without: a method or constant to leave out; share: one set of pools for all methods; draft: with
    a draft model; constants override CONSTANTS.
    """
    name = "weights" if weights_id is None else f"weights_{weights_id:016x}"
    toy, programs = edge_programs(name, dtype, draft)
    values = {**CONSTANTS, **(DRAFT_CONSTANTS if draft else {}), **constants}
    if weights_id is not None:
        values["get_weights_id"] = weights_id - (weights_id >> 63 << 64)
    edge = EdgeProgramManager(
        copy.deepcopy({k: v for k, v in programs.items() if k != without}),
        {k: v for k, v in values.items() if k != without},
    )
    program = edge.to_executorch(
        ExecutorchBackendConfig(
            external_constants=(lambda node: "model") if data else False,
            emit_mutable_buffer_names=True,
            memory_planning_pass=MemoryPlanningPass(
                share_mutable_buffers=share, alloc_graph_input=False
            ),
        )
    )
    os.makedirs(folder, exist_ok=True)
    with open(folder / "model.pte", "wb") as out:
        program.write_to_file(out)
    if data:
        program.write_tensor_data_to_file(str(folder))
    return toy
