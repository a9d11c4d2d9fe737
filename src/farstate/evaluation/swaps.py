"""Swapped states: what a prediction loses or gains when a head's state is replaced by another one.

At position t of a text the carried state is kept but for the recurrent entries of some heads, which are taken from another state;
then the text goes on. The change of the loss against the untouched continuation says whether those entries matter, which no
comparison of distributions can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farstate.evaluation.sampled_states import Head, Integers, StateSet, inference
from farstate.evaluation.stream import Precision
from farstate.evaluation.uncertainty import Floats
from farstate.models.contract import Model
from farstate.models.head import token_nll
from farstate.state import State

Group = Literal["top", "random", "all"]
Source = Literal["training state", "other document"]
"""A state met in training, or the state of the same head at the same position of another document: any foreign state."""


@dataclass(frozen=True)
class Swap:
    """Heads replaced together (their places among the analysed heads), and from where."""

    group: Group
    heads: tuple[int, ...]
    source: Source


def plan(drift: Floats, count: int, heads: int, generator: np.random.Generator) -> list[Swap]:
    """The `count` heads of the largest drift against as many at random of the rest: each alone, each group together, all heads.

    Every swap is made with both sources. A head whose drift is not known is in neither group.

    Args:
        drift: (heads,), NaN where unknown.
    """
    known = np.flatnonzero(np.isfinite(drift))
    ranked = known[np.argsort(-drift[known], kind="stable")]
    groups: dict[Group, npt.NDArray[np.int64]] = {
        "top": ranked[:count],
        "random": np.sort(generator.permutation(ranked[count:])[:count]),
    }
    sets: list[tuple[Group, tuple[int, ...]]] = []
    for name, members in groups.items():
        sets += [(name, (int(head),)) for head in members]
        if members.size > 1:
            sets.append((name, tuple(int(head) for head in members)))
    if heads > 1:
        sets.append(("all", tuple(range(heads))))
    sources: tuple[Source, ...] = ("training state", "other document")
    return [Swap(name, members, source) for source in sources for name, members in sets]


def donors(documents: Sequence[str], training_states: int, generator: np.random.Generator) -> Mapping[Source, Integers]:
    """For each text, which state takes the place of its own, by source; −1 where there is no other document."""
    names = np.asarray(documents)
    others = np.full(names.size, -1, dtype=np.int64)
    for text, name in enumerate(names):
        foreign = np.flatnonzero(names != name)
        if foreign.size:
            others[text] = generator.choice(foreign)
    return {"training state": generator.integers(training_states, size=names.size), "other document": others}


def replaced(state: State, heads: Iterable[tuple[Head, Tensor]]) -> State:
    """`state` with the recurrent entries of each (head, entries (B, E)) replaced; auxiliary states and other heads stay."""
    values: dict[int, Tensor] = {}
    for (layer, head), entries in heads:
        if layer not in values:
            values[layer] = state.entries(layer).clone()
        values[layer][:, head] = entries.to(values[layer])
    for layer, changed in values.items():
        state = state.with_entries(layer, changed)
    return state


def continued_nll(
    model: Model, tokens: Tensor, state: State, vocabulary_size: int | None, segment_tokens: int, precision: Precision = "float32"
) -> Floats:
    """Mean NLL in nats per token of `tokens[:, 1:]` after `state` and the tokens before each, (B,); not finite comes out as NaN."""
    total = np.zeros(tokens.shape[0])
    count = tokens.shape[1] - 1
    with inference(tokens.device, precision):
        for start in range(0, count, segment_tokens):
            part = tokens[:, start : start + segment_tokens + 1]
            hidden, state = model(part[:, :-1], state)
            nll = token_nll(hidden, model.head_weight, part[:, 1:], vocabulary_size)
            total += nll.double().sum(1).cpu().numpy()
    total[~np.isfinite(total)] = np.nan
    return total / count


def swapped_nll(
    model: Model,
    tokens: Tensor,
    state: State,
    texts: Integers,
    swaps: Sequence[Swap],
    sources: Mapping[Source, StateSet],
    chosen: Mapping[Source, Integers],
    vocabulary_size: int | None,
    segment_tokens: int,
    precision: Precision = "float32",
) -> Floats:
    """Mean NLL of the continuation under each swap, (swaps, B); NaN where a text has no donor.

    Args:
        tokens: (B, 1 + continuation) on the model's device: the last token is only a label.
        state: (B) carried states.
        texts: (B,) numbers of the texts, into `chosen`.
        sources: the states that replace, by source; `chosen`: for each text, which of them.
    """
    found = np.full((len(swaps), texts.size), np.nan)
    for number, swap in enumerate(swaps):
        donor = chosen[swap.source][texts]
        have = np.flatnonzero(donor >= 0)
        if not have.size:
            continue
        given = sources[swap.source]
        rows = torch.from_numpy(have).to(tokens.device)
        foreign = [(given.heads[head], torch.from_numpy(given.rows(head, donor[have])).to(tokens.device)) for head in swap.heads]
        with torch.inference_mode():
            other = replaced(state.select(rows), foreign)
        found[number, have] = continued_nll(model, tokens[rows], other, vocabulary_size, segment_tokens, precision)
    return found
