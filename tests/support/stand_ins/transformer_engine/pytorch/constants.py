"""Stands in for ``transformer_engine.pytorch.constants``."""

import torch

TE_DType = {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}
