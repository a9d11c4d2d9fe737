"""Sizes and initialisation of gated linear attention (Yang et al. 2023, arXiv 2312.06635), as in fla. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from farstate.models.config import Config, Positive, Shape, Size


class GLAShape(Shape):
    """GLA as in flash-linear-attention; the names are this project's (docs/notation.md).

    Raises:
        pydantic.ValidationError: sizes that do not divide each other, or values out of range.
    """

    initial_head = "normal"

    tied_embeddings: bool = False
    norm_epsilon: Positive = 1e-6
    heads: Size = Field(4, description="H, of the queries and of the state")
    kv_heads: Size | None = Field(
        None, description="heads of keys, values and decays, each shared by heads / kv_heads; null: heads"
    )
    expand_k: Positive = Field(0.5, description="key channels of all heads / width")
    expand_v: Positive = Field(1.0, description="value channels of all heads / width")
    decay_rank: Size = Field(16, description="inner width of the low-rank map to the log decays")
    gate_logit_normalizer: Positive = Field(16.0, description="log decay = logsigmoid(gate) / this; larger forgets more slowly")
    log_decay_floor: Annotated[float, Field(lt=0.0)] | None = Field(None, description="log decays below are raised to this")
    conv_width: Annotated[int, Field(ge=2)] | None = Field(
        None, description="taps of short convolutions over queries, keys and values; null: none"
    )
    mlp_ratio: Positive = Field(
        4.0, description="the MLP has about 2 · mlp_ratio · width² parameters; its width is a multiple of 256"
    )
    mlp_width: Size | None = Field(None, description="inner width of the MLP; null: from mlp_ratio")
    decay_bias_range: tuple[float, float] = Field(
        (0.0, 0.0), description="initial bias of the gate's logit, uniform; positive forgets more slowly"
    )

    @model_validator(mode="after")
    def _divides(self) -> GLAShape:
        for name, expand in (("expand_k", self.expand_k), ("expand_v", self.expand_v)):
            channels = self.width * expand
            if abs(channels - round(channels)) > 1e-6 * channels or round(channels) % self.heads:
                raise ValueError(f"width × {name} = {channels:g} must be a multiple of heads = {self.heads}")
        if self.heads % self.shared_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.decay_bias_range[0] > self.decay_bias_range[1]:
            raise ValueError(f"decay_bias_range = {self.decay_bias_range} must be (low, high)")
        return self

    @property
    def key_size(self) -> int:
        """K, key channels of a head."""
        return round(self.width * self.expand_k) // self.heads

    @property
    def value_size(self) -> int:
        """V, value channels of a head."""
        return round(self.width * self.expand_v) // self.heads

    @property
    def shared_heads(self) -> int:
        """Heads that keys, values and decays are computed for."""
        return self.kv_heads or self.heads

    @property
    def inner_mlp_width(self) -> int:
        return self.mlp_width or gated_mlp_width(self.width, self.mlp_ratio)

    def block_parameters(self, layer: int) -> int:
        keys, values = self.heads * self.key_size, self.heads * self.value_size
        shared_keys, shared_values = self.shared_heads * self.key_size, self.shared_heads * self.value_size
        attention = self.width * (keys + shared_keys + shared_values + 2 * values) + self.value_size
        attention += self.width * self.decay_rank + self.decay_rank * shared_keys + shared_keys
        attention += (self.conv_width or 0) * (keys + shared_keys + shared_values)
        return attention + 3 * self.width * self.inner_mlp_width + 2 * self.width


class GLAConfig(GLAShape, Config):
    """A shape with its vocabulary."""

    architecture: Literal["gla"] = "gla"


def gated_mlp_width(width: int, ratio: float) -> int:
    """fla's rule: two thirds of ratio · width, rounded up to a multiple of 256."""
    return -(-int(width * ratio * 2 / 3) // 256) * 256
