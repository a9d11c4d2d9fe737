"""`farstate plan`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import typer

from farstate.errors import FarstateError
from farstate.params import read_yaml
from farstate.plan import Plan
from farstate.planner import show
from farstate.planner.devices import device_of
from farstate.planner.jobs import RULES, TRAININGS, Job, estimates
from farstate.planner.refusal import refusal
from farstate.settings import Settings, load_settings
from farstate.sources import read_lock
from farstate.workflow import parameters

PROFILE = "slurm/config.yaml"


def plan_command(
    targets: list[str], configfiles: list[Path], rate: str | None, memory: float | None, json_wanted: bool, cluster: bool = False
) -> None:
    """Print the jobs that `targets` stand on.

    Raises:
        FarstateError: a job cannot fit its device, a training cannot divide its batches, a target or a device that is not known,
            parameters that are wrong.
    """
    root = Path.cwd()
    settings = load_settings(Path("config/settings.yaml"), {"planner": _given(rate, memory)})
    plan = Plan(parameters(configfiles, {}, root), read_lock())
    if strange := [target for target in targets if not plan.wanted(root, [target], absent=False)]:
        raise FarstateError(
            f"'{strange[0]}' is no page, phase or result of these parameters; pages: {', '.join(plan.pages) or 'none'}"
        )
    device = device_of(settings, elsewhere=cluster, threads=settings.threads.pretrain)
    directories = plan.wanted(root, targets, absent=False)
    waiting = plan.wanted(root, targets, absent=True)
    stages = [stage for stage in plan.stages.values() if stage.directory in directories]
    jobs = estimates(stages, settings, device, root)
    due = [job for job in jobs if job.stage.directory in waiting]
    if json_wanted:
        typer.echo(json.dumps(show.as_json(jobs, device, waiting), indent=2))
    else:
        show.show(jobs, device, waiting, sum(stage.rule not in RULES for stage in stages))
    if said := refusal(due, settings, device, root):
        raise FarstateError(said)
    if (cluster or device.is_gpu) and (said := too_long(due, settings, _retries(root / PROFILE))):
        typer.echo(f"farstate: {said}", err=True)


def too_long(jobs: list[Job], settings: Settings, retries: int) -> str:
    """What to raise where the longest training takes more hours than all attempts of a job may have; empty where none does."""
    limit = settings.planner.longest_job_hours
    trainings = [job for job in jobs if job.stage.rule in TRAININGS and job.hours is not None]
    longest = max(trainings, key=lambda job: job.hours or 0.0, default=None)
    if longest is None or longest.hours is None or longest.hours <= limit * (retries + 1):
        return ""
    return (
        f"warning: {longest.stage.rule} {longest.stage.name} is planned for {longest.hours:.0f} hours, {retries + 1} attempts of "
        f"{limit:g} hours (planner.longest_job_hours) end before: retries: {math.ceil(longest.hours / limit) - 1} in {PROFILE}, or call "
        "Snakemake again when they are used up"
    )


def _retries(profile: Path) -> int:
    """How often the profile lets a job be submitted again."""
    given = read_yaml(profile).get("retries", 0) if profile.exists() else 0
    return given if isinstance(given, int) else 0


def _given(rate: str | None, memory: float | None) -> dict[str, Any]:
    given: dict[str, Any] = {} if memory is None else {"memory_gb": memory}
    if rate is None:
        return given
    try:
        return {**given, "rate": float(rate)}
    except ValueError:
        return {**given, "device": rate, "rate": None}
