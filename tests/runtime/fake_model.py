"""A model whose logits tell which tokens it could see: wrong pages give wrong logits.

It stores (id, position) of every token in paged pools through the page tables, as a real program
stores K and V, and derives a row's logits from what it reads back there.
"""

from __future__ import annotations

import numpy as np

from glimmer_ops._native import _C

VOCAB = 13


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
        self.pools = {
            (layer, part): np.full(
                (lim.sliding_pages if s else lim.global_pages, 1, lim.page_size, 2),
                np.nan,
                np.float32,
            )
            for layer, s in enumerate(lim.sliding_layers)
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

    def _write(self, ids, pos, slot, tables):
        written = set()
        for i, p, s in zip(ids, pos, slot, strict=True):
            if s < 0:
                continue
            for (layer, _), pool in self.pools.items():
                page = tables[self.lim.sliding_layers[layer]][s, p // self.lim.page_size]
                assert page >= 0, f"slot {s} position {p} has no page"
                pool[page, 0, p % self.lim.page_size] = (i, p)
            written.add((s, p))
        assert len(written) == np.count_nonzero(np.asarray(slot) >= 0), "duplicate (slot, pos)"

    def _read(self, layer, part, table, slot, first, last):
        ids = []
        for p in range(first, last + 1):
            page = table[slot, p // self.lim.page_size]
            stored = self.pools[layer, part][page, 0, p % self.lim.page_size]
            if page < 0 or stored[1] != p:
                return None  # freed, never written, or another sequence's
            ids.append(stored[0])
        return ids

    def _logits(self, pos, slot, tables):
        seen = {}
        for (layer, part), _ in self.pools.items():
            sliding = self.lim.sliding_layers[layer]
            first = max(0, pos - self.lim.window + 1) if sliding else 0
            ids = self._read(layer, part, tables[sliding], slot, first, pos)
            if ids is None or seen.setdefault(sliding, ids) != ids:
                return np.full(VOCAB, np.nan, np.float32)
        return history_logits(seen.get(0), seen.get(1))

    def forward(self, embeds, pos, slot, global_table, sliding_table, rows):
        self._called("forward", (len(pos), len(rows)))
        assert len(rows) <= self.lim.max_rows and len(pos) <= self.lim.max_chunk
        tables = (global_table, sliding_table)
        self._write(embeds[:, 0], pos, slot, tables)
        out = [self._logits(pos[r], slot[r], tables) for r in rows]
        return np.array(out, np.float32).reshape(len(rows), VOCAB)

    def decode(self, ids, pos, slot, global_table, sliding_table, sampling):
        self._called("decode", len(ids))
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
        for (layer, _), pool in self.pools.items():
            if self.lim.sliding_layers[layer] == (kind == "sliding"):
                pool[dst] = pool[src]

    def pool(self, layer, part):
        return self.pools[layer, part]
