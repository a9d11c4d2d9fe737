"""Sizes and initialisation of Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464), as in fla. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from farstate.models.config import Config, NonNegative, Positive, Shape, Size
from farstate.models.gla.shape import gated_mlp_width


class GatedDeltaNetShape(Shape):
    """Gated DeltaNet as in flash-linear-attention; the names are this project's (docs/notation.md).

    Raises:
        pydantic.ValidationError: sizes that do not divide each other, or values out of range.
    """

    initial_head = "normal"

    tied_embeddings: bool = False
    norm_epsilon: Positive = 1e-6
    heads: Size = Field(6, description="heads of queries and keys")
    value_heads: Size | None = Field(
        None, description="H, heads of values and of the state; value_heads / heads neighbours share a key; null: heads"
    )
    head_size: Size | None = Field(None, description="K, key channels of a head; null: ¾ · width / heads")
    expand_v: Positive = Field(2.0, description="V / K")
    conv_width: Annotated[int, Field(ge=2)] | None = Field(
        4, description="taps of the short convolutions over queries, keys and values; null: none"
    )
    output_gate: bool = Field(True, description="whether silu of a projection multiplies the normed outputs")
    negative_eigenvalues: bool = Field(False, description="writing strengths up to 2 instead of 1")
    mlp_ratio: Positive = Field(
        4.0, description="the MLP has about 2 · mlp_ratio · width² parameters; its width is a multiple of 256"
    )
    mlp_width: Size | None = Field(None, description="inner width of the MLP; null: from mlp_ratio")
    dt_min: Positive = Field(1e-3, description="initial time step, log-uniform from dt_min to dt_max")
    dt_max: Positive = 0.1
    dt_init_floor: Positive = 1e-4
    A_init_range: tuple[NonNegative, Positive] = Field((0.0, 16.0), description="initial −A, uniform; log decay = A · time step")

    @model_validator(mode="after")
    def _divides(self) -> GatedDeltaNetShape:
        if self.head_size is None and 3 * self.width % (4 * self.heads):
            raise ValueError(
                f"¾ · width = {0.75 * self.width:g} must be a multiple of heads = {self.heads}, or head_size be given"
            )
        values = self.key_size * self.expand_v
        if round(values) < 1 or abs(values - round(values)) > 1e-5 * values:
            raise ValueError(f"head_size × expand_v = {values:g} must be a whole number")
        if self.state_heads % self.heads:
            raise ValueError(f"value_heads = {self.value_heads} must be a multiple of heads = {self.heads}")
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min = {self.dt_min} must not exceed dt_max = {self.dt_max}")
        if self.A_init_range[0] > self.A_init_range[1]:
            raise ValueError(f"A_init_range = {self.A_init_range} must be (low, high)")
        return self

    @property
    def key_size(self) -> int:
        """K, key channels of a head."""
        return self.head_size or 3 * self.width // (4 * self.heads)

    @property
    def value_size(self) -> int:
        """V, value channels of a head."""
        return round(self.key_size * self.expand_v)

    @property
    def state_heads(self) -> int:
        """H, heads of the values and of the state."""
        return self.value_heads or self.heads

    @property
    def inner_mlp_width(self) -> int:
        return self.mlp_width or gated_mlp_width(self.width, self.mlp_ratio)

    def block_parameters(self, layer: int) -> int:
        keys, values = self.heads * self.key_size, self.state_heads * self.value_size
        mixer = self.width * (2 * keys + (3 if self.output_gate else 2) * values + 2 * self.state_heads)
        mixer += 2 * self.state_heads + self.value_size + (self.conv_width or 0) * (2 * keys + values)
        return mixer + 3 * self.width * self.inner_mlp_width + 2 * self.width


class GatedDeltaNetConfig(GatedDeltaNetShape, Config):
    """A shape with its vocabulary."""

    architecture: Literal["gated_deltanet"] = "gated_deltanet"
