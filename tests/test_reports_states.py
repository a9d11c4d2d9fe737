"""Pages of the states: sentences from invented summaries, pages from invented measurements that went through the comparison."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import altair
import polars as pl
import pytest

from farstate.errors import FarstateError
from farstate.evaluation.compare_states import compare_states
from farstate.files import write_manifest
from farstate.params import Compare
from farstate.reports import state_text, states
from farstate.reports.figures import FIGURES
from farstate.reports.page import MAXIMUM_BYTES, OUTPUTS
from test_reports_curves import page_data
from test_states import DRIFT, read_manifest_loosely, write_measurement

NAMES = {"base": "base (no post-training)", "control": "zero-init control", "state_passing": "state passing"}
ARMS = tuple(NAMES)


def compared(root: Path) -> Path:
    """Two models; in `m` one head drifts up and one down, `large` breaks at position 100."""
    size = {"documents": 8, "length": 256}
    half = {key: value / 2 for key, value in DRIFT.items()}
    directories = [
        write_measurement(root / "base", drift=DRIFT, **size),
        write_measurement(root / "control.s0", "control", drift=DRIFT, **size),
        write_measurement(root / "control.s1", "control", 1, drift=DRIFT, size=1.01, **size),
        write_measurement(root / "passing", "state_passing", drift=half, size=1.5, **size),
        write_measurement(root / "broken", model="large", broken=100, **size),
        *(write_measurement(root / f"large.{arm}", arm, model="large", drift=half, **size) for arm in ARMS[1:]),
    ]
    compare_states(
        evaluations=directories,
        compare=Compare(resamples=200),
        figure={"models": ["m", "large"], "arms": list(ARMS)},
        output=root / "comparison",
    )
    return root / "comparison"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("states-page"))


def context(**changes: Any) -> dict[str, Any]:
    card = {"parameters": 40_000, "parameters_without_embeddings": 10_000, "training_tokens": 10**6, "context": 16}
    return {
        "models": {
            "m": {**card, "label": "small (40K)", "architecture": "mamba2", "paper_model": None},
            "large": {**card, "label": "large (40K)", "architecture": "mamba1", "paper_model": None},
        },
        "scale": "test",
        "budget": "10 post-training steps of 100 tokens",
        "parameters": [{"name": "states.length", "value": 256}],
        "provenance": {"commit": "abc"},
        "note": "Synthetic tables.",
        "figure": {"heads": None},
        **changes,
    }


def build(page: str, comparison: Path, folder: Path, **changes: Any) -> dict[str, Path]:
    output = {kind: folder / f"{page}.{kind}" for kind in OUTPUTS}
    states.draw(FIGURES[page], {"states": [comparison]}, output, context(**changes), {"figure": page})
    return output


@pytest.fixture(scope="module")
def pages(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    return {figure: build(figure, comparison, tmp_path_factory.mktemp(figure)) for figure in ("fig4", "fig9")}


def words_of(output: dict[str, Path]) -> str:
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", output["html"].read_text(encoding="utf-8"), flags=re.S)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup)))


@pytest.mark.parametrize("figure", ["fig4", "fig9"])
def test_both_pages_are_drawn(pages: dict[str, dict[str, Path]], figure: str) -> None:
    output, words = pages[figure], words_of(pages[figure])
    page = output["html"].read_text(encoding="utf-8")
    assert len(page.encode()) < MAXIMUM_BYTES
    assert output["svg"].read_text().startswith("<svg")
    assert output["png"].stat().st_size > 20_000
    for sentence in (
        "A stable standard deviation is not an equal distribution",
        "Intervals over texts say nothing about another training run",
        "8 documents",
        "simultaneous over all heads",
        "the base model's state is not finite from position 100 on",
        "LongSSM",
        "Synthetic tables",
        "Of an architecture that the paper's figure does not show: large (40K)",
        "a head is one channel",
    ):
        assert sentence in words, sentence
    assert not re.search(r"\b(None|nan|inf)\b", words)
    charts = [chart["id"] for chart in page_data(page)["charts"]]
    table = pl.read_parquet(output["parquet"])
    if figure == "fig4":
        # Whole model, norm, largest entry, two layers, mean, convolution.
        assert charts == [
            f"{name}-{model}" for model in (0, 1) for name in ("std", "norm", "largest", "std_0", "std_1", "mean", "std_conv")
        ]
        assert set(table["statistic"]) == {"std", "norm", "largest", "mean"}
        assert "here too, in" in words
        assert "the shift counts, not the size" in words
    else:
        # Heads by drift: 0/0 (2.0), 1/0 (−1.0), 1/1 (0.5), 0/1.
        heads = ("0_0", "1_0", "1_1", "0_1")
        assert charts[:11] == [*(f"std_{h}-0" for h in heads), *(f"rank_{h}-0" for h in heads), "map-0-0", "map-1-0", "map-2-0"]
        assert charts[11] == "ranking-0"
        assert "in the base model 3 of 4 heads drift, 2 wider and 1 narrower than at the end of training" in words
        assert "The base's largest: layer 0, head 0 (× 2." in words
        assert set(table["statistic"].drop_nulls()) == {"std", "effective_rank"}
        assert table["drift"].drop_nulls().len() > 0


def test_specifications_are_valid_vega_lite(pages: dict[str, dict[str, Path]]) -> None:
    for figure, names in (("fig4", ("std-0",)), ("fig9", ("map-0-0", "ranking-0"))):
        charts = {chart["id"]: chart["spec"] for chart in page_data(pages[figure]["html"].read_text(encoding="utf-8"))["charts"]}
        for name in names:
            altair.LayerChart.from_dict(charts[name])


def test_heads_that_are_asked_for_are_drawn(comparison: Path, tmp_path: Path) -> None:
    output = build("fig9", comparison, tmp_path, figure={"heads": [[1, 1], [0, 1]]})
    charts = [chart["id"] for chart in page_data(output["html"].read_text(encoding="utf-8"))["charts"]]
    assert [name for name in charts if name.startswith("std_")] == ["std_1_1-0", "std_0_1-0", "std_1_1-1", "std_0_1-1"]
    assert "The heads asked for." in words_of(output)
    with pytest.raises(FarstateError, match=r"no model has layer 7, head 2.*m: layers 0 to 1, heads 0 to 1.*give null"):
        build("fig9", comparison, tmp_path, figure={"heads": [[7, 2]]})


def test_the_papers_values_stand_beside_the_papers_model_only(comparison: Path, tmp_path: Path) -> None:
    changed = context()["models"]
    changed["m"]["paper_model"] = "mamba2-370m"
    output = build("fig4", comparison, tmp_path, models=changed)
    charts = {chart["id"]: chart for chart in page_data(output["html"].read_text(encoding="utf-8"))["charts"]}
    points = [curve for curve in charts["std-0"]["curves"] if curve["kind"] == "paper"]
    assert sum(len(curve["position"]) for curve in points) == 9
    assert {curve["arm"] for curve in points} == {"base", "state_passing"}
    assert not any(curve["kind"] == "paper" for name in ("norm-0", "std-1") for curve in charts[name]["curves"])
    assert "the size of its model is not stated" in words_of(output)


def test_bad_input(comparison: Path, tmp_path: Path) -> None:
    with pytest.raises(FarstateError, match="of which the context says nothing"):
        build("fig4", comparison, tmp_path, models={"m": context()["models"]["m"]})
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("states", "heads"):
        pl.read_parquet(comparison / f"{name}.parquet").write_parquet(copy / f"{name}.parquet")
    manifest = {k: v for k, v in read_manifest_loosely(comparison).items() if k not in ("files", "summary")}
    write_manifest(copy, manifest, ["states.parquet", "heads.parquet"])
    with pytest.raises(FarstateError, match="has no summary"):
        build("fig4", copy, tmp_path)
    pl.read_parquet(copy / "heads.parquet").drop("rank").write_parquet(copy / "heads.parquet")
    with pytest.raises(FarstateError, match="column rank is missing"):
        build("fig4", copy, tmp_path)
    with pytest.raises(FarstateError, match="no path given for svg"):
        states.draw(FIGURES["fig4"], {"states": [comparison]}, {"html": tmp_path / "x"}, context(), {})


# Sentences


def summary_of(arm: str = "base", **changes: Any) -> dict[str, Any]:
    return {
        **{"model": "m", "arm": arm, "seed": None, "n_seeds": 1, "n_heads": 16, "n_known": 16, "n_up": 3, "n_down": 1},
        **{"near_from": 24, "near_to": 32, "far_from": 1025, "far_to": 2048, "broken_at": None, "begins": 46},
        **{"std_near": 1.0, "std_far": 2.0, "drift": 1.0, "drift_low": 0.8, "drift_high": 1.2},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            "x: the base model's state drifts. Its standard deviation widens × 2 (1.74 to 2.3) between positions 24 to 32 and 1,025",
        ),
        ({"drift": -1.0, "drift_low": -1.2, "drift_high": -0.8}, "narrows × 0.5"),
        ({"drift": 0.0, "drift_low": -0.1, "drift_high": 0.1}, "x: no drift of the base model's state is established"),
        ({"drift_low": None, "drift_high": None}, "without an interval nothing is established"),
        ({"far_from": None, "drift": None, "begins": None}, "ends at the training length"),
        (
            {"broken_at": {"position": 77, "layer": 3, "document": "d", "stretch": 0, "stretches": 2}},
            "not finite from position 77 on (layer 3, document d",
        ),
    ],
)
def test_the_headline_claims_what_the_interval_allows(changes: dict[str, Any], expected: str) -> None:
    headline, _ = state_text.whole("x", {"base": summary_of(**changes)}, NAMES)
    assert expected in headline
    assert ("drifts." in headline) == (changes in ({}, {"drift": -1.0, "drift_low": -1.2, "drift_high": -0.8}))


def test_findings_of_the_whole_model() -> None:
    bins = {
        "n_bins": 22,
        "n_bins_within": 10,
        "n_above_base": 15,
        "n_below_base": 2,
        "n_above_base_beyond": 9,
        "n_above_base_within": 6,
    }
    none = {**bins, "n_above_base": 0, "n_above_base_beyond": 0, "n_above_base_within": 0}

    def findings(**arms: dict[str, Any]) -> dict[str, str]:
        summary = {"base": summary_of()} | {arm: summary_of(arm, **changes) for arm, changes in arms.items()}
        return {finding.topic: finding.text for finding in state_text.whole("x", summary, NAMES)[1]}

    found = findings(control=none, state_passing=bins)
    assert found["Where it begins."].startswith(
        "It leaves the value at the end of training in the bin from position 46 on, 1.4 × T_train"
    )
    assert found["Heads."].startswith("4 of 16 heads (25 %) drift beyond the simultaneous interval: 3 widen, 1 narrow")
    assert "in 15 of 22 bins (9 of 12 beyond the training length), below in 2" in found["State passing."]
    assert "not repair it by keeping the state small" in found["Shift, not size."]
    assert "control" not in found["Shift, not size."]
    assert "so further steps by themselves do it too" in findings(control=bins, state_passing=bins)["Shift, not size."]
    assert "Shift, not size." not in findings(control=bins, state_passing=none)
    still = findings(control=none, state_passing={**none, "drift": 0.0, "drift_low": -0.1, "drift_high": 0.1})
    assert still["State passing."].startswith("No drift is established: × 1 (0.933 to 1.07)")
    assert (
        "right beyond it"
        in {f.topic: f.text for f in state_text.whole("x", {"base": summary_of(begins=33)}, NAMES)[1]}["Where it begins."]
    )
    assert (
        "In no bin"
        in {f.topic: f.text for f in state_text.whole("x", {"base": summary_of(begins=None)}, NAMES)[1]}["Where it begins."]
    )
    assert "not here" in state_text.paper_whole(none)


def test_sentences_about_heads() -> None:
    def row(arm: str, head: int, drift: float, against: tuple[float, float] | None) -> dict[str, Any]:
        low, high = against or (None, None)
        return {
            **{"arm": arm, "layer": 1, "head": head, "drift": drift, "low": drift - 0.1, "high": drift + 0.1, "rank": head + 1},
            **{"against_base_low": low, "against_base_high": high},
        }

    rows = [row("base", 0, 2.0, None), row("base", 1, -0.5, None)]
    rows += [row("control", 0, 1.0, (-1.1, -0.9)), row("control", 1, -0.5, (-0.1, 0.1))]
    summary = {
        "base": summary_of(n_heads=2, n_known=2, n_up=1, n_down=1),
        "control": summary_of("control", n_heads=3, n_known=2, n_up=1, n_down=0),
    }
    headline, findings = state_text.heads("x", summary, rows, NAMES)
    assert headline == "x: in the base model 2 of 2 heads drift, 1 wider and 1 narrower than at the end of training."
    assert findings[0].text.startswith("The base's largest: layer 1, head 0 (× 4, 3.73 to 4.29) and layer 1, head 1 (× 0.707")
    assert "1 have no drift: their state is zero or not finite" in findings[1].text
    assert "Against the base the drift is lower in 1, higher in 0 and not told apart in 1" in findings[1].text
    headline, findings = state_text.heads("x", {"base": summary_of(n_known=0)}, rows, NAMES)
    assert headline == "x: no interval, so no drift of a head is established."


def test_numbers() -> None:
    assert [state_text.number(value) for value in (0.00123456, -0.5, 12345.6, None, float("nan"))] == [
        *("0.001235", "−0.5000", "12,346", "–", "–"),
    ]
    assert (state_text.signed(-0.4), state_text.factor(2.0)) == ("−0.40", "4")
