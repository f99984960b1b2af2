"""A model whose logits tell which tokens it could see: wrong pages give wrong logits.

It stores (id, position) of every token in paged pools through the page tables, as a real program
stores K and V, and derives a row's logits from what it reads back there.
"""

from __future__ import annotations

import numpy as np

from glimmer_ops._native import _C

VOCAB = 13
MASK = 12


def draft_limits(slots=3, max_chunk=12, max_seq_len=96, page_size=4, **overrides):
    """A draft with a global and a sliding layer."""
    window = overrides.pop("window", 11)
    values = {
        "block_size": 8,
        "mask_token_id": MASK,
        "window": window,
        "sliding_layers": [1, 0],
        "global_pages": slots * -(-max_seq_len // page_size),
        "sliding_pages": _C.sliding_pages(window, max_chunk, slots, page_size),
    }
    return _C.DraftLimits(**(values | overrides))


def limits(**overrides):
    values = {
        "vocab_size": VOCAB,
        "max_seq_len": 96,
        "max_chunk": 12,
        "max_rows": 3,
        "slots": 3,
        "page_size": 4,
        "window": 10,
        "sliding_layers": [1, 0, 1],
    }
    values |= overrides
    if 1 not in values["sliding_layers"]:
        values["window"] = 0
    pages = -(-values["max_seq_len"] // values["page_size"])
    values.setdefault("global_pages", values["slots"] * pages)
    if values["window"]:
        shape = (values["window"], values["max_chunk"], values["slots"], values["page_size"])
        values.setdefault("sliding_pages", _C.sliding_pages(*shape))
    values.setdefault("sliding_pages", 0)
    return _C.ModelLimits(**values)


def history_logits(everything, window):
    """float32 [VOCAB] for the tokens of a full history and of the window's part of it."""
    logits = np.zeros(VOCAB)
    for weight, ids in ((1.0, everything), (0.5, window)):
        if ids is None:
            continue
        state = 17
        for i in ids:
            state = (state * 31 + int(i) + 1) % 1_000_003
        logits += weight * np.cos(state * (1.0 + np.arange(VOCAB)))
    return logits.astype(np.float32)


def expected_logits(ids, lim):
    """The logits after a sequence of ids."""
    kinds = set(lim.sliding_layers)
    return history_logits(ids if 0 in kinds else None, ids[-lim.window :] if 1 in kinds else None)


def expected_next(ids, lim, seed=0):
    return int((np.argmax(expected_logits(ids, lim)) + seed * len(ids)) % lim.vocab_size)


class FakeModel(_C.Model):
    def __init__(self, lim):
        super().__init__(lim)
        self.lim = lim
        self.calls = []
        self.fail_on = None  # (method, countdown)
        self.pools = self._new_pools(lim)
        self.draft_pools = self._new_pools(lim.draft) if lim.draft else {}
        self.taps = []  # (slot, id, position) of the rows of the last step with taps
        self.mistake = lambda slot, pos: False

    def _new_pools(self, caches):
        return {
            (layer, part): np.full(
                (caches.sliding_pages if s else caches.global_pages, 1, self.lim.page_size, 2),
                np.nan,
                np.float32,
            )
            for layer, s in enumerate(caches.sliding_layers)
            for part in "kv"
        }

    def _called(self, method, detail=None):
        self.calls.append((method, detail))
        if self.fail_on and self.fail_on[0] == method:
            self.fail_on = (method, self.fail_on[1] - 1)
            if self.fail_on[1] == 0:
                self.fail_on = None
                raise RuntimeError(f"{method} broke")

    def embed(self, ids):
        self._called("embed", len(ids))
        return np.stack([ids, ids * 2], 1).astype(np.float32)

    def _write(self, ids, pos, slot, tables, draft=False):
        caches, pools = (self.lim.draft, self.draft_pools) if draft else (self.lim, self.pools)
        written = set()
        for i, p, s in zip(ids, pos, slot, strict=True):
            if s < 0:
                continue
            for (layer, _), pool in pools.items():
                page = tables[caches.sliding_layers[layer]][s, p // self.lim.page_size]
                assert page >= 0, f"slot {s} position {p} has no page"
                pool[page, 0, p % self.lim.page_size] = (i, p)
            written.add((s, p))
        assert len(written) == np.count_nonzero(np.asarray(slot) >= 0), "duplicate (slot, pos)"

    def _read(self, pool, table, slot, first, last):
        ids = []
        for p in range(first, last + 1):
            page = table[slot, p // self.lim.page_size]
            stored = pool[page, 0, p % self.lim.page_size]
            if page < 0 or stored[1] != p:
                return None  # freed, never written, or another sequence's
            ids.append(stored[0])
        return ids

    def _logits(self, pos, slot, tables):
        seen = {}
        for (layer, _), pool in self.pools.items():
            sliding = self.lim.sliding_layers[layer]
            first = max(0, pos - self.lim.window + 1) if sliding else 0
            ids = self._read(pool, tables[sliding], slot, first, pos)
            if ids is None or seen.setdefault(sliding, ids) != ids:
                return np.full(VOCAB, np.nan, np.float32)
        return history_logits(seen.get(0), seen.get(1))

    def target_forward(self, embeds, pos, slot, *rest):
        self.taps = list(zip(slot, embeds[:, 0], pos, strict=True))
        return self.forward(embeds, pos, slot, *rest, method="target_forward")

    def target_decode(self, ids, pos, slot, *rest):
        self.taps = list(zip(slot, ids, pos, strict=True))
        return self.decode(ids, pos, slot, *rest, method="target_decode")

    def draft_prefill(self, rows, pos, slot, global_table, sliding_table):
        self._called("draft_prefill", len(rows))
        tapped = [self.taps[row] for row in rows]
        assert [(t[0], t[2]) for t in tapped] == list(zip(slot, pos, strict=True))
        self._write([t[1] for t in tapped], pos, slot, (global_table, sliding_table), draft=True)

    def draft_forward(self, ids, pos, slot, global_table, sliding_table, sampling):
        self._called("draft_forward", len(ids))
        tables = (global_table, sliding_table)
        self._write(ids, pos, slot, tables, draft=True)
        out = []
        for i, (id_, p, s) in enumerate(zip(ids, pos, slot, strict=True)):
            if i == 0 or slot[i - 1] != s:
                history = [*self._context(s, p, tables), int(id_)]
                out.append(0)  # an anchor's means nothing
                continue
            assert id_ == self.lim.draft.mask_token_id and p == pos[i - 1] + 1
            right = expected_next(history, self.lim, sampling[i].seed)
            history.append((right + 1) % VOCAB if self.mistake(int(s), int(p)) else right)
            out.append(history[-1])
        return out

    def _context(self, slot, length, tables):
        """The ids that were injected for positions [0, length)."""
        context = None
        for (layer, _), pool in sorted(self.draft_pools.items(), reverse=True):  # the global first
            sliding = self.lim.draft.sliding_layers[layer]
            first = max(0, length - self.lim.draft.window + 1) if sliding else 0
            ids = self._read(pool, tables[sliding], slot, first, length - 1)
            assert ids is not None, f"layer {layer} lacks a position of slot {slot}"
            context = ids if context is None else context
            assert ids == context[first:], f"layer {layer} of slot {slot}"
        return [int(i) for i in context]

    def forward(self, embeds, pos, slot, global_table, sliding_table, rows, method="forward"):
        self._called(method, (len(pos), len(rows)))
        assert len(rows) <= self.lim.max_rows and len(pos) <= self.lim.max_chunk
        tables = (global_table, sliding_table)
        self._write(embeds[:, 0], pos, slot, tables)
        out = [self._logits(pos[r], slot[r], tables) for r in rows]
        return np.array(out, np.float32).reshape(len(rows), VOCAB)

    def decode(self, ids, pos, slot, global_table, sliding_table, sampling, method="decode"):
        self._called(method, len(ids))
        tables = (global_table, sliding_table)
        self._write(ids, pos, slot, tables)
        out = []
        for p, s, how in zip(pos, slot, sampling, strict=True):
            logits = self._logits(p, s, tables) if s >= 0 else np.zeros(VOCAB)
            finite = np.isfinite(logits).all()
            out.append((int(np.argmax(logits)) + how.seed * (int(p) + 1)) % VOCAB if finite else -1)
        return out

    def copy_page(self, kind, src, dst):
        self._called("copy_page", (kind, src, dst))
        draft = kind.startswith("draft_")
        caches, pools = (self.lim.draft, self.draft_pools) if draft else (self.lim, self.pools)
        for (layer, _), pool in pools.items():
            if caches.sliding_layers[layer] == kind.endswith("sliding"):
                pool[dst] = pool[src]

    def pool(self, layer, part):
        return self.pools[layer, part]

    def draft_pool(self, layer, part):
        return self.draft_pools[layer, part]
