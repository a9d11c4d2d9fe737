"""What stands at the head of the pages `diagnosis` and `repair`, and at the end of their commands: a plain answer, by rule, from the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars

from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.own_model.repairing import Judgement, judge_repair
from farstate.reports import page, state_text, text
from farstate.reports.page import Section
from farstate.reports.tables import read_table
from farstate.reports.text import Finding, Row
from farstate.reports.theme import arm_styles
from farstate.runs import BASE, CONTROL

REACH_COLUMNS = (
    *("model", "arm", "seed", "train_length", "T", "verdict", "fails_beyond", "would_be", "documents_to_decide"),
    *("worst_beyond", "gap_beyond", "gap_beyond_low", "gap_beyond_high"),
)
SUGGESTED = "state_passing"
_MANY = 1e6
_GUILTY = 3
"""Heads that are named."""


@dataclass(frozen=True)
class Answer:
    """Of one model.

    Attributes:
        outcome: in capitals: PASS, FAIL, UNDECIDED of Def. 3.2, or the outcome of a repair.
        headline: in a sentence.
        findings: what it rests on, and what to try.
        reach: rows of the table of verdicts by T, the base first, by arm.
        judgements: of the arms that are to repair, by arm.
        lines: before, control and after, by measure; empty without a repair.
    """

    outcome: str
    headline: str
    findings: list[Finding]
    reach: Sequence[Row]
    judgements: dict[str, Judgement] = field(default_factory=dict)
    lines: Sequence[Row] = field(default_factory=list)

    @property
    def arms(self) -> dict[str, str]:
        """Those of `reach`, with their labels."""
        return {row["arm"]: row["label"] for row in self.reach}

    @property
    def by_length(self) -> dict[int, dict[str, Row]]:
        """The rows of `reach` by T and arm."""
        found: dict[int, dict[str, Row]] = {}
        for row in self.reach:
            found.setdefault(int(row["T"]), {})[row["arm"]] = row
        return found


def answer(
    inputs: Mapping[str, Sequence[Path]], model: str, label: str, figure: Mapping[str, Any], recipe: Mapping[str, Any]
) -> Answer:
    """The plain answer about a model.

    Args:
        inputs: by role the results' directories, as of a page.
        model: in the tables.
        label: for readers.
        figure: the figure's parameters.
        recipe: of the post-training, with its `steps`.

    Raises:
        FarstateError: a table or a column is missing, or the tables hold no base.
    """
    comparison, reach = inputs["comparison"][0], inputs["reach"][0]
    verdicts = read_table(comparison, "verdicts", ("model", "arm", "seed", "verdict", "ppl_ratio"))
    mine = {
        row["arm"]: row
        for row in verdicts.filter((polars.col("model") == model) & polars.col("seed").is_null()).iter_rows(named=True)
    }
    if BASE not in mine:
        raise FarstateError(
            f"{comparison / 'verdicts.parquet'}: holds no verdict on the base of {model}; run the comparison again"
        )
    steps = read_table(reach, "reach", REACH_COLUMNS, may_be_empty=True).filter(
        (polars.col("model") == model) & polars.col("seed").is_null()
    )
    names = {style.name: style.label for style in arm_styles(mine)} | {BASE: "base"}
    order = [BASE, *(arm for arm in names if arm != BASE)]
    told = [
        {**row, "label": names[row["arm"]]}
        for arm in order
        for row in steps.filter(polars.col("arm") == arm).sort("T").iter_rows(named=True)
    ]
    base = mine[BASE]
    of_base = [row for row in told if row["arm"] == BASE]
    why = _states(inputs, model)
    arms = [arm for arm in order if arm not in (BASE, CONTROL)]
    if not arms:
        findings = [Finding("To where.", _where(base, of_base)), Finding("By how much.", _how_much(base)), *why]
        findings += [Finding("What to try.", words) for words in _try(base, figure, recipe)]
        return Answer(_outcome(base), _headline(label, base, of_base), findings, told)
    differences = read_table(
        comparison, "differences", ("model", "arm", "seed", "against_arm", "quantity", "value"), may_be_empty=True
    )
    judgements = {}
    for arm in arms:
        found = differences.filter(
            (polars.col("model") == model)
            & (polars.col("arm") == arm)
            & (polars.col("against_arm") == CONTROL)
            & (polars.col("quantity") == "nll")
            & polars.col("seed").is_null()
        )
        judgements[arm] = judge_repair(
            base,
            mine[arm],
            mine.get(CONTROL),
            found.row(0, named=True) if found.height else None,
            least_removed=float(figure["least_removed"]),
            tolerance=float(figure["short_context_tolerance"]),
        )
    first = next(iter(judgements.values()))
    findings = []
    for arm, judged in judgements.items():
        words = judged.reason
        if judged.documents is not None:
            words += f" {documents(judged.documents).capitalize()} documents in all would decide it, if the estimates stay as they are [assumed]."
        findings.append(Finding(f"{names[arm].capitalize()}: {judged.outcome}.", words))
    findings += [Finding("Before.", f"{_where(base, of_base)} {_how_much(base)}"), *why]
    headline = f"{label}: {'; '.join(f'{names[arm]}: {judged.outcome}' for arm, judged in judgements.items())}."
    lines = _beside(mine, order, names)
    return Answer(first.outcome, headline, findings, told, judgements, lines)


def lead(
    inputs: Mapping[str, Sequence[Path]], models: Mapping[str, str], figure: Mapping[str, Any], recipe: Mapping[str, Any]
) -> Section:
    """The first section of the page; `models`: names in the tables, with their labels."""
    answers = [answer(inputs, model, label, figure, recipe) for model, label in models.items()]
    html = page.fragment(
        "diagnosis_lead.html.j2",
        answers=answers,
        documents=documents,
        times=lambda row: f"{row['T'] / row['train_length']:g}",
        removed=text.share(float(figure["least_removed"])),
        tolerance=f"{float(figure['short_context_tolerance']):g}",
    )
    return Section(html, leads=[found.headline for found in answers])


def documents(number: float) -> str:
    """How many would decide something, which is an order of magnitude."""
    return f"about {text.count(number)}" if number < _MANY else "more than a million"


def _outcome(base: Row) -> str:
    if base["verdict"] == "FAIL" and not base["fails_beyond"]:
        return "UNDECIDED" if base["fails_beyond"] is None else "FAIL"
    return str(base["verdict"])


def _headline(label: str, base: Row, steps: Sequence[Row]) -> str:
    length, times = _last(steps)
    if base["verdict"] == "PASS":
        return f"{label} generalises in length, as far as was measured: to {length:,} tokens, {times} times its training length."
    if base["verdict"] == "UNDECIDED":
        return f"{label}: these texts cannot tell whether it generalises to {length:,} tokens, {times} times its training length."
    if not base["fails_beyond"]:
        return f"{label} misses Def. 3.2 inside its training length; a failure beyond it is not shown."
    return f"{label} does not generalise in length: it fails beyond its training length of {base['train_length']:,} tokens."


def _last(steps: Sequence[Row]) -> tuple[int, str]:
    row = steps[-1]
    return int(row["T"]), f"{row['T'] / row['train_length']:g}"


def _where(base: Row, steps: Sequence[Row]) -> str:
    """To which T the verdict is PASS, from which on FAIL, and what lies between."""
    if not steps:
        return "Nothing beyond the training length was measured."
    passes = [row["T"] for row in steps if row["verdict"] == "PASS"]
    fails = [row["T"] for row in steps if row["verdict"] == "FAIL" and row["fails_beyond"]]
    open_ = [row for row in steps if row["verdict"] == "UNDECIDED"]
    parts = []
    if passes:
        parts.append(f"it passes Def. 3.2 to T = {max(passes):,}")
    else:
        parts.append(f"no T beyond the training length of {base['train_length']:,} passes Def. 3.2")
    if fails:
        parts.append(f"it fails from T = {min(fails):,} on")
    if open_:
        between = text.listing([f"{row['T']:,}" for row in open_])
        parts.append(f"undecided to T = {between}" + _needed(open_[-1]))
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]} (tolerance {base['tolerance']:g} nats)."


def _needed(row: Row) -> str:
    if not text.finite(row["documents_to_decide"]):
        return ""
    return f" ({documents(row['documents_to_decide'])} documents would make it {row['would_be']} [assumed])"


def _how_much(base: Row) -> str:
    if text.finite(base["broken_at"]):
        return f"Its loss is not a number from position {base['broken_at']:,} on."
    parts = []
    if text.finite(base["gap_beyond"]):
        near = f" near position {base['worst_beyond']:,}" if text.finite(base["worst_beyond"]) else ""
        parts.append(
            f"beyond the training length its loss is at most {text.estimate(base, 'gap_beyond')} nats above its best{near}"
        )
    if text.finite(base["ppl_ratio"]):
        parts.append(
            f"from position {base['far_from']:,} to {base['far_to']:,} its perplexity is {text.estimate(base, 'ppl_ratio', _ratio)} times its best"
        )
    if text.finite(base["excess_nll"]):
        parts.append(
            f"there the carried state costs {text.estimate(base, 'excess_nll')} nats against fresh windows of T_train tokens"
        )
    sentence = "; ".join(parts) or "nothing beyond the training length was measured"
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _ratio(value: Any) -> str:
    return f"{value:.3g}" if text.finite(value) else text.NONE


def _states(inputs: Mapping[str, Sequence[Path]], model: str) -> list[Finding]:
    """Which heads leave their range."""
    if not inputs.get("states"):
        return []
    directory = inputs["states"][0]
    summary = next(
        (
            row
            for row in read_manifest(directory).get("summary", [])
            if (row["model"], row["arm"], row["seed"]) == (model, BASE, None)
        ),
        None,
    )
    if summary is None or not summary.get("n_known"):
        return []
    beyond = summary["n_up"] + summary["n_down"]
    words = f"{beyond} of {summary['n_known']} heads leave the range they had inside the training length ({summary['n_up']} widen, {summary['n_down']} narrow)"
    heads = read_table(
        directory, "heads", ("model", "arm", "seed", "layer", "head", "drift", "beyond", "rank"), may_be_empty=True
    )
    guilty = heads.filter(
        (polars.col("model") == model) & (polars.col("arm") == BASE) & polars.col("seed").is_null() & polars.col("beyond")
    ).sort("rank")
    named = [
        f"layer {row['layer']}, head {row['head']} (× {state_text.factor(row['drift'])})"
        for row in guilty.head(_GUILTY).iter_rows(named=True)
    ]
    return [
        Finding(
            "Its states.",
            words
            + (f", most of all {text.listing(named)}" if named else "")
            + ". A drift goes with a failure or not; it is no proof of its cause.",
        )
    ]


def _try(base: Row, figure: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """What to do next, with numbers."""
    if base["verdict"] == "PASS":
        return ["Nothing: use it as it is, to the length measured. What it remembers is another question, see below."]
    if base["verdict"] == "UNDECIDED":
        needed = base["documents_to_decide"]
        if text.finite(needed):
            return [
                f"Measure on more text: {documents(needed)} documents of this length in all (now {base['n_documents']:,}) would decide "
                f"it as {base['would_be']}, if the gap stays as it is [assumed]."
            ]
        return ["Measure on more text: give more documents with --corpus, or --budget full."]
    if not base["fails_beyond"]:
        return ["No repair: it is worse inside its training length, where no initial state helps."]
    tokens = int(recipe["steps"]) * int(recipe["batch_tokens"])
    known = figure.get("pretrained_tokens")
    share = f", {100 * tokens / known:.2g} % of its pre-training" if known else " (its pre-training's tokens are not recorded)"
    found = [
        f"farstate repair {figure.get('given') or 'CHECKPOINT'} --with {SUGGESTED} --steps {recipe['steps']}: {text.magnitude(tokens)} tokens for "
        f"it and as many for the zero-init control{share}; peak rate {text.scientific(recipe['peak_learning_rate'])}, {figure.get('rate') or 'as given'}."
    ]
    if text.direction(base, "beats_reset") == 1:
        found.append(
            f"Without any training: forget the state every {base['train_length']:,} tokens. Far out that is "
            f"{text.estimate(base, 'beats_reset')} nats better than carrying it, and nothing farther back is used."
        )
    return found


def _beside(mine: Mapping[str, Row], order: Sequence[str], names: Mapping[str, str]) -> list[Row]:
    """Before, control and after, side by side: a line a measure."""
    arms = [arm for arm in order if arm in mine]
    measures: list[tuple[str, Any]] = [
        ("Def. 3.2", lambda row: str(row["verdict"])),
        ("widest gap beyond T_train, nats", lambda row: text.estimate(row, "gap_beyond")),
        ("far excess, own windows, nats", lambda row: text.estimate(row, "excess_nll")),
        ("far excess, base's windows, nats", lambda row: text.estimate(row, "excess_nll_base")),
        ("of the base's far excess removed", lambda row: text.estimate(row, "removed_base", text.share)),
        ("short-context cost, nats", lambda row: text.estimate(row, "short_context_cost")),
        (
            "best perplexity inside T_train",
            lambda row: text.perplexity(row["p_star"]) if text.finite(row["p_star"]) else text.NONE,
        ),
    ]
    return [{"measure": name, "cells": [(names[arm], write(mine[arm])) for arm in arms]} for name, write in measures]
