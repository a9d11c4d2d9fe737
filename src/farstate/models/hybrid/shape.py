"""Sizes and initialisation of the hybrid: Mamba-2 with an attention layer every n-th. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from farstate.models.config import Config, Positive, Size
from farstate.models.mamba2.shape import Mamba2Shape


class HybridShape(Mamba2Shape):
    """Mamba-2's sizes, and those of the attention layers between.

    Raises:
        pydantic.ValidationError: sizes that do not divide each other, or values out of range.
    """

    attention_every: Size = Field(4, description="every so many layers, one is attention")
    attention_offset: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the first attention layer, counted from 0; null: attention_every − 1"
    )
    attention_heads: Size = Field(4, description="heads of the queries")
    attention_kv_heads: Size | None = Field(None, description="heads of keys and values; null: attention_heads")
    attention_head_size: Size | None = Field(None, description="channels of an attention head; null: width / attention_heads")
    attention_window: Size | None = Field(
        2048, description="tokens that a token sees, itself included; null: all since the state was zero, and the state grows"
    )
    attention_cache: Size = Field(262144, description="without a window: tokens that a state may hold before the run stops")
    rope_theta: Positive | None = Field(10000.0, description="base of the rotary position embedding; null: none")

    @model_validator(mode="after")
    def _attends(self) -> HybridShape:
        if self.attention_head_size is None and self.width % self.attention_heads:
            raise ValueError(f"width = {self.width} must be a multiple of attention_heads = {self.attention_heads}")
        if self.attention_heads % self.kv_heads:
            raise ValueError(
                f"attention_heads = {self.attention_heads} must be a multiple of attention_kv_heads = {self.attention_kv_heads}"
            )
        if self.rope_theta is not None and self.attention_size % 2:
            raise ValueError(f"attention_head_size = {self.attention_size} must be even with a rotary position embedding")
        if not self.first_attention < self.attention_every:
            raise ValueError(f"attention_offset = {self.attention_offset} must be below attention_every = {self.attention_every}")
        if self.first_attention >= self.layers:
            raise ValueError(
                f"none of {self.layers} layers would be attention: attention_every = {self.attention_every}, "
                f"the first is number {self.first_attention}"
            )
        return self

    @property
    def first_attention(self) -> int:
        return self.attention_every - 1 if self.attention_offset is None else self.attention_offset

    @property
    def kv_heads(self) -> int:
        return self.attention_kv_heads or self.attention_heads

    @property
    def attention_size(self) -> int:
        """Channels of an attention head."""
        return self.attention_head_size or self.width // self.attention_heads

    def attends(self, layer: int) -> bool:
        """Whether block number `layer` is attention."""
        return layer % self.attention_every == self.first_attention

    def block_parameters(self, layer: int) -> int:
        if not self.attends(layer):
            return super().block_parameters(layer)
        projections = 2 * self.attention_size * (self.attention_heads + self.kv_heads)
        return self.width * projections + self.width


class HybridConfig(HybridShape, Config):
    """A shape with its vocabulary."""

    architecture: Literal["hybrid"] = "hybrid"
