"""Where a training stands, on stderr: a live line on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_TERMINAL_SECONDS = 0.25
_LOG_SECONDS = 10.0
_MARKS = 40


def notice(text: str) -> None:
    """One line for the person at the keyboard."""
    print(f"farstate: {text}", file=sys.stderr, flush=True)


class Progress:
    """Step, loss, tokens per second over the last while, time left.

    Args:
        label: what runs.
        steps: steps in all, None where nobody knows; `batch_tokens`: tokens of one; `start`: steps done by an earlier process.
    """

    _speed = True

    def __init__(self, label: str, steps: int | None, batch_tokens: int, start: int) -> None:
        self._label = label
        self._steps = steps
        self._batch_tokens = batch_tokens
        console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._every = _TERMINAL_SECONDS if self._live else _LOG_SECONDS
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), start)], maxlen=_MARKS)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, loss: float) -> None:
        """`step` steps are done; cheap enough for every step."""
        self._show(step, f"step {step}/{self._steps}, loss {loss:.4f}")

    def _show(self, step: int, what: str) -> None:
        now = time.monotonic()
        if now - self._marks[-1][0] < self._every and step != self._steps:
            return
        then, before = self._marks[0]
        if step <= before:  # no speed yet
            return
        self._marks.append((now, step))
        rate = (step - before) / max(now - then, 1e-9)
        line = f"{self._label}: {what}"
        if self._speed:
            line += f", {_short(rate * self._batch_tokens)} tokens/s"
        if self._steps is not None:
            line += f", {_clock((self._steps - step) / rate)} left"
        if self._live:
            self._live.update(Text(line), refresh=True)
        else:
            notice(line)


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
