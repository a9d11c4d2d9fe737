"""What a page prints besides its tables: names, sizes, budget, parameters, where everything comes from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from farstate.errors import FarstateError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelCard(_Strict):
    """What the page says about a model."""

    label: str
    parameters: int | None = Field(description="embeddings included; null: no input of the page gives it")
    parameters_without_embeddings: int | None
    training_tokens: int | None = Field(None, description="null: a published checkpoint whose count is not recorded")
    context: int = Field(description="training length in tokens")
    architecture: str
    paper_model: str | None = Field(None, description="the paper's name, when its digitised values are to be shown")


class Parameter(_Strict):
    """A parameter worth printing; `assumed`: the paper does not give it; `differs`: what the paper has instead."""

    name: str
    value: str | int | float | bool | None
    assumed: bool = False
    differs: str = ""


class Series(_Strict):
    """One curve of a family: what varies, and where the tables hold it."""

    panel: str = Field(description="heading of the panel it is drawn in")
    model: str = Field(description="in the tables")
    arm: str = Field(description="in the tables")
    of: str = Field("", description="the arm that is varied")
    label: str = Field(description="for readers")
    value: float | None = Field(None, description="of what is varied; null: a line to compare with")
    axis: str = Field("", description="what is varied, with its unit")


class Context(_Strict):
    """What the tables do not know."""

    models: dict[str, ModelCard]
    scale: Literal["demo", "paper", "test", "own"]
    budget: str = Field("", description="of post-training; empty: there is none")
    parameters: list[Parameter] = []
    provenance: dict[str, str | int | float | bool | list[int] | list[str] | None] = {}
    note: str = ""
    figure: dict[str, Any] = Field({}, description="the figure's own parameters")
    tasks: dict[str, Any] = Field({}, description="on a page of a long-context task, the task's parameters")
    posttrain: dict[str, Any] = Field(
        {}, description="steps and recipe of the post-training of the page's first model, if there is any"
    )
    series: list[Series] = []
    sizes: dict[str, dict[str, int]] = Field({}, description="parameter counts by the tables' name of a model")

    def titled(self, title: str) -> str:
        """A title that says the scale where it is not the paper's."""
        return title if self.scale in ("paper", "own") else f"{title} ({self.scale})"


def read_context(context: dict[str, Any]) -> Context:
    """Check what was handed over.

    Raises:
        FarstateError: naming the first field that is missing or wrong.
    """
    try:
        return Context.model_validate(context)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FarstateError(f"context.{where}: {first['msg']}") from None
