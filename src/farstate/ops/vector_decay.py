"""What the recurrences with a decay for each key channel share: GLA (`gla`) reads the state after a step, RWKV-6 (`wkv6`) before it.

    S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ
    o_t = scale · S_tᵀ r_t                                   without bonus: after the step
    o_t = scale · (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t          with bonus u: before the step, which enters by u

Within a chunk of Q steps a pair of steps j < i contributes A_ij v_j to o_i, between chunks the state S does:

    o_i = Σ_{j≤i} A_ij v_j + Sᵀ (r_i ∘ d_i),    A_ij = Σ_n r_i[n] k_j[n] exp(decays of channel n between j and i)

The decays are as many as the pairs times the channels, too many to form. They factor into one number of step i and one of
step j as soon as there is a step between the two to refer to; there are two ways to find it. `vector_decay_factored` takes
the start of the chunk: fast, for decays that leave enough of a state over a chunk. `vector_decay_halves` takes the middle of
the smallest aligned block that holds both steps: any decay, and every exponent is a sum of decays, never positive.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from farstate.ops.vector_decay_factored import FactoredDecays, smallest_log_decay
from farstate.ops.vector_decay_halves import HalvedDecays

LONGEST_CHUNK = 64
LONGEST_HALVED_CHUNK = 32  # Each doubling costs a level of its own there.
SHORTEST_CHUNK = 16


def chunked(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    chunk_length: int | None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final state of inputs of one dtype, float32 or float64.

    A T that no whole number of chunks fills is padded with k = 0 and g = 0, which change no state. First derivatives of both
    outputs with respect to all inputs. Memory: linear in T.

    Shapes: r, k, log_decay (B, T, H, K), v (B, T, H, V), bonus (H, K), initial_state (B, H, K, V) → (B, T, H, V), (B, H, K, V).

    Args:
        chunk_length: Q, at least 1, rounded up to a power of two; None takes one that fits the sizes and, on a CPU, the decays.
    """
    time = r.shape[1]
    length, factored = _plan(log_decay, v.shape[-1], chunk_length)
    if missing := -time % length:
        r, k, v, log_decay = (F.pad(t, (0, 0, 0, 0, 0, missing)) for t in (r, k, v, log_decay))
    compute = FactoredDecays if factored else HalvedDecays
    o, final_state = compute.apply(r, k, v, log_decay, bonus, scale, initial_state, length)
    return o[:, :time], final_state


def default_chunk_length(time: int, values: int) -> int:
    """A power of two. Longer chunks spend more on pairs of steps, shorter ones on the K × V states between them; none pads much."""
    length = min(max(_power_of_two(values), SHORTEST_CHUNK), LONGEST_CHUNK, _power_of_two(time))
    while length > SHORTEST_CHUNK and -time % length > time // 8:
        length //= 2
    return length


def _plan(log_decay: Tensor, values: int, chunk_length: int | None) -> tuple[int, bool]:
    """The chunk length, and whether decays are weak enough within such chunks to be factored.

    Shorter chunks are tried before giving up the factored form, unless the caller chose the length. The question costs one
    number read back from the device: a GPU is not stopped for it.
    """
    time = log_decay.shape[1]
    if chunk_length is None:
        length = default_chunk_length(time, values)
        shortest, halved = min(length, SHORTEST_CHUNK), min(length, LONGEST_HALVED_CHUNK)
    else:
        length = shortest = halved = _power_of_two(min(chunk_length, time))
    if log_decay.device.type != "cpu":
        return halved, False
    shorter = length
    totals = F.pad(log_decay.detach(), (0, 0, 0, 0, 0, -time % length)).unflatten(1, (-1, shortest)).sum(2)
    while shorter >= shortest:
        if totals.unflatten(1, (-1, shorter // shortest)).sum(2).min() >= smallest_log_decay(shorter):
            return shorter, True
        shorter //= 2
    return halved, False


def _power_of_two(number: int) -> int:
    """The smallest one that is at least `number`."""
    return 1 << (number - 1).bit_length()


def check(name: str, r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None) -> None:
    """Shapes that fit each other; `name` is what the caller calls r.

    Raises:
        ValueError: they do not.
    """
    if r.dim() != 4 or v.dim() != 4 or r.shape[1] < 1:
        raise ValueError(
            f"{name} must be (B, T, H, K) with T ≥ 1 and v must be (B, T, H, V), found {tuple(r.shape)} and {tuple(v.shape)}"
        )
    batch, time, heads, keys = r.shape
    expected = {
        "k": (k, (batch, time, heads, keys)),
        "v": (v, (batch, time, heads, v.shape[-1])),
        "log_decay": (log_decay, (batch, time, heads, keys)),
        "initial_state": (initial_state, (batch, heads, keys, v.shape[-1])),
    }
    for label, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{label} must have shape {shape}, found {tuple(tensor.shape)}")
