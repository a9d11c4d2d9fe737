"""The repository's rules, run by Snakemake in the folder of a diagnosis, with one progress bar over all jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from farstate.errors import FarstateError
from farstate.keys import Stage

LOG = Path("logs/own_model.log")
_OVERHEAD = 7.0
"""Seconds that a job takes before it computes: Python, torch, reading; measured on 2 CPU cores."""
BACKWARD = 3.0
"""Passes of a training step, in forward ones."""
_PASSES = {"perplexity": 3.5, "states": 2.5, "remembrance": 5.0, "task": 1.2}
"""Of a measurement, the times that it reads its text, in forward passes; measured on the demo's and a 1M-parameter Mamba-2."""
_STARTED = re.compile(r"^Job \d+: (.+)$")
_FINISHED = re.compile(r"^Finished jobid: (\d+)(?: \(Rule: (\w+)\))?")
_SAID = re.compile(r"^farstate: (.+)$")


@dataclass(frozen=True)
class Work:
    """What is to be run: by rule, how many jobs, and about how many seconds each of them takes on one core."""

    jobs: Mapping[str, int]
    seconds: Mapping[str, float]

    @property
    def count(self) -> int:
        return sum(self.jobs.values())

    @property
    def total(self) -> float:
        """Seconds of all jobs, one after the other."""
        return sum(number * self.seconds[rule] for rule, number in self.jobs.items())


def work_of(stages: Sequence[Stage], page: bool, rate: float) -> Work:
    """An estimate of what jobs take.

    Args:
        stages: those that are computed.
        page: whether a page is drawn.
        rate: tokens that the model reads in a second, forward, on one core.
    """
    jobs: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for stage in stages:
        number, before = jobs.get(stage.rule, 0), seconds.get(stage.rule, 0.0)
        jobs[stage.rule] = number + 1
        seconds[stage.rule] = (before * number + _OVERHEAD + tokens_of(stage) / rate) / (number + 1)
    if page:
        jobs["report"], seconds["report"] = 1, _OVERHEAD
    return Work(jobs, seconds)


def tokens_of(stage: Stage) -> float:
    """Tokens that a job's model reads, in forward passes."""
    given: dict[str, Any] = stage.params
    if stage.rule == "posttrain":
        return BACKWARD * float(given["steps"] * given["recipe"]["batch_tokens"])
    if stage.rule == "task":
        data = stage.upstream["data"][0].params
        return _PASSES["task"] * float(data["examples"] * sum(cell["length"] for cell in data["cells"]))
    section = given.get("evaluate" if stage.rule == "perplexity" else stage.rule)
    if not isinstance(section, dict) or stage.rule not in _PASSES:
        return 0.0
    documents = section["documents"] or 1
    return _PASSES[stage.rule] * documents * section["stretches_per_document"] * section["length"]


@dataclass
class _Seen:
    """What Snakemake's output has told so far."""

    done: dict[str, int] = field(default_factory=dict)
    running: str = ""
    error: str = ""
    lines: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        if found := _FINISHED.match(line):
            rule = found.group(2) or ""
            self.done[rule] = self.done.get(rule, 0) + 1
        elif found := _STARTED.match(line):
            self.running = found.group(1)
        elif (found := _SAID.match(line)) and not self.error:
            self.error = found.group(1)


def snakemake(
    root: Path,
    folder: Path,
    targets: Sequence[str],
    *,
    cores: int | None,
    profile: str | None,
    work: Work | None,
    settings: str = "",
) -> None:
    """Run the rules until the targets are there.

    Args:
        root: the repository.
        folder: in which results, logs and pages are written.
        cores, profile: as Snakemake takes them.
        work: what is expected to run; None: nothing is shown.
        settings: of `--config settings=…`; empty: those of the files.

    Raises:
        FarstateError: a job failed; what it said, and where the whole output is.
    """
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(root / "workflow" / "Snakefile"), "--directory", str(folder)]
    command += ["--workflow-profile", str(root / "profiles" / "default")]
    if cores is not None:
        command += ["--cores", str(cores)]
    if profile is not None:
        # The rules are read in the folder, from where a profile of the repository is not found by its name.
        command += ["--profile", str(root / profile) if (root / profile).is_dir() else profile]
    if settings:
        command += ["--config", f"settings={settings}"]
    log = folder / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    seen = _Seen()
    with log.open("a", encoding="utf-8") as written:
        process = subprocess.Popen(
            [*command, "--", *targets],
            cwd=root,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            with _Bar(work, seen):
                for line in process.stdout:
                    written.write(line)
                    written.flush()
                    seen.lines.append(line.rstrip())
                    seen.read(line.rstrip())
                status = process.wait()
        except BaseException:  # Ctrl-C reaches Snakemake too; what it has is kept
            process.terminate()
            process.wait()
            raise
    if status:
        said = seen.error or next((line for line in reversed(seen.lines) if line.strip()), f"exit status {status}")
        raise FarstateError(f"{said.strip()} (the whole output: {log})")


class _Bar:
    """One bar over all jobs, moved by finished ones and in between by the time that a job is expected to take."""

    def __init__(self, work: Work | None, seen: _Seen) -> None:
        self._work, self._seen = work, seen
        self._started = time.monotonic()
        self._ended = threading.Event()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[jobs]}"),
            TextColumn("{task.fields[left]}"),
        )
        self._console = Console(stderr=True)
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task: TaskID | None = None
        self._told = -1

    def __enter__(self) -> None:
        if self._work is None:
            return
        if self._console.is_terminal:
            self._progress.start()
            self._task = self._progress.add_task("starting", total=1.0, jobs="", left="")
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._work is None:
            return
        self._ended.set()
        self._thread.join()
        self._progress.stop()

    def _follow(self) -> None:
        while not self._ended.wait(0.5):
            self._show()
        self._show()

    def _show(self) -> None:
        assert self._work is not None
        done, running = dict(self._seen.done), self._seen.running
        seconds = sum(
            min(number, self._work.jobs.get(rule, 0)) * self._work.seconds.get(rule, 0.0) for rule, number in done.items()
        )
        share = seconds / self._work.total if self._work.total else 1.0
        elapsed = time.monotonic() - self._started
        finished = sum(number for rule, number in done.items() if rule in self._work.jobs)
        left = f"about {_time(elapsed / share * (1.0 - share))} left" if share > 0.05 else ""
        jobs = f"{finished} of {self._work.count} jobs"
        if self._task is not None:
            self._progress.update(self._task, completed=share, description=running or "starting", jobs=jobs, left=left)
        elif finished != self._told and finished:
            self._told = finished
            self._console.print(f"{jobs}, {100 * share:.0f} %{', ' + left if left else ''}", highlight=False)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
