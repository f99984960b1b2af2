"""Speculative decoding of real programs: the text of plain decoding, whatever the blocks."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import glimmer_ops
from glimmer_ops import _native
from glimmer_ops.config import DraftConfig
from glimmer_ops.inspect import describe
from glimmer_ops.lowering import from_gguf
from glimmer_ops.lowering.dflash import DraftForward, DraftPrefill, TargetForwardFromEmbeddings
from glimmer_ops.lowering.graph import PoolPages, make_pools
from glimmer_ops.ops import OPS
from glimmer_ops.program import read_program
from glimmer_ops.run import plain_token
from glimmer_ops.session import Sampling, Session, Speculation, load_program
from glimmer_ops.synth_draft import synth_pair

QUANTS = ("F16", "Q4_K_M")
HOW = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=11),
}
TOKENS = 520
PROMPT = 32


def prompt(n=PROMPT, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


@pytest.fixture(scope="module")
def plain(exported_pair):
    """plain("F16", "greedy"): the text of plain decoding."""

    @functools.cache
    def make(quant: str, how: str) -> list[int]:
        session = Session.load(exported_pair(quant))
        return session.generate(session.open(), prompt(), TOKENS, HOW[how]).ids

    return make


@pytest.fixture(scope="module")
def drafting(exported_pair):
    return functools.cache(lambda quant: Session.load(exported_pair(quant), draft=True))


@pytest.mark.parametrize("block", [2, 4, 8, 16, None])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("quant", QUANTS)
def test_the_text_is_plain_decodings(quant, how, block, plain, drafting):
    session = drafting(quant)
    slot = session.open()
    result = session.generate(slot, prompt(), TOKENS, HOW[how], speculation=Speculation(block))
    assert result.ids == plain(quant, how)
    assert session.length(slot) == PROMPT + TOKENS - 1
    session.close(slot)
    stats = result.speculation
    assert stats.passes + stats.accepted == TOKENS and sum(stats.passes_by_block) == stats.passes
    assert stats.accepted == sum(n * k for k, n in enumerate(stats.passes_by_accepted))
    if block:  # rejections and acceptances, so that the equality says something
        seen = np.array(stats.passes_by_accepted[:block])
        assert (seen > 0).mean() > 0.6 and stats.tokens_per_pass > 1.5, seen


def test_every_number_of_accepted_drafts_occurs(drafting):
    session, seen = drafting("F16"), np.zeros(16, int)
    for seed in range(4):
        slot = session.open()
        result = session.generate(slot, prompt(seed=seed), 400, speculation=Speculation(16))
        seen += result.speculation.passes_by_accepted
        session.close(slot)
    assert (seen > 0).all(), seen


def test_up_to_the_last_position(exported_pair, drafting):
    ids = prompt(600, 3)
    plain = Session.load(exported_pair("F16"))
    expected = plain.generate(plain.open(), ids, 41).ids
    session = drafting("F16")
    for block in (2, 7, 16):
        slot = session.open()
        result = session.generate(slot, ids, 41, speculation=Speculation(block))
        assert result.ids == expected and session.length(slot) == 640
        session.close(slot)


def test_several_slots_at_once(exported_pair, drafting):
    plain, session = Session.load(exported_pair("Q4_K_M")), drafting("Q4_K_M")
    sampling = [Sampling(), Sampling(0.8, 40, 0.95, 5), Sampling(1.2, seed=6)]
    texts, expected = {}, {}
    for i in range(3):
        ids = prompt(PROMPT + 7 * i, i)
        expected[i] = plain.generate(plain.open(), ids, 150, sampling[i]).ids
        slot = session.open()
        session.prefill(slot, ids[:-1], rows=[])
        texts[slot] = ids[-1:]
    slots, accepted = list(texts), 0
    for step in range(40):
        blocks = [[8, 4, 4], [1, 8, 7], [5, 5, 6], [2, 1, 13]][step % 4]
        last = [texts[s][-1] for s in slots]
        for slot, tokens in zip(
            slots, session.speculate(slots, last, blocks, sampling), strict=True
        ):
            texts[slot] += tokens
            accepted += len(tokens) - 1
    for i, slot in enumerate(slots):
        assert texts[slot][1:] == expected[i][: len(texts[slot]) - 1]
        session.close(slot)
    assert accepted > 100


def test_row_order_and_padding_of_pages_do_not_matter(exported_pair, plain):
    session = Session(load_program(exported_pair("F16")), page_seed=5, draft=True)
    others = [session.open(), session.open()]
    session.prefill(others[1], prompt(100, 9), rows=[])
    session.close(others[0])
    slot = session.open()
    result = session.generate(slot, prompt(), 200, chunk=5, speculation=Speculation(9))
    assert result.ids == plain("F16", "greedy")[:200]


def test_draft_logits_of_the_program_are_the_graphs(tiny_pair, exported_pair):
    """Bit for bit, so that what holds of the graph (tests/lowering/test_dflash.py) holds of it."""
    target, draft = tiny_pair("F16")
    fused, block = from_gguf(target, draft), 9
    pools = make_pools(fused.config, fused.draft, PoolPages(2, 2, 2, 2), torch.float16)
    graph = fused.with_pools(pools)
    ids = torch.tensor(prompt(70, 4))
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    pos, slot = torch.arange(70), torch.zeros(70, dtype=torch.int64)
    rows = torch.tensor([69])
    with torch.no_grad():
        forward = graph.method(TargetForwardFromEmbeddings)
        _, taps = forward(graph.embed(ids), pos, slot, table, table, rows)
        graph.method(DraftPrefill)(taps, pos, slot, table, table)
        mask = fused.draft.mask_token_id
        tokens = torch.tensor([17] + [mask] * (block - 1))
        at = torch.arange(70, 70 + block)
        expected = graph.method(DraftForward).denoise(tokens, at, slot[:block], table, table)

    model = load_program(exported_pair("F16"), trace="outputs")
    session = Session(model, draft=True)
    session.prefill(session.open(), ids.tolist())
    model.take_trace()
    session.speculate([0], [17], [block], Sampling())
    _, outputs = model.take_trace()
    places = read_program(exported_pair("F16") / "model.pte").method("draft_forward").by_place()
    logits = [
        o for o in outputs
        if o[0] == "draft_forward" and places[o[1], o[2]].name == "kquant_logits"
    ]  # fmt: skip
    assert len(logits) == 1
    found = np.frombuffer(logits[0][6], np.float32).reshape(block, 1024)
    assert np.array_equal(found, expected.numpy())


def test_a_draft_draws_with_its_tokens_noise(exported_pair):
    """The target draws the token at position p with step p - 1, and so does the draft."""
    model = load_program(exported_pair("F16"), trace="outputs")
    session = Session(model, draft=True)
    session.prefill(session.open(), prompt(40, 2))
    model.take_trace()
    session.speculate([0], [17], [16], Sampling(temperature=50.0, top_k=200, top_p=0.99, seed=9))
    places = read_program(exported_pair("F16") / "model.pte").method("draft_forward").by_place()
    made = {
        places[o[1], o[2]].name: np.frombuffer(o[6], o[4])
        for o in model.take_trace()[1]
        if o[0] == "draft_forward"
    }
    logits = torch.from_numpy(made["kquant_logits"].copy()).view(16, -1)
    parameters = (
        torch.full((16,), 50.0), torch.full((16,), 200), torch.full((16,), 0.99),
        torch.full((16,), 9),
    )  # fmt: skip
    for shift, equal in ((-1, True), (0, False)):
        step = torch.arange(40, 56) + shift
        expected = OPS["sample"].reference(logits, *parameters, step)
        assert (made["sample"].tolist() == expected.tolist()) == equal


def test_embedding_and_head_are_stored_once(tiny_pair, exported_pair):
    target, draft = tiny_pair("Q4_K_M")
    folder = exported_pair("Q4_K_M")
    program = read_program(folder / "model.pte")
    found = describe(folder, Path(target.path), Path(draft.path))
    assert found["data_file"]["tensors"] == len(program.weights)
    # Everything but the uniform gains of QK-norm, which are folded into the attention scale.
    folded = sum(t.nbytes for n, t in target.tensors.items() if "_q_norm" in n or "_k_norm" in n)
    weights = sum(w.tensor.nbytes for w in program.weights.values())
    assert weights == target.nbytes - folded + draft.nbytes
    assert (folder / "model.ptd").stat().st_size < 1.02 * (target.nbytes + draft.nbytes)
    methods = {m.name: {w.name for i in m.instructions for w in i.weights} for m in program.methods}
    shared = {n.rsplit(".", 1)[-1] for n in methods["draft_forward"] & methods["target_decode"]}
    assert shared == {"token_embd", "output"}
    assert methods["target_decode"] == methods["decode"]
    assert not any(w.draft for w in program.weights.values() if w.name in methods["decode"])


def test_ops_a_layer(exported_pair):
    program = read_program(exported_pair("Q4_K_M") / "model.pte")
    layers = {m.name: m.per_layer for m in program.methods}
    assert layers["target_decode"] == layers["decode"] == 11
    assert layers["draft_forward"] == 10
    counts = {m.name: len(m.instructions) for m in program.methods}
    assert counts["target_decode"] == counts["decode"] + 1  # the taps, side by side
    assert counts["draft_prefill"] == 2 + 3 * 3


def test_memory_does_not_grow_with_steps(drafting):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    session = drafting("F16")
    slot = session.open()
    session.generate(slot, prompt(), 100, speculation=Speculation(8))
    before, pages = resident(), session.pages_in_use()
    for _ in range(12):
        session.generate(slot, [5], 60, speculation=Speculation(8))
        session.truncate(slot, session.length(slot) - 15)
        session.close(slot)
        slot = session.open()
        session.prefill(slot, prompt(131), rows=[])
    assert resident() - before < 8 << 20
    assert session.pages_in_use()["draft_sliding"] <= pages["draft_sliding"] + 2
    session.close(slot)


@pytest.mark.parametrize("exact", [False, True])
def test_exact_and_integer_paths(exact, exported_pair):
    with glimmer_ops.use_exact(exact):
        plain = Session.load(exported_pair("Q4_K_M"))
        expected = plain.generate(plain.open(), prompt(seed=8), 60).ids
        session = Session.load(exported_pair("Q4_K_M"), draft=True)
        result = session.generate(session.open(), prompt(seed=8), 60, speculation=Speculation(16))
    assert result.ids == expected and result.speculation.accepted > 20


@pytest.mark.parametrize("isa", _native.isas())
def test_every_isa(isa, exported_pair):
    with _native.use_isa(isa):
        plain = Session.load(exported_pair("Q4_K_M"))
        expected = plain.generate(plain.open(), prompt(seed=2), 40).ids
        session = Session.load(exported_pair("Q4_K_M"), draft=True)
        result = session.generate(session.open(), prompt(seed=2), 40, speculation=Speculation(8))
    assert result.ids == expected and result.speculation.accepted > 10


# --- the command ---------------------------------------------------------------------------------


def ids_text(n=PROMPT):
    return ",".join(map(str, prompt(n)))


@pytest.mark.parametrize("block", ["5", None])
def test_run_prints_what_was_accepted(block, glimmer, exported_pair, plain):
    arguments = ["--block-length", block] if block else []
    status, out, _ = glimmer(
        "run", "--model", exported_pair("Q4_K_M"), "--tokens", ids_text(), "--speculate",
        "--max-new-tokens", 90, *arguments,
    )  # fmt: skip
    assert status == 0
    n = int(re.search(r"decode (\d+) tokens", out)[1])  # an end of text may come earlier
    session = Session.load(exported_pair("Q4_K_M"), draft=True)
    line = re.search(
        r"(\d+) passes \(blocks: (.*)\); (\d+) of (\d+) drafts accepted "
        r"\(passes by number accepted: (.*)\)\n([\d.]+) tokens a pass, ([\d.]+) drafts accepted a "
        r"drafting pass; ([\d.]+) x the speed",
        out,
    )
    passes, accepted, drafted = int(line[1]), int(line[3]), int(line[4])
    assert passes + accepted == n and float(line[6]) == round(n / passes, 2)
    blocks = dict(map(int, part.split(" of ")[::-1]) for part in line[2].split(", "))
    counts = dict(map(int, part.split(": ")) for part in line[5].split(", "))
    assert sum(blocks.values()) == passes and sum((b - 1) * m for b, m in blocks.items()) == drafted
    assert sum(k * m for k, m in counts.items()) == accepted
    assert float(line[8]) > 0
    if block:
        how = Speculation(int(block))
        stats = session.generate(session.open(), prompt(), n, speculation=how).speculation
        assert (stats.passes, stats.drafted, stats.accepted) == (passes, drafted, accepted)


def test_run_sets_no_speed_beside_a_few_tokens(glimmer, exported_pair):
    arguments = ("run", "--model", exported_pair("F16"), "--tokens", ids_text(), "--speculate")
    for n, measured in ((3, False), (40, True)):
        status, out, _ = glimmer(*arguments, "--max-new-tokens", n)
        assert status == 0 and f"decode {n} tokens" in out
        assert ("x the speed of plain decoding" in out) == measured


def test_plain_decoding_is_measured_at_the_last_position_too(drafting):
    session = drafting("F16")
    slot = session.open()
    last = session.generate(slot, prompt(600), 41, speculation=Speculation(16)).ids[-1]
    assert session.length(slot) == session.limits.max_seq_len
    assert 0 < plain_token(session, slot, last, Sampling()) < 1
    session.close(slot)


def test_run_gives_the_same_ids(glimmer, exported_pair):
    texts = [
        glimmer(
            "run", "--model", exported_pair("F16"), "--tokens", ids_text(), "--ids-only",
            "--temperature", 0.9, "--seed", 4, "--max-new-tokens", 70, *more,
        )[1]
        for more in ((), ("--speculate",), ("--speculate", "--block-length", 16))
    ]  # fmt: skip
    assert texts[0] == texts[1] == texts[2] and len(texts[0].split()) > 20


def test_profile_shows_the_draft(glimmer, exported_pair, tmp_path):
    status, out, _ = glimmer(
        "run", "--model", exported_pair("F16"), "--tokens", ids_text(), "--speculate",
        "--block-length", 4, "--max-new-tokens", 40, "--profile", tmp_path / "p.json",
    )  # fmt: skip
    assert status == 0
    assert re.search(r"draft: \d+ steps, \d+ tokens", out) and "draft_fc" in out
    for name, steps in re.findall(r"(prefill|decode|draft): (\d+) steps", out):
        assert int(steps) > 0, name
    assert all(float(x) < 110 for x in re.findall(r"([\d.]+)% of wall", out))


def refused(glimmer, *arguments):
    status, out, err = glimmer(*arguments)
    assert status == 1 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_bad_input_of_run(glimmer, exported, exported_pair):
    both = ("run", "--tokens", "1,2,3", "--max-new-tokens", 4, "--model")
    plain, pair = exported("F16"), exported_pair("F16")
    assert "--speculate: expected a model with a draft" in refused(
        glimmer, *both, plain, "--speculate"
    )
    for length in (1, 17, 0, -4):
        found = refused(glimmer, *both, pair, "--speculate", "--block-length", length)
        assert f"--block-length: expected 2 to 16, found {length}" in found
    assert "--block-length: expected --speculate" in refused(
        glimmer, *both, pair, "--block-length", 4
    )


def test_bad_input_of_export(glimmer, tiny_pair, tmp_path):
    target, draft = tiny_pair("F16")
    out = tmp_path / "out"

    def export(gguf, draft_gguf):
        found = refused(glimmer, "export", "--gguf", gguf, "--draft-gguf", draft_gguf, "--out", out)
        assert not out.exists()
        return found

    assert "general.architecture: expected dflash" in export(target.path, target.path)
    assert "general.architecture: expected muse-glimmer" in export(draft.path, draft.path)
    assert "nothing.gguf" in export(target.path, tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 768}, "draft: dim: expected the target's 512, found 768"),
        ({"mask_token_id": 1024}, "draft: mask_token_id: expected an id below"),
        ({"target_layers": (1, 3, 6)}, "draft: target_layers: expected layers below the target's"),
    ],
)
def test_a_draft_that_does_not_fit(change, message, tiny_pair):
    target, draft = tiny_pair("F16")
    other = type(draft)(
        draft.path, DraftConfig(**(vars(draft.config) | change)), draft.tensors, draft.metadata
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        from_gguf(target, other)


def test_a_file_with_another_drafts_weights_is_refused(tmp_path, exported_pair, tiny_pair):
    folder = shutil.copytree(exported_pair("F16"), tmp_path / "mixed")
    shutil.copy(exported_pair("Q4_K_M") / "model.ptd", folder / "model.ptd")
    with pytest.raises(ValueError, match="holds weights"):
        Session.load(folder, draft=True)


def test_a_random_pair_speculates_too(tmp_path):
    """Nothing is accepted, so every pass rejects, and the text stays."""
    from glimmer_ops.gguf import load, load_draft
    from glimmer_ops.lowering import ExportOptions, to_executorch

    synth_pair(tmp_path / "t.gguf", tmp_path / "d.gguf", "tiny", "Q4_K_M")
    fused = from_gguf(load(tmp_path / "t.gguf"), load_draft(tmp_path / "d.gguf"))
    options = ExportOptions(max_seq_len=256, slots=1, max_chunk=64, kv_dtype="bf16", pages=3)
    folder = to_executorch(fused, tmp_path / "out", options)
    plain, session = Session.load(folder), Session.load(folder, draft=True)
    expected = plain.generate(plain.open(), prompt(), 160).ids  # to the end of the third page
    result = session.generate(session.open(), prompt(), 160, speculation=Speculation(16))
    assert result.ids == expected and result.speculation.accepted < 10
