"""Encoder for the GGUF weight types (the gguf package decodes K-quants but cannot encode them).

Layouts follow ggml's block formats, one super-block of 256 weights each:

* Q4_K, 144 bytes: f16 d, f16 dmin, 12 bytes of 6-bit scales and mins, 128 bytes of nibbles.
* Q5_K, 176 bytes: the same head, 32 bytes of fifth bits (bit s of byte l belongs to sub-block s,
  element l), 128 bytes of nibbles.
* Q6_K, 210 bytes: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 int8 scales, f16 d.

Q4_K and Q5_K decode sub-block s of 32 weights as d * scale[s] * q - dmin * min[s]; Q6_K decodes
sub-block s of 16 weights as d * scale[s] * (q - 32).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .gguf import QTYPES, row_bytes

_F16_MAX = 65504.0
_BF16_MAX = torch.finfo(torch.bfloat16).max
_TINY = 1e-20  # below every scale that f16 can hold; keeps reciprocals finite
# What a K-quant block can represent at most is about 65504 * 63 * 31; inputs are saturated well
# above that so that sums of squares stay finite in fp32.
_SATURATE = 1e12
# Weights encoded at once: they stay in the L2 cache, and below 32768 elements torch runs these
# operations on the calling thread. That is faster here than OpenMP, whose barriers after every one
# of some 35 short operations cost more than they gain and stall on a busy machine.
_SLAB = 127 * 256


def encode(x: torch.Tensor, qtype: str) -> torch.Tensor:
    """Encode rows of weights.

    Args:
        x: [N, K] float32, K a multiple of the type's block size, every value finite.
        qtype: a key of `QTYPES`.

    Returns:
        uint8 [N, row_bytes], each row encoded on its own. Values beyond the type's range
        saturate. The result does not depend on the number of threads.

    Raises:
        ValueError: unknown type, wrong rank, dtype or K, or a value that is not finite.
    """
    if qtype not in QTYPES:
        raise ValueError(f"qtype: expected one of {', '.join(QTYPES)}, found {qtype!r}")
    if x.dim() != 2 or x.dtype != torch.float32:
        raise ValueError(f"x: expected float32 [N, K], found {x.dtype} {list(x.shape)}")
    n, k = x.shape
    out = torch.empty((n, row_bytes(k, qtype)), dtype=torch.uint8)
    if out.numel() == 0:
        return out
    block, block_bytes = QTYPES[qtype]
    unit = max(block, 1)
    source = x.contiguous().view(-1, unit)
    target = out.view(-1, block_bytes)
    step = max(_SLAB // unit, 1)
    encode_blocks = _ENCODERS[qtype]
    for start in range(0, source.shape[0], step):
        part = source[start : start + step]
        low, high = torch.aminmax(part)
        # NaN propagates through aminmax, so two scalars tell about the whole slab
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise ValueError(f"x: expected finite values, found {low.item()} and {high.item()}")
        if max(-low.item(), high.item()) > _SATURATE and qtype not in ("F32", "BF16"):
            part = part.clamp(-_SATURATE, _SATURATE)
        encode_blocks(part, target[start : start + step])
    return out


def _encode_f32(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.view(torch.uint8))


def _encode_f16(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.clamp(-_F16_MAX, _F16_MAX).to(torch.float16).view(torch.uint8))


def _encode_bf16(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.clamp(-_BF16_MAX, _BF16_MAX).to(torch.bfloat16).view(torch.uint8))


def _encode_q8_0(x: torch.Tensor, out: torch.Tensor) -> None:
    # d = max|x| / 127 and q = x / d rounded half away from zero, the rule of ggml's reference
    d = (x.abs().amax(1, keepdim=True) / 127).clamp_(max=_F16_MAX)
    inverse = torch.where(d > _TINY, 1 / d, 0.0)
    q = (x * inverse).clamp_(-127, 127)
    q += torch.full_like(q, 0.5).copysign_(q)  # the conversion truncates
    out[:, :2] = d.to(torch.float16).view(torch.uint8)
    out[:, 2:] = q.to(torch.int8).view(torch.uint8)


# Adding and subtracting 1.5 * 2**23 rounds |x| < 2**22 to the nearest integer, ties to even, as
# round_ does, which however runs on every thread whatever the size
_ROUNDING = 12582912.0


def _round_(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Clamp to low..high and round, in place."""
    return x.clamp_(low, high).add_(_ROUNDING).sub_(_ROUNDING)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.abs() > _TINY, 1 / scale, 0.0)


def _to_f16(x: torch.Tensor) -> torch.Tensor:
    """Float16 of block scales x >= 0, saturating."""
    d = x.clamp(max=_F16_MAX).to(torch.float16)
    # Subnormals are coarse, and one rounded well down would put the largest sub-block scale out
    # of reach of its 6 or 7 bits: take the next float16 up there
    low = (d.float() * (1 + 2**-9) < x) & (d < 1)
    return (d.view(torch.int16) + low.to(torch.int16)).view(torch.float16)


def _affine_codes(
    x: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Affine codes of x [B, 8, 32]: x is about d * scale * q - dmin * min.

    Returns q uint8 [B, 8, 32] in 0..top, scale and min uint8 [B, 8] in 0..63, d and dmin
    float16 [B, 1].
    """
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    low = low.clamp_(max=0.0)
    step = (high - low) / top
    q = _round_((x - low) * _inverse(step), 0, top)

    # One least-squares step: with q fixed, the best affine fit of x over the 32 weights
    n = x.shape[2]
    sum_q, sum_x = q.sum(2, keepdim=True), x.sum(2, keepdim=True)
    sum_qq, sum_qx = (q * q).sum(2, keepdim=True), (q * x).sum(2, keepdim=True)
    det = n * sum_qq - sum_q * sum_q
    fit_step = (n * sum_qx - sum_q * sum_x) / det
    fit_low = (sum_qq * sum_x - sum_q * sum_qx) / det
    # The format holds no positive offset: refit through zero there
    through_zero = fit_low > 0
    fit_step = torch.where(through_zero, sum_qx / sum_qq, fit_step)
    fit_low = fit_low.clamp(max=0.0)
    usable = (det > 0) & (fit_step > 0) & torch.isfinite(fit_step) & torch.isfinite(fit_low)
    step = torch.where(usable, fit_step, step)[:, :, 0]
    low = torch.where(usable, fit_low, low)[:, :, 0]

    d = _to_f16(step.amax(1, keepdim=True) / 63)
    dmin = _to_f16(-low.amin(1, keepdim=True) / 63)
    d32, dmin32 = d.float(), dmin.float()
    scale = _round_(step * _inverse(d32), 0, 63)
    minimum = _round_(-low * _inverse(dmin32), 0, 63)

    # Codes for the scales as stored, not as wished
    stored_step = (d32 * scale).unsqueeze(2)
    offset = (dmin32 * minimum).unsqueeze(2)
    q = _round_(torch.add(x, offset, out=q).mul_(_inverse(stored_step)), 0, top)
    return q.to(torch.uint8), scale.to(torch.uint8), minimum.to(torch.uint8), d, dmin


def _write_affine_head(
    out: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor,
    d: torch.Tensor,
    dmin: torch.Tensor,
) -> None:
    # Sub-blocks 0-3 keep their 6 bits in the low part of bytes 4-11; sub-blocks 4-7 put 4 bits in
    # bytes 12-15 and their top 2 bits above those of sub-blocks 0-3.
    out[:, 0:2] = d.view(torch.uint8)
    out[:, 2:4] = dmin.view(torch.uint8)
    out[:, 4:8] = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    out[:, 8:12] = minimum[:, :4] | ((minimum[:, 4:] >> 4) << 6)
    out[:, 12:16] = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)


def _encode_q4_k(x: torch.Tensor, out: torch.Tensor) -> None:
    q, scale, minimum, d, dmin = _affine_codes(x.view(-1, 8, 32), 15)
    _write_affine_head(out, scale, minimum, d, dmin)
    pairs = q.view(-1, 4, 2, 32)
    out[:, 16:] = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).view(-1, 128)


def _encode_q5_k(x: torch.Tensor, out: torch.Tensor) -> None:
    q, scale, minimum, d, dmin = _affine_codes(x.view(-1, 8, 32), 31)
    _write_affine_head(out, scale, minimum, d, dmin)
    high = q[:, 0] >> 4
    for s in range(1, 8):
        high |= (q[:, s] >> 4) << s
    out[:, 16:48] = high
    pairs = (q & 15).view(-1, 4, 2, 32)
    out[:, 48:] = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).view(-1, 128)


def _encode_q6_k(x: torch.Tensor, out: torch.Tensor) -> None:
    x = x.view(-1, 16, 16)
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    # The value of largest magnitude becomes code -32 (there is no +32), so the scale takes the
    # opposite sign of that value.
    step = torch.where(-low >= high, low, high) / -32
    q = _round_(x * _inverse(step), -32, 31)
    sum_qq = (q * q).sum(2, keepdim=True)
    fit = (q * x).sum(2, keepdim=True) / sum_qq
    step = torch.where((sum_qq > 0) & torch.isfinite(fit), fit, step)[:, :, 0]

    d = _to_f16(step.abs().amax(1, keepdim=True) / 127)
    d32 = d.float()
    scale = _round_(step * _inverse(d32), -127, 127)
    stored = (d32 * scale).unsqueeze(2)
    q = _round_(torch.mul(x, _inverse(stored), out=q), -32, 31)

    # Half h (128 weights) holds groups g = 0..3 of 32: nibbles of groups 0 and 2, then 1 and 3,
    # share bytes; the bit pairs of all four groups share one byte.
    code = (q + 32).to(torch.uint8).view(-1, 2, 4, 32)
    nibble = code & 15
    out[:, :128] = (nibble[:, :, :2] | (nibble[:, :, 2:] << 4)).reshape(-1, 128)
    top = code >> 4
    out[:, 128:192] = (
        top[:, :, 0] | (top[:, :, 1] << 2) | (top[:, :, 2] << 4) | (top[:, :, 3] << 6)
    ).view(-1, 64)
    out[:, 192:208] = scale.to(torch.int8).view(torch.uint8)
    out[:, 208:210] = d.view(torch.uint8)


_ENCODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_K": _encode_q4_k,
    "Q5_K": _encode_q5_k,
    "Q6_K": _encode_q6_k,
    "Q8_0": _encode_q8_0,
    "F16": _encode_f16,
    "BF16": _encode_bf16,
    "F32": _encode_f32,
}
