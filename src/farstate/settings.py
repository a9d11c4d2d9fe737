"""Where and how to run: nothing here enters a key, and nothing here changes numbers beyond a stated tolerance.

Read from `config/settings.yaml`, overridden with `--config 'settings={device: cuda}'`, handed to the commands in
the environment variable FARSTATE_SETTINGS. Loads no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from farstate.errors import FarstateError, nearest
from farstate.ops.backends import Backend
from farstate.params import merge, read_yaml

_SHOWN = 80

Threads = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ThreadsPerRule(_Strict):
    """CPU threads of one job of a rule; jobs run side by side as long as there are cores."""

    tokens: Threads = 2
    pretrain: Threads = 1
    posttrain: Threads = 1
    evaluate: Threads = 1


class Distributed(_Strict):
    """How one training job uses several devices; results agree to float32 tolerance whatever stands here."""

    processes: Count = Field(1, description="processes of a training job on each node, one per GPU, started by torchrun")
    nodes: Count = Field(1, description="nodes of a training job")
    mode: Literal["ddp", "fsdp"] = Field(
        "ddp", description="ddp: every process holds the whole model; fsdp: weights, gradients and optimizer are shared out"
    )
    activation_checkpointing: bool = Field(
        False, description="keep only what enters each block and compute the rest again in the backward pass"
    )


class Planner(_Strict):
    """What `farstate plan` and the jobs of a cluster reckon with."""

    device: str = Field(
        "auto",
        description="auto, cpu, a100-40gb, a100-80gb, l40s, h100, h200, b200; auto: an a100-40gb where a GPU would be used, else the CPU",
    )
    rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="FLOP/s that one device reaches in training; null: 30 % of its peak [assumed]"
    )
    memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        None, description="memory of one device in GB; null: that of its name"
    )
    longest_job_hours: Annotated[float, Field(gt=0)] = Field(
        24.0, description="the cluster's time limit: no job asks for more; a training that needs more goes on in its retries"
    )


class Settings(_Strict):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where there is one")
    backend: Backend = Field(
        "auto",
        description="what computes the recurrences; auto: chunked on a CPU, on a GPU the fastest that is installed and agrees with "
        "naive there; `farstate doctor` shows which",
    )
    threads: ThreadsPerRule = ThreadsPerRule()
    distributed: Distributed = Distributed()
    split_micro_batches: Count = Field(
        1,
        description="each micro-batch of a recipe is computed in so many parts, to need less memory; not with `previous: micro_batch`",
    )
    planner: Planner = Planner()
    checkpoint_seconds: Annotated[float, Field(gt=0)] = Field(60.0, description="time between checkpoints for resuming")
    scratch: str = Field(".farstate/scratch", description="folder for checkpoints; put it on a fast disk")
    evaluation_rows: Annotated[int, Field(ge=1)] = Field(32, description="sequences evaluated side by side")
    evaluation_segment: Annotated[int, Field(ge=1)] = Field(512, description="tokens per carried segment")


def load_settings(path: Path, overrides: dict[str, Any] | None = None) -> Settings:
    """Read and check the settings; an absent file means the defaults."""
    data = read_yaml(path) if path.exists() else {}
    if overrides is not None and not isinstance(overrides, dict):
        raise FarstateError(f"--config settings={overrides}: a mapping is expected, like 'settings={{device: cuda}}'")
    return _validate(merge(data, overrides or {}), str(path))


def current_settings() -> tuple[Settings, bool]:
    """Settings of this process and whether outside inputs are verified by checksum: from the workflow, else the file."""
    given = os.environ.get("FARSTATE_SETTINGS")
    if given is None:
        return load_settings(Path("config/settings.yaml")), False
    try:
        data = json.loads(given)
    except (ValueError, RecursionError):
        raise FarstateError(f"FARSTATE_SETTINGS: not JSON: {given[:_SHOWN]!r}; unset it to use config/settings.yaml") from None
    if not isinstance(data, dict):
        raise FarstateError(f"FARSTATE_SETTINGS: a JSON object is expected, found {given[:_SHOWN]!r}")
    verify = bool(data.pop("verify", False))
    return _validate(data, "FARSTATE_SETTINGS"), verify


def _validate(data: dict[str, Any], where: str) -> Settings:
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = [
                *Settings.model_fields,
                *(f"threads.{name}" for name in ThreadsPerRule.model_fields),
                *(f"distributed.{name}" for name in Distributed.model_fields),
                *(f"planner.{name}" for name in Planner.model_fields),
            ]
            raise FarstateError(f"{where}: {key}: unknown setting{nearest(key, known)}; known: {', '.join(known)}") from None
        raise FarstateError(f"{where}: {key}: {first['input']!r} is not allowed; {first['msg']}") from None
