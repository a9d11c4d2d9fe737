"""The training stages as the command line calls them: from a stage's record to the trainer's arguments."""

from __future__ import annotations

from typing import Any

from farstate.corpus.store import TokenStore
from farstate.grid import snapshot_tokens
from farstate.models.registry import config_from_json
from farstate.params import Recipe, arm_from_json, as_written
from farstate.stages import Stage
from farstate.training import trainer
from farstate.training.settings import run_settings


def pretrain_stage(stage: Stage) -> dict[str, Any]:
    """Run the pre-training that the record describes; returns what the run measured of itself."""
    given = stage.params
    return trainer.pretrain(
        config=config_from_json(
            {"architecture": given["architecture"], **given["shape"], "vocabulary_size": given["vocabulary_size"]}
        ),
        context=given["context"],
        tokens=given["tokens"],
        seed=given["seed"],
        snapshot_tokens=snapshot_tokens(given["tokens"]),
        block_tokens=given.get("block_tokens"),
        **_common(stage),
    )


def posttrain_stage(stage: Stage) -> dict[str, Any]:
    """Run the post-training that the record describes; returns what the run measured of itself."""
    given = stage.params
    return trainer.posttrain(
        checkpoint=stage.one("checkpoint"),
        context=given["context"],
        steps=given["steps"],
        seed=given["seed"],
        arm=arm_from_json(given["arm"]),
        stretch_tokens=given["stretch_tokens"],
        **_common(stage),
    )


def _common(stage: Stage) -> dict[str, Any]:
    return {
        "recipe": Recipe.model_validate(as_written(stage.params["recipe"])),
        "store": TokenStore(stage.one("store")),
        "output": stage.output,
        "scratch": stage.scratch,
        "settings": run_settings(stage),
        "key": stage.record["key"],
        "manifest": stage.identity,
    }
