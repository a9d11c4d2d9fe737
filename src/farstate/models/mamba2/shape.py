"""Sizes and initialisation of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), as in mamba-ssm. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from farstate.models.config import Config, NonNegative, Positive, Shape, Size


class Mamba2Shape(Shape):
    """Mamba-2 as in mamba-ssm; the names are this project's (docs/notation.md).

    Raises:
        pydantic.ValidationError: sizes that do not divide each other, or values out of range.
    """

    expand: Size = Field(2, description="inner width / width")
    state_size: Size = Field(128, description="N")
    head_size: Size = Field(64, description="P")
    groups: Size = Field(1, description="G, heads that share B and C")
    conv_width: Annotated[int, Field(ge=2)] = 4
    conv_bias: bool = True
    linear_bias: bool = False
    norm_groups: Size | None = Field(None, description="groups of the gated RMSNorm; null: as many as `groups` (mamba-ssm)")
    dt_min: Positive = Field(1e-3, description="initial time step, log-uniform from dt_min to dt_max")
    dt_max: Positive = 0.1
    dt_init_floor: Positive = 1e-4
    dt_limit: tuple[NonNegative, Positive | None] = Field(
        (0.0, None), description="time steps are clamped to this range; null: no upper limit"
    )
    A_init_range: tuple[Positive, Positive] = Field((1.0, 16.0), description="initial −A, uniform")
    rescale_prenorm_residual: bool = True

    @model_validator(mode="after")
    def _divides(self) -> Mamba2Shape:
        inner = self.width * self.expand
        if inner % self.head_size:
            raise ValueError(f"width × expand = {inner} must be a multiple of head_size = {self.head_size}")
        if (inner // self.head_size) % self.groups:
            raise ValueError(f"the number of heads {inner // self.head_size} must be a multiple of groups = {self.groups}")
        if inner % (self.norm_groups or self.groups):
            raise ValueError(f"width × expand = {inner} must be a multiple of norm_groups = {self.norm_groups or self.groups}")
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min = {self.dt_min} must not exceed dt_max = {self.dt_max}")
        if self.A_init_range[0] > self.A_init_range[1]:
            raise ValueError(f"A_init_range = {self.A_init_range} must be (low, high)")
        low, high = self.dt_limit
        if high is not None and low > high:
            raise ValueError(f"dt_limit = {self.dt_limit} must be (low, high)")
        return self

    @property
    def inner_width(self) -> int:
        return self.width * self.expand

    @property
    def heads(self) -> int:
        return self.inner_width // self.head_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C side by side."""
        return self.inner_width + 2 * self.groups * self.state_size

    def block_parameters(self, layer: int) -> int:
        projected = self.inner_width + self.channels + self.heads
        block = self.width * projected + self.inner_width * self.width + self.channels * self.conv_width
        block += 3 * self.heads + self.inner_width + self.width
        return block + self.channels * self.conv_bias + (projected + self.width) * self.linear_bias


class Mamba2Config(Mamba2Shape, Config):
    """A shape with its vocabulary."""

    architecture: Literal["mamba2"] = "mamba2"
