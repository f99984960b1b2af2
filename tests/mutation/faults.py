"""Faults that a kernel could have, and what must catch each: the data of the mutation test.

Each is planted alone in a copy of the tree. `old` must occur exactly once in `file`. `caught_by` is
a `glimmer check` command or a pytest node: it must pass without the fault and fail with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """kind: the class of fault, for the table. what: this one, in the table's words.

    isa: the ISA that it needs: scalar is always there, "vector" is any other.
    """

    id: str
    kind: str
    what: str
    file: str
    old: str
    new: str
    caught_by: str
    isa: str = "scalar"

    def __post_init__(self) -> None:
        if self.old == self.new:
            raise ValueError(f"fault {self.id}: old and new are equal")


def _check(op: str, case: str) -> str:
    return f"glimmer check --op {op} --case {case}"


def _memory(op: str, case: str) -> str:
    return f"tests/ops/test_fixtures.py::test_memory[{op}-cpu-{case}]"


CHI_SQUARE = "tests/ops/test_sample.py::test_chi_square_of_temperature_with_top_k_and_top_p[scalar]"

# Faults of one file stay together: that spares compilations.
FAULTS = [
    Fault(
        "tail",
        "off-by-one tail",
        "the last element of a row is not computed",
        "kernels/cpu/add_rms_norm.cpp",
        "const int n = static_cast<int>(dim - i);",
        "const int n = static_cast<int>(dim - i - 1);",
        _check("add_rms_norm", "f32/7x769"),
        isa="vector",
    ),
    Fault(
        "past-the-end",
        "missing guard: bounds",
        "one element behind the row is written",
        "kernels/cpu/add_rms_norm.cpp",
        "(w ? v * load_tail(w + i, n) : v), n);",
        "(w ? v * load_tail(w + i, n) : v), n + 1);",
        _memory("add_rms_norm", "f32/7x769"),
        isa="vector",
    ),
    Fault(
        "eps-swapped",
        "swapped parameter",
        "the post-norm uses the next norm's eps",
        "kernels/cpu/add_rms_norm.cpp",
        "inverse_rms(row, dim, *post_eps)",
        "inverse_rms(row, dim, next_eps)",
        _check("add_rms_norm", "f32/small-eps-swapped"),
    ),
    Fault(
        "sum-not-rounded",
        "double rounding",
        "the fused norm reads the branch instead of the sum",
        "kernels/cpu/add_rms_norm.cpp",
        "inverse_rms(sum_row, dim, next_eps)",
        "inverse_rms(row, dim, next_eps)",
        _check("add_rms_norm", "f32/5x6656"),
    ),
    Fault(
        "argument-check",
        "missing guard: argument check",
        "a gain of the wrong length is accepted",
        "kernels/cpu/rms_norm.cpp",
        "GLIMMER_RETURN_IF_ERROR(check_norm_weight(weight, x.size(x.ndim - 1)));",
        "",
        _check("rms_norm", "refuse/weight-size"),
    ),
    Fault(
        "rope-layout",
        "RoPE layout",
        "half-split pairs instead of interleaved ones",
        "kernels/cpu/qk_norm_rope_kv.cpp",
        'if (rope == "interleaved") return Rope::Interleaved;',
        'if (rope == "interleaved") return Rope::Half;',
        _check("qk_norm_rope_kv", "f32/interleaved-far"),
    ),
    Fault(
        "rope-position",
        "RoPE position",
        "every token of a task turns by its first token's position",
        "kernels/cpu/qk_norm_rope_kv.cpp",
        "a.rotation.angles(a.pos[t],",
        "a.rotation.angles(a.pos[begin],",
        _check("qk_norm_rope_kv", "f32/f32-cache"),
    ),
    Fault(
        "rope-angle",
        "RoPE precision",
        "angles in float32",
        "kernels/cpu/qk_norm_rope_kv.cpp",
        "const double angle = static_cast<double>(pos) * frequency_[i];",
        "const float angle = static_cast<float>(pos) * static_cast<float>(frequency_[i]);",
        _check("qk_norm_rope_kv", "f32/half-far"),
    ),
    Fault(
        "padding-row",
        "padding row written",
        "a padding token's query is computed from what its row holds",
        "kernels/cpu/qk_norm_rope_kv.cpp",
        "if (a.slot[token] < 0) {",
        "if (a.slot[token] < -1) {",
        _check("qk_norm_rope_kv", "f32/slots-and-padding"),
    ),
    Fault(
        "duplicate-rows",
        "missing guard: argument check",
        "two tokens may write one cache row",
        "kernels/cpu/qk_norm_rope_kv.cpp",
        "return check_distinct(cache, pos, slot, tokens);",
        "return {};",
        _check("qk_norm_rope_kv", "refuse/duplicate"),
    ),
    Fault(
        "kv-head",
        "wrong kv head",
        "query heads are dealt to kv heads in turn instead of in groups",
        "kernels/cpu/sdpa.cpp",
        "const T* row = q_ + t.row * width_ + (kv_head * group_ + h) * s.dim;",
        "const T* row = q_ + t.row * width_ + (h * cache_.kv_heads + kv_head) * s.dim;",
        _check("sdpa", "f32/f32-cache"),
    ),
    Fault(
        "window-plus-1",
        "window + 1",
        "one key too many is visible",
        "kernels/cpu/sdpa.cpp",
        "pos[t] >= window ? pos[t] - window + 1 : 0",
        "pos[t] > window ? pos[t] - window : 0",
        _check("sdpa", "f32/window-4-seq-9"),
    ),
    Fault(
        "window-minus-1",
        "window - 1",
        "one key too few is visible",
        "kernels/cpu/sdpa.cpp",
        "pos[t] >= window ? pos[t] - window + 1 : 0",
        "pos[t] >= window ? pos[t] - window + 2 : 0",
        _check("sdpa", "f32/model-window"),
    ),
    Fault(
        "block-causal",
        "wrong mask",
        "a bidirectional block is causal",
        "kernels/cpu/sdpa.cpp",
        "(r.causal ? r.pos[t] : last) + 1",
        "r.pos[t] + 1",
        _check("sdpa", "f32/block-w0"),
    ),
    Fault(
        "stale-split",
        "stale scratch",
        "a split starts from the softmax state of the one before",
        "kernels/cpu/sdpa.cpp",
        "    s.split.clear();\n",
        "",
        _check("sdpa", "f32/prefill-70"),
    ),
    Fault(
        "padding-output",
        "unwritten output",
        "a padding token's row keeps what the output held",
        "kernels/cpu/sdpa.cpp",
        "if (request.slot[t] < 0) std::memset(",
        "if (request.slot[t] < -1) std::memset(",
        _memory("sdpa", "f32/slots-and-padding-w0"),
    ),
    Fault(
        "split-start",
        "row-order-dependent reduction",
        "splits start where the block of rows starts to see, not at absolute positions",
        "kernels/cpu/sdpa.cpp",
        "const int64_t begin = std::max(b.begin, index * kSplit);\n"
        "    const int64_t end = std::min(b.end, (index + 1) * kSplit);",
        "const int64_t first = b.begin + (index - b.begin / kSplit) * kSplit;\n"
        "    const bool last = index + 1 == (b.end + kSplit - 1) / kSplit;\n"
        "    const int64_t begin = std::min(first, b.end);\n"
        "    const int64_t end = last ? b.end : std::min(b.end, first + kSplit);",
        "tests/ops/test_registry.py::test_row_invariance[sdpa-cpu-scalar]",
    ),
    Fault(
        "int32-cache",
        "int32 offset",
        "an offset into the cache loses its bits from 31 on",
        "kernels/cpu/sdpa.cpp",
        "const int64_t at = cache_.offset(slot, tile + j, kv_head);",
        "const int64_t at = cache_.offset(slot, tile + j, kv_head) & 0x7fffffff;",
        "tests/ops/test_large.py::test_attention_to_a_page_beyond_2_31_elements[True-cpu]",
    ),
    Fault(
        "ring-check",
        "missing guard: argument check",
        "a ring may have lost a visible key",
        "kernels/cpu/sdpa.cpp",
        "GLIMMER_RETURN_IF_ERROR(check_contiguous(cache, r, t, last));",
        "",
        _check("sdpa", "refuse/ring-chunk-6"),
    ),
    Fault(
        "soft-cap",
        "missing soft-cap",
        "logits are only multiplied",
        "kernels/cpu/kquant_logits.cpp",
        "return cap > 0 ? c * tanh(v / c) : v;",
        "return cap > 0 ? v : c;",
        _check("kquant_logits", "Q4_K/f32/5x257x768"),
    ),
    Fault(
        "silu-operand",
        "swapped operands",
        "silu of up instead of gate",
        "kernels/cpu/kquant_swiglu.cpp",
        "silu(at(gate + m * n)) * at(up + m * n)",
        "silu(at(up + m * n)) * at(gate + m * n)",
        _check("kquant_swiglu", "Q4_K/f32/5x257x768"),
    ),
    Fault(
        "stale-result",
        "stale result",
        "a call is skipped whose output lies where the last one's did",
        "kernels/cpu/kquant_linear.cpp",
        "  static thread_local Scratch scratch;\n  for_row_ranges(",
        "  static thread_local Scratch scratch;\n"
        "  static thread_local const void* last = nullptr;\n"
        "  if (last == out.data) return {};\n"
        "  last = out.data;\n"
        "  for_row_ranges(",
        _memory("kquant_linear", "Q4_K/f32/5x257x768"),
    ),
    Fault(
        "tie-break",
        "tie to the highest id",
        "equal largest logits give the last one",
        "kernels/cpu/sample.cpp",
        "  return std::find(row.logits, row.logits + row.vocab, row.max) - row.logits;",
        "  int64_t last = 0;\n"
        "  for (int64_t i = 0; i < row.vocab; ++i)\n"
        "    if (row.logits[i] == row.max) last = i;\n"
        "  return last;",
        _check("sample", "greedy-ties"),
    ),
    Fault(
        "philox-key",
        "Philox key order",
        "the seed's halves are exchanged",
        "kernels/include/glimmer/philox.h",
        "static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32));",
        "static_cast<uint32_t>(s >> 32), static_cast<uint32_t>(s));",
        _check("sample", "seeds-64-bit"),
    ),
    Fault(
        "shared-noise",
        "biased draw",
        "two neighbouring ids share their noise",
        "kernels/cpu/sample.cpp",
        "score + gumbel_of(words_.word[id % 4]);",
        "score + gumbel_of(words_.word[id % 4 & ~1]);",
        CHI_SQUARE,
    ),
    Fault(
        "top-p-total",
        "swapped steps",
        "the mass that top-p takes its share of is summed before the temperature",
        "kernels/cpu/sample.cpp",
        "total += weight_of(row.score(id));",
        "total += weight_of(row.score(id) * row.temperature);",
        CHI_SQUARE,
    ),
    Fault(
        "int32-rows",
        "int32 offset",
        "an offset into the table loses its bits from 31 on",
        "kernels/cpu/kquant_embedding.cpp",
        "decode_row(w.row(id[t]), w.k,",
        "decode_row(w.data + (id[t] * w.stride & 0x7fffffff), w.k,",
        "tests/ops/test_large.py::test_embedding_of_the_last_rows_of_a_large_table[Q4_K-cpu]",
    ),
    Fault(
        "embedding-scale",
        "wrong scale group",
        "half of Q6_K's weights take the neighbouring sub-block's scale",
        "kernels/cpu/kquant_decode.h",
        "d * static_cast<float>(b.scales[2 * g + s]);",
        "d * static_cast<float>(b.scales[2 * g]);",
        _check("kquant_embedding", "Q6_K/1x5x256"),
    ),
    Fault(
        "stale-padding",
        "stale scratch",
        "activations past a row's end keep what the scratch held",
        "kernels/cpu/kquant_matmul.cpp",
        "  std::fill(out + count, out + n, 0.0f);\n}",
        "}",
        "tests/ops/test_kquant.py::test_padding_in_scratch_is_zeroed",
    ),
    Fault(
        "one-row-order",
        "row-order-dependent reduction",
        "a single row sums its super-blocks from the end",
        "kernels/cpu/kquant_matmul.cpp",
        "  for (int64_t u = 0; u < units; ++u) {\n    unroll<R>(",
        "  for (int64_t i = 0; i < units; ++i) {\n"
        "    const int64_t u = MT == 1 ? units - 1 - i : i;\n"
        "    unroll<R>(",
        "tests/ops/test_registry.py::test_row_invariance[kquant_linear-cpu-scalar-int8]",
    ),
    Fault(
        "int8-min",
        "wrong scale group",
        "odd groups take the even group's min (int8 path)",
        "kernels/cpu/kquant_int8_scalar.h",
        "byte_of(subs.mins, g)",
        "byte_of(subs.mins, g & ~1)",
        _check("kquant_linear", "Q4_K/f32/5x257x768"),
    ),
    Fault(
        "int8-activation-scale",
        "wrong scale group",
        "activations take the neighbouring group's scale (int8 path)",
        "kernels/cpu/kquant_int8_scalar.h",
        "const int g = s * kSubSize / kGroup;",
        "const int g = (s * kSubSize / kGroup) ^ 1;",
        _check("kquant_linear", "Q6_K/f32/5x257x768"),
    ),
    Fault(
        "int8-lane",
        "wrong scale group",
        "scales land in the neighbouring group's lane (AVX-512)",
        "kernels/cpu/kquant_int8_avx512.h",
        "scale[lane + 2 * block] = a.scale;",
        "scale[(lane ^ 1) + 2 * block] = a.scale;",
        _check("kquant_linear", "Q4_K/f32/5x257x768"),
        isa="avx512",
    ),
]

DRAFT_FILE = "lowering/dflash.py"


def _draft(id_: str, kind: str, what: str, old: str, new: str) -> Fault:
    test = "tests/lowering/test_dflash.py::test_logits_equal_transformers[True-mixed-Q4_K]"
    return Fault(f"draft-{id_}", kind, what, DRAFT_FILE, old, new, test)


# Each gives a draft model that looks right and drafts worse.
DRAFT_FAULTS = [
    _draft(
        "rope-layout",
        "RoPE layout",
        "interleaved pairs instead of half-split ones",
        'ROPE = "half"',
        'ROPE = "interleaved"',
    ),
    _draft(
        "window-minus-1",
        "window - 1",
        "the window excludes its last key, as the target's does",
        "d.window + 1 if d.sliding",
        "d.window if d.sliding",
    ),
    _draft(
        "window-plus-1",
        "window + 1",
        "one key too many is visible",
        "d.window + 1 if d.sliding",
        "d.window + 2 if d.sliding",
    ),
    _draft(
        "block-causal",
        "wrong mask",
        "a block's rows do not see the rows behind them",
        "d.attn_scale, window, False, None)",
        "d.attn_scale, window, True, None)",
    ),
    _draft(
        "taps-norm",
        "missing norm",
        "the projected taps are not normed",
        'torch.ops.glimmer.rms_norm(h, self._w(DRAFT + "enc_output_norm"), d.eps)',
        "h",
    ),
    _draft(
        "embedding-norm",
        "extra norm",
        "the block's embeddings are normed, as the target's are",
        "        h = torch.ops.glimmer.rms_norm(x, self._w(self._draft(0,",
        "        x = torch.ops.glimmer.rms_norm(x, None, d.eps)\n"
        "        h = torch.ops.glimmer.rms_norm(x, self._w(self._draft(0,",
    ),
    _draft(
        "head-multiplier",
        "extra multiplier",
        "the head multiplies its logits, as the target's does",
        "head, 1.0, 0.0)",
        "head, self.config.logit_scale, 0.0)",
    ),
    _draft(
        "head-cap",
        "extra soft-cap",
        "the head caps its logits, as the target's does",
        "head, 1.0, 0.0)",
        "head, 1.0, self.config.soft_cap)",
    ),
    _draft(
        "block-position",
        "RoPE position",
        "a block begins one position late",
        "        x = torch.ops.glimmer.kquant_embedding(",
        "        pos = pos + 1\n        x = torch.ops.glimmer.kquant_embedding(",
    ),
    _draft(
        "q-norm-gain",
        "missing gain",
        "a block's queries are normed without their gain",
        "            q, k, v, *gains, d.eps",
        "            q, k, v, None, (*gains,)[1], d.eps",
    ),
    _draft(
        "taps-order",
        "swapped operands",
        "the taps are joined from the deepest layer on",
        'h = self._linear(taps, DRAFT + "fc")',
        'h = self._linear(taps.unflatten(1, (-1, d.dim)).flip(1).flatten(1), DRAFT + "fc")',
    ),
]
FAULTS += DRAFT_FAULTS

SPECULATE = "tests/runtime/test_speculate.py::"
FAULTS += [
    Fault(
        "accept-next",
        "off-by-one acceptance",
        "a draft is compared with the token after the one it stands for",
        "runtime/session.cpp",
        "blocks[a][n] == next[first + n - 1]",
        "blocks[a][n] == next[first + n]",
        SPECULATE + "test_text_is_plain_decodings_and_counts_are_right[8-0.15-0]",
    ),
    Fault(
        "inject-row",
        "wrong row",
        "every slot's accepted rows are taken from the first slot's block",
        "runtime/session.cpp",
        "rows.push_back(static_cast<int64_t>(first + i))",
        "rows.push_back(static_cast<int64_t>(i))",
        SPECULATE + "test_several_slots_speculate_in_one_step[0.3]",
    ),
    Fault(
        "rejected-pages",
        "leak",
        "pages of rejected rows stay reserved",
        "runtime/session.cpp",
        "for (const Anchor& a : anchors) roll_back(a.slot, lengths_[a.slot]);",
        "",
        SPECULATE + "test_afterwards_the_session_is_as_after_plain_decoding[1.0-None]",
    ),
    Fault(
        "past-the-stop",
        "missing rollback",
        "what follows a stop token in its block stays in the sequence",
        "runtime/generate.cpp",
        "if (length(slot) > start + used) truncate(",
        "if (length(slot) < start + used) truncate(",
        SPECULATE + "test_a_stop_token_inside_a_block[1]",
    ),
    Fault(
        "draft-noise",
        "wrong noise",
        "a draft draws with the noise of the token after its own",
        "runtime/program.cpp",
        "before.push_back(pos - 1)",
        "before.push_back(pos)",
        "tests/test_speculation.py::test_a_draft_draws_with_its_tokens_noise",
    ),
    Fault(
        "never-off",
        "missing fallback",
        "blocks are drafted whether they pay or not",
        "runtime/block_policy.cpp",
        "double rate = 1 / cost(1);",
        "double rate = 0;",
        "tests/runtime/test_block_policy.py::test_switches_off_when_drafts_do_not_pay[linear]",
    ),
]


def table() -> str:
    """The faults as a Markdown table."""
    lines = ["| fault | planted in | caught by |", "|---|---|---|"]
    for f in FAULTS:
        where = f"`{f.file.removeprefix('kernels/')}`"
        lines.append(f"| **{f.kind}**: {f.what} | {where} | `{f.caught_by}` |")
    return "\n".join(lines)
