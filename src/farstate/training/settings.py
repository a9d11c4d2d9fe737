"""Where and how one training runs. Loads no torch; nothing here changes numbers beyond float tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from farstate.stages import Stage


@dataclass(frozen=True)
class RunSettings:
    """Settings of one training process.

    Attributes:
        device: auto takes the GPU where there is one.
        threads: CPU threads; None leaves torch's choice. Equal bits are promised for equal threads on one machine.
        checkpoint_seconds: time between checkpoints for resuming; stretched where writing one takes over 5 % of it.
        checkpoint_steps: a checkpoint every so many steps as well; None for none.
        mode: what several processes share: the batch alone, or weights, gradients and optimizer too.
        activation_checkpointing: keep only what enters each block, compute the rest again in the backward pass.
        split_micro_batches: parts in which each micro-batch of the recipe is computed.

    Raises:
        ValueError: a value out of range.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    checkpoint_seconds: float = 60.0
    checkpoint_steps: int | None = None
    mode: Literal["ddp", "fsdp"] = "ddp"
    activation_checkpointing: bool = False
    split_micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, found {self.threads}")
        if not self.checkpoint_seconds > 0.0:
            raise ValueError(f"checkpoint_seconds must be positive, found {self.checkpoint_seconds}")
        if self.checkpoint_steps is not None and self.checkpoint_steps < 1:
            raise ValueError(f"checkpoint_steps must be at least 1, found {self.checkpoint_steps}")
        if self.split_micro_batches < 1:
            raise ValueError(f"split_micro_batches must be at least 1, found {self.split_micro_batches}")


def run_settings(stage: Stage) -> RunSettings:
    """The settings of a stage's process."""
    where = stage.settings
    return RunSettings(
        device=where.device,
        threads=stage.threads,
        checkpoint_seconds=where.checkpoint_seconds,
        mode=where.distributed.mode,
        activation_checkpointing=where.distributed.activation_checkpointing,
        split_micro_batches=where.split_micro_batches,
    )
