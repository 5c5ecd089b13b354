"""Stands in for ``apex.normalization.fused_layer_norm``: weights in the dtype of the input, shape as a sequence."""

import torch.nn.functional as F


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    assert input.dtype == weight.dtype == bias.dtype
    assert input.numel() > 0
    return F.layer_norm(input, list(normalized_shape), weight, bias, eps)


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    assert input.dtype == weight.dtype
    assert input.numel() > 0
    return F.rms_norm(input, list(normalized_shape), weight, eps)
