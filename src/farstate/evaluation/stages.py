"""The evaluation stages as the command line calls them: from a stage's record to the functions' arguments.

Each loads what it computes with, and no more: a comparison of tables starts without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from farstate.errors import FarstateError
from farstate.evaluation.progress import PhaseProgress, ScoringProgress, StreamProgress
from farstate.grid import snapshot_file
from farstate.ops import backends
from farstate.params import Compare, Evaluate, Remembrance, Shift, States, as_written
from farstate.settings import current_settings
from farstate.stages import Stage

if TYPE_CHECKING:
    from farstate.evaluation.perplexity import EvaluationSettings


def perplexity_stage(stage: Stage) -> None:
    """Measure the model that the record names."""
    from farstate.evaluation.perplexity import evaluate

    with ScoringProgress(stage.output.name) as progress:
        evaluate(
            **_common(stage),
            evaluate=Evaluate.model_validate(as_written(stage.params["evaluate"])),
            progress=progress,
        )


def _common(stage: Stage) -> dict[str, Any]:
    """What all measurements of a model are given."""
    return {
        "checkpoint": _checkpoint(stage),
        "store_directory": stage.one("store"),
        "context": stage.params["context"],
        "labels": stage.params["labels"],
        "output": stage.output,
        "settings": evaluation_settings(stage),
    }


def evaluation_settings(stage: Stage) -> EvaluationSettings:
    """Where and how this stage computes."""
    from farstate.evaluation.perplexity import EvaluationSettings

    return EvaluationSettings(
        device=_device(stage.settings.device),
        threads=stage.threads,
        rows=stage.settings.evaluation_rows,
        segment_tokens=stage.settings.evaluation_segment,
    )


def _comparison(stage: Stage) -> dict[str, Any]:
    """What all comparisons of a figure's arms are given."""
    return {
        "evaluations": stage.many("evaluations"),
        "compare": Compare.model_validate(as_written(stage.params["compare"])),
        "figure": stage.params["figure"],
        "output": stage.output,
    }


def _checkpoint(stage: Stage) -> Path:
    """The model that the record names: the folder of a training, or one of its snapshots."""
    folder, tokens = stage.one("checkpoint"), stage.params.get("snapshot")
    return folder if tokens is None else folder / snapshot_file(tokens)


def perplexity_command(
    checkpoint: str,
    text: Path,
    text_key: str,
    tokenizer: str,
    context: int,
    documents: int | None,
    end_of_text: str,
    softmax: Literal["padded", "real"],
    device: str | None,
    published: str | None,
) -> list[str]:
    """Measure any checkpoint on a file, and say in lines what was found; the arguments are the command's.

    Raises:
        FarstateError: as `perplexity_of_text`, or an argument that is not allowed.
    """
    from farstate.evaluation.perplexity import EvaluationSettings
    from farstate.evaluation.published import Procedure, perplexity_of_text, report
    from farstate.models.importing import locate

    settings, _ = current_settings()
    where = _device(device or settings.device)
    path = locate(checkpoint)
    with backends.use(settings.backend), StreamProgress(path.name or str(path)) as progress:
        measured = perplexity_of_text(
            path,
            text,
            text_key=text_key,
            tokenizer=None if tokenizer == "auto" else Path(tokenizer),
            procedure=Procedure(context, documents, softmax, None if end_of_text == "none" else end_of_text),
            settings=EvaluationSettings(where, None, settings.evaluation_rows, settings.evaluation_segment),
            published_model=published,
            progress=progress,
        )
    return report(measured, checkpoint, text, where)


def _device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise FarstateError(f"--device: '{name}' is unknown; known: auto, cpu, cuda")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise FarstateError("device: cuda was asked for, but torch finds no GPU; use auto or cpu")
    return name


def compare_stage(stage: Stage) -> None:
    """Compare the arms of the figure that the record names."""
    from farstate.evaluation.compare import compare

    compare(
        **_comparison(stage),
        trainings=stage.params["trainings"],
    )


def compare_reach_stage(stage: Stage) -> None:
    """Say how far the arms of the figure that the record names hold."""
    from farstate.evaluation.reach import reach

    reach(**_comparison(stage))


def states_stage(stage: Stage) -> None:
    """Measure the states of the model that the record names."""
    from farstate.evaluation.states import states

    with ScoringProgress(stage.output.name) as progress:
        states(
            **_common(stage),
            states=States.model_validate(as_written(stage.params["states"])),
            progress=progress,
        )


def remembrance_stage(stage: Stage) -> None:
    """Measure what the model that the record names remembers."""
    from farstate.evaluation.remembrance import evaluate_remembrance

    with ScoringProgress(stage.output.name) as progress:
        evaluate_remembrance(
            **_common(stage),
            remembrance=Remembrance.model_validate(as_written(stage.params["remembrance"])),
            progress=progress,
        )


def compare_states_stage(stage: Stage) -> None:
    """Compare the states of the arms of the figure that the record names."""
    from farstate.evaluation.compare_states import compare_states

    compare_states(**_comparison(stage))


def shift_stage(stage: Stage) -> None:
    """Compare the states of the model that the record names with those that its training met."""
    from farstate.evaluation.shift import evaluate_shift

    with PhaseProgress(stage.output.name) as progress:
        evaluate_shift(
            **_common(stage),
            shift=Shift.model_validate(as_written(stage.params["shift"])),
            training=stage.params["training"],
            scratch=stage.scratch,
            progress=progress,
        )


def compare_remembrance_stage(stage: Stage) -> None:
    """Compare what the arms of the figure that the record names remember."""
    from farstate.evaluation.compare_remembrance import compare_remembrance

    compare_remembrance(**_comparison(stage))
