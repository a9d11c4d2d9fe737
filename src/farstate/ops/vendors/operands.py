"""In which dtype inputs are handed to kernels that multiply in half precision or in float32, and know no float64."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of matrix products, which must have one dtype: their own if they share a half-precision one, else float32.

    Raises:
        TypeError: a float64 input.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1 and tensors[0].dtype in _HALF:
        return tensors
    return tuple(float32(tensor) for tensor in tensors)


def float32(tensor: Tensor) -> Tensor:
    """`tensor` in float32.

    Raises:
        TypeError: it is float64, which would silently lose digits.
    """
    if tensor.dtype == torch.float64:
        raise TypeError("this backend computes in float32; float64 inputs need the chunked or the naive one")
    return tensor.float()
