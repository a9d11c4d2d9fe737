"""Figure 5 as files and in a browser: drawn, offline, filtered by its legend, legible at several widths, the same bytes twice."""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import altair
import polars as pl
import pytest

from farstate.errors import FarstateError
from farstate.reference import paper_points
from farstate.reports import charts
from farstate.reports import curves as stage
from farstate.reports.context import Context
from farstate.reports.figures import FIGURES
from farstate.reports.theme import arm_styles
from test_reports_synthetic import context, outputs, write_tables

KEYS = {"compare": "0123abc", "evaluate": ["<script>", "é"]}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The figure of one model, all arms, three seeds."""
    root = tmp_path_factory.mktemp("demo")
    return build(write_tables(root / "tables"), root)


def at_the_papers_scale(root: Path) -> dict[str, Path]:
    """Two of the paper's models, with its values, and an arm that breaks in one seed and in the mean."""
    models = ("mamba2-370m", "mamba2-780m")
    arms = ("base", "control", "random_noise", "state_passing", "my_arm")
    import test_reports_synthetic as synthetic

    patch = pytest.MonkeyPatch()
    patch.setitem(synthetic.FAR_EXCESS, "my_arm", 0.3)
    patch.setitem(synthetic.COST, "my_arm", 0.0)
    tables = write_tables(root / "tables", models=models, train_length=2048, length=32768, seeds=(0, 1), arms=arms, level=2.05)
    patch.undo()
    curves = pl.read_parquet(tables / "curves.parquet")
    gone = (pl.col("arm") == "random_noise") & (pl.col("seed").is_null() | (pl.col("seed") == 1)) & (pl.col("position") > 8000)
    nan = pl.lit(float("nan"))
    curves.with_columns(
        pl.when(gone).then(nan).otherwise(pl.col(name)).alias(name) for name in ("value", "low", "high")
    ).write_parquet(tables / "curves.parquet")
    return build(tables, root, context(models, scale="paper", train_length=2048, paper=True))


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return at_the_papers_scale(tmp_path_factory.mktemp("paper"))


def build(tables: Path, root: Path, about: dict[str, Any] | None = None) -> dict[str, Path]:
    output = outputs(root)
    stage.draw(FIGURES["fig5"], inputs={"comparison": [tables]}, output=output, context=about or context(), keys=KEYS)
    return output


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="farstate-charts">(.*?)</script>', page, re.S)
    assert found is not None
    (group,) = json.loads(found.group(1))["groups"]
    return group


def test_the_page_names_no_outside_resource(demo: dict[str, Path]) -> None:
    page = demo["html"].read_text(encoding="utf-8")
    assert demo["html"].stat().st_size < 2_500_000
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert re.findall(r"<(?:script|img|iframe|source|video|audio|object|embed)[^>]*\bsrc\s*=", markup) == []
    assert re.findall(r'<link[^>]*href="(?!data:)', markup) == []
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style is not None
    assert "url(" not in style.group(1)
    assert "@import" not in style.group(1)
    assert "default-src 'none'" in markup
    assert page.count("vegaEmbed=") == 1
    links = set(re.findall(r'<a [^>]*href="(https?:[^"]*)"', markup))
    assert links == {"https://arxiv.org/abs/2507.02782", "https://arxiv.org/abs/2406.02080"}


def test_the_page_says_what_it_must(demo: dict[str, Path], paper: dict[str, Path]) -> None:
    page = demo["html"].read_text(encoding="utf-8")
    carried = re.search(r'<meta name="farstate-keys" content="([^"]*)">', page)
    assert carried is not None
    assert json.loads(html.unescape(carried.group(1))) == KEYS
    assert len(page[: carried.end()].encode()) < 64 * 1024
    order = [
        "Which initial state",
        "What the numbers say",
        "Perplexity and excess",
        "Verdicts, prices",
        "How to read this",
        "What misleads",
        "Parameters and provenance",
    ]
    places = [page.index(f">{heading}") for heading in order]
    assert places == sorted(places)
    for sentence in (
        "The configuration of the demo was chosen to bring the failure within minutes",
        "The configuration was chosen on these test documents (docs/demo.md), so its numbers are not free of selection.",
        "over the same windows of text; TBTT reads them in document order, all others in one shuffled order",
        "[differs from the paper: 0.1]",
        "adds no capacity",
        "State and input phase decide jointly",
        "LongSSM",
        "[assumed]",
        "0000000 (synthetic)",
        "Synthetic tables: invented numbers",
        'data-text="Perplexity at position t',
    ):
        assert sentence in page, sentence
    for name in ("svg", "png", "json", "parquet"):
        assert f'href="fig5.{name}"' in page
    assert "Hollow markers" not in page
    other = paper["html"].read_text(encoding="utf-8")
    assert "Hollow markers" in other
    assert "The configuration of the demo" not in other
    assert "free of selection" not in other
    assert re.search(r"random noise, seed 1: not a number from position [89],\d{3} on", other)


def test_the_specifications_are_valid_vega_lite(demo: dict[str, Path], paper: dict[str, Path]) -> None:
    """Against Altair's copy of the schema; the rows, which it would check one by one, are left out."""
    for output, metrics in ((demo, {"ppl", "ages"}), (paper, {"ppl"})):
        sheet = json.loads(output["json"].read_text(encoding="utf-8"))
        for columns in sheet["vconcat"]:
            for panel in columns["hconcat"]:
                assert len(panel["data"].pop("values")) > 20
                panel["data"]["name"] = "rows"
        sheet["vconcat"] = sheet["vconcat"][:1]
        altair.VConcatChart.from_dict(sheet)
        for chart in page_data(output["html"].read_text(encoding="utf-8"))["charts"]:
            if chart["metric"] in metrics and chart["id"].endswith("-0"):
                altair.LayerChart.from_dict(chart["spec"])


def test_the_static_figure_is_drawn(demo: dict[str, Path], paper: dict[str, Path]) -> None:
    for output, panels in ((demo, 3), (paper, 6)):
        svg = output["svg"].read_text(encoding="utf-8")
        assert svg.startswith("<svg")
        assert svg.count('class="mark-symbol role-mark') >= panels
        assert svg.count("<path") > 200 * panels / 3
        assert svg.count(">zero-init control<") == 1, "one legend for all panels"
        assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", svg)
        width, height, values = png_values(output["png"])
        assert width > 1500
        assert height > 600
        assert len(values) > 40


def png_values(path: Path) -> tuple[int, int, set[int]]:
    """Width, height and the distinct bytes of a PNG's scan lines: a blank picture has a handful."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    packed, place = b"", 8
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        if kind == b"IDAT":
            packed += data[place + 8 : place + 8 + size]
        place += size + 12
    return width, height, set(zlib.decompress(packed))


def test_the_data_are_what_is_drawn(demo: dict[str, Path], paper: dict[str, Path]) -> None:
    table = pl.read_parquet(demo["parquet"])
    assert tuple(table.columns) == stage.CURVE_COLUMNS
    assert set(table["metric"]) == {"ppl", "excess_nll", "excess_nll_base"}
    assert table.schema["position"] == pl.Int64
    drawn = page_data(demo["html"].read_text(encoding="utf-8"))["charts"]
    curves = next(chart for chart in drawn if chart["metric"] == "ppl")["curves"]
    mean = next(curve for curve in curves if curve["arm"] == "tbtt" and curve["kind"] == "mean")
    expected = table.filter((pl.col("metric") == "ppl") & (pl.col("arm") == "tbtt") & pl.col("seed").is_null()).sort("position")
    assert mean["value"] == pytest.approx(expected["value"].to_list(), rel=1e-5)
    assert mean["position"] == expected["position"].to_list()
    assert {curve["kind"] for curve in curves} == {"mean", "seed", "reference"}
    with_reset = {chart["metric"] for chart in drawn if any(curve.get("kind") == "reference" for curve in chart["curves"])}
    assert with_reset == {"ppl", "excess_nll_base"}, "the base's reset is an excess over the base's windows"
    assert {curve["seed"] for curve in curves if curve["arm"] == "base"} == {"all"}

    shown = [chart for chart in page_data(paper["html"].read_text(encoding="utf-8"))["charts"] if chart["metric"] == "ppl"]
    points = [
        (curve["arm"], place, value)
        for curve in shown[0]["curves"]
        if curve["kind"] == "paper"
        for place, value in zip(curve["position"], curve["value"], strict=True)
    ]
    assert sorted(points) == [
        ("base", 2048, 7.96),
        ("random_noise", 2048, 8.19),
        ("random_noise", 16384, 8.79),
        ("state_passing", 2048, 7.79),
        ("state_passing", 16384, 7.79),
        ("state_passing", 32768, 7.76),
    ]


def test_the_same_tables_give_the_same_bytes(tmp_path: Path) -> None:
    """In this process and in another with another hash seed."""
    tables = write_tables(tmp_path / "tables", seeds=(0,), arms=("base", "state_passing"), length=512)
    here = build(tables, tmp_path / "here")
    code = "import sys; from pathlib import Path; import test_reports_curves as t;t.build(Path(sys.argv[1]), Path(sys.argv[2]))"
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(tables), str(tmp_path / "there")], env=environment, check=True, timeout=120)
    for name, path in here.items():
        other = outputs(tmp_path / "there")[name]
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest(), name
    assert list((tmp_path / "here").glob(".*.part")) == []


def test_one_seed_one_arm_no_ages(tmp_path: Path) -> None:
    """The least there can be: the base model alone."""
    tables = write_tables(tmp_path / "tables", seeds=(), arms=("base",), length=256)
    output = build(tables, tmp_path)
    page = output["html"].read_text(encoding="utf-8")
    assert "No other initial state was tried." in page
    assert "There is no zero-init control here" in page
    assert len(page_data(page)["charts"]) == 3


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_a_perplexity_that_a_log_axis_would_drop_is_refused(tmp_path: Path, value: float) -> None:
    tables = write_tables(tmp_path / "tables", seeds=(0,), arms=("base",), length=256)
    curves = pl.read_parquet(tables / "curves.parquet")
    wrong = (pl.col("metric") == "ppl") & (pl.col("position") == curves["position"].max())
    curves.with_columns(pl.when(wrong).then(value).otherwise(pl.col("low")).alias("low")).write_parquet(tables / "curves.parquet")
    with pytest.raises(FarstateError, match=r"curves.parquet: low = -?\d in ppl of small, base .*a perplexity is positive"):
        build(tables, tmp_path)
    assert not any(path.exists() for path in outputs(tmp_path).values())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    tables = write_tables(tmp_path / "tables", seeds=(0,), arms=("base",), length=256)
    whole = pl.read_parquet(tables / "verdicts.parquet")
    whole.drop("beats_reset").write_parquet(tables / "verdicts.parquet")
    with pytest.raises(FarstateError, match=r"verdicts.parquet: column beats_reset is missing"):
        build(tables, tmp_path)
    (tables / "verdicts.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(FarstateError, match=r"verdicts.parquet: damaged"):
        build(tables, tmp_path)
    (tables / "verdicts.parquet").unlink()
    with pytest.raises(FarstateError, match=r"verdicts.parquet: no such file"):
        build(tables, tmp_path)
    whole.write_parquet(tables / "verdicts.parquet")
    with pytest.raises(FarstateError, match=r"holds small, of which the context says nothing"):
        build(tables, tmp_path, context(("other",)))
    with pytest.raises(FarstateError, match=r"context.scale"):
        build(tables, tmp_path, context() | {"scale": "huge"})
    with pytest.raises(FarstateError, match=r"no path given for png"):
        stage.draw(
            FIGURES["fig5"],
            inputs={"comparison": [tables]},
            output={k: v for k, v in outputs(tmp_path).items() if k != "png"},
            context=context(),
            keys={},
        )
    pl.read_parquet(tables / "curves.parquet").clear().write_parquet(tables / "curves.parquet")
    with pytest.raises(FarstateError, match=r"curves.parquet: holds no rows"):
        build(tables, tmp_path)


def test_a_model_beyond_the_papers_figure_is_said_to_be_one(demo: dict[str, Path], tmp_path: Path) -> None:
    assert "that the paper's figure does not show" not in demo["html"].read_text()
    tables = write_tables(tmp_path / "tables", seeds=(0,), arms=("base", "control"), length=256)
    about = context()
    about["models"]["small"]["architecture"] = "gated_deltanet"
    stage.draw(FIGURES["fig1"], inputs={"comparison": [tables]}, output=outputs(tmp_path), context=about, keys=KEYS)
    page = outputs(tmp_path)["html"].read_text()
    assert "does not show: Mamba-2 small (synthetic)." in page
    assert FIGURES["fig1"].question in page
    assert FIGURES["fig1"].remark in page


def test_what_the_page_prints_of_the_parameters() -> None:
    """Our choices and what differs from the paper are marked; of a published checkpoint nothing is said that we did not do."""
    from farstate.reports.stage import _context

    recipe = {"batch_tokens": 2048, "peak_learning_rate": 5e-3, "weight_decay": 0.1}
    post = recipe | {"peak_learning_rate": 1e-3}
    small = {
        **{"architecture": "mamba2", "context": 32, "training_tokens": 4096, "pretrain": recipe, "posttrain": post, "steps": 200},
        "shape": {"width": 32, "dt_min": 5e-4, "dt_max": 3e-3, "A_init_range": [1.0, 1.0], "norm_groups": None},
    }
    report: dict[str, Any] = {
        "order": ["small"],
        "models": {"small": small},
        "pretrain": {"seed": 0, "tokens": 4100, "recipe": recipe},
        "posttrain": {
            "steps": 200,
            "seeds": [0, 1],
            "recipe": post,
            "arms": {
                "fitted": {"initial_state": "fitted_noise", "beta": 0.2},
                "passing": {"initial_state": "state_passing", "reset_probability": 0.05, "carry_auxiliary": True},
            },
        },
        "evaluate": {"streams": "documents"},
        "paper_models": {},
        **{"paper_values": True, "scale": "demo", "note": ""},
    }
    sizes = {"parameters": 10, "parameters_without_embeddings": 5}
    manifest = {"comparison": [{"key": "k", "models": {"small": sizes}}]}
    about = _context(FIGURES["fig5"], report, manifest)
    rows = {row["name"]: row for row in Context.model_validate(about).model_dump()["parameters"]}
    assert rows["models.small"]["value"] == "mamba2: width 32, dt_min 0.0005, dt_max 0.003, A_init_range 1.0 to 1.0"
    assert {name for name, row in rows.items() if row["assumed"]} == {
        *("models.small", "pretrain.recipe.peak_learning_rate", "pretrain.recipe.weight_decay"),
        *("posttrain.recipe.peak_learning_rate", "posttrain.recipe.weight_decay", "posttrain.arms.passing.carry_auxiliary"),
        *("evaluate.streams", "optimizer", "optimizer state when post-training begins"),
        *("fitted noise, moments over", "fitted noise, first update"),
    }
    assert {name: row["differs"] for name, row in rows.items() if row["differs"]} == {
        "posttrain.steps": "100",
        "posttrain.arms.fitted.beta": "0.1",
        "posttrain.arms.passing.reset_probability": "0.1",
        "posttrain.recipe.peak_learning_rate": "a tenth of the pre-training rate",
    }
    two = {"order": ["small", "other"], "models": {"other": small, "small": small}}
    about = _context(FIGURES["fig1"], report | two, {"comparison": [{"models": {"small": sizes, "other": sizes}}]})
    rows = {row["name"]: row["value"] for row in about["parameters"]}
    assert rows["models.small"] == "as models.other"
    assert rows["posttrain.seeds"] == "0, 1"
    both = {"comparison": [{"key": "k", "models": {"small": sizes, "other": sizes}}]}
    assert [*_context(FIGURES["fig1"], report | two, both)["models"]] == ["small", "other"]
    assert "uncommitted" not in about["provenance"]["commit"]
    assert about["provenance"]["pre-training seed"] == 0

    published = {"models": {"small": small | {"shape": None, "pretrain": None, "training_tokens": None}}}
    about = _context(FIGURES["fig5"], report | published, manifest)
    assert not [row for row in about["parameters"] if row["name"].startswith("pretrain.")]
    assert "pre-training seed" not in about["provenance"]
    assert not any(row.get("differs") for row in about["parameters"] if "learning_rate" in row["name"])

    own = {"models": {"small": small | {"posttrain": post | {"peak_learning_rate": 5e-4}, "steps": 500}}}
    about = _context(FIGURES["fig1"], report | own, manifest)
    rows = {row["name"]: row for row in about["parameters"]}
    assert not any(row.get("differs") for row in about["parameters"] if "learning_rate" in row["name"])
    assert rows["posttrain.by_model.small.recipe.peak_learning_rate"]["assumed"]
    assert rows["posttrain.by_model.small.steps"]["value"] == 500
    assert not rows["posttrain.by_model.small.steps"]["differs"]
    assert about["budget"].startswith("500 post-training steps")

    measured = {"key": "s", "labels": {"model": "small", "arm": "base", "seed": 0}, **sizes}
    bare = {key: value for key, value in report.items() if key not in ("posttrain", "evaluate")}
    bare |= {"shift": {"length": 128, "streams": "documents"}, "figure": {"models": ["small"], "heads": [[0, 1], [2, 3]]}}
    about = _context(FIGURES["shift"], bare, {"shift": [measured, measured | {"key": "t"}]})
    rows = {row["name"]: row for row in Context.model_validate(about).model_dump()["parameters"]}
    assert rows["shift.length"]["value"] == 128
    assert rows["shift.streams"]["assumed"]
    assert rows["figure.heads"]["value"] == "0/1, 2/3"
    assert about["models"]["small"]["parameters"] == 10
    assert (about["provenance"]["shift 1"], about["provenance"]["shift 2"]) == ("s", "t")
    assert about["budget"] == ""
    bare["figure"] = {"warmups": [0.1, 0.25], "seeds": [0, 1], "length": None}
    several = _context(FIGURES["fig11"], bare, manifest)
    rows = {row["name"]: row["value"] for row in several["parameters"]}
    assert several["provenance"]["pre-training seeds"] == [0, 1]
    assert rows["figure.warmups"] == "0.1, 0.25"
    assert not {"figure.length", "pretrain.seed"} & rows.keys()
    assert "post-training seeds" not in about["provenance"]


def test_a_page_is_drawn_by_the_module_of_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from farstate.files import write_manifest
    from farstate.reports import stage as page_stage

    drawn: dict[str, Any] = {}
    module = SimpleNamespace(draw=lambda about, **values: drawn.update(about=about, **values))
    monkeypatch.setattr(page_stage.importlib, "import_module", lambda name: drawn.update(module=name) or module)
    (tmp_path / "tables").mkdir()
    write_manifest(tmp_path / "tables", {"key": "k", "models": {}}, [])
    report = {"order": [], "models": {}, "paper_models": {}, "paper_values": False, "scale": "test", "note": ""}
    wanted = {"figure": "fig4", "inputs": {"states": [str(tmp_path / "tables")]}, "params": report, "version": 1}
    page_stage.report_stage(wanted, tmp_path)
    assert drawn["module"] == "farstate.reports.states"
    assert drawn["inputs"] == {"states": [tmp_path / "tables"]}
    assert drawn["output"]["svg"] == tmp_path / "fig4.svg"
    with pytest.raises(FarstateError, match="fig4: no directory given for states"):
        page_stage.report_stage(wanted | {"inputs": {"comparison": [str(tmp_path / "tables")]}}, tmp_path)
    with pytest.raises(FarstateError, match="'fig99' is not a figure we draw"):
        page_stage.report_stage(wanted | {"figure": "fig99"}, tmp_path)


def test_styles_tell_arms_apart_without_colour() -> None:
    styles = arm_styles(["tbtt", "base", "control", "random_noise", "fitted_noise", "state_passing", "zz", "aa"])
    assert [style.name for style in styles] == [
        "base",
        "control",
        "random_noise",
        "fitted_noise",
        "state_passing",
        "tbtt",
        "aa",
        "zz",
    ]
    assert len({style.shape for style in styles}) == len(styles)
    assert len({style.colour for style in styles}) == len(styles)
    assert arm_styles(["tbtt"])[0] == styles[5]
    every = arm_styles([*(style.name for style in styles), "gaussian_joint", "gaussian_head", "permuted", "xx", "yy"])
    for told_by in ("shape", "dash", "colour"):
        seen = [getattr(style, told_by) for style in every]
        # Base and state passing are both drawn without gaps, in black and blue.
        assert len(set(seen)) == len(every) - (told_by == "dash")


def test_lower_bounds_of_the_paper_become_arrows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(paper_points("fig5_ppl", "mamba2-1.3b")) == 12
    point = paper_points("fig5_ppl", "mamba2-1.3b")[0]
    bound = type(point)(**{**vars(point), "lower_bound": True})
    monkeypatch.setattr(stage, "paper_points", lambda figure, model: [bound])
    (row,) = stage._paper_rows(FIGURES["fig5"], "fig5_ppl", "mamba2-1.3b", {"base": "base"})
    assert row["low"] is None
    assert row["kind"] == "paper"
    panel = charts.Panel("m", "m", charts.METRICS[0], 2048, 32768, [row])
    layers = charts.screen_panel(panel, arm_styles(["base"]), (6.0, 12.0))["layer"]
    assert any(layer["mark"].get("text") == "↑" for layer in layers)
