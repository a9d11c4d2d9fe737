"""Why jobs cannot run as they are set, in one line, with what would help all of them."""

from __future__ import annotations

import math
from pathlib import Path

from farstate.planner.devices import Device
from farstate.planner.jobs import LARGER, MEASUREMENTS, TRAININGS, Job, division_of, remedy, splits_of
from farstate.settings import Settings
from farstate.training.division import divisors


def refusal(jobs: list[Job], settings: Settings, device: Device, root: Path) -> str:
    """Of jobs that are still to be made: what the trainer would refuse, else what does not fit `device`; empty where all can run."""
    trainings = [job for job in jobs if job.stage.rule in TRAININGS]
    if refused := [job for job in trainings if job.refused]:
        first = refused[0]
        others = f" (and {len(refused) - 1} more of {len(trainings)} trainings)" if len(refused) > 1 else ""
        return f"{_name(first)}{others}: {first.refused}{_common(trainings, settings)}"
    measurements = [job for job in jobs if job.stage.rule in MEASUREMENTS]
    for kind, some in (("trainings", trainings), ("measurements", measurements)):
        if large := [job for job in some if not job.fits]:
            worst = max(large, key=lambda job: job.bytes)
            return (
                f"{len(large)} of {len(some)} {kind} do not fit {device.name} ({device.memory / 1e9:.0f} GB); the largest is "
                f"{_name(worst)}: {worst.bytes / 1e9:.1f} GB; {_advice(large, some, settings, device, root)}; if your "
                "devices are others, say so there (planner:)"
            )
    return ""


def _common(trainings: list[Job], settings: Settings) -> str:
    """The values that all trainings allow, where there are several."""
    given = [division_of(job.stage) for job in trainings]
    if len(given) == 1 or any(one["batch_tokens"] % (one["context"] * one["micro_batches"]) for one in given):
        return ""
    rows = [one["batch_tokens"] // (one["context"] * one["micro_batches"]) for one in given]
    processes = settings.distributed.processes * settings.distributed.nodes
    if any(number % processes for number in rows):
        return f"; all {len(trainings)} trainings allow {_listed(divisors(math.gcd(*rows)))} processes"
    if splits := splits_of([job.stage for job in trainings], settings):
        return f"; all {len(trainings)} trainings allow split_micro_batches: {_listed(splits)}"
    return ""


def _advice(large: list[Job], all_of_kind: list[Job], settings: Settings, device: Device, root: Path) -> str:
    """One remedy for all that are too large, which those that fit allow too, else each one's own; apart, those that none helps."""
    told, helped = [], [job for job in large if job.advice not in LARGER.values()]
    if helped:
        splits = splits_of([job.stage for job in all_of_kind], settings)
        if said := remedy([job.stage for job in helped], settings, device, root, splits):
            count = "all of them fit" if len(helped) == len(large) else f"{len(helped)} fit"
            told.append(f"{'it fits' if len(large) == 1 else count} with {said} in config/settings.yaml")
        else:
            own: dict[str, list[Job]] = {}
            for job in helped:
                own.setdefault(job.advice, []).append(job)
            each = [f"{_named(some)}: {advice}" for advice, some in own.items()]
            told.append(f"no one setting suits all {len(all_of_kind)}, call for them apart: {'; '.join(each)}")
    if hopeless := [job for job in large if job.advice in LARGER.values()]:
        told.append(hopeless[0].advice if len(hopeless) == len(large) else f"{_named(hopeless)}: {hopeless[0].advice}")
    return "; ".join(told)


def _named(jobs: list[Job]) -> str:
    return _name(jobs[0]) + (f" and {len(jobs) - 1} more" if len(jobs) > 1 else "")


def _name(job: Job) -> str:
    return f"{job.stage.rule} {job.stage.name}"


def _listed(numbers: list[int]) -> str:
    *before, end = map(str, numbers)
    return f"{', '.join(before)} or {end}" if before else end
