"""Sizes and initialisation of RWKV-6 "Finch" (Peng et al. 2024, arXiv 2404.05892). No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from farstate.models.config import Config, Positive, Shape, Size


class RWKV6Shape(Shape):
    """RWKV-6 with fla's freedom of sizes; the defaults are the official model's. Names: docs/notation.md.

    Raises:
        pydantic.ValidationError: sizes that do not divide each other, or values out of range.
    """

    final_norm = "layer"
    initial_head = "normal"

    tied_embeddings: bool = False
    heads: Size = Field(4, description="H; officially width / 64")
    expand_k: Positive = Field(1.0, description="key channels of all heads / width")
    expand_v: Positive = Field(1.0, description="value channels of all heads / width")
    mix_rank: Size = Field(32, description="inner width of the low-rank maps to the token-shift mixes")
    decay_rank: Size = Field(64, description="inner width of the low-rank map to the log decays")
    ffn_ratio: Positive = Field(3.5, description="inner width of the channel mix / width, rounded up to a multiple of 32")
    ffn_width: Size | None = Field(None, description="inner width of the channel mix; null: from ffn_ratio")
    group_norm_epsilon: Positive = Field(64e-5, description="of the norm over the channels of a head; fla has norm_epsilon here")
    norm_first: bool = Field(True, description="a LayerNorm between embedding and first block")
    decay_init_range: tuple[float, float] = Field(
        (-6.0, -1.0),
        description="initial log(−log decay) of the first and the last key channel, in this order, whichever is larger; "
        "lower forgets more slowly",
    )

    @model_validator(mode="after")
    def _divides(self) -> RWKV6Shape:
        for name, expand in (("expand_k", self.expand_k), ("expand_v", self.expand_v)):
            channels = self.width * expand
            if abs(channels - round(channels)) > 1e-6 * channels or round(channels) % self.heads:
                raise ValueError(f"width × {name} = {channels:g} must be a multiple of heads = {self.heads}")
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
    def inner_ffn_width(self) -> int:
        return self.ffn_width or -(-int(self.width * self.ffn_ratio) // 32) * 32

    def block_parameters(self, layer: int) -> int:
        width, keys, values = self.width, self.heads * self.key_size, self.heads * self.value_size
        time_mix = 6 * width + 2 * 5 * self.mix_rank * width
        time_mix += width * (2 * keys + 3 * values) + self.decay_rank * (width + keys) + keys
        time_mix += keys + 2 * values
        channel_mix = 2 * width + 2 * width * self.inner_ffn_width + width * width
        norms = 3 if self.norm_first and layer == 0 else 2
        return time_mix + channel_mix + norms * 2 * width


class RWKV6Config(RWKV6Shape, Config):
    """A shape with its vocabulary."""

    architecture: Literal["rwkv6"] = "rwkv6"
