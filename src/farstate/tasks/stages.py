"""The stages of the tasks as the command line calls them: from a stage's record to the functions' arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farstate import sources
from farstate.files import MANIFEST, read_manifest, write_manifest
from farstate.params import PublishedBabilong, as_written
from farstate.stages import Stage
from farstate.task_plan import EXAMPLES, published_outside
from farstate.tasks import copying
from farstate.tasks.copying import Copying
from farstate.tasks.examples import Cell, Example, Generator, Tokens, write_examples

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from farstate.tasks.scores import Decode


def data_stage(stage: Stage) -> dict[str, Any]:
    """Make the data set that the record describes."""
    given = stage.params
    (stage.output / MANIFEST).unlink(missing_ok=True)
    made = _Making(stage)
    with _Counting(stage.output.name, made.total) as progress:
        facts = write_examples(progress.counted(made.examples()), stage.output / EXAMPLES)
    contents = {**stage.identity, **facts, **made.told()}
    write_manifest(stage.output, contents, [EXAMPLES])
    return {"examples": facts["examples"], "tokens": facts["tokens"], "seed": given["seed"]}


class _Making:
    """A data set in the making.

    Attributes:
        total: examples, where that is known.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._given = stage.params
        self._tokenizer: Tokenizer | None = None
        self._vocabulary_size = 0
        self._generator = self._made()
        cells = self._given.get("cells")
        published = "published" in self._given
        self.total = None if published else self._given["examples"] * (1 if cells is None else len(cells))
        self._answers: dict[str, Counter[str]] = {}

    def examples(self) -> Iterator[Example]:
        for example in self._drawn():
            self._answers.setdefault(example.task, Counter())[example.label] += 1
            yield example

    def _drawn(self) -> Iterator[Example]:
        given, generator = self._given, self._generator
        if "published" in given:
            yield from self._published()
        elif given["split"] == "train":
            yield from (generator.training(number) for number in range(given["examples"]))
        else:
            for cell in given["cells"]:
                yield from (generator.example(Cell(**cell), number) for number in range(given["examples"]))

    def told(self) -> dict[str, Any]:
        """What the manifest says for those who read the examples."""
        from farstate.tasks import labels

        task = self._given["task"]
        if task == "babilong":
            chance = {name: vars_of(labels.chance(name, counts)) for name, counts in self._answers.items()}
        else:
            assert hasattr(self._generator, "chance")
            chance = {task: {"uniform": self._generator.chance, "majority": None}}
        end = copying.END
        if self._tokenizer is None:
            assert isinstance(self._generator, Copying)
            end_token = self._generator.vocabulary.encode(end)[0]
        else:
            from farstate.tasks.passkey import end_of_answer

            end_token = end_of_answer(self._tokenizer)
        return {
            "vocabulary_size": self._vocabulary_size,
            "end": end_token,
            "end_text": end,
            "chance": chance,
            "spelled": self._spelled(),
        }

    def _spelled(self) -> dict[str, list[str]]:
        """How the tokenizer writes BABILong's labels: the pieces of each that occurs."""
        if self._given["task"] != "babilong" or self._tokenizer is None:
            return {}
        known = sorted({label for counts in self._answers.values() for label in counts})
        return {
            label: [
                self._tokenizer.decode([token]) for token in self._tokenizer.encode(f" {label}", add_special_tokens=False).ids
            ]
            for label in known
        }

    def _made(self) -> Generator:
        given = self._given
        common: dict[str, Any] = {"seed": given["seed"], "split": given["split"]}
        if given["task"] == "copying":
            lengths = given.get("training_lengths")
            made = Copying(given["generator"]["alphabet"], training_lengths=None if lengths is None else tuple(lengths), **common)
            self._vocabulary_size = len(made.vocabulary)
            return made
        from farstate.corpus.tokenizer import load_tokenizer, symbols
        from farstate.tasks.background import Background

        self._tokenizer = load_tokenizer(self._stage.one("tokenizer"))
        self._vocabulary_size = symbols(self._tokenizer)
        background = None
        if self._stage.many("store"):
            from farstate.corpus.store import TokenStore

            background = Background(TokenStore(self._stage.one("store")), given["split"], self._tokenizer)
        if given["task"] == "passkey":
            from farstate.tasks.passkey import Passkey

            return Passkey(
                self._tokenizer,
                keys=tuple(given["generator"]["keys"]),
                background=background,
                instruction=given["generator"]["instruction"],
                context=given.get("context"),
                **common,
            )
        from farstate.tasks.babilong import Babilong

        assert background is not None
        return Babilong(
            self._tokenizer,
            background,
            facts=tuple(given["generator"]["facts"]),
            shots=given["generator"]["shots"],
            split_labels=given["generator"]["split_labels"],
            tasks=tuple(dict.fromkeys(cell["task"] for cell in given.get("cells", ()))),
            context=given.get("context"),
            mixture=given.get("mixture"),
            training_lengths=given.get("training_lengths", "full"),
            **common,
        )

    def _published(self) -> Iterator[Example]:
        from farstate.tasks.babilong import Babilong

        published = PublishedBabilong.model_validate(as_written({**self._given["published"], "lengths": ["0k"]}))
        entry = sources.check(published_outside(published), verify=self._stage.verify)
        if published.files is not None:
            published = published.model_copy(update={"files": str(sources.inputs_root() / published.files)})
        assert isinstance(self._generator, Babilong)
        for cell in self._given["cells"]:
            yield from self._generator.published(
                published, cell["task"], cell["set"], examples=self._given["examples"], revision=entry.get("revision")
            )


def vars_of(chance: Any) -> dict[str, float | None]:
    return {"uniform": chance.uniform, "majority": chance.majority}


class _Counting:
    """Progress over examples that are made."""

    def __init__(self, label: str, total: int | None) -> None:
        from farstate.evaluation.progress import PhaseProgress

        self._progress = PhaseProgress(label)
        self._total = total

    def __enter__(self) -> _Counting:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def counted(self, examples: Iterator[Example]) -> Iterator[Example]:
        for number, example in enumerate(examples, start=1):
            yield example
            if self._total is not None:
                self._progress("examples", number, self._total)


def tune_stage(stage: Stage) -> dict[str, Any]:
    """Train the model that the record names on its task."""
    from farstate.models.registry import config_from_json
    from farstate.params import Recipe, arm_from_json
    from farstate.tasks.examples import Examples
    from farstate.tasks.rows import TaskRows
    from farstate.training import trainer
    from farstate.training.settings import run_settings

    given = stage.params
    training = given["training"]
    recipe = Recipe.model_validate(as_written(training["recipe"]))
    data = stage.one("data")
    vocabulary_size = read_manifest(data)["vocabulary_size"]
    checkpoints = stage.many("checkpoint")
    config = None
    if not checkpoints:
        config = config_from_json({"architecture": given["architecture"], **given["shape"], "vocabulary_size": vocabulary_size})
    rows = recipe.batch_tokens // given["context"]
    return trainer.tune(
        checkpoint=checkpoints[0] if checkpoints else None,
        config=config,
        batches=TaskRows(
            Examples(data / EXAMPLES), given["context"], rows, given["seed"], training["packing"], training["rest_weight"]
        ),
        vocabulary_size=vocabulary_size,
        context=given["context"],
        seed=given["seed"],
        arm=arm_from_json(given["arm"]),
        recipe=recipe,
        output=stage.output,
        scratch=stage.scratch,
        settings=run_settings(stage),
        key=stage.record["key"],
        manifest=stage.identity,
    )


def measure_stage(stage: Stage) -> None:
    """Ask the model that the record names."""
    from farstate.evaluation.progress import ScoringProgress
    from farstate.evaluation.stages import evaluation_settings
    from farstate.tasks.measure import measure

    given = stage.params
    data = stage.one("data")
    with ScoringProgress(stage.output.name) as progress:
        measure(
            checkpoint=stage.one("checkpoint"),
            data=data,
            decode=_decode(stage, data),
            task=given["task"],
            labels=given["labels"],
            train_length=given["train_length"],
            max_new_tokens=given.get("max_new_tokens"),
            precision=given["precision"],
            output=stage.output,
            settings=evaluation_settings(stage),
            progress=progress,
        )


def _decode(stage: Stage, data: Path) -> Decode:
    if not stage.many("tokenizer"):
        return copying.Vocabulary(read_manifest(data)["params"]["generator"]["alphabet"]).decode
    from farstate.corpus.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(stage.one("tokenizer"))

    def decode(tokens: Tokens) -> str:
        return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    return decode


def compare_stage(stage: Stage) -> None:
    """Score the answers of the figure that the record names."""
    from farstate.params import Compare
    from farstate.tasks.compare import compare

    compare(
        stage.many("evaluations"),
        task=stage.params["task"],
        figure=stage.params["figure"],
        compare=Compare.model_validate(as_written(stage.params["compare"])),
        output=stage.output,
    )
