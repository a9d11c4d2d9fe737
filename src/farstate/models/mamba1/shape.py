"""Sizes and initialisation of Mamba-1 (Gu and Dao 2023, arXiv 2312.00752), as in mamba-ssm. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from farstate.models.config import Config, Positive, Shape, Size


class Mamba1Shape(Shape):
    """Mamba-1 as in mamba-ssm; the names are this project's (docs/notation.md).

    Raises:
        pydantic.ValidationError: values out of range.
    """

    expand: Size = Field(2, description="inner width / width")
    state_size: Size = Field(16, description="N, entries of each channel; a head is one channel")
    conv_width: Annotated[int, Field(ge=2)] = 4
    conv_bias: bool = True
    linear_bias: bool = False
    dt_rank: Size | None = Field(None, description="rank of the projection to time steps; null: width / 16, rounded up")
    dt_min: Positive = Field(1e-3, description="initial time step at input zero, log-uniform from dt_min to dt_max")
    dt_max: Positive = 0.1
    dt_init_floor: Positive = 1e-4
    dt_init: Literal["random", "constant"] = Field(
        "random", description="initial projection to time steps: uniform in ±dt_scale · dt_rank^−½, or all of that size"
    )
    dt_scale: Positive = 1.0
    A_init_range: tuple[Positive, Positive] | None = Field(
        None, description="initial −A of a channel's N entries, evenly spaced; null: from 1 to N (S4D-real)"
    )
    rescale_prenorm_residual: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> Mamba1Shape:
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min = {self.dt_min} must not exceed dt_max = {self.dt_max}")
        if self.A_init_range is not None and self.A_init_range[0] > self.A_init_range[1]:
            raise ValueError(f"A_init_range = {self.A_init_range} must be (low, high)")
        return self

    @property
    def inner_width(self) -> int:
        return self.width * self.expand

    @property
    def time_step_rank(self) -> int:
        return -(-self.width // 16) if self.dt_rank is None else self.dt_rank

    def block_parameters(self, layer: int) -> int:
        inner, rank, state_size = self.inner_width, self.time_step_rank, self.state_size
        block = self.width * 2 * inner + inner * self.width + inner * self.conv_width
        block += inner * (rank + 2 * state_size) + rank * inner + inner
        block += inner * state_size + inner + self.width
        return block + inner * self.conv_bias + (2 * inner + self.width) * self.linear_bias


class Mamba1Config(Mamba1Shape, Config):
    """A shape with its vocabulary."""

    architecture: Literal["mamba1"] = "mamba1"
