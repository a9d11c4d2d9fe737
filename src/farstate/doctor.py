"""What this machine has, which backend each architecture would use and why, and whether each agrees with the definition.

Libraries are looked up, not imported, except those whose kernels can run here. Every check compares an implementation with
`naive` in float64 on small inputs: outputs, final state and all gradients (`farstate.ops.checks`).
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from farstate.models.config import Config
from farstate.models.registry import ARCHITECTURES
from farstate.ops import backends

if TYPE_CHECKING:
    import torch

# By the name that is imported: the distribution, and the compiled extension where it has one.
_LIBRARIES = {
    "triton": ("triton", None),
    "mamba_ssm": ("mamba-ssm", "selective_scan_cuda"),
    "causal_conv1d": ("causal-conv1d", "causal_conv1d_cuda"),
    "fla": ("fla-core", None),
}


def examine(requested: str = "auto") -> dict[str, Any]:
    """Everything that `show` prints, as JSON holds it.

    Args:
        requested: the backend of the settings, whose choices are reported beside those of `auto`.
    """
    import torch

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return {
        "machine": machine(),
        "libraries": {name: _library(name) for name in _LIBRARIES},
        "requested": requested,
        "architectures": [row for device in devices for row in _choices(device, requested)],
        "checks": [row for device in devices for row in _checks(device)],
        "unavailable": _unavailable(devices[-1]),
    }


def healthy(report: dict[str, Any]) -> bool:
    """No check failed."""
    return all(check["passed"] for check in report["checks"])


def machine() -> dict[str, str]:
    """Python, torch, devices, cores, memory, threads; in words."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none, a CPU build",
        "GPU": "none",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["GPU"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}"
        )
        if torch.cuda.device_count() > 1:
            found["GPU"] += f"; the first of {torch.cuda.device_count()}"
    found["driver"] = _driver() or "none"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["CPU"] = f"{platform.processor() or platform.machine()}, {cores} cores usable"
    memory = _memory()
    if memory is not None:
        found["memory"] = f"{memory / 2**30:.1f} GiB"
    found["threads"] = f"{torch.get_num_threads()} (OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')})"
    if interpreted := os.environ.get("TRITON_INTERPRET"):
        found["Triton"] = f"interpreted (TRITON_INTERPRET={interpreted})"
    return found


def _library(name: str) -> str:
    distribution, extension = _LIBRARIES[name]
    if find_spec(name) is None:
        return "not installed"
    try:
        found = version(distribution)
    except PackageNotFoundError:
        found = "installed, version unknown"
    if extension is not None and find_spec(extension) is None:
        found += f", without its compiled extension ({extension})"
    return found


def _driver() -> str | None:
    """The driver's version, asked of the tool that comes with it: torch may be a CPU build on a machine with a GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def operations_of(architecture: str) -> list[str]:
    """The recurrences that a model of `architecture` computes: a tiny one reads two tokens, and they are written down."""
    import torch

    from farstate.models.language_model import LanguageModel

    with backends.use("chunked") as selection, torch.no_grad():
        LanguageModel(_tiny(architecture))(torch.zeros(1, 2, dtype=torch.int64))
    return list(selection.resolved)


def _tiny(architecture: str) -> Config:
    """The architecture's default configuration, at the fewest layers and the smallest width that it takes."""
    sizes = [(layers, width) for layers in (1, 4, 8, 16) for width in (64, 128, 256, 512, 1024, 2048)]
    for layers, width in sizes:
        try:
            return ARCHITECTURES[architecture].config.model_validate(
                {"architecture": architecture, "width": width, "layers": layers, "vocabulary_size": 2}
            )
        except ValidationError:
            if (layers, width) == sizes[-1]:
                raise
    raise AssertionError


def _choices(device: torch.device, requested: str) -> list[dict[str, str]]:
    rows = []
    for architecture in ARCHITECTURES:
        for operation in operations_of(architecture):
            row = {"architecture": architecture, "device": device.type, "operation": operation}
            choice = backends.choose(operation, "auto", device)
            row |= {"backend": choice.backend, "why": choice.why}
            if requested != "auto":
                reason = backends.unavailable(operation, requested, device.type)
                row["requested"] = "works" if reason is None else reason
            rows.append(row)
    return rows


def _checks(device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for operation in backends.OPERATIONS:
        for backend in backends.BACKENDS:
            # The definition itself: what would it be checked against?
            if backend in ("auto", "naive") or backends.unavailable(operation, backend, device.type) is not None:
                continue
            errors = backends.agreement(operation, backend, device)
            row: dict[str, Any] = {"operation": operation, "backend": backend, "device": device.type}
            if isinstance(errors, str):
                row |= {"passed": False, "problem": errors}
            else:
                row |= {
                    "passed": errors.passed,
                    "outputs": _finite(errors.outputs),
                    "final_state": _finite(errors.final_state),
                    "gradients": _finite(errors.gradients),
                    "worst_gradient": errors.worst_gradient,
                    "tolerance": errors.tolerance,
                }
            rows.append(row)
    return rows


def _finite(error: float) -> float | None:
    """JSON has no NaN."""
    return error if math.isfinite(error) else None


def _unavailable(device: torch.device) -> list[dict[str, str]]:
    return [
        {"operation": operation, "backend": backend, "device": device.type, "why": why}
        for operation in backends.OPERATIONS
        for backend in backends.ACCELERATED.get(operation, {})
        if (why := backends.unavailable(operation, backend, device.type)) is not None
    ]


def show(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    from rich.console import Console
    from rich.table import Table

    def table(title: str, *columns: str, rows: Iterable[Iterable[str]]) -> None:
        drawn = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in columns:
            # What is folded, if the terminal is narrow, is the text of the last column.
            drawn.add_column(column, no_wrap=column != columns[-1])
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)
        console.print()

    console = Console()
    table("This machine", "", "", rows=(report["machine"] | report["libraries"]).items())

    requested = report["requested"]
    keys = ["architecture", "device", "operation", "backend", "why", *([] if requested == "auto" else ["requested"])]
    columns = ["architecture", "on", "operation", "auto takes", "because"]
    columns += [] if requested == "auto" else [f"{requested}, of the settings"]
    table("Backends", *columns, rows=([row[key] for key in keys] for row in report["architectures"]))

    def number(error: float | None) -> str:
        return "not finite" if error is None else f"{error:.1e}"

    def cells(row: dict[str, Any]) -> list[str]:
        verdict = "[green]agrees[/]" if row["passed"] else "[red]FAILS[/]"
        start = [row["operation"], row["backend"], row["device"]]
        if "problem" in row:
            return [*start, verdict, "", "", ""]
        gradients = f"{number(row['gradients'])} (d {row['worst_gradient']})"
        return [*start, verdict, number(row["outputs"]), number(row["final_state"]), gradients]

    allowed = {row["device"]: row["tolerance"] for row in report["checks"] if "tolerance" in row}
    limits = ", ".join(f"{tolerance:.0e} on {device}" for device, tolerance in allowed.items())
    table(
        f"Largest error against naive in float64, relative to the largest entry; allowed: {limits}",
        *("operation", "backend", "on", "", "outputs", "state", "gradients"),
        rows=map(cells, report["checks"]),
    )
    for row in report["checks"]:
        if "problem" in row:
            console.print(f"{row['operation']}, {row['backend']} on {row['device']}: {row['problem']}", markup=False)
            console.print()
    if report["unavailable"]:
        table(
            "Not available",
            *("operation", "backend", "on", "because"),
            rows=([row[key] for key in ("operation", "backend", "device", "why")] for row in report["unavailable"]),
        )
