"""flash-linear-attention's chunked kernels with the signatures of ours: `ssd`, `gla`, `wkv6`, `gated_delta`.

Always the chunked ones: the library's layers change to recurrent kernels at 64 positions or fewer, of which that of RWKV-6
ignores the gradient of the final state. What differs from our conventions is settled here:

- States: float32, (B, H, K, V); `ssd` of ours has (B, H, P, N), with P as values and N as keys.
- Scale: None is K^−½ in both for `gla` and `gated_delta`; RWKV-6 and Mamba-2 have none, where the library would take K^−½.
- Log decays, bonus and beta: float32, the decays as they are (natural logarithms, not positive).

Inputs of one half-precision dtype stay in it as operands of matrix products, which accumulate in float32. Everything else is
computed in float32, whose products are rounded to TF32 on the GPUs that have it, unless the environment says
TRITON_F32_DEFAULT=ieee. float64 is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from farstate.errors import FarstateError
from farstate.ops.vendors.operands import float32, operands
from farstate.ops.vendors.pieces import entries_per_position, in_pieces, piece_length
from farstate.ops.vendors.submodules import import_submodule

DISTRIBUTION = "fla-core"

_FUNCTIONS = {
    "ssd": ("fla.ops.simple_gla", "chunk_simple_gla", ("q", "k", "v", "g")),
    "gla": ("fla.ops.gla", "chunk_gla", ("q", "k", "v", "g")),
    "wkv6": ("fla.ops.rwkv6", "chunk_rwkv6", ("r", "k", "v", "w")),
    "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", ("q", "k", "v", "g", "beta")),
}
"""Where each is, and what it calls its inputs that have a time axis."""

# The library's own chunk length.
_CHUNK_LENGTH = 64

# Its kernels for the delta rule hold all keys of a head at once.
_MOST_KEYS = 256


def unavailable(operation: str) -> str | None:
    """Why `operation` cannot be imported here, or None."""
    try:
        _function(operation)
    except (ImportError, AttributeError) as error:
        return f"fla does not load: {error}"
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
    """Shapes: see `farstate.ops.ssd`. Linear attention with queries C, keys B, values dt x and log decays dt A.

    Raises:
        TypeError: a float64 input.
    """
    _own_chunks(chunk_length)
    out_dtype = x.dtype
    x, B, C = operands(x, B, C)
    dt, A = float32(dt), float32(A)
    per_group = x.shape[2] // B.shape[2]
    if per_group > 1:
        B, C = (t.repeat_interleave(per_group, dim=2) for t in (B, C))
    state = None if initial_state is None else initial_state.mT
    y, final = _run("ssd", (C, B, (x * dt.unsqueeze(-1)).to(x.dtype), dt * A), state, scale=1.0)
    if D is not None:
        y = y.float() + float32(D)[:, None] * x
    return y.to(out_dtype), final.mT


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes: see `farstate.ops.gla`.

    Raises:
        TypeError: a float64 input.
    """
    _own_chunks(chunk_length)
    out_dtype = q.dtype
    o, final = _run("gla", (*operands(q, k, v), float32(log_decay)), initial_state, scale=scale)
    return o.to(out_dtype), final


def wkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes: see `farstate.ops.wkv6`.

    Raises:
        TypeError: a float64 input.
    """
    _own_chunks(chunk_length)
    out_dtype = r.dtype
    o, final = _run("wkv6", (*operands(r, k, v), float32(log_decay)), initial_state, u=float32(bonus), scale=1.0)
    return o.to(out_dtype), final


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes: see `farstate.ops.gated_delta`.

    Raises:
        TypeError: a float64 input.
        FarstateError: more than 256 keys a head.
    """
    _own_chunks(chunk_length)
    if q.shape[-1] > _MOST_KEYS:
        raise FarstateError(
            f"backend: fla runs 'gated_delta' with at most {_MOST_KEYS} keys a head, this model has {q.shape[-1]}; "
            "set backend to chunked in config/settings.yaml"
        )
    out_dtype = q.dtype
    # Queries and keys have their unit length already: use_qk_l2norm_in_kernel stays off.
    inputs = (*operands(q, k, v), float32(log_decay), float32(beta))
    o, final = _run("gated_delta", inputs, initial_state, scale=scale)
    return o.to(out_dtype), final


def _run(operation: str, over_time: tuple[Tensor, ...], initial_state: Tensor | None, **constants: Any) -> tuple[Tensor, Tensor]:
    function = _function(operation)
    names = _FUNCTIONS[operation][2]

    def piece(*arguments: Tensor | None) -> tuple[Tensor, Tensor]:
        *inputs, state = arguments
        o, final = function(**dict(zip(names, inputs, strict=True)), **constants, initial_state=state, output_final_state=True)
        return o, final

    q, v = over_time[0], over_time[2]
    batch, time, heads, keys = q.shape
    values = v.shape[-1]
    # Besides the inputs: the scores within chunks and sub-chunks, the states at chunk ends.
    features = max(entries_per_position(*over_time), heads * max(keys, values, _CHUNK_LENGTH, -(-keys * values // _CHUNK_LENGTH)))
    state = None if initial_state is None else float32(initial_state).contiguous()
    return in_pieces(piece, over_time, state, piece_length(batch, time, features, _CHUNK_LENGTH))


def _function(operation: str) -> Callable[..., Any]:
    module, name, _ = _FUNCTIONS[operation]
    function: Callable[..., Any] = getattr(import_submodule(module, DISTRIBUTION), name)
    return function


def _own_chunks(chunk_length: int | None) -> None:
    if chunk_length not in (None, _CHUNK_LENGTH):
        raise ValueError(f"fla computes in chunks of {_CHUNK_LENGTH}, found chunk_length = {chunk_length}")
