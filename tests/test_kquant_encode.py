"""The K-quant encoder against the gguf package's decoder and against the block layouts."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glimmer_ops.gguf import QTYPES, row_bytes
from glimmer_ops.kquant_encode import _write_affine_head, encode

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
# rms error over rms weight for normal weights. Uniform rounding with step range / top gives about
# 7.9 %, 3.8 % and 2.0 % for the K-quants; the least-squares step lowers it.
RELATIVE_RMS = {
    "Q4_K": 0.078,
    "Q5_K": 0.039,
    "Q6_K": 0.0195,
    "Q8_0": 0.006,
    "F16": 3e-4,
    "BF16": 2e-3,
    "F32": 0.0,
}


def decode(encoded: torch.Tensor, qtype: str) -> np.ndarray:
    data = encoded.numpy()
    values = gguf.dequantize(data, gguf.GGMLQuantizationType[qtype])
    return np.asarray(values, np.float32).reshape(data.shape[0], -1)


def normal(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


# --- an independent decoder, one weight at a time ------------------------------------------------


def f16(two_bytes: bytes) -> float:
    return float(np.frombuffer(two_bytes, "<f2")[0])


def six_bits(packed: bytes, s: int) -> tuple[int, int]:
    if s < 4:
        return packed[s] & 63, packed[s + 4] & 63
    scale = (packed[s + 4] & 15) | ((packed[s - 4] >> 6) << 4)
    return scale, (packed[s + 4] >> 4) | ((packed[s] >> 6) << 4)


def decode_affine(block: bytes, fifth_bits: bool) -> list[float]:
    d, dmin = f16(block[0:2]), f16(block[2:4])
    codes = block[48:] if fifth_bits else block[16:]
    values = []
    for i in range(256):
        s, j = divmod(i, 32)
        byte = codes[(s // 2) * 32 + j]
        q = byte >> 4 if s % 2 else byte & 15
        if fifth_bits:
            q |= ((block[16 + j] >> s) & 1) << 4
        scale, minimum = six_bits(block[4:16], s)
        values.append(d * scale * q - dmin * minimum)
    return values


def decode_q6_k(block: bytes) -> list[float]:
    d = f16(block[208:210])
    values = []
    for i in range(256):
        half, rest = divmod(i, 128)
        group, j = divmod(rest, 32)
        low = block[half * 64 + (group % 2) * 32 + j]
        low = low >> 4 if group >= 2 else low & 15
        high = (block[128 + half * 32 + j] >> (2 * group)) & 3
        scale = int(np.int8(np.uint8(block[192 + i // 16])))
        values.append(d * scale * ((low | high << 4) - 32))
    return values


def decode_block(block: bytes, qtype: str) -> list[float]:
    return decode_q6_k(block) if qtype == "Q6_K" else decode_affine(block, qtype == "Q5_K")


def with_finite_scales(blocks: np.ndarray, qtype: str) -> np.ndarray:
    rng = np.random.default_rng(1)
    for column in (208,) if qtype == "Q6_K" else (0, 2):
        scales = rng.uniform(1e-4, 1e-2, (len(blocks), 1)).astype(np.float16)
        blocks[:, column : column + 2] = scales.view(np.uint8)
    return blocks


@pytest.mark.parametrize("qtype", K_QUANTS)
def test_random_blocks_decode_as_the_layout_says(qtype):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (12, QTYPES[qtype][1]), dtype=np.uint8)
    blocks = with_finite_scales(blocks, qtype)
    theirs = decode(torch.from_numpy(blocks), qtype)
    ours = np.array([decode_block(bytes(block), qtype) for block in blocks])
    np.testing.assert_allclose(theirs, ours, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("qtype", K_QUANTS)
def test_encoded_blocks_decode_as_the_layout_says(qtype):
    encoded = encode(normal(4, 512), qtype)
    blocks = encoded.numpy().reshape(-1, QTYPES[qtype][1])
    ours = np.array([decode_block(bytes(block), qtype) for block in blocks]).reshape(4, 512)
    np.testing.assert_allclose(decode(encoded, qtype), ours, rtol=1e-6, atol=1e-7)


def test_six_bit_scales_and_mins_are_packed_as_the_decoder_reads_them():
    rng = np.random.default_rng(2)
    scale = torch.from_numpy(rng.integers(0, 64, (500, 8), dtype=np.uint8))
    minimum = torch.from_numpy(rng.integers(0, 64, (500, 8), dtype=np.uint8))
    out = torch.zeros(500, 16, dtype=torch.uint8)
    one = torch.ones(500, 1, dtype=torch.float16)
    _write_affine_head(out, scale, minimum, one, one)
    got_scale, got_minimum = gguf.quants.Q4_K.get_scale_min(out[:, 4:].numpy().copy())
    np.testing.assert_array_equal(got_scale, scale)
    np.testing.assert_array_equal(got_minimum, minimum)


# --- quality -------------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", QTYPES)
def test_rms_error_of_normal_weights(qtype):
    x = normal(64, 1024) * 0.0123
    error = decode(encode(x, qtype), qtype) - x.numpy()
    assert np.sqrt(np.mean(error**2)) <= RELATIVE_RMS[qtype] * float(x.pow(2).mean().sqrt())


@pytest.mark.parametrize("qtype", K_QUANTS)
@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy", "shifted", "outliers"])
def test_error_of_every_block_is_bounded_by_its_range(qtype, kind):
    x = normal(32, 1024, 3)
    if kind == "uniform":
        x = torch.rand(32, 1024, generator=torch.Generator().manual_seed(4)) - 0.5
    elif kind == "heavy":
        x = x**5
    elif kind == "shifted":
        x = x - 4
    elif kind == "outliers":
        x[:, ::97] *= 50
    error = np.abs(decode(encode(x, qtype), qtype) - x.numpy()).reshape(-1, 256).max(1)
    if qtype == "Q6_K":
        step = x.abs().view(-1, 256).amax(1).numpy() / 32
        allowed = 1.3 * step  # code +32 does not exist
    else:
        sub = x.view(-1, 8, 32)
        low, high = sub.amin(2).clamp(max=0), sub.amax(2)
        top = 15 if qtype == "Q4_K" else 31
        step = ((high - low).amax(1) / top).numpy()
        # The offset has 6 bits of the largest one in the super-block
        allowed = 1.6 * step + (-low.amin(1)).numpy() / 126
    assert (error <= allowed).all(), (error / allowed).max()


@pytest.mark.parametrize("qtype", ["Q4_K", "Q5_K"])
def test_affine_blocks_on_the_grid_are_found_exactly(qtype):
    rng = np.random.default_rng(5)
    top = 15 if qtype == "Q4_K" else 31
    q = rng.integers(0, top + 1, (64, 8, 32))
    q[:, :, 3], q[:, :, 17] = 0, top
    scale, minimum = rng.integers(8, 64, (64, 8)), rng.integers(1, 64, (64, 8))
    scale[:, 2] = minimum[:, 5] = 63
    d, dmin = 2.0**-8, 2.0**-9
    x = d * scale[:, :, None] * q - dmin * minimum[:, :, None]
    x = torch.from_numpy(x.reshape(64, 256)).float()
    np.testing.assert_array_equal(decode(encode(x, qtype), qtype), x.numpy())


def test_q6_k_blocks_on_the_grid_are_found_exactly():
    rng = np.random.default_rng(6)
    q = rng.integers(-31, 32, (64, 16, 16))
    q[:, :, 9] = -32
    scale = rng.integers(16, 128, (64, 16)) * rng.choice([-1, 1], (64, 16))
    scale[:, 4] = -127
    x = torch.from_numpy((2.0**-9 * scale[:, :, None] * q).reshape(64, 256)).float()
    encoded = encode(x, "Q6_K")
    np.testing.assert_array_equal(decode(encoded, "Q6_K"), x.numpy())
    np.testing.assert_array_equal(encoded[:, 192:208].numpy().view(np.int8), scale)


def test_q6_k_uses_scales_of_both_signs():
    scales = encode(normal(16, 256), "Q6_K")[:, 192:208].numpy().view(np.int8)
    assert (scales > 0).any() and (scales < 0).any()


def test_plain_types_match_their_definitions():
    x = normal(8, 256)
    q8 = gguf.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(encode(x, "Q8_0").numpy(), q8)
    assert torch.equal(encode(x, "F16"), x.half().view(torch.uint8))
    assert torch.equal(encode(x, "BF16"), x.bfloat16().view(torch.uint8))
    assert torch.equal(encode(x, "F32"), x.view(torch.uint8))


# --- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", QTYPES)
def test_zero_rows_decode_to_zero(qtype):
    assert not decode(encode(torch.zeros(3, 512), qtype), qtype).any()


@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.37, -2.5e-3])
def test_constant_rows(qtype, value):
    got = decode(encode(torch.full((2, 512), value), qtype), qtype)
    np.testing.assert_allclose(got, value, rtol=1e-2)


@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-20, 1e-9, 1e-6, 1e3, 1e6, 1e12, 1e30, 1e38])
def test_extreme_magnitudes_stay_finite(qtype, scale):
    x = (normal(4, 512) * scale).clamp(-3e38, 3e38)
    got = decode(encode(x, qtype), qtype)
    assert np.isfinite(got).all()
    # Q8_0's d rounds to the nearest float16, at worst up by half a subnormal
    assert np.abs(got).max() <= 1.1 * float(x.abs().max()) + 127 * 2.0**-25


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(K_QUANTS), st.floats(-6, 4), st.floats(0, 8))
def test_mixed_magnitudes_stay_finite_and_close(seed, qtype, low, spread):
    generator = torch.Generator().manual_seed(seed)
    exponents = low + spread * torch.rand(2, 32, 1, generator=generator)
    x = (torch.randn(2, 32, 16, generator=generator) * 10**exponents).view(2, 512)
    got = decode(encode(x, qtype), qtype)
    largest = x.abs().view(-1, 256).amax(1)
    error = np.abs(got - x.numpy()).reshape(-1, 256).max(1)
    in_range = (largest < 1e6).numpy() & (largest > 1e-3).numpy()
    assert np.isfinite(got).all()
    assert (error[in_range] <= 0.25 * largest.numpy()[in_range]).all()


@pytest.mark.parametrize("qtype", QTYPES)
def test_rows_are_independent_of_each_other_of_layout_and_of_threads(qtype):
    x = normal(150, 512)
    whole = encode(x, qtype)
    assert whole.shape == (150, row_bytes(512, qtype)) and whole.dtype == torch.uint8
    for i in (0, 62, 63, 64, 149):
        assert torch.equal(encode(x[i : i + 1], qtype)[0], whole[i])
    assert torch.equal(encode(x.t().contiguous().t(), qtype), whole)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(encode(x, qtype), whole)
    finally:
        torch.set_num_threads(threads)


def test_no_rows_give_no_rows():
    assert encode(torch.zeros(0, 256), "Q4_K").shape == (0, 144)


@pytest.mark.parametrize(
    ("x", "qtype", "words"),
    [
        (torch.zeros(2, 256), "Q3_K", "qtype: expected one of .* found 'Q3_K'"),
        (torch.zeros(2, 256).half(), "Q4_K", "expected float32.*found torch.float16"),
        (torch.zeros(256), "Q4_K", r"expected float32 \[N, K\], found torch.float32 \[256\]"),
        (torch.zeros(2, 128), "Q6_K", "multiple of 256 for Q6_K, found 128"),
        (torch.zeros(2, 40), "Q8_0", "multiple of 32 for Q8_0, found 40"),
        (torch.full((2, 256), float("nan")), "Q4_K", "finite"),
        (torch.full((2, 256), float("inf")), "F16", "finite"),
    ],
)
def test_bad_input_is_refused(x, qtype, words):
    with pytest.raises(ValueError, match=words):
        encode(x, qtype)
