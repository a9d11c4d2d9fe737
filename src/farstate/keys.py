"""Content keys: a path names everything its content depends on.

A stage's key is a hash of the parameters it reads, the keys of its upstreams and the numerics versions of the
modules it uses. An existing complete directory under its key is therefore always right, a missing one is always
work, and time stamps decide nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from farstate.files import MANIFEST
from farstate.numerics import NUMERICS

KEY_LENGTH = 8


def digest(value: Any) -> str:
    """Short hash of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


@dataclass(frozen=True, eq=False)
class Stage:
    """One result directory and all that its content depends on.

    Attributes:
        rule: the Snakemake rule and command that makes it.
        phase: the folder under `results/`, one DVC stage each.
        name: readable part of the directory's name.
        params: the parameters it reads, JSON values.
        upstream: by role, the stages it reads.
        numerics: the modules whose numerics versions enter the key.
        files: declared outputs besides the manifest.
    """

    rule: str
    phase: str
    name: str
    params: dict[str, Any]
    files: tuple[str, ...]
    upstream: dict[str, tuple[Stage, ...]] = field(default_factory=dict)
    numerics: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        return digest(
            {
                "rule": self.rule,
                "params": self.params,
                "upstream": {role: [stage.key for stage in stages] for role, stages in self.upstream.items()},
                "numerics": {module: NUMERICS[module] for module in self.numerics},
            }
        )

    @cached_property
    def directory(self) -> str:
        return f"results/{self.phase}/{self.name}-{self.key}"

    @property
    def manifest(self) -> str:
        return f"{self.directory}/{MANIFEST}"

    @property
    def outputs(self) -> list[str]:
        """Every declared file, the manifest first."""
        return [self.manifest, *(f"{self.directory}/{name}" for name in self.files)]

    def record(self) -> dict[str, Any]:
        """What the stage's command reads: never `params.yaml`, always this."""
        return {
            "rule": self.rule,
            "phase": self.phase,
            "name": self.name,
            "key": self.key,
            "directory": self.directory,
            "params": self.params,
            "upstream": {role: [stage.directory for stage in stages] for role, stages in self.upstream.items()},
            "numerics": {module: NUMERICS[module] for module in self.numerics},
        }
