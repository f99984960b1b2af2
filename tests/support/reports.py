"""Public bug reports that must not repeat here, and what answers each: `-m support.reports`.

The ids are ours. A test answers a report by `@pytest.mark.report("G3")`; cases of an op, which all
fixtures run, by a pattern of "op:case id" here. test_reports.py holds that none is left out.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glimmer_ops.ops import OPS

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Report:
    """source: where it was reported. symptom: what went wrong, or would here. cases: see above.

    must: whether this project, as far as it is built, has to answer it.
    """

    source: str
    symptom: str
    must: bool = True
    cases: tuple[str, ...] = ()


def _may(source: str, symptom: str, *cases: str) -> Report:
    return Report(source, symptom, must=False, cases=cases)


def _must(source: str, symptom: str, *cases: str) -> Report:
    return Report(source, symptom, cases=cases)


REPORTS = {
    # K-quant weights
    "G1": _must(
        "ggml-org/llama.cpp#2136",
        "rows that are no whole super-blocks give garbage",
        "kquant_linear:refuse/k-*",
        "kquant_swiglu:refuse/k",
    ),
    "G2": _may("ggml-org/llama.cpp#2313", "stale bytes behind a row's end are used"),
    "G3": _must("ggml-org/llama.cpp#23539", "tail rows of a block read past the weights"),
    "G5": _must(
        "ggml-org/llama.cpp#21652",
        "the sum of a group of activations overflows float16",
        "kquant_*:*/edge/constant-3000-*",
    ),
    "G6": _must(
        "ggml-org/llama.cpp#26044",
        "many rows are cast to float16, one is not: infinite for M >= 64 only",
        "kquant_*:*/edge/amplitude-1e5-*",
    ),
    "G7": _must("ggml-org/llama.cpp#26223", "activations beyond 65504 become NaN in prefill"),
    "G8": _may("ggml-org/llama.cpp#28210", "an offset of 2^31 or more wraps"),
    "G10": _must(
        "pytorch/executorch, MLX patch qmm_splitk_bk_align",
        "a K smaller than a split is summed twice or not at all",
        "kquant_linear:*/f32/3x257x256",
    ),
    "G13": _must("sparkinfer #796", "splits without work leave partial sums unwritten"),
    "G16": _may(
        "paiml/trueno#159",
        "wide loads from blocks of 210 bytes are misaligned",
        "kquant_*:Q6_K/f32/*x768",
    ),
    "G17": _may(
        "aprender#3804",
        "one kernel for a model whose tensors differ in type",
        "kquant_swiglu:Q4_K+Q6_K/*",
    ),
    "G18": _may("vllm-project/vllm#24782, #53390", "row times stride overflows int32"),
    "G19": _may(
        "sgl-project/sglang#23609, #31350",
        "zero rows are an invalid launch that poisons what follows",
        "*:*/0x*",
        "sample:empty",
        "*:f32/no-tokens",
    ),
    "G20": _may("sgl-project/sglang#32065", "FFN widths above 8192 cannot be launched"),
    "G21": _may("pytorch/executorch#20196", "random inputs depend on device or order"),
    "G22": _must("pytorch/executorch#22940, #23011", "a row's bits depend on how many there are"),
    "G24": _may("sparkinfer 6d911d4", "quantised activations cached by pointer go stale"),
    "G28": _may("sparkinfer #769, #770", "one weight type is silently dequantised in memory"),
    "G29": _may("sparkinfer #785", "one row and many rows read different weight layouts"),
    "G30": _may("openvinotoolkit/openvino#34704", "float16 sums overflow in one variant only"),
    # Norms
    "N1": _must(
        "pytorch/pytorch#133085, microsoft/onnxruntime#29034",
        "squares of large float16 activations overflow",
        "rms_norm:f16/large*",
        "add_rms_norm:f16/constant-*",
        "qk_norm_rope_kv:f16/large-300",
    ),
    "N2": _must(
        "pytorch/pytorch#189581",
        "eps depends on the dtype: rows of little variance are off",
        "rms_norm:*/tiny-eps*",
        "qk_norm_rope_kv:*/small-1e-4",
    ),
    "N3": _must(
        "sparkinfer 6d911d4",
        "the post-norm uses 1e-5 instead of 1e-8",
        "add_rms_norm:*/small-*",
    ),
    "N5": _must(
        "ROCm/aiter#5044",
        "vector stores of an odd width spill into the next row",
        "*rms_norm:*/7x769",
        "*rms_norm:*/*x6655",
        "*rms_norm:*/*x6657",
    ),
    "N7": _may("linkedin/Liger-Kernel#803", "row times width overflows int32"),
    "N8": _must(
        "Dao-AILab/quack, Gemma-style weights",
        "a gain near 1 is rounded to bfloat16",
        "rms_norm:*/weight-1.001",
    ),
    "N10": _may(
        "gmlx", "soft-capped logits in bfloat16 lose near ties", "kquant_logits:*saturated"
    ),
    # RoPE
    "P1": _must(
        "sparkinfer 6d911d4",
        "half-split pairs where interleaved ones are meant",
        "qk_norm_rope_kv:*/interleaved-far",
        "qk_norm_rope_kv:*/half-far",
    ),
    "P2": _must(
        "sgl-project/sglang-jax#1472",
        "frequencies in bfloat16",
        "qk_norm_rope_kv:*/interleaved-far",
    ),
    "P3": _must(
        "huggingface/candle#3520",
        "positions in a half type: neighbours turn alike",
        "qk_norm_rope_kv:f32/neighbours",
    ),
    "P5": _must("lablup/mlxcel#1049, ROCm/aiter#4765", "fast sine of a large angle"),
    "P6": _must(
        "sparkinfer #787",
        "RoPE on layers that have none",
        "qk_norm_rope_kv:*/none-far",
    ),
    # Attention
    "S1": _must(
        "pytorch/executorch test_triton_sdpa_nan, vllm-project/vllm#4405",
        "NaN where all keys of a tile are masked",
        "sdpa:f32/window-750",
        "sdpa:f32/two-ends",
    ),
    "S2": _must("pegainfer #21, ROCm/aiter#4420", "NaN from splits without keys"),
    "S3": _must(
        "Dao-AILab/flash-attention#2470, flashinfer-ai/flashinfer#4484",
        "sequences without keys crash",
        "sdpa:f32/no-tokens",
        "sdpa:f32/only-padding",
        "sdpa:f32/one-empty-sequence",
    ),
    "S4": _must(
        "mistralai/mistral-inference#60, huggingface/transformers#39408",
        "the window is off by one",
        "sdpa:f32/window-*",
    ),
    "S5": _must(
        "pytorch/executorch#22358",
        "a chunk overwrites keys that are in the window",
        "sdpa:refuse/ring-*",
        "sdpa:f32/ring-8-window-4-chunk-*",
    ),
    "S6": _may("pytorch/executorch#21635", "the window is applied to global layers"),
    "S7": _must(
        "vllm-project/vllm#936",
        "NaN in unused cache rows reaches the output",
        "sdpa:f32/kv-509",
    ),
    "S8": _must(
        "pytorch/executorch#21749",
        "the causal mask is aligned to the wrong corner",
        "sdpa:f32/q4-kv10",
    ),
    "S10": _must(
        "fla-org/flash-linear-attention#1029",
        "query heads read the wrong kv head",
        "*:refuse/33-heads",
        "sdpa:f32/28x4x128",
    ),
    "S11": _may("fla-org/flash-linear-attention#1080", "block times stride overflows int32"),
    "S14": _may(
        "thu-ml/SageAttention#98",
        "NaN when there are fewer keys than a tile has",
        *(f"sdpa:f32/kv-{n}" for n in (1, 5, 31, 63)),
    ),
    "S16": _may("pytorch/executorch#20506", "time follows the cache's capacity"),
    # State
    "C1": _must("pytorch/executorch#20310", "one session's state leaks into another"),
    "C3": _must("ik_llama.cpp #2096", "a position or length is baked in at the first call"),
    # Registration and export
    "R1": _must("pytorch/executorch#4510, #8171", "loading kernels twice aborts"),
    "R2": _must("pytorch/executorch#7459, #9763", "an op is not found by the runtime"),
    "R3": _must("huggingface/kernel-builder#11", "a second definition of the namespace throws"),
    "R4": _must("pytorch/pytorch#141545", "export fails for want of a fake kernel"),
    "R5": _must("pytorch/pytorch#182940", "a dynamic dimension is specialised"),
    "R7": _may("pytorch/executorch#21959", "weights of one program used by another"),
    "R10": _may("pytorch/TensorRT#4459, pytorch/executorch#21441", "updates of pools get lost"),
    "R14": _may("pytorch/executorch#21617, #21798", "export holds copies of the weights"),
    # Speculation
    "D1": _must("ml-explore/mlx-lm#1914", "roll-back after the cache wrapped does nothing"),
    "D2": _must("vllm-project/vllm#42971, #55279", "look-ahead past the end corrupts memory"),
    "D4": _may("rMLX #509", "the roll-back target is one layer's, used for all"),
    "D6": _may("pytorch/executorch#22940", "acceptance depends on the number of rows"),
    "D8": _may("rMLX #380", "NaN logits are reported as success"),
}


def marked_tests() -> Iterator[tuple[str, str]]:
    """(report id, test) of every mark in the test files, as their source has it."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for report in _marks(node):
                    yield report, f"{path.relative_to(TESTS.parent)}::{node.name}"


def _marks(test: ast.FunctionDef) -> Iterator[str]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.report":
            yield from map(ast.literal_eval, mark.args)


@functools.cache
def _fast_cases() -> tuple[str, ...]:
    return tuple(f"{o.name}:{c.id}" for o in OPS.values() for c in o.all_cases() if not c.slow)


def matching_cases(pattern: str) -> list[str]:
    """Cases, as "op:case id", that are run in the fast tests and match a pattern."""
    return fnmatch.filter(_fast_cases(), pattern)


def answers() -> dict[str, list[str]]:
    """Tests and patterns of cases by report id."""
    found = {id: list(report.cases) for id, report in REPORTS.items()}
    for id, test in marked_tests():
        found[id].append(test)
    return found


if __name__ == "__main__":
    print("| id | report | symptom | answered by |\n|---|---|---|---|")
    for id, by in answers().items():
        tests = "<br>".join(f"`{x}`" for x in by)
        print(f"| {id} | {REPORTS[id].source} | {REPORTS[id].symptom} | {tests} |")
