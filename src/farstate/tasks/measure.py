"""The stage `task`: what one model answers to the examples of a task, one row an example.

Every prompt is read once, from the zero state, in segments whose state is carried; the answer is generated greedily from the
state after it. Beside it, the predictions inside the right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch

from farstate.errors import FarstateError
from farstate.evaluation.generation import NOT_FINITE, answers
from farstate.evaluation.perplexity import EvaluationSettings
from farstate.files import MANIFEST, atomic_path, read_manifest, write_manifest
from farstate.models.checkpoints import load_model
from farstate.ops.precision import flushed_denormals
from farstate.task_plan import ANSWERS, EXAMPLES
from farstate.tasks.examples import Example, Examples
from farstate.tasks.scores import BY_TASK, Decode, score

Progress = Callable[[int, int], None]
"""Called with the prompt tokens read so far and those in all."""

ANSWER_SCHEMA: dict[str, Any] = {
    **{"model": pl.String, "arm": pl.String, "prompting": pl.String, "seed": pl.Int64, "train_length": pl.Int64},
    **{"task": pl.String, "length": pl.Int64, "depth": pl.Float64, "example": pl.Int64, "tokens": pl.Int64},
    **{"label": pl.String, "generated": pl.String, "generated_tokens": pl.Int64, "nll": pl.Float64, "finite": pl.Boolean},
    **dict.fromkeys(("strict", "lenient", "exact", "characters", "characters_forced"), pl.Float64),
}
"""One row an example. tokens: of the prompt; nll: nats of the right answer, its end included, NaN where not finite; scores that a
task does not have are null."""
# Prompts in memory at once; a batch of the longest lies far below.
_TOKENS_AT_ONCE = 1 << 24


def measure(
    *,
    checkpoint: Path,
    data: Path,
    decode: Decode,
    task: str,
    labels: Mapping[str, Any],
    train_length: int,
    max_new_tokens: int | None,
    precision: Literal["float32", "bf16-mixed"],
    output: Path,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> None:
    """Ask a model, and write `answers.parquet` (see ANSWER_SCHEMA) and, last, `manifest.json`.

    Args:
        checkpoint: a folder with a model.
        data: a data set's folder.
        decode: its tokens to text.
        task: babilong, passkey or copying.
        labels: model, arm, prompting and seed, written into every row.
        train_length: of a training row in tokens (copying: of a string in letters), for the page.
        max_new_tokens: tokens of an answer; None: two more than the right one has characters.

    Raises:
        FarstateError: no such checkpoint or data set, examples with more symbols than the model knows, or right answers longer than
            `max_new_tokens`.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    told = read_manifest(data)
    examples = Examples(data / EXAMPLES)
    model = load_model(checkpoint, device=settings.device)
    if told["vocabulary_size"] > model.config.vocabulary_size:
        raise FarstateError(
            f"{checkpoint}: knows {model.config.vocabulary_size} symbols, the examples {data} use {told['vocabulary_size']}; make them with "
            "the model's own tokenizer"
        )
    if max_new_tokens is not None and told["longest_answer"] > max_new_tokens:
        raise FarstateError(
            f"tasks.{task}.max_new_tokens: {max_new_tokens} are fewer than the {told['longest_answer']} that the longest right answer takes with "
            "this tokenizer; raise it"
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    total, done = int(examples.lengths()[0].sum()), 0
    rows: list[dict[str, Any]] = []
    with flushed_denormals():
        for chunk in _chunks(examples):
            answered = answers(
                model,
                [example.prompt for example in chunk],
                [example.answer for example in chunk],
                max_new_tokens=max_new_tokens or max(map(_limit, chunk)),
                # The lenient scorer reads on after a full stop.
                stop=frozenset() if task == "babilong" else frozenset([told["end"]]),
                vocabulary_size=told["vocabulary_size"],
                segment_tokens=settings.segment_tokens,
                rows=_rows(chunk, settings),
                device=torch.device(settings.device),
                precision=precision,
                progress=_later(progress, done, total),
            )
            done += sum(example.prompt.size for example in chunk)
            for example, answer in zip(chunk, answered, strict=True):
                generated, forced = answer.generated[: max_new_tokens or _limit(example)], answer.forced
                rows.append(
                    {
                        **labels,
                        **{"train_length": train_length, "task": example.task, "length": example.length, "depth": example.depth},
                        **{"example": example.number, "tokens": example.prompt.size, "label": example.label},
                        "generated": decode(generated[generated >= 0]),
                        "generated_tokens": int((generated >= 0).sum()),
                        "nll": float(forced.nll.sum()),
                        "finite": not ((generated == NOT_FINITE).any() or (forced.predicted == NOT_FINITE).any()),
                        **score(task, example, generated, forced.predicted, decode, told["end_text"]),
                    }
                )
    table = pl.DataFrame(rows, schema=ANSWER_SCHEMA)
    with atomic_path(output / ANSWERS) as temporary:
        table.write_parquet(temporary, compression="zstd")
    broken = table.filter(~pl.col("finite"))
    write_manifest(
        output,
        {
            "labels": dict(labels),
            "task": task,
            "scores": list(BY_TASK[task]),
            "examples": table.height,
            "broken": broken.height,
            "chance": told["chance"],
            "spelled": told["spelled"],
            "parameters": model.config.parameter_count(),
            "parameters_without_embeddings": model.config.parameter_count(embeddings=False),
        },
        [ANSWERS],
    )


def _chunks(examples: Examples) -> Iterator[list[Example]]:
    """Consecutive examples of one cell whose prompts fit in memory together."""
    chunk: list[Example] = []
    held = 0
    for example in examples:
        other = chunk and (example.task, example.length) != (chunk[0].task, chunk[0].length)
        if other or (chunk and held + example.prompt.size > _TOKENS_AT_ONCE):
            yield chunk
            chunk, held = [], 0
        chunk.append(example)
        held += example.prompt.size
    if chunk:
        yield chunk


def _limit(example: Example) -> int:
    """Tokens that an answer may take: no tokenizer needs more for the right one, and no other example decides it."""
    return len(example.label) + 2


def _rows(chunk: list[Example], settings: EvaluationSettings) -> int:
    """Prompts side by side: as many more as they are shorter than a segment, so that a pass reads about as many tokens."""
    return settings.rows * max(1, settings.segment_tokens // max(example.prompt.size for example in chunk))


def _later(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Progress of a part, counted from what was done before it."""
    if progress is None:
        return None
    return lambda tokens, _: progress(done + tokens, total)
