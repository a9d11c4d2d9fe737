"""mamba-ssm's kernels with the signatures of `farstate.ops.ssd` and `farstate.ops.selective_scan`.

`ssd` is `mamba_chunk_scan_combined`, Triton kernels with gradients for every input, into the initial state and from the final
one. The library's layers pass it no states, and its fused convolution starts from zeros: neither is used.

`selective_scan` is `selective_scan_fn`, a CUDA extension. It starts from zero, and no gradient comes from its last state;
both are had by positions put before and after the segment, see there.

Inputs of one half-precision dtype stay in it as operands of matrix products, which accumulate in float32; time steps, decays
and states are float32. Everything else is computed in float32, whose products are rounded to TF32 on the GPUs that have it,
unless the environment says TRITON_F32_DEFAULT=ieee. float64 is refused.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from farstate.ops.vendors.operands import float32, operands
from farstate.ops.vendors.pieces import entries_per_position, in_pieces, piece_length
from farstate.ops.vendors.submodules import import_submodule

DISTRIBUTION = "mamba-ssm"

# The library's own chunk length; another one would be tuned for again.
_CHUNK_LENGTH = 256


def unavailable(operation: str) -> str | None:
    """Why `operation` cannot be imported here, or None."""
    try:
        if operation == "ssd":
            _ssd_module()
        else:
            _scan_module()
    except ImportError as error:
        if error.name == "selective_scan_cuda":
            return (
                "mamba_ssm was installed without its compiled extension (selective_scan_cuda), of which this operation is a part"
            )
        return f"mamba_ssm does not load: {error}"
    return None


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes: see `farstate.ops.ssd`.

    Raises:
        TypeError: a float64 input.
    """
    scan = _ssd_module().mamba_chunk_scan_combined
    out_dtype = x.dtype
    x, B, C = operands(x, B, C)
    dt, A = float32(dt), float32(A)
    D = None if D is None else float32(D)
    length = _CHUNK_LENGTH if chunk_length is None else chunk_length
    batch, time, heads, channels = x.shape
    state_size = B.shape[-1]

    def piece(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        # dt has been through softplus. No sequence indices: with them the initial state reaches sequence 0 only.
        y, final = scan(x, dt, A, B, C, length, D=D, initial_states=state, dt_softplus=False, return_final_states=True)
        return y, final

    # Besides the inputs: states at chunk ends, and what the backward pass keeps per head before it sums over heads.
    features = max(
        entries_per_position(x, dt, B, C), heads * max(channels, state_size, length, -(-channels * state_size // length))
    )
    state = None if initial_state is None else float32(initial_state).contiguous()
    y, final = in_pieces(piece, (x, dt, B, C), state, piece_length(batch, time, features, length))
    return y.to(out_dtype), final


# A power of two, so that dividing and multiplying by it is exact.
_WRITING_STEP = 2.0**-20


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes: see `farstate.ops.selective_scan`. `chunk_length` has no meaning here and is not looked at.

    The kernel knows no initial state and gives its last state no gradient. N positions before the segment write the one,
    N positions after it read the other, so that both are ordinary inputs and outputs:

    - Before, at position n: dt = ε, B = e_n, x = h[:, n] / ε. The ε A of this and the following steps is undone in x, by
      exp(−ε A_n (N − 1 − n)) for the steps that come after the writing.
    - After, at position n: dt = 0, so that the state stays, and C = e_n: the output is h[:, n].

    Raises:
        TypeError: a float64 input.
    """
    scan = _scan_module().selective_scan_fn
    out_dtype = x.dtype
    x, dt, A, B, C = (float32(t) for t in (x, dt, A, B, C))
    D = None if D is None else float32(D)
    batch, time, channels = x.shape
    state_size = A.shape[1]
    each = torch.eye(state_size, dtype=x.dtype, device=x.device).expand(batch, -1, -1)
    nothing = torch.zeros_like(each)
    later = torch.arange(state_size - 1, -1, -1, dtype=x.dtype, device=x.device)

    def piece(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        silent = x.new_zeros(batch, state_size, channels)
        columns = [[x, silent], [dt, silent], [B, nothing], [C, each]]
        if state is not None:
            written = (state / _WRITING_STEP * torch.exp(-_WRITING_STEP * A * later)).transpose(1, 2)
            steps = torch.full_like(silent, _WRITING_STEP)
            for column, first in zip(columns, (written, steps, each, nothing), strict=True):
                column.insert(0, first)
        u, delta, B, C = (torch.cat(column, dim=1).transpose(1, 2).contiguous() for column in columns)
        y = scan(u, delta, A, B, C, D=D, delta_softplus=False).transpose(1, 2)
        start = 0 if state is None else state_size
        end = start + x.shape[1]
        return y[:, start:end], y[:, end:].transpose(1, 2)

    around = 2 * state_size
    length = piece_length(batch, time + around, channels, 1)
    length = time if length == time + around else max(length - around, 1)
    y, final = in_pieces(piece, (x, dt, B, C), None if initial_state is None else float32(initial_state), length)
    return y.to(out_dtype), final


def _ssd_module() -> ModuleType:
    return import_submodule("mamba_ssm.ops.triton.ssd_combined", DISTRIBUTION)


def _scan_module() -> ModuleType:
    return import_submodule("mamba_ssm.ops.selective_scan_interface", DISTRIBUTION)
