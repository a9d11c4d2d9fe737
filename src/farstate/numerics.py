"""Numerics versions: one small integer per module, raised when its numbers change.

A stage's key contains the versions of the modules it uses, so that a change of numbers is never taken
for the old result, and a change of comments never repeats a training. The golden tests hold the two
together: they fail when a module's numbers change and its version here does not. "reports" is raised when a page shows
the same tables differently.
"""

from __future__ import annotations

NUMERICS: dict[str, int] = {
    "corpus": 1,
    "ops": 1,
    "models": 1,
    "training": 1,
    "evaluation": 1,
    "remembrance": 1,
    "states": 1,
    "shift": 1,
    "tasks": 1,
    "reports": 2,
}
