"""`farstate plan`: the jobs of a configuration, grouped by rule and model, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from farstate.planner.devices import Device
from farstate.planner.jobs import Job

_WIDEST = 500
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "moment": "for a moment",
    "states": "states",
}


def as_json(jobs: list[Job], device: Device, waiting: set[str]) -> dict[str, Any]:
    """Every job, bytes and FLOP unrounded; `waiting` are the directories still to be made."""
    return {
        "device": {
            "name": device.name,
            "why": device.why,
            "memory_bytes": device.memory,
            "flops_per_second": dict(_rates(device)),
        },
        "jobs": [
            {
                "rule": job.stage.rule,
                "model": job.model,
                "directory": job.stage.directory,
                "to_do": job.stage.directory in waiting,
                "parameters": job.parameters,
                "tokens": job.tokens,
                "flops": job.flops,
                "memory_bytes": {**job.memory, "all": job.bytes} if job.memory else None,
                "devices": job.devices,
                "hours": job.hours,
                "fits": job.fits,
                "advice": job.advice,
                "refused": job.refused,
            }
            for job in jobs
        ],
    }


def show(jobs: list[Job], device: Device, waiting: set[str], others: int) -> None:
    """Print the table: a line a rule and model, the largest of its jobs, and the totals of those still to be made."""
    console = Console(highlight=False)
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {precision}" for precision, rate in _rates(device))
    console.print(f"Planned for {device.name} ({device.why}): {device.memory / 1e9:.0f} GB, {rates}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "rule",
        "model",
        "jobs",
        "to do",
        "parameters",
        "tokens",
        "FLOP",
        "devices",
        *_PARTS.values(),
        "GB a device",
        "hours",
        "",
    ):
        table.add_column(name, justify="left" if name in ("rule", "model", "") else "right", no_wrap=True)
    for group in _groups(jobs):
        first = max(group, key=lambda job: (job.bytes, job.hours or 0.0))
        to_do = sum(job.stage.directory in waiting for job in group)
        table.add_row(
            first.stage.rule,
            first.model,
            str(len(group)),
            str(to_do),
            _short(first.parameters),
            _short(first.tokens),
            _short(first.flops),
            str(first.devices),
            *(f"{first.memory[part] / 1e9:.2f}" if part in first.memory else "" for part in _PARTS),
            f"{first.bytes / 1e9:.2f}" if first.memory else "?",
            _hours(max((job.hours for job in group if job.hours is not None), default=None)),
            "does not fit"
            if not all(job.fits for job in group)
            else "cannot be divided"
            if any(job.refused for job in group)
            else "",
        )
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum)
    console.print(table)  # a narrow terminal wraps its lines; nothing is left out
    due = [job for job in jobs if job.stage.directory in waiting]
    known = sum(job.hours * job.devices for job in due if job.hours is not None)
    unknown = sum(job.hours is None for job in due)
    console.print(
        f"To do: {len(due)} of {len(jobs)} jobs with a model, {_hours(known)} device-hours"
        + (f" and {unknown} whose length only the text or the checkpoint decides (?)" if unknown else "")
        + f"; besides {others} small jobs of corpus, comparisons and pages"
    )


def _groups(jobs: list[Job]) -> Iterator[list[Job]]:
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.stage.rule, job.model), []).append(job)
    yield from groups.values()


def _rates(device: Device) -> Iterator[tuple[str, float]]:
    for precision in device.peak:
        yield precision, device.reached(precision)


def _short(number: float | None) -> str:
    if number is None:
        return "?"
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _hours(hours: float | None) -> str:
    if hours is None:
        return "?"
    return f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"
