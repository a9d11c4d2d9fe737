"""How much of a text `farstate diagnose` and `farstate repair` read, and the parameters that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farstate.errors import FarstateError


@dataclass(frozen=True)
class Budget:
    """How much is read.

    Attributes:
        times: positions measured, in training lengths, where the documents are long enough.
        documents: at most so many for the perplexity; `tokens`: and no more tokens than these, but `fewest` documents in any case.
        stretches: of a document, where there are fewer than 20.
        others: documents for states and remembrance.
        remembered: T of the effective remembrance, in training lengths (the paper's is 4).
        starts: start points of it per octave.
        passkey: the longest prompt, in training lengths; `examples` in each of its cells.
        bins: per octave of position.
    """

    times: int
    documents: int
    tokens: int
    fewest: int
    stretches: int
    others: int
    remembered: int
    starts: int
    passkey: int
    examples: int
    bins: int


BUDGETS = {
    "small": Budget(16, 24, 1 << 18, 8, 4, 8, 4, 1, 4, 8, 2),
    "full": Budget(64, 200, 1 << 27, 20, 6, 64, 4, 2, 32, 25, 2),
}
_SHORTEST_PROMPT = 128
"""Tokens that hold a key and its question with any usual tokenizer."""
_DEPTHS = (0.1, 0.5, 0.9)
_LAST = 64


@dataclass(frozen=True)
class Sizes:
    """What is read of the texts that there are.

    Attributes:
        length: positions measured.
        documents: read for the perplexity; `usable`: long enough for it.
        notice: in a sentence, what the texts did not allow; empty where they allowed all.
    """

    length: int
    documents: int
    usable: int
    notice: str


def sizes(budget: Budget, context: int, lengths: Sequence[int] | None, *, wanted: int | None = None) -> Sizes:
    """How far and in how many documents is measured.

    Args:
        context: T_train.
        lengths: tokens of the held-out documents; None: not known yet.
        wanted: positions asked for instead of the budget's.

    Raises:
        FarstateError: no document is longer than twice the training length, or, where a length was asked for, than that.
    """
    asked = wanted or budget.times * context
    if lengths is None:
        return Sizes(asked, _documents(budget, asked, budget.documents), budget.documents, "")
    longest = max(lengths, default=0)

    def usable(length: int) -> int:
        return sum(own > length for own in lengths)

    if wanted is not None:
        if not usable(wanted):
            raise FarstateError(
                f"--set evaluate.length: {wanted:,} positions are asked for, the longest of {len(lengths):,} held-out documents allows "
                f"{max(longest - 1, 0):,}; give longer texts or a smaller length"
            )
        return Sizes(wanted, _documents(budget, wanted, usable(wanted)), usable(wanted), "")
    possible = [context * times for times in _halves(budget.times)]
    for least in (budget.fewest, 2, 1):
        for length in possible:
            if (count := usable(length)) >= least:
                notice = ""
                if length < asked:
                    notice = (
                        f"only {usable(asked):,} of {len(lengths):,} held-out documents hold more than {asked:,} tokens: measured to "
                        f"{length:,} positions, {length // context} × T_train"
                    )
                if count < budget.fewest:
                    notice += f"{'; ' if notice else ''}only {count:,} held-out document(s) to measure on, so intervals are wide or absent"
                return Sizes(length, _documents(budget, length, count), count, notice)
    raise FarstateError(
        f"texts too short: the longest of {len(lengths):,} held-out documents has {longest:,} tokens, more than {2 * context:,} are needed "
        f"to see beyond T_train = {context:,}; give longer texts, or join documents: --set evaluate.streams=concatenated --set "
        f"evaluate.length={2 * context}"
    )


def _halves(times: int) -> list[int]:
    """`times`, half of it, …, 2."""
    found = [times]
    while found[-1] > 2:
        found.append(found[-1] // 2)
    return found


def _documents(budget: Budget, length: int, usable: int) -> int:
    return max(1, min(budget.documents, usable, max(budget.fewest, budget.tokens // length)))


def measurements(budget: Budget, context: int, size: Sizes) -> dict[str, Any]:
    """The sections evaluate, remembrance, states and tasks of the parameters."""
    shared = {"split": "test", "streams": "documents", "precision": "float32"}
    remembered = min(budget.remembered * context, size.length)
    others = min(budget.others, size.documents)
    first = max(_SHORTEST_PROMPT, context)
    prompts = [first]
    while 2 * prompts[-1] <= max(budget.passkey * context, 4 * first):
        prompts.append(2 * prompts[-1])
    return {
        "evaluate": {
            **shared,
            "length": size.length,
            "documents": size.documents,
            "stretches_per_document": budget.stretches,
            "bins_per_octave": budget.bins,
            "softmax": "real",
        },
        "remembrance": {
            **shared,
            "length": remembered,
            "documents": others,
            "stretches_per_document": 1,
            "starts_per_octave": budget.starts,
            "last": min(_LAST, remembered),
            "softmax": "real",
        },
        "states": {
            **shared,
            "length": size.length,
            "documents": others,
            "stretches_per_document": 1,
            "bins_per_octave": budget.bins,
            "samples_per_octave": 1,
        },
        "tasks": {
            "passkey": {
                "examples": budget.examples,
                "seed": 0,
                "jobs": "model",
                "precision": "float32",
                "lengths": prompts,
                "depths": list(_DEPTHS),
                "keys": [10000, 99999],
                "filler": "sentences",
                "instruction": True,
                # Never trained on it here; the parameters want the section.
                "training": {"examples": 1, "recipe": {"batch_tokens": context, "peak_learning_rate": 1.0e-3}},
            }
        },
    }
