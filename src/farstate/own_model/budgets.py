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
        times, most_times: positions measured, in training lengths: so many, and up to so many where `documents` of that length are
            within `tokens`; less where the documents are shorter.
        documents: at most so many for the perplexity; `fewest`: at least, whatever their length.
        tokens: of text for the perplexity, about.
        stretches: of a document, at most.
        others: documents for states and remembrance.
        remembered: T of the effective remembrance, in training lengths (the paper's is 4); `starts`: its start points per octave.
        passkey: the longest prompt, in training lengths; `examples` in each of its cells.
    """

    times: int
    most_times: int
    documents: int
    fewest: int
    tokens: int
    stretches: int
    others: int
    remembered: int
    starts: int
    passkey: int
    examples: int


BUDGETS = {
    "small": Budget(
        times=16, most_times=64, documents=24, fewest=8, tokens=1 << 18, stretches=8,
        others=8, remembered=4, starts=1, passkey=4, examples=8,
    ),
    "full": Budget(
        times=64, most_times=64, documents=200, fewest=20, tokens=1 << 27, stretches=8,
        others=64, remembered=4, starts=2, passkey=32, examples=25,
    ),
}  # fmt: skip
_BINS = 2
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
    asked = wanted or _longest(budget, context)
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
    possible = [context * times for times in _halves(asked // context)]
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


def _longest(budget: Budget, context: int) -> int:
    """Positions measured where all documents are long enough."""
    times = budget.times
    while 2 * times <= budget.most_times and 2 * times * context * budget.documents <= budget.tokens:
        times *= 2
    return times * context


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
    stretches = max(1, min(budget.stretches, budget.tokens // (size.length * size.documents)))
    first = max(_SHORTEST_PROMPT, context)
    prompts = [first]
    while 2 * prompts[-1] <= budget.passkey * first:
        prompts.append(2 * prompts[-1])
    return {
        "evaluate": {
            **shared,
            "length": size.length,
            "documents": size.documents,
            "stretches_per_document": stretches,
            "bins_per_octave": _BINS,
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
            "bins_per_octave": _BINS,
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
