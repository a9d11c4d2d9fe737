"""Where the reading or the tokenising of a shard stands, on stderr, as a training shows it."""

from __future__ import annotations

from farstate.training.progress import Progress


class DocumentProgress(Progress):
    """Documents done, of how many where that is known, and the time left.

    To be entered, and given to a corpus stage as its `progress`.

    Args:
        label: what runs.
    """

    _speed = False

    def __init__(self, label: str) -> None:
        super().__init__(label, steps=None, batch_tokens=1, start=0)

    def __call__(self, done: int, total: int | None) -> None:
        """`done` of `total` documents are done."""
        self._steps = total
        self._show(done, f"{done:,} documents" if total is None else f"{done:,} of {total:,} documents")
