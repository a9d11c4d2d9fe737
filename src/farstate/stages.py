"""A stage as its command sees it: the record that Snakemake resolved, checked upstreams, the directory to write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from farstate import integrity
from farstate.errors import FarstateError
from farstate.files import read_json, read_manifest
from farstate.settings import current_settings


class Stage:
    """A stage's record, its upstream directories (checked) and the directory it writes."""

    def __init__(self, record: Path, output: Path | None, rule: str) -> None:
        self.record: dict[str, Any] = read_json(record)
        if not isinstance(self.record, dict) or self.record.get("rule") != rule:
            found = self.record.get("rule") if isinstance(self.record, dict) else None
            raise FarstateError(f"{record}: the record of a '{found}' stage was given to '{rule}'")
        self.params: dict[str, Any] = self.record["params"]
        self.output = output or Path(self.record["directory"])
        self.settings, self.verify = current_settings()
        # Of several processes of one training the first reads every byte, the others rely on it.
        first = os.environ.get("RANK", "0") == "0"
        for role in self.record["upstream"]:
            for directory in self.many(role):
                if first:
                    integrity.hold(directory, always=self.verify)
                else:
                    read_manifest(directory)
        self.output.mkdir(parents=True, exist_ok=True)
        if not os.access(self.output, os.W_OK):
            raise FarstateError(f"no permission to write '{self.output}': make the folder writable or run Farstate where it is")

    def many(self, role: str) -> list[Path]:
        return [Path(directory) for directory in self.record["upstream"].get(role, [])]

    def one(self, role: str) -> Path:
        return self.many(role)[0]

    @property
    def scratch(self) -> Path:
        return Path(self.settings.scratch) / self.record["phase"] / self.output.name

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifest says about the result besides its content."""
        return {name: self.record[name] for name in ("rule", "name", "key", "params", "upstream", "numerics")}

    @property
    def threads(self) -> int | None:
        """CPU threads that Snakemake gave this job; None by hand: torch's own choice."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdigit() and int(given) > 0 else None

    @property
    def label(self) -> str:
        return str(self.record["name"])
