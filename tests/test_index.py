"""The page of all results, the rules that hold a figure against the paper's, and where results come from."""

from __future__ import annotations

import csv
import json
import os
import re
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import REPOSITORY, run
from farstate.energy import Meter
from farstate.errors import FarstateError
from farstate.params import validate
from farstate.plan import Plan
from farstate.reference import paper_curves, paper_points
from farstate.reports import agreement, index, index_origin
from farstate.reports.agreement import AGREES, DEVIATES, NOT_COMPARABLE, UNDECIDED, Claim, judge
from farstate.reports.context import Context
from farstate.reports.family_text import Item
from farstate.reports.figures import FIGURES
from farstate.reports.remembrance_text import Arm
from farstate.reports.task_text import Case
from farstate.reports.text import Finding
from farstate.sources import read_lock
from test_workflow import planned

# --- agreement: each rule in both directions ---------------------------------------------------------------


def verdict(arm: str, verdict: str = "FAIL", **given: Any) -> dict[str, Any]:
    return {
        **{"model": "m", "arm": arm, "verdict": verdict, "fails_beyond": verdict == "FAIL", "tolerance": 0.02, "broken_at": None},
        **{"n_documents": 25, "n_seeds": 2, "would_be": "PASS", "documents_to_decide": 100.0},
        **given,
    }


def around(name: str, value: float, width: float = 0.01) -> dict[str, float]:
    return {name: value, f"{name}_low": value - width, f"{name}_high": value + width}


def states(claims: list[Claim]) -> dict[str, bool | None]:
    return {claim.topic: claim.holds for claim in claims}


@pytest.mark.parametrize(
    ("base", "passing", "noise", "expected", "word"),
    [
        ("FAIL", 0.9, 0.6, {"fails": True, "passing": True, "order": True}, AGREES),
        ("FAIL", 0.2, 0.6, {"fails": True, "passing": False, "order": False}, DEVIATES),
        ("FAIL", 0.5, 0.5, {"fails": True, "passing": None, "order": None}, UNDECIDED),
        ("PASS", 0.9, 0.6, {"fails": False}, DEVIATES),
        ("UNDECIDED", 0.9, 0.6, {"fails": None}, UNDECIDED),
    ],
)
def test_a_failure_and_its_repair(base: str, passing: float, noise: float, expected: dict[str, bool | None], word: str) -> None:
    rows = [
        verdict("base", base, **around("excess_nll", 0.89)),
        verdict("state_passing", "UNDECIDED", **around("excess_nll", 0.01), **around("removed_base", passing)),
        verdict("random_noise", "FAIL", **around("excess_nll", 0.3), **around("removed_base", noise)),
    ]
    claims = agreement.of_perplexity("m (55.7K)", rows, noise=True)
    assert states(claims) == expected
    judged = judge(claims)
    assert judged.agreement == word
    assert "0.890 (0.880 to 0.900) nats" in judged.sentence, "the numbers stand in the sentence"
    assert judged.sentence.count(".") - len(re.findall(r"\d\.\d", judged.sentence)) == 1, "one sentence"
    assert "55.7K" not in judged.sentence


def test_a_broken_repair_takes_nothing_away_and_a_missing_base_claims_nothing() -> None:
    rows = [verdict("base", **around("excess_nll", 0.89)), verdict("state_passing", broken_at=70, excess_nll=None)]
    assert states(agreement.of_perplexity("m", rows)) == {"fails": True, "passing": False}
    assert agreement.of_perplexity("m", rows[1:]) == []
    assert judge([]).agreement == NOT_COMPARABLE
    assert judge([Claim("fails", True, "m", "1")], scale="test").agreement == NOT_COMPARABLE


def item(value: float, excess: float, cost: float = 0.0, *, broken: bool = False) -> Item:
    row = verdict("a", **around("excess_nll", excess), **around("short_context_cost", cost), broken_at=9 if broken else None)
    return Item(label=f"value {value:g}", value=value, arm="a", of="a", row=row)


@pytest.mark.parametrize(("first", "last", "holds"), [(0.1, 0.9, True), (0.9, 0.1, False), (0.5, 0.505, None)])
def test_families(first: float, last: float, holds: bool | None) -> None:
    items = [item(1, first, first), item(2, last, last)]
    assert states(agreement.of_snapshots("m", items)) == {"more": holds}
    assert states(agreement.of_contexts("m", items[::-1])) == {"context": holds}
    assert states(agreement.of_sigmas("m", items))["wide"] == holds
    difference = {**around("difference", last - first), **around("difference_seeds", last - first)}
    assert states(agreement.of_warmups("m", difference)) == {"warmup": holds}
    assert agreement.of_snapshots("m", items[:1]) == agreement.of_contexts("m", items[:1]) == []
    assert agreement.of_warmups("m", None) == []


def test_noise_that_is_too_narrow_and_what_is_no_number_any_more() -> None:
    assert states(agreement.of_sigmas("m", [item(1, 0.5), item(2, 0.1)]))["narrow"] is True
    assert states(agreement.of_sigmas("m", [item(1, 0.0), item(2, 0.1)]))["narrow"] is False
    assert states(agreement.of_sigmas("m", [item(1, 0.02), item(2, 0.1)]))["narrow"] is None
    assert states(agreement.of_snapshots("m", [item(1, 0.5), item(2, 0.1, broken=True)])) == {"more": True}
    assert states(agreement.of_snapshots("m", [item(1, 0.5, broken=True), item(2, 0.1)])) == {"more": False}
    one_training = {**around("difference", 0.5), "difference_seeds_low": None, "difference_seeds_high": None}
    assert states(agreement.of_warmups("m", one_training)) == {"warmup": None}, "texts alone say nothing about trainings"


@pytest.mark.parametrize(("drift", "above", "up", "expected"), [(1.5, 20, 3, True), (-1.5, 0, 15, False), (0.0, 20, None, None)])
def test_states_and_heads(drift: float, above: int, up: int | None, expected: bool | None) -> None:
    summary = {
        "base": {**around("drift", drift), "n_heads": 16, "n_known": 16 if up is not None else 0, "n_up": up or 0, "n_down": 0},
        "state_passing": {"n_bins": 22, "n_above_base": above},
    }
    assert states(agreement.of_states("m", summary)) == {"drift": expected, "above": above > 0}
    assert states(agreement.of_heads("m", summary)) == {"few": expected}
    assert agreement.of_states("m", {}) == agreement.of_heads("m", {}) == []


@pytest.mark.parametrize(("value", "holds"), [(-0.2, True), (0.2, False), (0.0, None)])
def test_remembrance_by_every_distance(value: float, holds: bool | None) -> None:
    far = {(name, "base"): around("value", value) for name in ("total_variation", "cosine_distance")}
    arms = [Arm("base", "base", {}, None, None), Arm("state_passing", "state passing", far, None, None)]
    assert [claim.holds for claim in agreement.of_remembrance("m", arms, all_distances=True)] == [holds, holds]
    assert [claim.who for claim in agreement.of_remembrance("m", arms, all_distances=False)] == ["m"]
    assert agreement.of_remembrance("m", arms[:1], all_distances=True) == []


@pytest.mark.parametrize(("value", "holds"), [(0.2, True), (-0.2, False), (0.0, None)])
def test_tasks(value: float, holds: bool | None) -> None:
    def case(arm: str, other: str, score: str) -> Case:
        numbers = {"value": value, "low": value - 0.1, "high": value + 0.1, "value_low": value - 0.1, "value_high": value + 0.1}
        row = {"task": "qa1", "measured": None, "chance": 0.1, **numbers}
        rows = {(name, score, against, 64, None): row for name, against in ((arm, ""), (arm, other))}
        return Case("m", {other: other, arm: arm}, 32, rows)

    assert states(agreement.of_facts(case("state_passing", "base", "strict"), "few_shot")) == {"facts": holds}
    assert states(agreement.of_letters(case("state_passing", "control", "characters"))) == {"letters": holds}
    assert states(agreement.of_keys(case("fitted_noise", "control", "exact"))) == {"key": holds}
    assert agreement.of_keys(case("state_passing", "control", "exact")) == []


def test_digitised_values_are_held_against_ours_at_the_same_place() -> None:
    def row(kind: str, position: float, value: float, low: float | None, high: float | None) -> dict[str, Any]:
        return {"kind": kind, "arm": "base", "label": "base", "position": position, "value": value, "low": low, "high": high}

    ours = [row("mean", 2048, 8.0, 7.9, 8.1), row("mean", 8192, 12.0, 11.0, 13.0)]
    paper = [row("paper", 2000, 7.96, 7.91, 8.01), row("paper", 8192, 9.0, 8.9, 9.1), row("paper", 8192, 10.0, None, None)]
    met, missed, bound = agreement.compare("PPL", [*ours, *paper], "position", agreement.BETWEEN_FIGURES)
    assert (met.inside, met.tolerance, met.ours) == (True, 0.24, 8.0)
    assert (missed.inside, bound.inside) == (False, True)
    assert agreement.compare("PPL", [*ours, row("paper", 100_000, 9, 8, 10)], "position") == [], "nothing is measured near it"
    judged = judge([Claim("fails", True, "m", "x")], [met, missed])
    assert judged.agreement == DEVIATES
    assert "1 of 2 digitised values" in judged.sentence
    assert judge([Claim("fails", True, "m", "x")], [met]).agreement == AGREES


def test_every_digitised_value_can_be_read() -> None:
    for points in (points for several in index.DIGITISED.values() for points, _ in several):
        assert paper_curves(points), points
        for (model, _), curve in paper_curves(points).items():
            assert set(curve) <= set(paper_points(points, model))
    assert any(point.lower_bound for point in paper_points("fig1b_ppl", "mamba2-780m"))


def test_every_topic_is_said_in_three_ways_and_every_figure_says_what_the_paper_found() -> None:
    assert all(len(set(words)) == 3 for words in agreement.PHRASES.values())
    own = {"fig4", "fig6", "fig7", "fig9"}  # from the digitised values or beside them, in their modules
    assert {name for name, about in FIGURES.items() if about.source and not about.remark} == own


# --- the page ----------------------------------------------------------------------------------------------


CARD = {"label": "m", "parameters": 1, "parameters_without_embeddings": 1, "context": 32, "architecture": "mamba2"}


def record(figure: str, **given: Any) -> dict[str, Any]:
    card = Context.model_validate(
        {
            "models": {"m": CARD},
            "scale": "demo",
        }
    )
    claims = [Claim("fails", True, "m", "far excess <0.89> nats")]
    rows = [verdict("base"), verdict("state_passing", "UNDECIDED")]
    said = [("m", [Finding("The steps alone", "change nothing."), Finding("Is it free?", "not free: 0.09.")])]
    made = agreement.record(
        FIGURES[figure], card, {"figure": figure, "inputs": {"comparison": [f"results/evaluate/{figure}-00000000"]}}, judge(claims),
        ["m fails."], verdicts=rows, said=said,
    )  # fmt: skip
    return {**made, **given}


def write_page(folder: Path, figure: str, models: tuple[str, ...] = ("m", "n"), **given: Any) -> None:
    charts = [
        {
            "id": f"ppl-{place}",
            "metric": "ppl",
            "model": model,
            "near": 1,
            "spec": {"params": []},
            "curves": [{"arm": "base", "x": [1]}],
        }
        for place, model in enumerate(models)
    ]
    group = {"name": figure, "arms": ["base"], "extents": {}, "charts": charts}
    parts = [
        '<button type="button" data-arm="base" aria-pressed="true"><svg></svg>base model</button>',
        *(f'<h4 id="{c["id"]}-title">Perplexity &lt;x&gt;</h4><div class="chart" id="{c["id"]}" data-text="falls &amp; rises"></div>' for c in charts),
        f'<script type="application/json" id="farstate-findings">{json.dumps(record(figure, **given))}</script>',
        f'<script type="application/json" id="farstate-charts">{json.dumps({"groups": [group]})}</script>',
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / f"{figure}.html").write_text("\n".join(parts))


def wanted(figures: tuple[str, ...], params: dict[str, Any] | None = None) -> dict[str, Any]:
    below = {name: [f"results/evaluate/{name}-00000000", "results/pretrain/m.s0-11111111"] for name in figures}
    given = params or {"report": {"scale": "demo", "note": ""}, "pretrain": {"seed": 3}, "posttrain": {"steps": 10}}
    return {
        "pages": dict.fromkeys(figures, "0"),
        "work": {name: {"needs": {"pre-trainings": [1, 0], "post-trainings": [0, 0]}, "below": below[name]} for name in figures},
        "params": given,
        "version": 2,
    }


def test_the_page_holds_every_figure_with_its_charts_sentence_cost_and_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for figure in ("fig5", "fig10", "table1"):
        write_page(tmp_path / "reports", figure)
    (tmp_path / "logs/pretrain").mkdir(parents=True)
    sidecar = {
        "wall_seconds": 90.0,
        "commit": "abc",
        "dirty": True,
        "processor": "x",
        "cores": 2,
        "device": "cpu",
        "host": "secret",
    }
    (tmp_path / "logs/pretrain/m.s0-11111111.provenance.json").write_text(
        json.dumps({**sidecar, "versions": {"torch": "2"}, "energy_joules": 7200.0})
    )
    index.index_stage(wanted(("fig5", "fig10", "table1")), tmp_path / "reports")
    page = (tmp_path / "reports/index.html").read_text()
    groups = json.loads(re.search(r'id="farstate-charts">(.*?)</script>', page, re.S)[1])["groups"]  # type: ignore[index]
    assert [group["name"] for group in groups] == ["fig5", "fig10", "table1"]
    for group in groups:
        assert f'<section class="figure" id="{group["name"]}" data-group="{group["name"]}"' in page
        for chart in group["charts"]:
            assert chart["id"].startswith(f"{group['name']}-")
            assert page.count(f'class="chart" id="{chart["id"]}"') == 1
        for kind in ("html", "parquet", "csv", "json", "svg", "png"):
            assert f'href="{group["name"]}.{kind}"' in page
        assert f'data-arm="base" data-group="{group["name"]}"' in page
    assert "Perplexity &lt;x&gt;" in page
    assert "falls &amp; rises" in page
    assert "far excess &lt;0.89&gt; nats" in page, "what a page says is text"
    assert page.index("Figure 5. ") < page.index("Figure 10. ") < page.index("Table 1. ")
    assert 'data-model="m" aria-pressed' in page, "a model of several figures can be picked in all of them"
    assert "1 pre-training (0 of its own)" in page
    assert "90 s, of 1 of 2 results" in page
    assert "2 Wh" in page
    assert "secret" not in page, "no host"
    assert "abc, with uncommitted changes: 1 result<" in page
    assert page.count("m: change nothing.") == 4, "a section each, and at the top"
    assert "about 100 documents would show PASS, these are 25" in page
    assert "at least 30 at 8,192" not in page.split('id="fig10"')[1], "only the figure's own values"
    assert not re.search(r'(?:src|href)="(?:https?:)?//(?!arxiv)', page)

    told = json.loads((tmp_path / "reports/index.json").read_text())
    assert [figure["figure"] for figure in told["figures"]] == ["fig5", "fig10", "table1"]
    assert told["figures"][0]["certainty"]["verdicts"] == {"PASS": 0, "FAIL": 1, "UNDECIDED": 1}
    assert told["origin"]["phases"][0] == {"phase": "pretrain", "results": 1, "recorded": 1, "seconds": 90.0, "joules": 7200.0}
    lines = list(csv.DictReader((tmp_path / "reports/index.csv").read_text().splitlines()))
    assert [(line["figure"], line["agreement"]) for line in lines] == [("fig5", AGREES), ("fig10", AGREES), ("table1", AGREES)]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("It fails (one: 0.9 (0.8 to 1.0) nats; two: 1.3 nats) and holds (two: 0).", "It fails (one, two) and holds (two)."),
        ("Lower (one, by TV: −0.2 (−0.3 to −0.1); one, by JS: −0.1).", "Lower (one)."),
        ("one (55K): costs +0.06 nats (0.04 to 0.08).", "one: costs +0.06 nats."),
    ],
)
def test_a_brief_sentence_keeps_the_names(sentence: str, expected: str) -> None:
    assert index.brief(sentence) == expected


def test_values_at_the_same_scale_stand_beside_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"what": "PPL of m at 2,048", "ours": 8.0, "low": 7.9, "high": None, "paper": 7.96, "tolerance": 0.24, "inside": True}
    write_page(tmp_path / "reports", "fig5", ("",), compared=[row], scale="paper")
    index.index_stage(wanted(("fig5",)), tmp_path / "reports")
    page = (tmp_path / "reports/index.html").read_text()
    assert "7.96 ± 0.24" in page
    assert page.count("not recorded here") >= 4, "cost, wall time and energy"
    line = next(csv.DictReader((tmp_path / "reports/index.csv").read_text().splitlines()))
    assert (line["what"], line["ours"], line["high"], line["inside"]) == ("PPL of m at 2,048", "8.0", "", "True")


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FarstateError, match=r"fig5\.html: no such page; run `snakemake"):
        index.index_stage(wanted(("fig5",)), tmp_path / "reports")
    write_page(tmp_path / "reports", "fig5")
    old = (tmp_path / "reports/fig5.html").read_text().replace("farstate-findings", "other")
    (tmp_path / "reports/fig5.html").write_text(old)
    with pytest.raises(FarstateError, match="carries no findings, it was drawn by another version"):
        index.index_stage(wanted(("fig5",)), tmp_path / "reports")
    write_page(tmp_path / "reports", "fig5")
    monkeypatch.setattr(index, "MAXIMUM_BYTES", 1000)
    with pytest.raises(FarstateError, match="more than 1,000; take a figure out"):
        index.index_stage(wanted(("fig5",)), tmp_path / "reports")
    assert not (tmp_path / "reports/index.html").exists()


# --- where it comes from -----------------------------------------------------------------------------------


def test_what_changed_is_told_since_the_last_report_with_other_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = {"posttrain": {"steps": 10, "seeds": [0]}}, {"posttrain": {"steps": 20, "seeds": [0]}, "new": 1}
    assert index_origin.changes_since(first, tmp_path) == {"since": "", "changes": []}
    changed = index_origin.changes_since(second, tmp_path)
    assert changed["since"].startswith("the report drawn here 2")
    expected = [{"key": "new", "old": None, "new": 1}, {"key": "posttrain.steps", "old": 10, "new": 20}]
    assert changed["changes"] == expected
    assert index_origin.changes_since(second, tmp_path)["changes"] == expected, "drawing the same again forgets nothing"
    assert [change["new"] for change in index_origin.changes_since(first, tmp_path)["changes"]] == [None, 10]
    (tmp_path / index_origin.HISTORY / index_origin.PREVIOUS).write_text("{")
    assert index_origin.changes_since(first, tmp_path)["since"] == "", "a damaged record is none"


def test_without_an_earlier_report_the_committed_parameters_are_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = yaml.safe_load((REPOSITORY / "config/test.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(data))
    for command in (["init", "-q"], ["add", "params.yaml"], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        run(tmp_path, "git", *command)
    monkeypatch.chdir(tmp_path)
    params = validate(data, "test").model_dump(mode="json")
    params["posttrain"]["steps"] += 1
    told = index_origin.changes_since(params, tmp_path)
    assert told["since"] == "params.yaml as last committed"
    assert [change["key"] for change in told["changes"]] == ["posttrain.steps"]


def test_energy_is_told_where_the_device_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, powercap = tmp_path / "bin", tmp_path / "powercap"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    meter = Meter(powercap)
    meter.stop()
    assert meter.joules is None, "no device tells"
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        (powercap / name).mkdir(parents=True)
        (powercap / name / "energy_uj").write_text("9000000")
        (powercap / name / "max_energy_range_uj").write_text("10000000")
    meter = Meter(powercap)
    (powercap / "intel-rapl:0/energy_uj").write_text("9500000")
    (powercap / "intel-rapl:1/energy_uj").write_text("1000000")
    meter.stop()
    assert meter.joules == 2.5, "0.5 J, and 2 J of a counter that began anew; a part is in its package"
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 100.0\necho 50.0\n")
    os.chmod(tools / "nvidia-smi", stat.S_IRWXU)
    meter = Meter(tmp_path / "none", seconds=0.2)
    meter.stop()
    assert meter.joules is not None
    assert meter.joules >= 0.0
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho '[N/A]'\n")
    meter = Meter(tmp_path / "none", seconds=0.01)
    meter.stop()
    assert meter.joules is None


# --- the workflow ------------------------------------------------------------------------------------------


def test_the_plan_knows_whether_the_page_is_current(tmp_path: Path) -> None:
    data = yaml.safe_load((REPOSITORY / "config/test.yaml").read_text())
    plan = Plan(validate(data, "test"), read_lock(REPOSITORY / "config/sources.lock"))
    data["posttrain"]["steps"] += 1
    other = Plan(validate(data, "test"), read_lock(REPOSITORY / "config/sources.lock"))
    assert plan.index.digest != other.index.digest
    for path in plan.index.outputs.values():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("x")
    content = json.dumps({"index": plan.index.digest}).replace('"', "&quot;")
    (tmp_path / "reports/index.html").write_text(f'<meta name="farstate-keys" content="{content}">')
    assert plan.index.is_current(tmp_path)
    assert not other.index.is_current(tmp_path)
    plan.write_pages(tmp_path)
    other.write_pages(tmp_path)
    assert (tmp_path / plan.index.manifest).stat().st_mtime < 1000
    assert (tmp_path / other.index.manifest).stat().st_mtime > 1000
    assert plan.wanted(tmp_path, ["reports/index.html"], absent=True) == plan.wanted(tmp_path, ["all"], absent=True) != set()
    with pytest.raises(FarstateError, match=r"asked for, not made"):
        plan.refuse_incomplete(tmp_path, ["index"])
    assert plan.supersede(tmp_path, "report") == [], "it is no figure's page"
    (tmp_path / "reports/index.csv").unlink()
    assert not plan.index.is_current(tmp_path)


@pytest.mark.workflow
def test_the_page_of_a_finished_run(clone_with_results: Path) -> None:
    clone = clone_with_results
    page = (clone / "reports/index.html").read_text()
    assert len(page.encode()) < index.MAXIMUM_BYTES
    assert "Figure 5. " in page
    assert "held against nothing" in page, "tiny sizes"
    told = json.loads((clone / "reports/index.json").read_text())
    (figure,) = told["figures"]
    assert figure["wall"]["recorded"] == figure["wall"]["results"] > 10
    assert {row["phase"] for row in told["origin"]["phases"]} == {"corpus", "pretrain", "posttrain", "evaluate"}
    assert told["changes"] == {"since": "params.yaml as last committed", "changes": []}
    (clone / "reports/index.html").unlink()
    assert planned(clone) == planned(clone, "reports/index.html") == {"index": 1}, "drawn of the finished pages alone"
    assert planned(clone, "reports/fig5.html") == {}
    run(clone, "snakemake", "--config", 'report={"note": "other"}')
    told = json.loads((clone / "reports/index.json").read_text())
    assert told["changes"]["changes"] == [{"key": "report.note", "old": "", "new": "other"}]
    assert told["changes"]["since"].startswith("the report drawn here")


@pytest.mark.workflow
def test_snakemakes_own_report_holds_the_pages_with_captions_and_categories(clone_with_results: Path) -> None:
    done = run(clone_with_results, "snakemake", "--report", "report.zip")
    with zipfile.ZipFile(clone_with_results / "report.zip") as archive:
        names = archive.namelist()
        content = archive.read(next(name for name in names if name.endswith("report.html"))).decode()
    assert sum(name.endswith(("fig5.html", "index.html", "fig5.svg")) for name in names) >= 3, done.stdout[-2000:]
    for words in ("All results", "Figures", "fig5", "What was asked, what was found", "How far does the state"):
        assert words in content, words
