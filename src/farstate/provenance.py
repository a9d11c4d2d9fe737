"""Who made a result, when and with what: a sidecar in `logs/`, never part of a key nor of what DVC records."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from farstate.files import write_json

_PACKAGES = (
    "farstate",
    "torch",
    "triton",
    "mamba-ssm",
    "fla-core",
    "numpy",
    "tokenizers",
    "polars",
    "pyarrow",
    "altair",
    "snakemake",
    "dvc",
)


def commit() -> dict[str, Any]:
    """The checkout's commit and whether it has uncommitted changes; empty outside of git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if head is None:
        return {}
    return {"commit": head, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose numbers or drawings results depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def sidecar(output: Path) -> Path:
    """`logs/<phase>/<name>-<key>.provenance.json`."""
    return Path("logs") / output.parent.name / f"{output.name}.provenance.json"


def write_provenance(
    record: dict[str, Any],
    output: Path,
    started: float,
    run: dict[str, Any] | None = None,
    operations: dict[str, Any] | None = None,
    joules: float | None = None,
) -> None:
    """Write the sidecar of a finished stage.

    Args:
        run: what the stage measured of itself.
        operations: by recurrence that it computed, the backend that was requested, those it resolved to, and why.
        joules: that its devices used meanwhile, None where they do not tell.
    """
    device = "cpu"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    write_json(
        sidecar(output),
        {
            "directory": record["directory"],
            "key": record["key"],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "wall_seconds": round(time.time() - started, 2),
            "host": platform.node(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "device": device,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "versions": versions(),
            "run": run or {},
            "operations": operations or {},
            "energy_joules": joules,
            **commit(),
        },
    )
