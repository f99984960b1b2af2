"""Random but valid Muse Glimmer GGUF files: everything can be tried with no download.

A file has the official names, keys, types and shapes, and weights that keep the model well
conditioned: matrices are N(0, 1 / K), the gains of the pre-norms lie near 1 and those of the
post-norms near 0.25, so that rounding errors are not amplified from layer to layer, and the output
head is scaled so that logits differ by whole units and greedy decoding is decisive.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from .config import ModelConfig, sliding_layers
from .gguf import ARCHITECTURE, DEFAULT_PERIOD, QTYPES, expected_tensors, row_bytes
from .kquant_encode import encode
from .tokenizer import byte_alphabet

QK_SCALE = 43.7840518911  # of the official checkpoint; attn_q_norm holds it over sqrt(head_dim)
LOGIT_STD = 4.5  # of the logits before the soft cap
PATTERNS = ("array", "period", "none")
GATE_NAMES = ("attn_gate", "attn_output_gate")
# Quant -> (most matrices, attn_v and ffn_down of the layers that use more bits, output head)
QUANTS = {
    "F16": ("F16", "F16", "F16"),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q5_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"),
}
_FILE_TYPES = {
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K_M": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": gguf.LlamaFileType.MOSTLY_Q6_K,
}

Progress = Callable[[int, int], None]
Plan = list[tuple[str, tuple[int, ...], str]]

_CHUNK = 1 << 22  # weights drawn and encoded at a time: 16 MB of fp32


def _f32(x: float) -> float:
    return float(np.float32(x))


def _preset(
    dim: int,
    n_layers: int,
    n_heads: int,
    ffn_dim: int,
    vocab_size: int,
    window: int,
    context_length: int,
) -> ModelConfig:
    return ModelConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=2,
        head_dim=128,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        eps=_f32(1e-5),
        rope_theta=5e5,
        window=window,
        sliding=sliding_layers(n_layers, DEFAULT_PERIOD),
        soft_cap=20.0,
        logit_scale=_f32(1 / math.sqrt(dim / 256)),
        q_scale=_f32(QK_SCALE / math.sqrt(128)),
        k_scale=1.0,
        context_length=context_length,
    )


# tiny: six layers, so that counting layers forward and backward differ, and a window shorter than
# a test prompt. mid: the real widths, so that every kernel shape of the real model is met.
PRESETS = {
    "tiny": _preset(512, 6, 8, 1536, 1024, 40, 4096),
    "mid": _preset(6656, 4, 32, 19968, 32768, 2048, 131072),
    "30b": _preset(6656, 52, 32, 19968, 202048, 2048, 131072),
}


def plan(preset: str, quant: str) -> Plan:
    """(name, row-major shape, type) of every tensor, in file order; nothing is written.

    `30b` with `Q4_K_M` has the types of the official 17 GB file: 365 Q4_K, 1 Q5_K, 52 Q6_K and
    313 F32 tensors. Raises ValueError for an unknown preset or quant.
    """
    _choice("preset", preset, PRESETS)
    _choice("quant", quant, QUANTS)
    base, more, head = QUANTS[quant]
    config = PRESETS[preset]
    tensors: Plan = []
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1:
            qtype = "F32"
        elif name == "output.weight":
            qtype = head
        elif name.endswith((".attn_v.weight", ".ffn_down.weight")) and _uses_more_bits(
            int(name.split(".")[1]), config.n_layers
        ):
            qtype = more
        else:
            qtype = base
        tensors.append((name, shape, qtype))
    return tensors


def plan_bytes(tensors: Plan) -> int:
    """Encoded bytes of the tensors of a plan, without header and padding."""
    return sum(_nbytes(shape, qtype) for _, shape, qtype in tensors)


def synth(
    path: str | os.PathLike[str],
    preset: str,
    quant: str,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    pattern: str = "array",
    gate_name: str = "attn_gate",
) -> Path:
    """Write a random model; the same arguments give the same bytes, whatever the thread count.

    Memory stays below 256 MB whatever the preset. The file appears under its name only when it is
    complete: until then its bytes are in a hidden file beside it, which is removed on failure.

    `tiny` and `mid` draw every weight. `30b` draws and encodes about four million weights of each
    tensor; the rows after those repeat them with the super-blocks of 256 weights along K in
    another random order for each repeat, so that no two rows are equal. That makes it a matter of
    a minute or two, and changes neither the bytes a kernel reads nor the statistics of the weights.

    Args:
        preset: a key of `PRESETS`.
        quant: a key of `QUANTS`.
        seed: 0 or greater.
        progress: called with (tensor bytes written, tensor bytes in all).
        pattern: how the file tells its layer kinds: "array" of bools (as the official files),
            "period" (an integer) or "none" (no key).
        gate_name: the spelling of the output gate's tensors.

    Raises:
        ValueError: an argument is not one of its choices.
        OSError: the folder is missing, lacks the space, or cannot be written.
    """
    tensors = plan(preset, quant)
    _choice("pattern", pattern, PATTERNS)
    _choice("gate_name", gate_name, GATE_NAMES)
    if seed < 0:
        raise ValueError(f"seed: expected 0 or greater, found {seed}")
    target = Path(path)
    total = plan_bytes(tensors)
    if target.is_dir():
        raise IsADirectoryError(f"{target}: expected a file name, found a folder")
    free = shutil.disk_usage(target.absolute().parent).free
    if free < total:
        raise OSError(f"{target}: expected {total} bytes of free space, found {free}")

    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    try:
        _add_metadata(writer, preset, quant, pattern)
        for name, shape, qtype in tensors:
            writer.add_tensor_info(
                name.replace(".attn_gate.", f".{gate_name}."),
                shape,
                np.dtype(np.float32),
                _nbytes(shape, qtype),
                raw_dtype=gguf.GGMLQuantizationType[qtype],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer, tensors, PRESETS[preset], seed, preset == "30b", total, progress)
        writer.close()
        os.replace(partial, target)
    finally:
        # A failed flush inside close must not keep the partial file alive
        with contextlib.suppress(OSError):
            writer.close()
        partial.unlink(missing_ok=True)
    return target


def _choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, found {value!r}")


def _uses_more_bits(i: int, n_layers: int) -> bool:
    """Whether a K-quant "M" mix spends more bits on layer i: the first and last eighth, and every
    third between (26 of 52 layers), the rule of ggml's quantisation tool."""
    eighth = n_layers // 8
    return i < eighth or i >= 7 * n_layers // 8 or (i - eighth) % 3 == 2


def _nbytes(shape: tuple[int, ...], qtype: str) -> int:
    return math.prod(shape[:-1]) * row_bytes(shape[-1], qtype)


# --- metadata ------------------------------------------------------------------------------------


def _add_metadata(writer: gguf.GGUFWriter, preset: str, quant: str, pattern: str) -> None:
    config = PRESETS[preset]
    writer.add_name(f"Muse Glimmer synthetic {preset} {quant}")
    writer.add_file_type(_FILE_TYPES[quant])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.dim)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_sliding_window(config.window)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_final_logit_softcapping(config.soft_cap)
    writer.add_logit_scale(config.logit_scale)
    key = f"{ARCHITECTURE}.attention.sliding_window_pattern"
    if pattern == "array":
        writer.add_array(key, list(config.sliding))
    elif pattern == "period":
        writer.add_uint32(key, DEFAULT_PERIOD)
    _add_tokenizer(writer, config.vocab_size)


# Enough merges that a prompt meets multi-byte tokens, chained merges and leading spaces
_MERGES = (
    "t h|th e|Ġ the|i n|e r|a n|Ġ a|o n|r e|Ġ t|a t|e n|o r|i s|e s|in g|an d|Ġ and|o f|Ġ of"
    "|Ġt o|l l|o u|Ġ w|Ġ s|l o|s t|Ġ in|Ġ is|er s|in d|lo w|Ġw or|l d|Ġwor ld|h e|he ll|hell o"
    "|H e|He ll|Hell o|Ã ©|â Ģ"
)
_CONTROL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = byte_alphabet()
    merges = _MERGES.split("|")
    for merge in merges:
        left, right = merge.split(" ")
        tokens.append(left + right)
    types = [gguf.TokenType.NORMAL] * len(tokens)
    first_control = len(tokens)
    tokens += _CONTROL
    types += [gguf.TokenType.CONTROL] * len(_CONTROL)
    unused = vocab_size - len(tokens)
    tokens += [f"[unused{i}]" for i in range(unused)]
    types += [gguf.TokenType.UNUSED] * unused
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(first_control + _CONTROL.index("<|begin_of_text|>"))
    writer.add_eos_token_id(first_control + _CONTROL.index("<|end_of_text|>"))
    writer.add_eot_token_id(first_control + _CONTROL.index("<|eot|>"))


# --- weights -------------------------------------------------------------------------------------


def _write_tensors(
    writer: gguf.GGUFWriter,
    tensors: Plan,
    config: ModelConfig,
    seed: int,
    repeat: bool,
    total: int,
    progress: Progress | None,
) -> None:
    # GGUFWriter.write_tensor_data wants a whole tensor at once (the head has 925 MB), so chunks go
    # to its file directly, padded as it pads.
    assert writer.fout is not None
    file = writer.fout[0]
    done = 0
    with ThreadPoolExecutor(1) as drawer:
        for index, (name, shape, qtype) in enumerate(tensors):
            writer.write_padding(file, file.tell())
            chunks: Iterator[npt.NDArray[np.uint8]]
            if len(shape) == 1:
                gain = _norm(name, shape[0], config, _generator(seed, index))
                chunks = iter([gain.view(np.uint8)])
            else:
                std = 1 / math.sqrt(shape[1])
                if name == "output.weight":
                    # The normed hidden state has rms 1, so h @ W.T has std * sqrt(dim)
                    std = LOGIT_STD / (math.sqrt(config.dim) * config.logit_scale)
                rows = max(_CHUNK // shape[1], 1)
                if repeat and shape[0] > rows:
                    chunks = _repeated(drawer, shape, rows, qtype, std, seed, index)
                else:
                    chunks = _drawn(drawer, shape, rows, qtype, std, seed, index)
            for chunk in chunks:
                chunk.tofile(file)
                done += chunk.nbytes
                if progress is not None:
                    progress(done, total)
        writer.write_padding(file, file.tell())


def _generator(seed: int, *key: int) -> np.random.Generator:
    """An independent stream for each key, so that no draw depends on another's order."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, spawn_key=key)))


def _norm(
    name: str, size: int, config: ModelConfig, generator: np.random.Generator
) -> npt.NDArray[np.float32]:
    if ".attn_q_norm." in name:
        return np.full(size, config.q_scale, np.float32)
    if ".attn_k_norm." in name:
        return np.full(size, config.k_scale, np.float32)
    centre, spread = (0.25, 0.025) if ".post_" in name else (1.0, 0.1)
    unit = generator.random(size, dtype=np.float32) * 2 - 1
    return (centre + spread * unit).astype(np.float32)


def _draw(rows: int, k: int, std: float, seed: int, key: tuple[int, ...]) -> torch.Tensor:
    weights = _generator(seed, *key).standard_normal((rows, k), dtype=np.float32)
    weights *= np.float32(std)
    return torch.from_numpy(weights)


def _drawn(
    drawer: ThreadPoolExecutor,
    shape: tuple[int, ...],
    rows: int,
    qtype: str,
    std: float,
    seed: int,
    index: int,
) -> Iterator[npt.NDArray[np.uint8]]:
    """Encoded chunks of `rows` rows; the next one is drawn while this one is encoded."""
    n, k = shape
    sizes = [min(rows, n - start) for start in range(0, n, rows)]
    pending = drawer.submit(_draw, sizes[0], k, std, seed, (index, 0))
    for i in range(len(sizes)):
        weights = pending.result()
        if i + 1 < len(sizes):
            pending = drawer.submit(_draw, sizes[i + 1], k, std, seed, (index, i + 1))
        yield encode(weights, qtype).numpy()


def _repeated(
    drawer: ThreadPoolExecutor,
    shape: tuple[int, ...],
    rows: int,
    qtype: str,
    std: float,
    seed: int,
    index: int,
) -> Iterator[npt.NDArray[np.uint8]]:
    """The first `rows` rows as drawn, then the same with their super-blocks reordered."""
    n, k = shape
    (base,) = _drawn(drawer, (rows, k), rows, qtype, std, seed, index)
    yield base
    block, size = QTYPES[qtype]
    groups = base.reshape(rows, k // 256, 256 // block * size)
    for repeat, start in enumerate(range(rows, n, rows), 1):
        order = _generator(seed, index, repeat).permutation(groups.shape[1])
        yield groups[: min(rows, n - start), order].reshape(-1, base.shape[1])
