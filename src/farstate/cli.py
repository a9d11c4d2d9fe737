"""The command line: one sub-command a stage, and a few for people. Torch is loaded only by the stages that need it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
import typer.core

from farstate.errors import FarstateError, explain_os_error
from farstate.files import read_json
from farstate.stages import Stage

PANELS: dict[str, tuple[str, ...]] = {
    "Your own model": ("diagnose", "repair", "perplexity", "remembrance", "states", "shift", "export"),
    "A project": (*("doctor", "check", "plan", "register", "corpus", "verify", "prune", "summary", "supersede", "schema"),),
    "Stages, which Snakemake calls": (
        *("fetch", "documents", "tokenizer", "tokens", "store", "pretrain", "import-checkpoint", "posttrain"),
        *("task-data", "tune", "task", "compare", "compare-reach", "compare-remembrance", "compare-states", "compare-task"),
        *("report", "index"),
    ),
}
"""Where `farstate --help` and docs/commands.md show a command, in this order."""


class _Panels(typer.core.TyperGroup):
    """The commands in the panels and the order of PANELS; what is in none comes last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for panel, names in PANELS.items():
            for name in names:
                if name in self.commands:
                    cast(typer.core.TyperCommand, self.commands[name]).rich_help_panel = panel

    def list_commands(self, ctx: Any) -> list[str]:
        ordered = [name for names in PANELS.values() for name in names if name in self.commands]
        return [*ordered, *(name for name in self.commands if name not in ordered)]


app = typer.Typer(
    name="farstate",
    cls=_Panels,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help=(
        "How far does the state of a recurrent language model carry?\n\n"
        "`snakemake` computes what params.yaml describes and draws the pages in reports/ (`make demo`: the first of them; docs/index.md leads "
        "on). It calls the stages: **fetch** → **documents** → **tokenizer** → **tokens** → **store** → **pretrain** (or "
        "**import-checkpoint**) → **posttrain** → **perplexity**, **remembrance**, **states**, **shift** → **compare**, "
        "**compare-remembrance**, **compare-states** → **report**; for the long-context tasks **task-data** → **tune** → **task** → "
        "**compare-task** → **report**. Each also runs by hand on the record that Snakemake resolved, "
        "`.farstate/stages/<phase>.<name>-<key>.json`."
    ),
)

Record = Annotated[Path, typer.Argument(help="resolved parameters of the stage, written by Snakemake", show_default=False)]
Output = Annotated[Path | None, typer.Option(help="result directory; default: the one the record names")]


# What several processes compute together when torchrun starts them.
_SHARED = ("pretrain", "posttrain", "tune")


def _run_shared(record: Path, output: Path | None, rule: str, work: Callable[[Stage], dict[str, Any]]) -> None:
    from farstate.training.distributed import launched

    held: list[Stage] = []
    with launched(lambda: held.append(Stage(record, output, rule))):
        _run(record, output, rule, work, held[0] if held else None)


def _run(
    record: Path,
    output: Path | None,
    rule: str,
    work: Callable[[Stage], dict[str, Any] | None],
    held: Stage | None = None,
) -> None:
    """Do a stage's work, and write down how; `held`: the stage, where its inputs were checked already."""
    from farstate import integrity, tables
    from farstate.energy import metered
    from farstate.ops import backends
    from farstate.provenance import write_provenance

    if rule not in _SHARED and os.environ.get("WORLD_SIZE", "1") != "1":
        raise FarstateError(
            f"{rule}: is computed by one process, torchrun started {os.environ['WORLD_SIZE']}; call farstate itself"
        )
    started = time.time()
    stage = held or Stage(record, output, rule)
    with metered() as meter, backends.use(stage.settings.backend) as operations:
        facts = work(stage)
    if os.environ.get("RANK", "0") != "0":
        return  # the first process writes
    tables.hold_all(stage.output)
    integrity.note(stage.output)
    write_provenance(stage.record, stage.output, started, facts, operations.record(), meter.joules)


_BY_HAND, _WITH_TEXT = "A checkpoint by hand (with --corpus)", "A checkpoint as published (with --text)"
What = Annotated[
    str,
    typer.Argument(
        metavar="RECORD|CHECKPOINT",
        help="a stage's record (.json, written by Snakemake); or, with --corpus, a checkpoint to measure by hand: its folder, file or "
        "hub name",
        show_default=False,
    ),
]
HandOutput = Annotated[
    Path | None,
    typer.Option(help="result directory; default: the one the record names, or one in results/by_hand", show_default=False),
]
CorpusOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHERE",
        help="a token store (results/corpus/store-…), or files and globs of .txt, .jsonl, .parquet, compressed or not; may be repeated",
        rich_help_panel=_BY_HAND,
        show_default=False,
    ),
]
TokenizerOption = Annotated[
    str, typer.Option(help="of text files, a tokenizer.json; auto: that beside the checkpoint", rich_help_panel=_BY_HAND)
]
TextKey = Annotated[str, typer.Option(help="the field or column that holds a document's text", rich_help_panel=_BY_HAND)]
ContextOption = Annotated[
    int | None,
    typer.Option(help="T_train in tokens; default: as the checkpoint says", rich_help_panel=_BY_HAND, show_default=False),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu or cuda; default: that of config/settings.yaml", rich_help_panel=_BY_HAND, show_default=False),
]
Documents = Annotated[
    int | None,
    typer.Option(
        help="read only the first so many documents; default: all that are long enough",
        rich_help_panel=_BY_HAND,
        show_default=False,
    ),
]
Length = Annotated[
    int | None, typer.Option(help="positions 1 … length are measured; default 8192", rich_help_panel=_BY_HAND, show_default=False)
]
Stretches = Annotated[
    int | None,
    typer.Option(
        help="non-overlapping stretches of a document, each from a zero state; default 1 (shift: 16)",
        rich_help_panel=_BY_HAND,
        show_default=False,
    ),
]
SplitOption = Annotated[
    Literal["validation", "test"] | None,
    typer.Option(help="of a token store; default test", rich_help_panel=_BY_HAND, show_default=False),
]
Streams = Annotated[
    Literal["documents", "concatenated"] | None,
    typer.Option(
        help="concatenated: documents joined to reach the length; default documents", rich_help_panel=_BY_HAND, show_default=False
    ),
]
BinsPerOctave = Annotated[
    int | None, typer.Option(help="log-spaced bins; default 2", rich_help_panel=_BY_HAND, show_default=False)
]
Softmax = Annotated[
    Literal["real", "padded"] | None,
    typer.Option(
        help="over the tokenizer's symbols (default), or all rows of the head", rich_help_panel=_BY_HAND, show_default=False
    ),
]
Precision = Annotated[
    Literal["float32", "bf16-mixed"] | None,
    typer.Option(help="default float32", rich_help_panel=_BY_HAND, show_default=False),
]
# Parameters of all measures, and the options of a measurement by hand that are none of its parameters.
_TEXT_PARAMETERS = ("stretches_per_document", "split", "streams")
_PUBLISHED_OPTIONS = ("end_of_text", "published")
_HAND_OPTIONS = ("output", "corpus", "tokenizer", "text_key", "context", "device", "arm_record")


def _given(called: typer.Context) -> dict[str, Any]:
    """What stands on the command line, without what is at its default."""
    return {
        name: value for name, value in called.params.items() if str(called.get_parameter_source(name)).endswith("COMMANDLINE")
    }


def _record_or_hand(rule: str, given: dict[str, Any], work: Callable[[Stage], None]) -> None:
    """Run a stage on its record, or its measurement on the checkpoint that was given with --corpus."""
    what: str = given.pop("what")
    if "corpus" not in given:
        if not what.endswith(".json"):
            raise FarstateError(f"{what}: not the .json record of a stage; to measure a checkpoint give --corpus WHERE with it")
        if strange := [name for name in given if name != "output"]:
            raise FarstateError(
                f"--{strange[0].replace('_', '-')}: only with --corpus{' or --text' if rule == 'perplexity' else ''}; what a stage measures stands in its record"
            )
        _run(Path(what), given.get("output"), rule, work)
        return
    if what.endswith(".json"):
        raise FarstateError(f"{what}: a record says itself which text is read; leave out --corpus, or give a checkpoint")
    from farstate.evaluation.by_hand import measure

    options = {name: value for name, value in given.items() if name not in _HAND_OPTIONS}
    for name in ("starts", "positions"):
        if name in options:
            options[name] = _integers(name, options[name])
    tokenizer = given.get("tokenizer", "auto")
    lines = measure(
        rule,
        what,
        given["corpus"],
        options,
        context=given.get("context"),
        tokenizer=None if tokenizer == "auto" else Path(tokenizer),
        text_key=given.get("text_key", "text"),
        arm_record=given.get("arm_record"),
        output=given.get("output"),
        device=given.get("device"),
    )
    for line in lines:
        typer.echo(line)


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise FarstateError(f"--{option}: '{text}' is not a list of whole numbers; write 0,16,1024") from None


@app.command()
def fetch(record: Record, output: Output = None) -> None:
    """Download a pinned package as an archive, through pip, checked by SHA-256."""

    def work(stage: Stage) -> None:
        from farstate.corpus.fetch import fetch_package

        fetch_package(stage.params["package"], stage.params["sha256"], stage.params["archive"], stage.output)

    _run(record, output, "fetch", work)


@app.command()
def documents(record: Record, output: Output = None) -> None:
    """Read one source into documents with boundaries, origin and split."""

    def work(stage: Stage) -> None:
        from farstate.corpus.stages import documents_stage

        documents_stage(stage)

    _run(record, output, "documents", work)


@app.command()
def tokenizer(record: Record, output: Output = None) -> None:
    """Train a byte-level BPE on the training split, or copy a ready tokenizer."""

    def work(stage: Stage) -> None:
        from farstate import sources
        from farstate.corpus.tokenizer import make_tokenizer
        from farstate.params import Tokenizer
        from farstate.plan import tokenizer_outside

        given = Tokenizer.model_validate(stage.params["tokenizer"])
        revision = None
        if given.kind in ("file", "hub"):
            revision = sources.check(tokenizer_outside(given.file, given.hub), verify=stage.verify).get("revision")
        if given.file is not None:
            given = given.model_copy(update={"file": str(sources.inputs_root() / given.file)})
        archives = stage.many("archive")
        make_tokenizer(
            given,
            [directory / "documents.parquet" for directory in stage.many("documents")],
            stage.output,
            archive=archives[0] / "archive" if archives else None,
            threads=stage.threads,
            revision=revision,
        )

    _run(record, output, "tokenizer", work)


@app.command()
def tokens(record: Record, output: Output = None) -> None:
    """Tokenise one shard of documents into a memory-mapped file."""

    def work(stage: Stage) -> None:
        from farstate.corpus.progress import DocumentProgress
        from farstate.corpus.tokens import write_tokens
        from farstate.params import Store

        with DocumentProgress(stage.label) as progress:
            write_tokens(
                stage.one("documents") / "documents.parquet",
                stage.one("tokenizer") / "tokenizer.json",
                Store.model_validate(stage.params["store"]),
                stage.params["vocabulary_size"],
                stage.output,
                threads=stage.threads,
                progress=progress,
            )

    _run(record, output, "tokens", work)


@app.command()
def store(record: Record, output: Output = None) -> None:
    """Index the token shards: one store, documents with offsets."""

    def work(stage: Stage) -> None:
        from farstate.corpus.progress import DocumentProgress
        from farstate.corpus.store import write_store

        with DocumentProgress(stage.label) as progress:
            write_store(
                stage.many("shards"),
                stage.params["vocabulary_size"],
                stage.output,
                to_train_on=stage.params.get("to_train_on", True),
                progress=progress,
            )

    _run(record, output, "store", work)


@app.command()
def pretrain(record: Record, output: Output = None) -> None:
    """Train a model from a zero state on short contexts; resumes after a kill."""

    def work(stage: Stage) -> dict[str, Any]:
        from farstate.training.stages import pretrain_stage

        return pretrain_stage(stage)

    _run_shared(record, output, "pretrain", work)


@app.command("import-checkpoint")
def import_checkpoint(record: Record, output: Output = None) -> None:
    """Bring a published checkpoint, registered in `config/sources.lock`, into Farstate's format."""

    def work(stage: Stage) -> None:
        from farstate.models.importing import import_stage

        import_stage(stage)

    _run(record, output, "import_checkpoint", work)


@app.command()
def posttrain(record: Record, output: Output = None) -> None:
    """Post-train a model from one arm's initial states; resumes after a kill."""

    def work(stage: Stage) -> dict[str, Any]:
        from farstate.training.stages import posttrain_stage

        return posttrain_stage(stage)

    _run_shared(record, output, "posttrain", work)


@app.command("task-data")
def task_data(record: Record, output: Output = None) -> None:
    """Make the examples of a long-context task: prompts of exact length, and their answers."""

    def work(stage: Stage) -> dict[str, Any]:
        from farstate.tasks.stages import data_stage

        return data_stage(stage)

    _run(record, output, "task_data", work)


@app.command()
def tune(record: Record, output: Output = None) -> None:
    """Train a model on a task's examples, from one arm's initial states; resumes after a kill."""

    def work(stage: Stage) -> dict[str, Any]:
        from farstate.tasks.stages import tune_stage

        return tune_stage(stage)

    _run_shared(record, output, "tune", work)


@app.command()
def task(record: Record, output: Output = None) -> None:
    """Ask a model the examples of a task: greedy answers from the state after each prompt."""

    def work(stage: Stage) -> None:
        from farstate.tasks.stages import measure_stage

        measure_stage(stage)

    _run(record, output, "task", work)


@app.command("compare-task")
def compare_task(record: Record, output: Output = None) -> None:
    """Score the answers of a figure's models, with intervals."""

    def work(stage: Stage) -> None:
        from farstate.tasks.stages import compare_stage

        compare_stage(stage)

    _run(record, output, "compare_task", work)


@app.command()
def perplexity(
    called: typer.Context,
    what: What,
    output: HandOutput = None,
    corpus: CorpusOption = None,
    tokenizer: TokenizerOption = "auto",
    text_key: TextKey = "text",
    context: Annotated[
        int | None,
        typer.Option(
            help="T_train in tokens, default: as the checkpoint says; with --text, tokens of a window, default 2048",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    documents: Documents = None,
    length: Length = None,
    stretches_per_document: Stretches = None,
    split: SplitOption = None,
    streams: Streams = None,
    bins_per_octave: BinsPerOctave = None,
    softmax: Annotated[
        Literal["padded", "real"] | None,
        typer.Option(
            help="real: over the tokenizer's symbols, as the stage does; padded: over all rows of the head, as published values "
            "[assumed], and so with --text",
            show_default=False,
        ),
    ] = None,
    precision: Precision = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="measure one number as published values are, on this file: .txt, .jsonl or .parquet, compressed or not",
            rich_help_panel=_WITH_TEXT,
        ),
    ] = None,
    end_of_text: Annotated[
        str, typer.Option(help="the token after each document; none: nothing between documents", rich_help_panel=_WITH_TEXT)
    ] = "<|endoftext|>",
    published: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="the text is the original Pile's validation file: hold the value against the one published for this model "
            "(mamba2-130m, …); without it, a text named val.jsonl.zst and a model of a published one's sizes are compared",
            rich_help_panel=_WITH_TEXT,
        ),
    ] = None,
) -> None:
    """Measure position-wise perplexity and its window references on held-out text; or, with --text, a checkpoint as published.

    `farstate perplexity RECORD.json` is the pipeline's stage. `farstate perplexity CHECKPOINT --corpus WHERE` writes the stage's
    tables for any checkpoint. `farstate perplexity CHECKPOINT --text FILE` takes any checkpoint that Farstate reads and prints
    one perplexity, computed as published values are: documents joined by the end-of-text token, windows that do not overlap,
    softmax over padded rows too; and its distance from the published value where there is one.
    """
    given = _given(called)
    if text is None:

        def work(stage: Stage) -> None:
            from farstate.evaluation.stages import perplexity_stage

            perplexity_stage(stage)

        if strange := [name for name in given if name in _PUBLISHED_OPTIONS]:
            raise FarstateError(f"--{strange[0].replace('_', '-')}: only with --text")
        if corpus is None and not what.endswith(".json"):
            raise FarstateError(
                f"{what}: not the .json record of a stage; to measure a checkpoint give --corpus WHERE with it (the stage's tables), or "
                "--text FILE (one number, as published)"
            )
        _record_or_hand("perplexity", given, work)
        return
    if output is not None or what.endswith(".json"):
        raise FarstateError(
            "perplexity: --output and a .json record belong to the stage, --text to a checkpoint; give one of the two"
        )
    if strange := [name for name in ("corpus", *_TEXT_PARAMETERS, "length", "bins_per_octave", "precision") if name in given]:
        raise FarstateError(f"--{strange[0].replace('_', '-')}: not with --text, which takes one number of a whole file")
    from farstate.evaluation.stages import perplexity_command

    lines = perplexity_command(
        what,
        text,
        text_key,
        tokenizer,
        2048 if context is None else context,
        documents,
        end_of_text,
        softmax or "padded",
        device,
        published,
    )
    for line in lines:
        typer.echo(line)


@app.command()
def remembrance(
    called: typer.Context,
    what: What,
    output: HandOutput = None,
    corpus: CorpusOption = None,
    tokenizer: TokenizerOption = "auto",
    text_key: TextKey = "text",
    context: ContextOption = None,
    device: Device = None,
    documents: Documents = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="T: predictions after the tokens x_0 … x_T are compared; default 8192",
            rich_help_panel=_BY_HAND,
            show_default=False,
        ),
    ] = None,
    starts: Annotated[
        str | None,
        typer.Option(
            metavar="T,T,…",
            help="start points, 0 … T; default: a grid from 0 to T, dense at both ends",
            rich_help_panel=_BY_HAND,
            show_default=False,
        ),
    ] = None,
    starts_per_octave: Annotated[
        int | None, typer.Option(help="of that grid; default 2", rich_help_panel=_BY_HAND, show_default=False)
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(help="positions up to T that are averaged; default 64", rich_help_panel=_BY_HAND, show_default=False),
    ] = None,
    stretches_per_document: Stretches = None,
    split: SplitOption = None,
    streams: Streams = None,
    softmax: Softmax = None,
    precision: Precision = None,
) -> None:
    """Measure how much the predictions at the end of a text owe to its first tokens (Effective Remembrance).

    `farstate remembrance RECORD.json` is the pipeline's stage; `farstate remembrance CHECKPOINT --corpus WHERE` writes its tables
    for any checkpoint.
    """

    def work(stage: Stage) -> None:
        from farstate.evaluation.stages import remembrance_stage

        remembrance_stage(stage)

    _record_or_hand("remembrance", _given(called), work)


@app.command()
def states(
    called: typer.Context,
    what: What,
    output: HandOutput = None,
    corpus: CorpusOption = None,
    tokenizer: TokenizerOption = "auto",
    text_key: TextKey = "text",
    context: ContextOption = None,
    device: Device = None,
    documents: Documents = None,
    length: Length = None,
    bins_per_octave: BinsPerOctave = None,
    samples_per_octave: Annotated[
        int | None,
        typer.Option(
            help="positions at which largest entry and effective rank are taken; default 1",
            rich_help_panel=_BY_HAND,
            show_default=False,
        ),
    ] = None,
    stretches_per_document: Stretches = None,
    split: SplitOption = None,
    streams: Streams = None,
    precision: Precision = None,
) -> None:
    """Measure mean, deviation and norm of the carried state at every position, by layer and head.

    `farstate states RECORD.json` is the pipeline's stage; `farstate states CHECKPOINT --corpus WHERE` writes its tables for any
    checkpoint.
    """

    def work(stage: Stage) -> None:
        from farstate.evaluation.stages import states_stage

        states_stage(stage)

    _record_or_hand("states", _given(called), work)


@app.command()
def shift(
    called: typer.Context,
    what: What,
    output: HandOutput = None,
    corpus: CorpusOption = None,
    tokenizer: TokenizerOption = "auto",
    text_key: TextKey = "text",
    context: ContextOption = None,
    device: Device = None,
    arm_record: Annotated[
        Path | None,
        typer.Option(
            help="the record of the checkpoint's post-training, or the manifest.json of its result: its states are the reference; "
            "default: what the manifest beside the checkpoint says, and without one states that begin from zero",
            rich_help_panel=_BY_HAND,
            show_default=False,
        ),
    ] = None,
    documents: Documents = None,
    length: Annotated[
        int | None, typer.Option(help="longest position; default 8192", rich_help_panel=_BY_HAND, show_default=False)
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            metavar="T,T,…",
            help="positions whose states are compared; default: T_train · 4^k, and the last that fits",
            rich_help_panel=_BY_HAND,
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(help="at most so many, spread over the layers; default 64", rich_help_panel=_BY_HAND, show_default=False),
    ] = None,
    minimum_states: Annotated[
        int | None,
        typer.Option(help="of a class; with fewer there is no number; default 200", rich_help_panel=_BY_HAND, show_default=False),
    ] = None,
    reference_states: Annotated[
        int | None,
        typer.Option(help="states of training that are drawn; default 1000", rich_help_panel=_BY_HAND, show_default=False),
    ] = None,
    swap_heads: Annotated[
        int | None,
        typer.Option(
            help="heads swapped by drift, and as many at random; default 5", rich_help_panel=_BY_HAND, show_default=False
        ),
    ] = None,
    swap_position: Annotated[
        int | None,
        typer.Option(
            help="where states are swapped; default: the largest position", rich_help_panel=_BY_HAND, show_default=False
        ),
    ] = None,
    resamples: Annotated[
        int | None,
        typer.Option(help="of the bootstrap over documents; default 1000", rich_help_panel=_BY_HAND, show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="of all draws; default 0", rich_help_panel=_BY_HAND, show_default=False)
    ] = None,
    stretches_per_document: Stretches = None,
    split: SplitOption = None,
    streams: Streams = None,
    precision: Precision = None,
) -> None:
    """Compare states far into a text with those that training met: distance, two-sample test, novelty, swaps.

    `farstate shift RECORD.json` is the pipeline's stage; `farstate shift CHECKPOINT --corpus WHERE` writes its tables for any
    checkpoint. Text files are halved by their content, so that the two sides share no document.
    """

    def work(stage: Stage) -> None:
        from farstate.evaluation.stages import shift_stage

        shift_stage(stage)

    _record_or_hand("shift", _given(called), work)


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="a result of pretrain, import-checkpoint or posttrain, or any checkpoint", show_default=False)
    ],
    output: Annotated[Path, typer.Option(help="a new folder; it appears whole or not at all", show_default=False)],
    format_name: Annotated[
        str | None, typer.Option("--format", help="transformers, mamba-ssm, fla, …; default: the one the weights came from")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float16 or bfloat16; default: that of the original file where nothing is lost, else float32"),
    ] = None,
) -> None:
    """Write a model's weights back into the format they came from, or into another one."""
    from farstate.models.checkpoints import export as write
    from farstate.models.importing import locate

    done = write(locate(checkpoint), output, format_name, dtype)
    typer.echo(f"wrote {output}: {done.format} format, {done.dtype}{''.join(f', {name}' for name in done.beside)}")
    if done.absent:
        typer.echo(f"not there to copy: {', '.join(done.absent)}; take them from {done.checkpoint}")


@app.command()
def compare(record: Record, output: Output = None) -> None:
    """Compare the arms of a figure: curves, intervals, verdicts, state ages."""

    def work(stage: Stage) -> None:
        from farstate.evaluation.stages import compare_stage

        compare_stage(stage)

    _run(record, output, "compare", work)


OwnCheckpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="folder, file or hub name, of any format that Farstate reads", show_default=False),
]
OwnCorpus = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHERE",
        help="texts: files, globs, a folder, or a data set's hub name; may be repeated; default: the demo's books",
        show_default=False,
    ),
]
OwnTokenizer = Annotated[
    Path | None,
    typer.Option(
        help="a tokenizer.json; default: that beside the checkpoint, or of the corpus it was trained on", show_default=False
    ),
]
OwnContext = Annotated[
    int | None, typer.Option(help="T_train in tokens; default: as the checkpoint's own record says", show_default=False)
]
OwnBudget = Annotated[str, typer.Option(help="small: minutes for a small model on a CPU; full: the paper's multiples of T_train")]
OwnOutput = Annotated[
    Path | None,
    typer.Option(help="folder of everything; default: `own_models/<name>-<digest of what was asked>`", show_default=False),
]
OwnCores = Annotated[int | None, typer.Option(help="as Snakemake takes them; default: all", show_default=False)]
OwnProfile = Annotated[str | None, typer.Option(help="a profile of Snakemake: slurm", show_default=False)]
OwnDevice = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option(help="default: that of config/settings.yaml", show_default=False)
]
OwnSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="any parameter instead of the command's, like evaluate.length=4096; may be repeated",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="say what would run, and how long it would take")]


@app.command()
def diagnose(
    checkpoint: OwnCheckpoint,
    corpus: OwnCorpus = None,
    tokenizer: OwnTokenizer = None,
    context: OwnContext = None,
    budget: OwnBudget = "small",
    output: OwnOutput = None,
    cores: OwnCores = None,
    profile: OwnProfile = None,
    device: OwnDevice = None,
    overrides: OwnSet = None,
    dry_run: DryRun = False,
) -> None:
    """Say whether your own model works beyond its training length, to where, and why not: `reports/diagnosis.html`.

    Perplexity and excess by position with the verdict of Def. 3.2, effective remembrance, drifting heads, a passkey; then a plain
    recommendation. Cached and resumable: a second call shows the result.
    """
    from farstate.own_model.command import Asked
    from farstate.own_model.command import diagnose as run

    run(
        Asked(checkpoint, corpus or [], tokenizer, context, budget, output, cores, profile, device, dry_run, overrides or []),
        typer.echo,
    )


@app.command()
def repair(
    checkpoint: OwnCheckpoint,
    arms: Annotated[
        list[str],
        typer.Option("--with", metavar="INTERVENTION", help="the initial states: state_passing, tbtt, fitted_noise, …"),
    ],
    steps: Annotated[int, typer.Option(help="of the post-training")] = 100,
    seeds: Annotated[str, typer.Option(help="of the post-training, like 0,1,2")] = "0",
    tolerance: Annotated[
        float, typer.Option(help="nats below which the interval of the short-context cost must end to call it a repair")
    ] = 0.02,
    control: Annotated[
        bool, typer.Option(help="the same steps from the zero state; without it nothing can be called a repair")
    ] = True,
    corpus: OwnCorpus = None,
    tokenizer: OwnTokenizer = None,
    context: OwnContext = None,
    budget: OwnBudget = "small",
    output: OwnOutput = None,
    cores: OwnCores = None,
    profile: OwnProfile = None,
    device: OwnDevice = None,
    overrides: OwnSet = None,
    dry_run: DryRun = False,
) -> None:
    """Post-train your own model from other initial states, and say whether that repairs it: `reports/repair.html`.

    Before, after and the zero-init control side by side; the repaired checkpoint in the format it came from, with a model card.
    """
    from farstate.own_model.command import Asked, Repairing
    from farstate.own_model.command import repair as run

    run(
        Asked(checkpoint, corpus or [], tokenizer, context, budget, output, cores, profile, device, dry_run, overrides or []),
        Repairing(arms, steps, _integers("seeds", seeds), tolerance, control=control),
        typer.echo,
    )


@app.command("compare-reach")
def compare_reach(record: Record, output: Output = None) -> None:
    """Say how far the arms of a figure hold: the verdict of Def. 3.2 to every octave."""

    def work(stage: Stage) -> None:
        from farstate.evaluation.stages import compare_reach_stage

        compare_reach_stage(stage)

    _run(record, output, "compare_reach", work)


@app.command("compare-remembrance")
def compare_remembrance(record: Record, output: Output = None) -> None:
    """Compare what the arms of a figure remember, with intervals."""

    def work(stage: Stage) -> None:
        from farstate.evaluation.stages import compare_remembrance_stage

        compare_remembrance_stage(stage)

    _run(record, output, "compare_remembrance", work)


@app.command("compare-states")
def compare_states(record: Record, output: Output = None) -> None:
    """Compare the states of a figure's arms, with intervals, and rank heads by their drift."""

    def work(stage: Stage) -> None:
        from farstate.evaluation.stages import compare_states_stage

        compare_states_stage(stage)

    _run(record, output, "compare_states", work)


@app.command()
def report(
    keys: Annotated[Path, typer.Argument(help="the page's small manifest, `.farstate/pages/<figure>.json`", show_default=False)],
    output: Annotated[Path, typer.Option(help="folder of the page and its siblings")] = Path("reports"),
) -> None:
    """Draw a figure's page, readable offline, with its svg, png, spec and table."""
    from farstate import tables
    from farstate.reports.stage import report_stage

    wanted = read_json(keys)
    report_stage(wanted, output)
    tables.hold(output / f"{wanted['figure']}.parquet", page=True)


@app.command()
def index(
    wanted: Annotated[Path, typer.Argument(help="its small manifest, `.farstate/pages/index-<digest>.json`", show_default=False)],
    output: Annotated[Path, typer.Option(help="folder of the finished pages, and of the page of all results")] = Path("reports"),
) -> None:
    """Put all finished pages on one, `index.html`, with their records as json and csv."""
    from farstate.reports.index import index_stage

    index_stage(read_json(wanted), output)


@app.command()
def register(
    params: Annotated[
        list[Path] | None,
        typer.Option(
            "--params",
            help="parameters whose outside inputs are registered; files laid over each other are joined by +; default: params.yaml",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Record what local files, hub data sets and checkpoints contain, in `config/sources.lock`."""
    from farstate import sources
    from farstate.params import load
    from farstate.plan import Plan

    def reading(file: Path, number: int, count: int) -> None:
        if (size := (sources.inputs_root() / file).stat().st_size) >= 1e9:
            typer.echo(f"reading {file} ({number} of {count}), {size / 1e9:.1f} GB", err=True)

    for path in params or [Path("params.yaml")]:
        outside = Plan(load(path)).outside()
        if not outside:
            typer.echo(f"{path}: nothing to register, its sources are pinned packages")
        for item in outside:
            entry = sources.register(item, reading=reading)
            files = entry.get("files", [])
            what = [f"revision {entry['revision']}"] if "revision" in entry else []
            if files:
                what.append(f"{len(files)} file(s), {sum(file['bytes'] for file in files):,} bytes")
            typer.echo(f"registered {item.kind} {item.where}: {', '.join(what)}")


@app.command()
def corpus(
    store: Annotated[
        Path | None, typer.Argument(help="a token store; default: that of the parameters", show_default=False)
    ] = None,
    params: Annotated[
        Path, typer.Option(help="the parameters whose store is shown; files laid over each other are joined by +")
    ] = Path("params.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, with each shard's inputs and their checksums")] = False,
) -> None:
    """Show what a token store holds, by split, set and source, and what was left out and why."""
    import json

    from rich.console import Console

    from farstate.corpus.accounting import account, show
    from farstate.params import load
    from farstate.plan import Plan
    from farstate.sources import read_lock

    accounts = account(Path(Plan(load(params), read_lock()).store.directory) if store is None else store)
    if as_json:
        typer.echo(json.dumps(accounts, indent=2, ensure_ascii=False))
    else:
        show(accounts, Console(width=None if sys.stdout.isatty() else 120))


@app.command()
def supersede(
    phase: Annotated[str, typer.Argument(help="corpus, pretrain, posttrain, tasks, evaluate or report", show_default=False)],
    params: Annotated[Path, typer.Option(help="the parameters that say what is current")] = Path("params.yaml"),
) -> None:
    """Move results that no current parameter asks for into `.superseded/`, and name those that are current for DVC."""
    from farstate.files import only_one
    from farstate.params import load
    from farstate.plan import PHASES, RUN_LOCK, Plan
    from farstate.sources import read_lock

    phases = (*PHASES, "report")
    if phase not in phases:
        raise FarstateError(f"phase '{phase}' is not one of {', '.join(phases)}")
    root = Path.cwd()
    with only_one(root / RUN_LOCK, "a Snakemake run in this folder"):  # it may be writing what would be moved
        plan = Plan(load(params), read_lock())
        for name in plan.supersede(root, phase):
            typer.echo(f"superseded {'reports' if phase == 'report' else f'results/{phase}'}/{name}")
        if phase in PHASES:
            plan.write_recorded(root, phase)


@app.command()
def verify(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="results, or folders of a phase; default: every finished result here", show_default=False),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="delete what is damaged, so that the next run makes it again")] = False,
) -> None:
    """Read every byte of finished results and hold it against the checksums that were written with them.

    Superseded results are read too, since they come back when their parameters do.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from farstate import integrity
    from farstate.files import only_one
    from farstate.plan import RUN_LOCK

    root = Path.cwd()
    directories = integrity.finished(root, results)
    with only_one(root / RUN_LOCK, "a Snakemake run in this folder"):  # it may be writing what would be read
        wrong = {}
        columns = (TextColumn("verify"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("verify", total=sum(map(integrity.size, directories)))
            for directory in directories:
                if problems := integrity.damaged(directory, lambda size: progress.advance(task, size)):
                    wrong[directory] = problems
                    for problem in problems:
                        typer.echo(f"damaged: {problem}")
        for directory in wrong if remove else ():
            integrity.remove(directory)
            typer.echo(f"removed {directory}")
    typer.echo(f"{len(directories)} results read, {len(wrong)} damaged")
    if wrong and not remove:
        raise FarstateError(
            f"{len(wrong)} damaged; `farstate verify --remove` deletes them, then run Snakemake again or `dvc pull`"
        )


@app.command()
def summary(
    params: Annotated[Path, typer.Option(help="the parameters that say which figures there are")] = Path("params.yaml"),
) -> None:
    """Write the main numbers of every finished figure into `summary/`, for `dvc metrics` and `dvc plots`."""
    from farstate.params import load
    from farstate.plan import Plan
    from farstate.sources import read_lock
    from farstate.summary import describe, write_summary

    for line in describe(write_summary(Plan(load(params), read_lock()), Path.cwd())):
        typer.echo(line)


@app.command()
def prune(
    params: Annotated[
        list[str] | None,
        typer.Option(
            help="parameters whose results stay, more than once for several; files laid over each other are joined by +; "
            "default: params.yaml"
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="remove what is shown")] = False,
) -> None:
    """Show results that no current parameter needs, with sizes; what `dvc repro` recorded last stays. With --remove, remove them."""
    from farstate import prune
    from farstate.params import load
    from farstate.plan import Plan
    from farstate.settings import current_settings
    from farstate.sources import read_lock

    plans = []
    for given in params or ["params.yaml"]:
        plans.append(Plan(load(given), read_lock()))
    root, scratch = Path(), Path(current_settings()[0].scratch)
    if remove:
        removed, held = prune.remove(root, plans, scratch)
        lines = prune.report(removed, verb="removed")
    else:
        found, held = prune.unneeded(root, plans, scratch), []
        lines = prune.report(found, verb="could be removed with --remove:")
    for line in lines:
        typer.echo(line)
    for item in held:
        typer.echo(f"left, a training holds it: {item.path}")


@app.command()
def check(
    params: Annotated[
        Path, typer.Argument(help="the parameter file; several that are laid over each other are joined by +")
    ] = Path("params.yaml"),
) -> None:
    """Check a parameter file, and say how many trainings and measurements each of its figures asks for."""
    from collections import Counter

    from farstate.params import layers, load
    from farstate.plan import KINDS, Plan
    from farstate.sources import read_lock

    for name in layers(params):
        if not Path(name).exists():
            raise FarstateError(
                f"{name}: no such file; run `farstate check` in the repository's folder, or give the path of a parameter file"
            )
    plan = Plan(load(params), read_lock())
    counts = Counter(stage.rule for stage in plan.stages.values())
    typer.echo(
        f"{params}: valid; {', '.join(f'{number} × {rule}' for rule, number in counts.items())}, {len(plan.pages)} page{'s' if len(plan.pages) != 1 else ''}"
    )
    totals = dict.fromkeys(KINDS, 0)
    for name, needed in plan.needs():
        asks = (f"{_counted(many, kind)} ({new} of its own)" for kind, (many, new) in needed.items() if many)
        typer.echo(f"  {name}: " + ", ".join(asks))
        for kind, (_, new) in needed.items():
            totals[kind] += new
    typer.echo(
        "  together: "
        + ", ".join(_counted(many, kind) for kind, many in totals.items())
        + "; what figures share is computed once"
    )


def _counted(many: int, kind: str) -> str:
    return f"{many} {kind if many != 1 else kind.replace('trainings', 'training').replace('measurements', 'measurement')}"


@app.command()
def plan(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="pages, phases or result directories, as for snakemake; default: every page", show_default=False),
    ] = None,
    configfile: Annotated[
        list[Path] | None,
        typer.Option(help="parameter files, each laid over the one before; default: params.yaml", show_default=False),
    ] = None,
    device_rate: Annotated[
        str | None,
        typer.Option(
            help="a device's name (h100, …), or the FLOP/s it reaches; default: config/settings.yaml", show_default=False
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="memory of one device in GB; default: config/settings.yaml", show_default=False)
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="plan for the device that jobs of a cluster are planned for, not for this machine")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print every job as one JSON object")] = False,
) -> None:
    """Say what each job costs before it runs: parameters, tokens, operations, memory of a device, hours; exit 1 if one cannot fit."""
    from farstate.planner.command import plan_command

    plan_command(targets or [], configfile or [], device_rate, memory, as_json, cluster)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print the same as one JSON object")] = False,
) -> None:
    """Say what this machine has and which backend each architecture would use, and check each against its definition."""
    import json

    from farstate import doctor
    from farstate.settings import current_settings

    report = doctor.examine(current_settings()[0].backend)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        doctor.show(report)
    if not doctor.healthy(report):
        raise FarstateError("a backend disagrees with its definition on this machine; choose another in config/settings.yaml")


@app.command()
def schema(
    check_only: Annotated[bool, typer.Option("--check", help="fail when the files differ from what would be written")] = False,
) -> None:
    """Write the generated files: the parameters' schema and docs/parameters.md, commands.md and tables.md."""
    from farstate.files import write_text
    from farstate.reference_pages import reference_pages

    for path, text in reference_pages().items():
        if check_only:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                raise FarstateError(
                    f"{path}: not what the code says; run `farstate schema` in the repository and commit the file"
                )
        else:
            write_text(path, text)
            typer.echo(f"wrote {path}")


def main() -> None:
    """Entry point: errors meant for people are printed in one line, with exit status 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        # The library turns Ctrl-C and its own exits into a status that it returns; what commands return is None.
        status = app(standalone_mode=False)
        if isinstance(status, int) and status:
            sys.exit(status)
    except FarstateError as error:
        sys.exit(f"farstate: {error}")
    except OSError as error:
        sys.exit(f"farstate: {explain_os_error(error)}")
    except MemoryError:
        sys.exit("farstate: out of memory; lower evaluation_rows in config/settings.yaml or use a larger machine")
    except KeyboardInterrupt:
        sys.exit(130)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except Exception as error:
        # Usage errors of the command-line library: they know how to show themselves and their exit status.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            sys.exit(error.exit_code)
        if type(error).__name__ == "Abort":
            sys.exit(130)
        raise
