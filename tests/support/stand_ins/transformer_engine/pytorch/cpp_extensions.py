"""Stands in for ``transformer_engine.pytorch.cpp_extensions``."""


def general_gemm(
    A,
    B,
    out_dtype=None,
    quantization_params=None,
    gelu=False,
    gelu_in=None,
    alpha=1.0,
    beta=None,
    accumulate=False,
    layout="TN",
    out=None,
    bias=None,
    use_split_accumulator=False,
    grad=False,
    ub=None,
    ub_type=None,
    extra_output=None,
    bulk_overlap=False,
):
    """As BLAS: memory is read column by column, so a tensor is its own transpose, and so is the result."""
    assert layout in ("TN", "NN", "NT")
    assert A.is_contiguous()
    assert B.is_contiguous()
    assert A.dtype == B.dtype
    a, b = (x.float() if flag == "T" else x.float().t() for x, flag in zip((A, B), layout))
    product = (a @ b).t()
    if bias is not None:
        product = product + bias.float()
    if out is None:
        assert not accumulate
        return product.to(out_dtype or A.dtype).contiguous(), None, None, None
    assert out.is_contiguous()
    assert out.shape == product.shape
    assert out_dtype == out.dtype
    out.copy_(product + out.float() if accumulate else product)
    return out, None, None, None
