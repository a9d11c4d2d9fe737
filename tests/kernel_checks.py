"""What the tests of all kernels need: address spaces of more than 2³¹ elements, and a look at compiled code."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from farstate.kernels.aot import Compiled

_NO_RESERVE = 0x4000
BEFORE = 1 << 31
"""Elements that lie before a sparse tensor: where offsets that wrapped around 2³² would point."""


def sparse(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros with these strides, of which only the pages that are touched take memory."""
    reach = BEFORE + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, reach * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, BEFORE)


@contextmanager
def in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter writes every argument back to where it came from, untouched pages included; here it is there already."""
    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        yield


def strided(tensor: Tensor) -> Tensor:
    """Equal values with gaps of NaN between them, the dimensions in another order in memory."""
    order = list(range(tensor.dim()))[::-1]
    wide = torch.full([2 * size + 1 for size in tensor.permute(order).shape], float("nan"), dtype=tensor.dtype)
    view = wide.permute(order)[tuple(slice(1, 2 * size + 1, 2) for size in tensor.shape)]
    view.copy_(tensor)
    assert not view.is_contiguous() or view.numel() <= 1
    return view


def check_addresses(compiled: Compiled) -> None:
    """The code of `addressing.offsets` multiplies into 64 bits and never within 32."""
    (number,) = re.findall(r'\.file\s+(\d+)\s+"[^"]*addressing\.py"', compiled.ptx)
    here, wide = False, 0
    for line in compiled.ptx.splitlines():
        if location := re.match(r"\s*\.loc\s+(\d+)", line):
            here = location.group(1) == number
        elif here:
            assert not re.search(r"\b(mul|mad)\.lo\.[su]32\b", line), line
            wide += bool(re.search(r"\b(mul|mad)\.(wide\.[su]32|lo\.[su]64)\b", line))
    assert wide > 0
