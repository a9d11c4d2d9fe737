"""`farstate plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from farstate.errors import FarstateError
from farstate.plan import Plan
from farstate.planner import show
from farstate.planner.devices import device_of
from farstate.planner.jobs import RULES, TRAININGS, estimates
from farstate.settings import load_settings
from farstate.sources import read_lock
from farstate.workflow import parameters


def plan_command(targets: list[str], configfiles: list[Path], rate: str | None, memory: float | None, json_wanted: bool) -> None:
    """Print the jobs that `targets` stand on.

    Raises:
        FarstateError: a training cannot fit its device, a target or a device that is not known, parameters that are wrong.
    """
    root = Path.cwd()
    settings = load_settings(Path("config/settings.yaml"), {"planner": _given(rate, memory)})
    plan = Plan(parameters(configfiles, {}, root), read_lock())
    if strange := [target for target in targets if not plan.wanted(root, [target], absent=False)]:
        raise FarstateError(
            f"'{strange[0]}' is no page, phase or result of these parameters; pages: {', '.join(plan.pages) or 'none'}"
        )
    device = device_of(settings, elsewhere=False, threads=settings.threads.pretrain)
    directories = plan.wanted(root, targets, absent=False)
    waiting = plan.wanted(root, targets, absent=True)
    stages = [stage for stage in plan.stages.values() if stage.directory in directories]
    jobs = estimates(stages, settings, device, root)
    if json_wanted:
        typer.echo(json.dumps(show.as_json(jobs, device, waiting), indent=2))
    else:
        show.show(jobs, device, waiting, sum(stage.rule not in RULES for stage in stages))
    refused = [job for job in jobs if not job.fits and job.stage.rule in TRAININGS and job.stage.directory in waiting]
    if refused:
        worst = max(refused, key=lambda job: job.bytes)
        raise FarstateError(
            f"{len(refused)} trainings do not fit {device.memory / 1e9:.0f} GB; the largest is {worst.stage.rule} {worst.stage.name}: "
            f"{worst.bytes / 1e9:.1f} GB; {worst.advice}"
        )


def _given(rate: str | None, memory: float | None) -> dict[str, Any]:
    given: dict[str, Any] = {} if memory is None else {"memory_gb": memory}
    if rate is None:
        return given
    try:
        return {**given, "rate": float(rate)}
    except ValueError:
        return {**given, "device": rate, "rate": None}
