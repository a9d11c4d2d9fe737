"""Addresses of more than 2³¹ elements."""

import triton
import triton.language as tl


@triton.jit
def offsets(index, stride):
    """index · stride in 64 bits. Both arrive as 32-bit integers where they fit, and their product may not."""
    return index.to(tl.int64) * stride
