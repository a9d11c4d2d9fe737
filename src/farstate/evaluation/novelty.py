"""Novelty: how far a state is from those met in training, against how far those are from each other.

Unexplored is not the same as unequal: states may be distributed otherwise and yet all lie where training was, which any test of
distributions notices and novelty does not. Distances are Euclidean in the space of all entries of a head, not among principal
components of the training states: a state that leaves their span would be invisible there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from farstate.evaluation.uncertainty import Floats

Integers = npt.NDArray[np.int64]


def novelties(
    squared: Floats, neighbours: int, documents: npt.NDArray[np.str_], chains: Integers, generator: np.random.Generator
) -> Floats | None:
    """d_k of every state / the median d_k of the reference states; about 1 for more states of the same law.

    d_k is the distance to the k-th nearest reference state. A reference state's neighbours are taken from other documents and
    other chains (a passed state in common). Of every other state as many candidates are left out: it takes the place of a
    reference state, drawn at random, and its neighbours are those which that one may have.

    Args:
        squared: (n + m, n) squared distances to the n reference states, which are the first n rows.
        neighbours: k.
        documents: (n,), chains: (n,): of the reference states, −1 for no chain.

    Returns:
        (n + m,); None where a reference state has fewer than k candidates, or the reference states all coincide.
    """
    count = documents.size
    kin = documents[:, None] == documents[None, :]
    kin |= (chains[:, None] == chains[None, :]) & (chains[:, None] >= 0)
    np.fill_diagonal(kin, True)
    if int((~kin).sum(1).min()) < neighbours:
        return None
    place = np.concatenate([np.arange(count), generator.integers(count, size=squared.shape[0] - count)])
    masked = np.where(kin[place], np.inf, squared)
    distance = np.sqrt(np.partition(masked, neighbours - 1, axis=1)[:, neighbours - 1])
    middle = float(np.median(distance[:count]))
    return distance / middle if middle > 0.0 else None


def weighted_median(values: Floats, weights: Floats) -> Floats:
    """The lower median of `values`, (n,), under each row of `weights`, (resamples, n): (resamples,)."""
    order = np.argsort(values, kind="stable")
    mass = np.cumsum(weights[:, order], axis=1)
    return values[order][np.argmax(mass >= 0.5 * mass[:, -1:], axis=1)]
