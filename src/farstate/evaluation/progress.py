"""Where an evaluation stands, on stderr, as a training shows it."""

from __future__ import annotations

import time

from farstate.training.progress import Progress


class ScoringProgress(Progress):
    """Share of the token positions scored, tokens per second over the last while, time left.

    To be entered, and given to `evaluate` as its `progress`. Carried state and window reference count separately.

    Args:
        label: what runs.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label, steps=0, batch_tokens=1, start=0)

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` positions are scored."""
        self._steps = total
        self._show(done, f"{100 * done // total} % scored")


class StreamProgress(Progress):
    """Tokens scored of a text whose end is not known, and the perplexity so far.

    Args:
        label: what runs.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label, steps=None, batch_tokens=1, start=0)

    def __call__(self, tokens: int, documents: int, perplexity: float) -> None:
        """`tokens` are scored; `documents` have been read."""
        self._show(tokens, f"{documents:,} documents, {tokens:,} tokens, perplexity {perplexity:.3f}")


class PhaseProgress(Progress):
    """What a measurement of several phases is doing, the share of it that is done, the time left of it.

    To be entered, and given as its `progress`.

    Args:
        label: what runs.
    """

    _speed = False

    def __init__(self, label: str) -> None:
        super().__init__(label, steps=0, batch_tokens=1, start=0)
        self._phase = ""

    def __call__(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` units of `phase` are done."""
        if phase != self._phase:
            self._phase = phase
            self._marks.clear()
            self._marks.append((time.monotonic(), 0))
        self._steps = total
        self._show(done, f"{phase}, {100 * done // total} %")
