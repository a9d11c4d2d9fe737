"""Sizes and initialisation of the architectures, without torch: parameters and dry runs import this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Mamba2Shape(BaseModel):
    """Mamba-2 as in mamba-ssm; the names are this project's (docs/notation.md).

    Raises:
        pydantic.ValidationError: sizes that do not divide each other, or values out of range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    width: Size = Field(description="D, the residual stream")
    layers: Size = Field(description="L")
    expand: Size = Field(2, description="inner width / width")
    state_size: Size = Field(128, description="N")
    head_size: Size = Field(64, description="P")
    groups: Size = Field(1, description="G, heads that share B and C")
    conv_width: Annotated[int, Field(ge=2)] = 4
    conv_bias: bool = True
    linear_bias: bool = False
    tied_embeddings: bool = True
    vocabulary_multiple: Size = Field(16, description="the vocabulary is padded to a multiple of this")
    residual_in_fp32: bool = True
    norm_epsilon: Positive = 1e-5
    norm_groups: Size | None = Field(None, description="groups of the gated RMSNorm; null: as many as `groups` (mamba-ssm)")
    dt_min: Positive = Field(1e-3, description="initial time step, log-uniform from dt_min to dt_max")
    dt_max: Positive = 0.1
    dt_init_floor: Positive = 1e-4
    dt_limit: tuple[NonNegative, Positive | None] = Field(
        (0.0, None), description="time steps are clamped to this range; null: no upper limit"
    )
    A_init_range: tuple[Positive, Positive] = Field((1.0, 16.0), description="initial −A, uniform")
    initializer_range: Positive = Field(0.02, description="standard deviation of the initial embedding")
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


class Mamba2Config(Mamba2Shape):
    """A shape with its vocabulary: what `config.json` beside the weights holds."""

    architecture: Literal["mamba2"] = "mamba2"
    vocabulary_size: Size

    @property
    def padded_vocabulary(self) -> int:
        multiple = self.vocabulary_multiple
        return -(-self.vocabulary_size // multiple) * multiple

    def parameter_count(self, *, embeddings: bool = True) -> int:
        """Trained numbers; without `embeddings` neither the input embedding nor the output head is counted."""
        inner, heads = self.inner_width, self.heads
        channels = self.channels
        projected = inner + channels + heads
        block = self.width * projected + inner * self.width + channels * self.conv_width + 3 * heads + inner + self.width
        block += channels * self.conv_bias + (projected + self.width) * self.linear_bias
        total = self.layers * block + self.width
        if embeddings:
            total += self.padded_vocabulary * self.width * (1 if self.tied_embeddings else 2)
        return total


def config_from_json(data: dict[str, Any]) -> Mamba2Config:
    """The configuration that a `config.json` written by `save_model` holds."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Mamba2Config.model_validate(values)
