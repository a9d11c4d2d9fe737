"""How an answer is scored: every score is 0 or 1, or a share between them."""

from __future__ import annotations

from collections.abc import Callable

from farstate.tasks.examples import Example, Tokens
from farstate.tasks.labels import labels, lenient, strict

Decode = Callable[[Tokens], str]

BY_TASK: dict[str, tuple[str, ...]] = {
    "babilong": ("strict", "lenient"),
    "passkey": ("exact", "characters"),
    "copying": ("exact", "characters", "characters_forced"),
}
"""The scores of each task. strict, lenient: BABILong's two public scorers (`farstate.tasks.labels`). exact: the text before what
ends an answer is the right one, white space around it aside. characters: share of the label's characters that stand at
their place in it. characters_forced: share of the label's tokens that are predicted right, each after the right ones."""
WHOLE = ("strict", "lenient", "exact")
"""Those that are 0 or 1."""
LENIENT_TOKENS = 16
"""Of an answer, those that the lenient scorer reads."""


def score(task: str, example: Example, generated: Tokens, forced: Tokens, decode: Decode, end: str) -> dict[str, float]:
    """The scores of one answer.

    Args:
        task: babilong, passkey or copying.
        generated: tokens of greedy decoding; one that is negative ended it, since the logits were not finite.
        forced: (A,), the predictions inside the right answer.
        decode: tokens to text.
        end: the character that ends an answer.
    """
    text = decode(generated[generated >= 0])
    if task == "babilong":
        beginning = generated[:LENIENT_TOKENS]
        return {
            "strict": float(strict(text, example.label, labels(example.task))),
            "lenient": float(lenient(decode(beginning[beginning >= 0]), example.label)),
        }
    told = text.partition(end)[0].strip()
    found = {
        # Without its end the answer would have gone on.
        "exact": float(told == example.label and end in text),
        "characters": sum(map(str.__eq__, told, example.label)) / len(example.label),
    }
    if task == "copying":
        right = example.answer[:-1]
        found["characters_forced"] = float((forced[:-1] == right).mean())
    return found
