"""What shapes and configurations of all architectures share, without torch: parameters and dry runs import this.

A *shape* is what `params.yaml` gives under `models.<name>.shape`: sizes and initialisation. A *configuration* is a shape with its
vocabulary, and what `config.json` beside the weights holds. Each architecture has both in `models/<architecture>/shape.py`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LARGEST_SIZE = 1 << 31


def _computable(size: int) -> int:
    # Far above any model, and low enough for products of a few to be numbers of any kind.
    if size > LARGEST_SIZE:
        raise ValueError(f"must not exceed {LARGEST_SIZE}")
    return size


Size = Annotated[int, Field(ge=1), AfterValidator(_computable)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Shape(BaseModel):
    """Sizes and initialisation, the part that every architecture has.

    Attributes:
        final_norm: the norm after the last block, RMSNorm or LayerNorm with bias.
        initial_head: how an untied head is drawn: `uniform` in ±D^−½ (mamba-ssm), or `normal` as the embedding (fla).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    final_norm: ClassVar[Literal["rms", "layer"]] = "rms"
    initial_head: ClassVar[Literal["uniform", "normal"]] = "uniform"

    width: Size = Field(description="D, the residual stream")
    layers: Size = Field(description="L")
    tied_embeddings: bool = True
    vocabulary_multiple: Size = Field(16, description="the vocabulary is padded to a multiple of this")
    residual_in_fp32: bool = True
    norm_epsilon: Positive = 1e-5
    initializer_range: Positive = Field(0.02, description="standard deviation of the initial embedding")

    def block_parameters(self, layer: int) -> int:
        """Trained numbers of one block."""
        raise NotImplementedError


class Config(Shape):
    """A shape with its vocabulary, of some architecture."""

    architecture: str
    vocabulary_size: Size

    @property
    def padded_vocabulary(self) -> int:
        multiple = self.vocabulary_multiple
        return -(-self.vocabulary_size // multiple) * multiple

    def parameter_count(self, *, embeddings: bool = True) -> int:
        """Trained numbers; without `embeddings` neither the input embedding nor the output head is counted."""
        total = sum(self.block_parameters(layer) for layer in range(self.layers))
        total += self.width * (2 if self.final_norm == "layer" else 1)
        if embeddings:
            total += self.padded_vocabulary * self.width * (1 if self.tied_embeddings else 2)
        return total
