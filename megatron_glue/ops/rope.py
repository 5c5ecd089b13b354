"""Rotary and sinusoidal positions: tables, and the rotation itself.

RoPE (Su et al. 2021, "RoFormer") in the half-split convention of GPT-NeoX and Llama: element i of the rotated part is
paired with element i + R/2. Partial rotation leaves the rest of each head as it is.

Tables are built once per model and device by the layers; the rotation runs between the fused q/k/v product and
attention. Its backward is the rotation by the opposite angle, so it keeps no activation. :func:`split_and_rotate` also
takes the fused product apart, so that its backward fills one gradient buffer instead of adding three padded ones.

Shape suffixes: T tokens, P positions, H query heads, G kv heads, C head dim, R half of the rotated width,
Q query heads per kv head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_table(num_positions: int, rotary_dim: int, base: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Build cosines and sines of all rotation angles.

    Args:
        num_positions: P, the longest position plus one.
        rotary_dim: Rotated width of a head, 2R; even.
        base: Base of the frequencies.
        device: Where the tables go.

    Returns:
        Two fp32 tensors [P, R]. Angles are computed in fp64: in fp32 an angle of 1e5 rad is off by 4e-3.
    """
    assert rotary_dim % 2 == 0, "pairs of elements rotate together"
    exponents_R = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles_PR = torch.arange(num_positions, dtype=torch.float64)[:, None] * base**-exponents_R
    return angles_PR.cos().float().to(device), angles_PR.sin().float().to(device)


def sinusoidal_table(num_positions: int, hidden_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Build absolute positions: sines in even columns, cosines in odd ones (Vaswani et al. 2017).

    Args:
        num_positions: P.
        hidden_size: D.
        device: Where the table goes.

    Returns:
        fp32 [P, D].
    """
    cos_PR, sin_PR = rope_table(num_positions, hidden_size + hidden_size % 2, 10000.0, device)
    return torch.stack((sin_PR, cos_PR), dim=-1).flatten(1)[:, :hidden_size].contiguous()


def _rotate_into(out: Tensor, x: Tensor, cos_TR: Tensor, sin_TR: Tensor, sign: float) -> None:
    """Write x [T, ..., C], rotated by sign * angle, to ``out`` of the same shape."""
    num_half = cos_TR.shape[1]
    view = (x.shape[0], *[1] * (x.dim() - 2), num_half)
    cos, sin = cos_TR.view(view), sin_TR.view(view)
    if x.dtype in (torch.bfloat16, torch.float16):
        # One rounding at the end instead of one per operation.
        rotated = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _rotate_into(rotated, x.float(), cos_TR, sin_TR, sign)
        out.copy_(rotated)
        return
    first, second = x[..., :num_half], x[..., num_half : 2 * num_half]
    torch.mul(first, cos, out=out[..., :num_half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., num_half : 2 * num_half]).addcmul_(first, sin, value=sign)
    if x.shape[-1] > 2 * num_half:
        out[..., 2 * num_half :] = x[..., 2 * num_half :]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        out_THC = torch.empty(x_THC.shape, dtype=x_THC.dtype, device=x_THC.device)
        _rotate_into(out_THC, x_THC, cos_TR, sin_TR, 1.0)
        return out_THC

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        grad_THC = torch.empty_like(grad_outputs[0])
        _rotate_into(grad_THC, grad_outputs[0], cos_TR, sin_TR, -1.0)
        return grad_THC, None, None


def apply_rope(x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate heads by the angle of their token's position.

    Args:
        x_THC: Queries or keys; the first 2R elements of each head rotate, the others stay.
        cos_TR: fp32 cosines at each token's position.
        sin_TR: fp32 sines likewise.

    Returns:
        Same shape and dtype, contiguous.
    """
    return _Rotate.apply(x_THC, cos_TR, sin_TR)


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TGPC: Tensor, cos_TR: Tensor | None, sin_TR: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.has_rotation = cos_TR is not None
        ctx.save_for_backward(*(table for table in (cos_TR, sin_TR) if table is not None))
        num_tokens, num_groups, num_parts, head_dim = qkv_TGPC.shape
        q_TGQC, k_TGC, v_TGC = qkv_TGPC[:, :, :-2], qkv_TGPC[:, :, -2], qkv_TGPC[:, :, -1].contiguous()
        if cos_TR is None or sin_TR is None:
            q_out, k_out = q_TGQC.contiguous(), k_TGC.contiguous()
        else:
            q_out = qkv_TGPC.new_empty(num_tokens, num_groups, num_parts - 2, head_dim)
            k_out = qkv_TGPC.new_empty(num_tokens, num_groups, head_dim)
            _rotate_into(q_out, q_TGQC, cos_TR, sin_TR, 1.0)
            _rotate_into(k_out, k_TGC, cos_TR, sin_TR, 1.0)
        return q_out.flatten(1, 2), k_out, v_TGC

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        grad_q_THC, grad_k_TGC, grad_v_TGC = grad_outputs
        num_tokens, num_groups, head_dim = grad_k_TGC.shape
        num_queries = grad_q_THC.shape[1] // num_groups
        grad_TGPC = grad_k_TGC.new_empty(num_tokens, num_groups, num_queries + 2, head_dim)
        grad_q_TGQC = grad_q_THC.unflatten(1, (num_groups, num_queries))
        if ctx.has_rotation:
            cos_TR, sin_TR = ctx.saved_tensors
            _rotate_into(grad_TGPC[:, :, :-2], grad_q_TGQC, cos_TR, sin_TR, -1.0)
            _rotate_into(grad_TGPC[:, :, -2], grad_k_TGC, cos_TR, sin_TR, -1.0)
        else:
            grad_TGPC[:, :, :-2] = grad_q_TGQC
            grad_TGPC[:, :, -2] = grad_k_TGC
        grad_TGPC[:, :, -1] = grad_v_TGC
        return grad_TGPC, None, None


def split_and_rotate(
    qkv_TGPC: Tensor, cos_TR: Tensor | None = None, sin_TR: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the fused q/k/v product apart and rotate queries and keys.

    Args:
        qkv_TGPC: Per kv head its query heads, then its key, then its value: P = H / G + 2 parts.
        cos_TR: fp32 cosines at each token's position; ``None`` rotates nothing.
        sin_TR: fp32 sines likewise.

    Returns:
        q [T, H, C], k [T, G, C], v [T, G, C], each contiguous.
    """
    return _SplitAndRotate.apply(qkv_TGPC, cos_TR, sin_TR)
