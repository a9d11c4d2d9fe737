"""The evaluation stages as the command line calls them: from a stage's record to the functions' arguments."""

from __future__ import annotations

from farstate.evaluation.compare import compare
from farstate.evaluation.perplexity import EvaluationSettings, evaluate
from farstate.evaluation.progress import ScoringProgress
from farstate.params import Compare, Evaluate, as_written
from farstate.stages import Stage


def perplexity_stage(stage: Stage) -> None:
    """Measure the model that the record names."""
    import torch

    device = stage.settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with ScoringProgress(stage.output.name) as progress:
        evaluate(
            checkpoint=stage.one("checkpoint"),
            store_directory=stage.one("store"),
            evaluate=Evaluate.model_validate(as_written(stage.params["evaluate"])),
            context=stage.params["context"],
            labels=stage.params["labels"],
            output=stage.output,
            settings=EvaluationSettings(
                device=device,
                threads=stage.threads,
                rows=stage.settings.evaluation_rows,
                segment_tokens=stage.settings.evaluation_segment,
            ),
            progress=progress,
        )


def compare_stage(stage: Stage) -> None:
    """Compare the arms of the figure that the record names."""
    compare(
        evaluations=stage.many("evaluations"),
        trainings=stage.params["trainings"],
        compare=Compare.model_validate(as_written(stage.params["compare"])),
        figure=stage.params["figure"],
        output=stage.output,
    )
