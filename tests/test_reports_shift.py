"""The page of shifts: sentences by rule from invented tables, files, layout in a browser."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import altair
import polars as pl
import pytest

from farstate.errors import FarstateError
from farstate.evaluation.shift import ASSOCIATION_SCHEMA, MEASURES, SHIFT_SCHEMA, SWAPS_SCHEMA, beyond, summary
from farstate.evaluation.swap_effects import explains
from farstate.files import write_manifest
from farstate.reports import shift, shift_text
from farstate.reports.figures import FIGURES
from farstate.reports.page import MAXIMUM_BYTES, OUTPUTS
from test_reports_curves import page_data

POSITIONS, CONTEXT, HEADS = (16, 64, 250), 16, 8
INTERVAL = "95 % bootstrap over 24 documents"


def write_run(
    folder: Path,
    arm: str,
    *,
    seed: int = 0,
    new: float = 1.0,
    excess: float = 0.0,
    effect: float = 0.0,
    reason: str = "",
    chains: int = 0,
) -> Path:
    """Tables of a run whose states lie `new` times as far from training as they should at the last position."""
    folder.mkdir(parents=True)
    named: dict[str, Any] = {"model": "m", "arm": arm, "seed": seed, "train_length": CONTEXT}
    rows = []
    for reference in ("own training", "zero start"):
        for head in range(HEADS):
            for place, position in enumerate(POSITIONS):
                for measure in MEASURES:
                    grown = new ** (place / (len(POSITIONS) - 1))
                    value = {
                        "novelty": grown,
                        "sliced_wasserstein": 0.1 * grown,
                        "accuracy": 1 - 0.5 / grown,
                        "auc": 1 - 0.5 / grown,
                    }[measure]
                    null = {"novelty": 1.0, "sliced_wasserstein": 0.1, "accuracy": 0.5, "auc": 0.5}[measure]
                    numbers: dict[str, Any] = {"reason": reason}
                    if not reason:
                        numbers = {"value": value, "low": 0.95 * value, "high": 1.05 * value, "interval": INTERVAL}
                        numbers |= {"null": null, "null_low": 0.9 * null, "null_high": 1.1 * null}
                        numbers |= {"null_end": null, "null_end_low": 0.95 * null, "null_end_high": 1.15 * null}
                        numbers["beyond"] = beyond(numbers)
                    counts = {"n_states": 300, "n_documents": 24, "n_reference": 1000, "n_reference_documents": 30}
                    where = {
                        "layer": head // 4,
                        "head": head % 4,
                        "position": position,
                        "reference": reference,
                        "measure": measure,
                    }
                    rows.append({**named, **where, **counts, **numbers})
    swaps = [_swap("untouched", "none", False, excess)]
    for source, change in (("training state", effect), ("other document", 0.0)):
        for group, share in (("top", 1.0), ("random", 0.1)):
            swaps += [_swap(group, source, False, 0.1 * share * change, layer=0, head=head, heads=1) for head in range(2)]
            swaps += [_swap(group, source, together, share * change, heads=2) for together in (False, True)]
        swaps.append(_swap("all", source, True, 1.5 * change, heads=HEADS))
    for together in (False, True):
        swaps.append(_swap("top − random", "training state", together, 0.9 * effect))
        swaps.append(_swap("top", "training state − other document", together, effect))
    if reason:
        swaps = [swaps[0], {**_swap("top", "training state", False, None), "reason": reason}]
    association = [
        {
            **{"position": position, "reference": "own training", "across": "documents", "layer": head // 4, "head": head % 4},
            **{"predictor": "novelty", "outcome": "excess_nll", "n": 24, "reason": reason or None},
            **(
                {}
                if reason
                else {"value": 0.1 * head, "low": -0.3, "high": 0.9, "p": 0.001, "p_holm": 0.008 if head == 7 else 0.5}
            ),
        }
        for head in range(HEADS)
        for position in POSITIONS
    ]
    pl.DataFrame(rows, schema=SHIFT_SCHEMA).write_parquet(folder / "shift.parquet")
    pl.DataFrame([{**named, **row} for row in association], schema=ASSOCIATION_SCHEMA).write_parquet(
        folder / "association.parquet"
    )
    pl.DataFrame([{**named, **row} for row in swaps], schema=SWAPS_SCHEMA).write_parquet(folder / "swaps.parquet")
    met = {
        **{"states": 1000, "documents": 30, "chains": chains, "initial_state": "zero" if not chains else "state_passing"},
        **{"steps": 20 if chains else None, "rows_replayed": 8, "rows_of_a_batch": 16, "age_median": 40.0, "age_largest": 300},
        **{"null_states": [300, 300, 300], "null_end_states": 300, "null_documents": 24},
        **({"steps_replayed": 20, "steps_replayed_held_out": 7} if chains else {}),
    }
    contents = {
        **{"labels": {key: named[key] for key in ("model", "arm", "seed")}, "context": CONTEXT, "parameters": 40_000},
        **{"parameters_without_embeddings": 10_000, "positions": list(POSITIONS), "swap_position": POSITIONS[-1]},
        **{
            "summary": summary(rows),
            "swaps": {"explains": explains(swaps)},
            "references": {"own training": met, "zero start": met},
        },
        **{"interval": INTERVAL, "comparisons": HEADS * len(POSITIONS), "documents": 24, "stretches": 300, "broken_at": None},
    }
    write_manifest(folder, contents, ["shift.parquet", "association.parquet", "swaps.parquet"])
    return folder


def _swap(group: str, source: str, together: bool, value: float | None, margin: float = 0.01, **more: Any) -> dict[str, Any]:
    ends = {} if value is None else {"low": value - margin, "high": value + margin}
    row = {
        "position": POSITIONS[-1],
        "group": group,
        "source": source,
        "together": together,
        "value": value,
        "interval": INTERVAL,
    }
    return {
        "layer": None,
        "head": None,
        "heads": None,
        "drift": None,
        "reason": None,
        "n_texts": 300,
        "n_documents": 24,
        **row,
        **ends,
        **more,
    }


def context(**changes: Any) -> dict[str, Any]:
    card = {"parameters": 40_000, "parameters_without_embeddings": 10_000, "training_tokens": 10**6, "context": CONTEXT}
    return {
        "models": {"m": {**card, "label": "small (40K)", "architecture": "mamba2", "paper_model": None}},
        "scale": "test",
        "budget": "20 post-training steps of 100 tokens",
        "parameters": [{"name": "shift.length", "value": 256}],
        "provenance": {"commit": "abc"},
        "note": "Synthetic tables.",
        **changes,
    }


def build(folder: Path, directories: list[Path], **changes: Any) -> dict[str, Path]:
    output = {kind: folder / f"shift.{kind}" for kind in OUTPUTS}
    shift.draw(FIGURES["shift"], {"shift": directories}, output, context(**changes), {"figure": "shift"})
    return output


def built(root: Path) -> dict[str, Path]:
    """The page of four runs."""
    return build(
        root,
        [
            write_run(root / "passing.s1", "state_passing", seed=1, new=1.02, chains=90),
            write_run(root / "passing.s0", "state_passing", new=1.02, chains=90),
            write_run(root / "base", "base", new=40.0, excess=1.0, effect=-0.6),
            write_run(root / "control", "control", new=30.0, excess=0.9, effect=0.05),
        ],
    )


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return built(tmp_path_factory.mktemp("shift-page"))


def words_of(output: dict[str, Path]) -> str:
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", output["html"].read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", markup)))


def test_the_page_says_what_the_tables_hold(drawn: dict[str, Path]) -> None:
    words = words_of(drawn)
    assert "at t = 250 all 8 heads of the base model are in states that training did not meet" in words
    assert (
        "in the median head 40.0 times that among training states (inside training 0.90 to 1.10, at t = T_train 0.95 to 1.15)"
        in words
    )
    assert "After state passing, seed 0: 0 of 8 heads, median 1.02." in words
    assert re.search(r"Does it explain the excess of base \(no post-training\)\? Yes, in part", words)
    assert (
        "Training states in the 2 heads that drift most, swapped together, change it by −0.600 (−0.610 to −0.590); less what they change in "
        "random heads −0.540 (−0.550 to −0.530), less what other documents' states change in the same heads −0.600 (−0.610 to −0.590). "
        "Training states in the 2 heads that drift most, swapped one at a time, change it by −0.600"
    ) in words
    assert "The rule is tried both ways, uncorrected." in words
    assert re.search(r"Does it explain the excess of zero-init control\? Not shown", words)
    assert re.search(r"excess of state passing, seed 1\? Not asked: .* is not established above zero", words)
    assert "The held-out split has text for 7 steps only against 20" in words
    assert "1 of 8 heads at t = 250" in words
    assert "24 heads and positions of each arm are compared with each measure" in words
    assert "nothing is corrected, and heads of one model depend on each other" in words
    assert "Passed states carry a mixture of many documents" in words
    assert "8 of 16 rows of each" in words
    for path in drawn.values():
        assert path.stat().st_size > 1000
    assert drawn["html"].stat().st_size < MAXIMUM_BYTES
    table = pl.read_parquet(drawn["parquet"])
    assert set(table["arm"]) == {"base", "control", "state_passing"}
    assert set(table["reference"]) == {"own training", "zero start"}


def test_specifications_are_valid_vega_lite(drawn: dict[str, Path]) -> None:
    charts = {chart["id"]: chart for chart in page_data(drawn["html"].read_text(encoding="utf-8"))["charts"]}
    assert len(charts) == 3 + 2 * 3 + 3
    for name in ("novelty-0", "strip-accuracy-1-0", "swaps-0-0"):
        altair.LayerChart.from_dict(charts[name]["spec"])


def test_states_that_are_not_new_are_called_so(tmp_path: Path) -> None:
    words = words_of(build(tmp_path, [write_run(tmp_path / "base", "base", new=1.01)]))
    assert "that states of the base model at t = 250 are new is not shown" in words
    assert "There is no zero-init control here to compare with" in words
    assert "Passed states carry a mixture" not in words


@pytest.mark.parametrize("ends", [(None, None), (float("nan"), float("nan"))])
@pytest.mark.parametrize(("missing", "said"), [("untouched", "Not known: its excess"), ("top", "What swaps change is not known")])
def test_without_an_interval_nothing_is_claimed(missing: str, said: str, ends: tuple[float | None, float | None]) -> None:
    rows = []
    for together in (False, True):
        rows += [
            _swap("untouched", "none", False, 0.5),
            _swap("top", "training state", together, -0.3, heads=2),
            _swap("top − random", "training state", together, -0.2),
            _swap("top", "training state − other document", together, -0.2),
        ]
    rows = [{**row, "low": ends[0], "high": ends[1]} if row["group"] == missing else row for row in rows]
    assert shift_text.explained({"swaps": rows, "explains": explains(rows)}, 250).count(said) == 1


@pytest.mark.parametrize(
    ("excess", "said"),
    [(0.5, "above"), (0.005, "Not asked: its excess after t = 250 is +0.005"), (-0.5, "which is below zero: long states help")],
)
def test_an_excess_and_two_ways_that_disagree(excess: float, said: str) -> None:
    rows = [_swap("untouched", "none", False, excess)]
    for together, margin in ((False, 1.0), (True, 0.01)):
        rows += [
            _swap("top", "training state", together, -0.3, heads=2),
            _swap("top − random", "training state", together, -0.2, margin),
            _swap("top", "training state − other document", together, -0.25),
        ]
    words = shift_text.explained({"swaps": rows, "explains": explains(rows)}, 250)
    if said != "above":
        assert said in words
        return
    assert words.startswith(
        "The two ways of swapping disagree: swapped together their drift explains some of it, swapped one at a time that is not shown."
    )
    assert "random heads −0.200 (−0.210 to −0.190)" in words
    assert "random heads −0.200 (−1.200 to +0.800)" in words


def test_without_numbers_the_page_gives_the_reason(tmp_path: Path) -> None:
    reason = "60 training states; a test needs 200 (shift.minimum_states)"
    output = build(tmp_path, [write_run(tmp_path / "base", "base", reason=reason)])
    words = words_of(output)
    assert "nothing can be said of the states at t = 250" in words
    assert reason in words
    assert page_data(output["html"].read_text(encoding="utf-8"))["charts"] == []


def test_bad_input(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "base", "base")
    with pytest.raises(FarstateError, match="of which the context says nothing"):
        build(tmp_path, [folder], models={})
    pl.read_parquet(folder / "swaps.parquet").drop("group").write_parquet(folder / "swaps.parquet")
    with pytest.raises(FarstateError, match="column group is missing"):
        build(tmp_path, [folder])
    (folder / "shift.parquet").unlink()
    with pytest.raises(FarstateError, match="no such file"):
        build(tmp_path, [folder])
