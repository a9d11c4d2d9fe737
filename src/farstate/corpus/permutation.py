"""Pseudo-random numbers and permutations without memory: any element in constant time, the same on every platform.

Everything is 64-bit integer arithmetic modulo 2^64; no generator of a library, whose stream may change, is used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]

# Eight or fewer are visibly uneven over the keys when the range is a handful of numbers.
_ROUNDS = 10


def mix(*parts: ArrayLike) -> Words:
    """Hash integers, broadcast against each other, to 64 uniform bits (a chain of splitmix64 finalisers)."""
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = (state ^ np.asarray(part).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state, dtype=np.uint64)


def permute(index: NDArray[np.int64], size: int, *key: ArrayLike) -> NDArray[np.int64]:
    """Where the permutation of [0, size) that belongs to `key` sends each `index`.

    A Feistel network permutes the next power of two; values that fall outside [0, size) are sent through it again until
    they are inside (cycle walking: less than twice on average), which is a permutation again.

    Args:
        index: (n,) integers in [0, size).
        key: integers, or (n,) arrays of them when every element has a permutation of its own.

    Returns:
        (n,) integers in [0, size).
    """
    bits = max(2, (size - 1).bit_length())
    # The halves may differ in width and trade places every round: the number of rounds is even.
    widths = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    masks = [(np.uint64(1) << width) - np.uint64(1) for width in widths]
    seed = mix(*key)
    rounds = [np.broadcast_to(mix(seed, number), index.shape) for number in range(_ROUNDS)]
    value = index.astype(np.uint64)
    pending = np.arange(value.size)
    while pending.size:
        left, right = value[pending] >> widths[1], value[pending] & masks[1]
        for number, round_key in enumerate(rounds):
            left, right = right, left ^ (mix(round_key[pending] ^ right) & masks[number % 2])
        value[pending] = (left << widths[1]) | right
        pending = pending[value[pending] >= np.uint64(size)]
    return value.astype(np.int64)
