"""The model card beside a repaired checkpoint: what was done to it, what that changed, and how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from farstate.errors import FarstateError
from farstate.keys import Stage
from farstate.own_model.checkpoint import Known
from farstate.plan import Plan
from farstate.provenance import versions
from farstate.reports.diagnosis import Answer

_CARD = "README.md"
_LIBRARIES = {
    "transformers": (
        "transformers",
        "from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained(FOLDER)",
    ),
    "fla": (
        "fla",
        "import fla  # registers its models\nfrom transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained(FOLDER)",
    ),
    "mamba-ssm": (
        "mamba-ssm",
        "from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel\n\nmodel = MambaLMHeadModel.from_pretrained(FOLDER)",
    ),
    "blinkdl": ("rwkv", "from farstate.models.checkpoints import load_model\n\nmodel = load_model(FOLDER)"),
    "farstate": ("farstate", "from farstate.models.checkpoints import load_model\n\nmodel = load_model(FOLDER)"),
}
"""By format, the library's name on the hub and how it loads a folder."""


def card(known: Known, plan: Plan, stage: Stage, arm: str, found: Answer, recipe: dict[str, Any]) -> str:
    """The card as Markdown, with the front matter that the hub reads.

    Args:
        stage: the post-training whose weights lie beside the card.
        arm: its name in `posttrain.arms`.
        found: the answer of the repair.
        recipe: of the post-training, with its `steps`.
    """
    library, loading = _LIBRARIES[known.format]
    front: dict[str, Any] = {
        "base_model": known.given,
        "library_name": library,
        "tags": ["farstate", "length-generalization", known.config.architecture, arm],
    }
    if (licence := _licence(known.folder)) is not None:
        front["license"] = licence
    judged = found.judgements[arm]
    columns = [name for name, _ in found.lines[0]["cells"]]
    table = [
        f"| measure | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| {line['measure']} | {' | '.join(cell for _, cell in line['cells'])} |" for line in found.lines),
    ]
    tokens = int(recipe["steps"]) * int(recipe["batch_tokens"])
    share = f", {100 * tokens / known.pretrained_tokens:.2g} % of the pre-training's" if known.pretrained_tokens else ""
    sources = ", ".join(str(source.package or source.files or source.hub) for source in plan.params.corpus.sources)
    done = [
        f"- Post-trained for {recipe['steps']} steps of {recipe['batch_tokens']:,} tokens ({tokens:,} in all{share}), each sequence of "
        f"{known.context:,} tokens, from initial states of the kind `{arm}`: `{stage.params['arm']}`.",
        f"- Peak learning rate {recipe['peak_learning_rate']:g} ({plan.params.figures.repair.rate if plan.params.figures.repair else ''}), "
        f"warm-up {recipe['warmup']:g} of the steps, then a cosine to {recipe['final_learning_rate']:g}; precision {recipe['precision']}; "
        f"seed {stage.params['seed']}.",
        f"- Corpus: {sources} (training split; measured on held-out documents).",
        f"- Keys: post-training `{stage.key}`, store `{plan.store.key}`.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions().items() if name in ('farstate', 'python', 'torch'))}.",
    ]
    needed = f" About {judged.documents:,.0f} documents in all would decide it [assumed]." if judged.documents is not None else ""
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {Path(known.given).name}, after {arm.replace('_', ' ')}",
        "",
        f"**{judged.outcome}.** {judged.reason}{needed}",
        "",
        "## What was done",
        "",
        *done,
        "",
        "## Before and after",
        "",
        *table,
        "",
        "Intervals in brackets, over documents; they say nothing about another training run. The control took the same steps from the zero "
        "state. A perplexity that holds shows that nothing breaks, not that distant text is used.",
        "",
        "## How to load it",
        "",
        f"```python\n{loading.replace('FOLDER', repr('.'))}\n```",
        "",
        "Made with Farstate, after Buitrago Ruiz & Gu, *Understanding and Improving Length Generalization in Recurrent Models* "
        "(arXiv 2507.02782).",
        "",
    ]
    return "\n".join(lines)


def _licence(folder: Path) -> str | None:
    """The licence that the card beside a checkpoint tells, or None."""
    path = folder / _CARD
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---"):
        return None
    try:
        front = yaml.safe_load(text.split("---", 2)[1])
    except (yaml.YAMLError, FarstateError):
        return None
    licence = front.get("license") if isinstance(front, dict) else None
    return licence if isinstance(licence, str) else None
