"""Stands in for the compiled functions of Transformer Engine: norms of rows, with fp32 statistics."""

import torch


def _check(x, ln_out, quantizer, otype, zero_centered_gamma):
    assert x.dim() == 2
    assert x.is_contiguous()
    assert ln_out is None
    assert quantizer is None
    assert otype == {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}[x.dtype]
    assert not zero_centered_gamma


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    _check(input, ln_out, quantizer, otype, zero_centered_gamma)
    x = input.float()
    rsigma = torch.rsqrt(x.square().mean(1) + eps)
    return [(x * rsigma[:, None] * weight.float()).to(input.dtype), None, rsigma]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    normed = x.float() * rsigma[:, None]
    through = dz.float() * gamma.float()
    dx = rsigma[:, None] * (through - normed * (through * normed).mean(1, keepdim=True))
    return [dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)]


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    _check(input, ln_out, quantizer, otype, zero_centered_gamma)
    x = input.float()
    mu = x.mean(1)
    rsigma = torch.rsqrt(x.var(1, unbiased=False) + eps)
    normed = (x - mu[:, None]) * rsigma[:, None]
    return [(normed * weight.float() + bias.float()).to(input.dtype), mu, rsigma]


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    normed = (x.float() - mu[:, None]) * rsigma[:, None]
    through = dz.float() * gamma.float()
    centred = through - through.mean(1, keepdim=True) - normed * (through * normed).mean(1, keepdim=True)
    dx = (rsigma[:, None] * centred).to(x.dtype)
    return [dx, (dz.float() * normed).sum(0).to(gamma.dtype), dz.float().sum(0).to(gamma.dtype)]
