"""What a job asks a cluster for: memory of the node, minutes, GPUs. Functions of the stage for the rules' `resources:`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from farstate.errors import FarstateError
from farstate.plan import Plan
from farstate.planner.devices import Device, device_of
from farstate.planner.jobs import TRAININGS, Job, estimate, estimates
from farstate.planner.refusal import refusal
from farstate.settings import Distributed, Settings

SAFETY = 1.5
"""Factor on memory and time."""
PROCESS_MB = 1500
"""A Python process with torch and its data, beside what is counted: 0.5 GB resident once torch is loaded, and room for tables."""
GPU_PROCESS_MB = 6000
"""The same with a CUDA context and pinned buffers [assumed]."""
START_MINUTES = 20
"""Start of Python, reading and writing results."""
UNKNOWN_MB, UNKNOWN_MINUTES = 16_000, 120
"""Where sizes or texts are not known before the job runs."""
MOST = 3
"""Times the memory of the first attempt that a later one asks for at the most: with many retries no node would have it."""


class Asks:
    """What the jobs of a plan ask for.

    Args:
        elsewhere: whether jobs are sent to a cluster; only then they ask for GPUs.
        root: of the results that may be there already.
        together: by rule, how many of its jobs the profile puts into one: they stay within the time limit together.
    """

    def __init__(
        self, plan: Plan, settings: Settings, *, elsewhere: bool, root: Path, together: Mapping[str, int] | None = None
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._elsewhere = elsewhere
        self._root = root
        self._together = together or {}
        self._job = cache(self._estimate)

    def function(self, what: str, pattern: str) -> Callable[..., int]:
        """A resource function of the rule whose directories follow `pattern`; `what` is mem_mb, runtime (minutes) or gpu.

        Memory and time grow with each attempt.
        """
        ask = {"mem_mb": self._memory, "runtime": self._minutes, "gpu": self._gpus}[what]

        def resource(wildcards: Any, attempt: int) -> int:
            return ask(self._job(pattern.format(**wildcards)), attempt)

        return resource

    def _estimate(self, directory: str) -> Job:
        stage = self._plan.at(directory)
        return estimate(stage, self._settings, self._device(stage.rule), self._root)

    def _device(self, rule: str) -> Device:
        threads = self._settings.threads
        count = threads.pretrain if rule == "pretrain" else threads.posttrain if rule in TRAININGS else threads.evaluate
        return device_of(self._settings, elsewhere=self._elsewhere, threads=count)

    def _memory(self, job: Job, attempt: int) -> int:
        """MB of one node."""
        processes = self._settings.distributed.processes if job.stage.rule in TRAININGS else 1
        if job.parameters is None:
            needed = float(UNKNOWN_MB)
        elif self._device(job.stage.rule).is_gpu:
            # Weights are read, and a checkpoint with the optimizer is put together, in the memory of the node.
            needed = processes * GPU_PROCESS_MB + SAFETY * 16 * job.parameters / 1e6
        else:
            needed = processes * (PROCESS_MB + SAFETY * job.bytes / 1e6)
        return math.ceil(needed / 100) * 100 * min(attempt, MOST)

    def _minutes(self, job: Job, attempt: int) -> int:
        needed = UNKNOWN_MINUTES if job.hours is None else START_MINUTES + math.ceil(SAFETY * 60 * job.hours)
        limit = 60 * self._settings.planner.longest_job_hours
        return min(needed * attempt, max(1, math.floor(limit / self._together.get(job.stage.rule, 1))))

    def _gpus(self, job: Job, attempt: int) -> int:
        uses = self._elsewhere and job.stage.rule != "import_checkpoint" and self._device(job.stage.rule).is_gpu
        return job.devices if uses else 0


def jobs_together(groups: Mapping[str, str], components: Mapping[str, int]) -> dict[str, int]:
    """By rule, how many of its jobs Snakemake puts into one: from its `groups` (rule: group) and `group-components` (group: number)."""
    return {rule: components.get(group, 1) for rule, group in groups.items()}


def refuse_what_cannot_fit(plan: Plan, settings: Settings, root: Path, targets: list[str]) -> None:
    """Stop before a job is submitted that the planned device cannot hold, or whose batches the trainer cannot divide.

    Raises:
        FarstateError: naming such a job, what it needs, and what would help all of them.
    """
    device = device_of(settings, elsewhere=True)
    jobs = estimates(map(plan.at, sorted(plan.wanted(root, targets, absent=True))), settings, device, root)
    if said := refusal(jobs, settings, device, root):
        raise FarstateError(f"{said}; `farstate plan --cluster` shows all jobs")


def torchrun(distributed: Distributed, threads: int) -> str:
    """What stands before `pretrain`, `posttrain` or `tune` in a shell: `farstate`, alone or in each process that torchrun starts.

    On several nodes, one torchrun each, which meet at the first node of the Slurm job; of Slurm's variables a job's shell has only its number.
    `threads` are those of a node.
    """
    if distributed.processes * distributed.nodes == 1:
        return "farstate"
    each = f"--nproc-per-node={distributed.processes}"
    if distributed.nodes == 1:
        return f"torchrun --standalone {each} -m farstate"
    first = '$(scontrol show hostnames "$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%N)" | head -n 1)'
    return (
        f"srun --nodes={distributed.nodes} --ntasks-per-node=1 --cpus-per-task={threads} "
        f"torchrun --nnodes={distributed.nodes} {each} --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID "
        f"--rdzv-endpoint={first}:$((20000 + SLURM_JOB_ID % 10000)) -m farstate"
    )


def over_nodes(distributed: Distributed) -> dict[str, Any]:
    """Resources of a training on several nodes, one task each; the rule's own srun starts them. Empty on one node."""
    if distributed.nodes == 1:
        return {}
    return {"nodes": distributed.nodes, "tasks": distributed.nodes, "mpi": "srun", "tasks_per_gpu": 0}
