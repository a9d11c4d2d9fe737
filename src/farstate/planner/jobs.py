"""What one job costs: a stage's parameters, tokens, operations, memory of a device and hours."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from farstate.errors import FarstateError
from farstate.keys import Stage
from farstate.models.config import Config
from farstate.models.registry import config_from_json
from farstate.planner.activations import HALVED, forward_bytes, held_bytes, logits_bytes
from farstate.planner.devices import Device
from farstate.planner.work import forward_flops, parameters_of, state_bytes, training_flops
from farstate.settings import Settings
from farstate.training.division import allowed_splits, rows_of_batch

TRAININGS = ("pretrain", "posttrain", "tune")
MEASUREMENTS = ("perplexity", "remembrance", "states", "shift", "task")
LARGER = {
    True: "take a larger device, or more processes with distributed: {mode: fsdp} in config/settings.yaml",
    False: "lower evaluation_segment in config/settings.yaml, or take a larger device",
}
"""What is left to a training, and to a measurement, where no setting below makes it fit."""
RULES = (*TRAININGS, "import_checkpoint", *MEASUREMENTS)
"""Rules whose jobs hold a model."""

_SIZES = {  # width and layers of state-spaces' published Mamba models, with their vocabulary of 50,277
    ("mamba1", "130m"): (768, 24), ("mamba1", "370m"): (1024, 48), ("mamba1", "790m"): (1536, 48), ("mamba1", "1.4b"): (2048, 48),
    ("mamba1", "2.8b"): (2560, 64), ("mamba2", "130m"): (768, 24), ("mamba2", "370m"): (1024, 48), ("mamba2", "780m"): (1536, 48),
    ("mamba2", "1.3b"): (2048, 48), ("mamba2", "2.7b"): (2560, 64),
}  # fmt: skip
_SYMBOLS = 64  # of a task that has an alphabet of its own
_PASSES = {"perplexity": 4.0, "remembrance": 12.0, "states": 1.0, "shift": 3.0, "task": 1.0}
"""Times that a measurement reads its text: carried, in windows that overlap by half, and reset; from a dozen starts; with swaps."""


@dataclass(frozen=True)
class Job:
    """A job before it runs.

    Attributes:
        model: its name in the parameters.
        parameters: trained numbers; None: the checkpoint's sizes are not known before it is imported.
        tokens: read in all; None: the number of documents is decided by the text.
        flops: in all, over all devices.
        memory: bytes on one device, by what they hold; empty where the sizes are not known.
        devices: over which it runs.
        hours: on these devices at the device's rate.
        advice: what would make it fit, where it does not.
        refused: the line with which the trainer would refuse to divide its batches; empty where it would not.
    """

    stage: Stage
    model: str
    parameters: int | None
    tokens: int | None
    flops: float | None
    memory: dict[str, float]
    devices: int
    hours: float | None
    fits: bool
    advice: str = ""
    refused: str = ""

    @property
    def bytes(self) -> float:
        """All of `memory`."""
        return sum(self.memory.values())


def estimate(stage: Stage, settings: Settings, device: Device, root: Path) -> Job:
    """The job that makes `stage`, one of RULES, on `device`; `root` holds results that may be there already.

    Of an architecture that the planner has no formulas for, as of a checkpoint of unknown sizes, only the tokens are known.
    """
    config = config_of(stage, root)
    trains = _trains(stage)
    # A training may run over several processes; a measurement never does.
    devices = settings.distributed.processes * settings.distributed.nodes if trains else 1
    tokens, refused = _tokens(stage), _refused(stage, settings, devices)
    if config is None or config.architecture not in HALVED:
        return Job(stage, model_of(stage), None, tokens, None, {}, devices, None, fits=True, refused=refused)
    memory = _memory(stage, config, settings, device, devices)
    flops = None if tokens is None else tokens * _flops_per_token(stage, config, settings)
    hours = None if flops is None else flops / (device.reached(_precision(stage)) * devices) / 3600
    fits = sum(memory.values()) <= device.memory
    said = "" if fits else remedy([stage], settings, device, root, splits_of([stage], settings))
    return Job(
        stage,
        model_of(stage),
        parameters_of(config),
        tokens,
        flops,
        memory,
        devices,
        hours,
        fits,
        "" if fits else f"it fits with {said} in config/settings.yaml" if said else LARGER[trains],
        refused,
    )


def estimates(stages: Iterable[Stage], settings: Settings, device: Device, root: Path) -> list[Job]:
    """The jobs of all stages that hold a model."""
    return [estimate(stage, settings, device, root) for stage in stages if stage.rule in RULES]


def model_of(stage: Stage) -> str:
    """The model's name in the parameters."""
    if "labels" in stage.params:
        return str(stage.params["labels"]["model"])
    if stage.rule == "pretrain":
        return stage.name.rpartition(".s")[0]
    if stage.rule == "import_checkpoint":
        return stage.name.removeprefix("checkpoint.")
    if checkpoints := stage.upstream.get("checkpoint"):
        return model_of(checkpoints[0])
    # model.<model>.<arm>.<task>.s<seed>: names of models may hold dots, those of arms and tasks do not.
    return stage.name.removeprefix("model.").rsplit(".", 3)[0]


@cache
def config_of(stage: Stage, root: Path) -> Config | None:
    """The model's sizes: from the parameters, else from an imported checkpoint, else by a published one's name."""
    if "shape" in stage.params:
        vocabulary = stage.params.get("vocabulary_size", _SYMBOLS)
        given = {"architecture": stage.params["architecture"], **stage.params["shape"], "vocabulary_size": vocabulary}
        return config_from_json(given)
    if stage.rule == "import_checkpoint":
        path = root / stage.directory / "config.json"
        if path.exists():
            return config_from_json(json.loads(path.read_text(encoding="utf-8")))
        return _published(stage.params["architecture"], stage.params["checkpoint"])
    checkpoints = stage.upstream.get("checkpoint")
    return config_of(checkpoints[0], root) if checkpoints else None


def _published(architecture: str, checkpoint: str) -> Config | None:
    size = re.search(r"-(\d+(?:\.\d+)?[mb])\b", checkpoint.lower())
    found = _SIZES.get((architecture, size.group(1))) if size else None
    if found is None:
        return None
    return config_from_json({"architecture": architecture, "width": found[0], "layers": found[1], "vocabulary_size": 50277})


def _recipe(stage: Stage) -> dict[str, Any]:
    recipe: dict[str, Any] = stage.params["training"]["recipe"] if stage.rule == "tune" else stage.params["recipe"]
    return recipe


def _section(stage: Stage) -> dict[str, Any]:
    """What a measurement reads of the parameters."""
    section: dict[str, Any] = (
        {} if stage.rule == "task" else stage.params["evaluate" if stage.rule == "perplexity" else stage.rule]
    )
    return section


def _precision(stage: Stage) -> str:
    if _trains(stage):
        return str(_recipe(stage)["precision"])
    return str(_section(stage).get("precision") or stage.params.get("precision", "float32"))


def _tokens(stage: Stage) -> int | None:
    """Tokens that a job reads, the windows and starts of a measurement counted."""
    given = stage.params
    if stage.rule == "pretrain":
        return int(given["tokens"])
    if stage.rule == "posttrain":
        return int(given["steps"] * given["recipe"]["batch_tokens"])
    if stage.rule == "tune":
        return int(stage.upstream["data"][0].params["examples"] * given["context"])
    if stage.rule == "task":
        data = stage.upstream["data"][0].params
        lengths = [cell.get("length") for cell in data["cells"]]
        return None if None in lengths or data["examples"] is None else int(data["examples"] * sum(lengths))
    if stage.rule == "import_checkpoint":
        return None
    section = _section(stage)
    if section.get("documents") is None:
        return None
    read = section["documents"] * section["stretches_per_document"] * section["length"]
    return int(_PASSES[stage.rule] * read)


def _flops_per_token(stage: Stage, config: Config, settings: Settings) -> float:
    if _trains(stage):
        recomputes = settings.distributed.activation_checkpointing
        return training_flops(config, stage.params["context"], recomputes=recomputes)
    return forward_flops(config, _section(stage).get("length", settings.evaluation_segment))


def _memory(stage: Stage, config: Config, settings: Settings, device: Device, devices: int) -> dict[str, float]:
    parameters = parameters_of(config)
    half = 2.0 * parameters if _trains(stage) and _precision(stage) == "bf16-mixed" else 0.0  # what matrix products read
    if not _trains(stage):
        return {"weights": 4.0 * parameters, **_evaluation(stage, config, settings, device)}
    sharded = settings.distributed.mode == "fsdp" and devices > 1
    shares = devices if sharded else 1
    # Sharded weights are put together block by block: one is in use and one on its way. What no block holds is there all the time.
    blocks = [config.block_parameters(layer) for layer in range(config.layers)]
    whole = 4.0 * (2 * max(blocks) + parameters - sum(blocks)) if sharded else 0.0
    context, rows = stage.params["context"], _rows(stage, settings, devices)
    kept, moment = held_bytes(
        config, rows, context, _precision(stage),
        recomputes=settings.distributed.activation_checkpointing, kernels=_kernels(settings, device), gpu=device.is_gpu,
    )  # fmt: skip
    return {
        "weights": (4.0 * parameters + half) / shares + whole,
        "gradients": 4.0 * parameters / shares,
        "optimizer": 8.0 * parameters / shares,
        "activations": kept,
        "moment": moment,
        "states": state_bytes(config, context) * _states(stage, rows, devices),
    }


def _evaluation(stage: Stage, config: Config, settings: Settings, device: Device) -> dict[str, float]:
    if stage.rule == "import_checkpoint":
        return {}
    rows, segment = settings.evaluation_rows, settings.evaluation_segment
    return {
        "activations": forward_bytes(config, rows, segment),
        "moment": logits_bytes(config, rows * segment, gpu=device.is_gpu),
        "states": 2.0 * rows * state_bytes(config, segment),
    }


def _trains(stage: Stage) -> bool:
    return stage.rule in TRAININGS


def _kernels(settings: Settings, device: Device) -> bool:
    """Whether fused kernels compute the recurrence: on a GPU, unless another backend was asked for."""
    return device.is_gpu and settings.backend not in ("naive", "chunked")


def _rows(stage: Stage, settings: Settings, devices: int) -> int:
    """Sequences that one device computes together."""
    recipe = _recipe(stage)
    sequences = recipe["batch_tokens"] / stage.params["context"]
    return max(1, math.ceil(sequences / recipe["micro_batches"] / settings.split_micro_batches / devices))


def _states(stage: Stage, rows: int, devices: int) -> float:
    """States of a sequence that a training holds: final ones, initial ones, and those kept from batch to batch."""
    initial = (stage.params.get("arm") or {}).get("initial_state", "zero")
    if initial == "zero":
        return rows
    if initial in ("random_noise", "fitted_noise", "gaussian", "permuted"):
        return 2 * rows
    return 2 * rows + math.ceil(_recipe(stage)["batch_tokens"] / stage.params["context"] / devices)


def division_of(stage: Stage) -> dict[str, Any]:
    """What `farstate.training.division` asks about the batches of a training."""
    recipe = _recipe(stage)
    passes = (stage.params.get("arm") or {}).get("previous") == "micro_batch"
    given = {"batch_tokens": recipe["batch_tokens"], "micro_batches": recipe["micro_batches"]}
    return {**given, "context": stage.params["context"], "passes": passes}


def _refused(stage: Stage, settings: Settings, devices: int) -> str:
    if not _trains(stage):
        return ""
    try:
        rows_of_batch(**division_of(stage), split=settings.split_micro_batches, processes=devices)
    except FarstateError as error:
        return str(error)
    return ""


def splits_of(stages: Iterable[Stage], settings: Settings) -> list[int]:
    """Values of `split_micro_batches` that all trainings among `stages` allow, ascending; without a training, the present one."""
    devices = settings.distributed.processes * settings.distributed.nodes
    allowed = [set(allowed_splits(**division_of(stage), processes=devices)) for stage in stages if _trains(stage)]
    return sorted(set.intersection(*allowed)) if allowed else [settings.split_micro_batches]


def remedy(stages: list[Stage], settings: Settings, device: Device, root: Path, splits: list[int]) -> str:
    """Settings with which each of `stages`, all trainings or all measurements, fits: the least change that does; empty if none.

    Numbers stay the same to float32 tolerance.

    Args:
        stages: of known sizes.
        splits: values of `split_micro_batches` to choose from.
    """
    if not _trains(stages[0]):
        halves = [settings.evaluation_rows >> n for n in range(1, settings.evaluation_rows.bit_length())]
        changes: list[dict[str, Any]] = [{"evaluation_rows": rows} for rows in halves]
    else:
        parts = [{"split_micro_batches": split} for split in splits if split > settings.split_micro_batches]
        checkpointed = {"distributed": {**settings.distributed.model_dump(), "activation_checkpointing": True}}
        changes = [*parts, checkpointed, *({**checkpointed, **part} for part in parts)]
    for change in changes:
        changed = type(settings).model_validate({**settings.model_dump(), **change})
        if all(_needed(stage, changed, device, root) <= device.memory for stage in stages):
            said = [f"{name}: {value}" for name, value in change.items() if name != "distributed"]
            return " and ".join([*said, *["distributed: {activation_checkpointing: true}"] * ("distributed" in change)])
    return ""


def _needed(stage: Stage, settings: Settings, device: Device, root: Path) -> float:
    """Bytes on one device."""
    config = config_of(stage, root)
    assert config is not None
    devices = settings.distributed.processes * settings.distributed.nodes if _trains(stage) else 1
    return sum(_memory(stage, config, settings, device, devices).values())
