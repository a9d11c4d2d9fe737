"""The joined tables of a figure, from evaluations whose answers are known."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from farstate.errors import FarstateError
from farstate.evaluation.bins import Bins, log_bins
from farstate.evaluation.compare import AGE_SCHEMA, CURVE_SCHEMA, DIFFERENCE_SCHEMA, VERDICT_SCHEMA, compare
from farstate.files import read_manifest, write_manifest
from farstate.params import Compare

CONTEXT, LENGTH, DOCUMENTS = 8, 1024, 24
BINS = log_bins(LENGTH, CONTEXT, 2)


def write_evaluation(
    root: Path,
    arm: str,
    seed: int | None,
    *,
    excess: float,
    model: str = "m",
    shift: float = 0.0,
    cost: float = 0.0,
    documents: int = DOCUMENTS,
    stretches: int = 1,
    bins: Bins = BINS,
    context: int = CONTEXT,
    broken_at: int | None = None,
    first: int = 0,
    noise: float = 0.01,
) -> Path:
    """An evaluation as `evaluate` writes it, whose own windows score 3 + the text's level + `cost`, and whose carried state scores `excess` above them beyond T_train."""
    generator = np.random.default_rng(5)  # the same texts for every arm
    units = documents * stretches
    level = np.repeat(generator.normal(size=documents) * 0.3, stretches)[:, None]
    own = np.random.default_rng([11, len(arm), seed or 0, int(1e3 * excess)])
    far = (bins.low > context).astype(float)
    window = 3.0 + cost + level + 0.001 * own.normal(size=(units, len(bins)))
    carried = window + far * (excess + shift + noise * own.normal(size=(units, 1)))
    reset = window + far * 0.04
    if broken_at is not None:
        carried[0, bins.high >= broken_at] = np.nan
    folder = root / f"{model}.{arm}.s{seed}"
    folder.mkdir(parents=True)
    ids = [f"{first + number:064x}" for number in range(documents) for _ in range(stretches)]
    count = len(bins)
    pl.DataFrame(
        {
            "model": [model] * (units * count),
            "arm": [arm] * (units * count),
            "seed": pl.Series([seed] * (units * count), dtype=pl.Int64),
            "train_length": [context] * (units * count),
            "document": [name for name in ids for _ in range(count)],
            "stretch": [number % stretches for number in range(units) for _ in range(count)],
            "position_low": np.tile(bins.low, units),
            "position_high": np.tile(bins.high, units),
            "tokens": np.tile(bins.tokens, units),
            "nll_carried": (carried * bins.tokens).ravel(),
            "nll_window": (window * bins.tokens).ravel(),
            "nll_reset": (reset * bins.tokens).ravel(),
        }
    ).write_parquet(folder / "perplexity.parquet")
    broken = None if broken_at is None else {"position": broken_at, "document": ids[0], "stretch": 0, "stretches": 1}
    labels = {"model": model, "arm": arm, "seed": seed}
    stated = {
        "labels": labels,
        "context": context,
        "broken_at": {"carried": broken, "window": None, "reset": None},
        "parameters": 1000,
        "parameters_without_embeddings": 400,
    }
    write_manifest(folder, stated, ["perplexity.parquet"])
    return folder


def write_training(root: Path, arm: str, seed: int, *, model: str = "m", ages: list[tuple[int, int | None, int]]) -> dict:
    folder = root / f"training.{model}.{arm}.s{seed}"
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "tokens": step * 64, "learning_rate": rate, "loss": 3.0}
        for step, rate in ((1, 1e-4), (2, 5e-4), (3, 1e-5))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    schema = {"step": pl.Int64, "age": pl.Int64, "sequences": pl.Int64}
    pl.DataFrame(ages, schema=schema, orient="row").write_parquet(folder / "ages.parquet")
    return {"model": model, "arm": arm, "seed": seed, "directory": str(folder)}


def run(root: Path, evaluations: list[Path], arms: list[str], trainings=(), models=("m",), **options) -> dict[str, pl.DataFrame]:
    output = root / "comparison"
    compare(
        evaluations=evaluations,
        trainings=list(trainings),
        compare=Compare(**{"resamples": 400, **options}),
        figure={"models": list(models), "arms": arms},
        output=output,
    )
    read_manifest(output, verify=True)
    return {name: pl.read_parquet(output / f"{name}.parquet") for name in ("curves", "references", "verdicts", "ages")}


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    root = tmp_path_factory.mktemp("figure")
    evaluations = [write_evaluation(root, "base", 0, excess=1.0)]
    trainings = []
    for seed in (0, 1, 2):
        evaluations.append(write_evaluation(root, "control", seed, excess=0.8))
        evaluations.append(write_evaluation(root, "state_passing", seed, excess=0.1, shift=0.02 * seed, cost=0.05))
        trainings.append(write_training(root, "control", seed, ages=[(1, 0, 4), (2, 0, 4)]))
        trainings.append(write_training(root, "state_passing", seed, ages=[(1, 0, 4), (2, 8, 3), (2, 0, 1)]))
    evaluations += [write_evaluation(root, "noise", 0, excess=0.5)]
    trainings.append(write_training(root, "noise", 0, ages=[(1, None, 4)]))
    tables = run(root, evaluations, ["base", "control", "noise", "state_passing"], trainings)
    return root, tables


def row(table: pl.DataFrame, arm: str, seed: int | None = None) -> dict:
    chosen = table.filter((pl.col("arm") == arm) & pl.col("seed").eq_missing(pl.lit(seed)))
    assert chosen.height == 1
    return chosen.row(0, named=True)


def curve(table: pl.DataFrame, arm: str, metric: str, seed: int | None = None) -> pl.DataFrame:
    return table.filter((pl.col("arm") == arm) & pl.col("seed").eq_missing(pl.lit(seed)) & (pl.col("metric") == metric))


def test_curves(figure):
    curves = figure[1]["curves"]
    assert curves.schema == CURVE_SCHEMA
    assert curves["metric"].unique().sort().to_list() == ["excess_nll", "excess_nll_base", "ppl"]
    assert curves.group_by("arm", "seed", "metric").len()["len"].unique().to_list() == [len(BINS)]
    assert set(curves.filter(pl.col("arm") == "state_passing")["seed"]) == {None, 0, 1, 2}
    assert (curves["n_documents"] == DOCUMENTS).all()
    assert curve(curves, "base", "ppl")["n_tokens"].to_list() == (BINS.tokens * DOCUMENTS).tolist()
    own = curve(curves, "state_passing", "excess_nll")
    near = own.filter(pl.col("position") <= CONTEXT)
    assert near.select("value", "low", "high").to_numpy().tolist() == [[0.0] * 3] * near.height
    far = own.filter(pl.col("position") > CONTEXT)
    assert far["value"].to_numpy() == pytest.approx(0.12, abs=0.01)
    assert (far["low"] < far["value"]).all()
    assert (far["value"] < far["high"]).all()
    # What the repair cost within the context shows against the base's windows.
    assert curve(curves, "state_passing", "excess_nll_base")["value"].to_numpy() == pytest.approx(
        np.where(BINS.low > CONTEXT, 0.17, 0.05), abs=0.01
    )


def test_perplexity_is_exp_of_the_mean_loss(figure):
    root, tables = figure
    table = pl.concat([pl.read_parquet(root / f"m.state_passing.s{seed}/perplexity.parquet") for seed in range(3)])
    expected = (
        table.group_by("position_low")
        .agg((pl.col("nll_carried").sum() / pl.col("tokens").sum()).exp().alias("ppl"))
        .sort("position_low")
    )
    assert curve(tables["curves"], "state_passing", "ppl")["value"].to_numpy() == pytest.approx(expected["ppl"].to_numpy())


def test_references(figure):
    references = figure[1]["references"]
    assert references.schema == CURVE_SCHEMA
    far = curve(references, "base", "reset_excess").filter(pl.col("position") > CONTEXT)
    assert far["value"].to_numpy() == pytest.approx(0.04)
    assert references["metric"].unique().sort().to_list() == ["ppl_reset", "ppl_window", "reset_excess"]


def test_verdicts(figure):
    verdicts = figure[1]["verdicts"]
    assert verdicts.schema == VERDICT_SCHEMA
    passing, base, control = row(verdicts, "state_passing"), row(verdicts, "base"), row(verdicts, "control")
    assert [base["verdict"], control["verdict"], passing["verdict"]] == ["FAIL"] * 3
    assert (passing["far_from"], passing["far_to"]) == (32 * CONTEXT + 1, LENGTH)
    assert passing["excess_nll"] == pytest.approx(0.12, abs=0.01)
    assert passing["removed"] == pytest.approx(0.88, abs=0.02)
    assert passing["removed_low"] < passing["removed"] < passing["removed_high"]
    assert passing["removed_base"] == pytest.approx(0.83, abs=0.02)
    assert passing["removed_vs_control"] == pytest.approx(1 - 0.12 / 0.8, abs=0.02)
    assert passing["short_context_cost"] == pytest.approx(0.05, abs=0.002)
    assert passing["short_context_cost_low"] > 0
    assert passing["beats_reset"] == pytest.approx(0.08, abs=0.01)
    assert passing["beats_reset_low"] > 0
    assert passing["beats_base_reset"] == pytest.approx(0.13, abs=0.01)  # the base's reset does not pay the cost of 0.05
    assert passing["beats_base_reset_low"] > 0.08
    assert base["beats_base_reset"] == base["beats_reset"]
    assert passing["fails_beyond"] is True
    assert passing["worst_beyond"] > CONTEXT
    assert passing["gap_beyond_low"] > 0.02
    assert passing["ppl_ratio"] == pytest.approx(np.exp(0.12), rel=0.01)
    assert (passing["would_be"], passing["documents_to_decide"]) == (None, None)
    assert (passing["steps"], passing["tokens"], passing["learning_rate"]) == (3, 192, 5e-4)
    assert base["short_context_cost"] == base["short_context_cost_high"] == 0.0
    assert base["removed"] is None
    assert base["steps"] is None
    assert control["removed_vs_control"] is None
    assert passing["interval"] == "95 % bootstrap over 24 documents"
    assert passing["verdict_interval"] == "95 % bootstrap over 12 documents"


def test_cost_against_the_control(tmp_path):
    evaluations = [write_evaluation(tmp_path, "base", 0, excess=1.0)]
    for seed in (0, 1):
        evaluations.append(write_evaluation(tmp_path, "control", seed, excess=0.8, cost=0.02 + 0.02 * seed))
        evaluations.append(write_evaluation(tmp_path, "sp", seed, excess=0.1, cost=0.05 + 0.02 * seed))
    verdicts = run(tmp_path, evaluations, ["base", "control", "sp"])["verdicts"]
    for seed in (None, 0, 1):
        found = row(verdicts, "sp", seed)
        assert found["short_context_cost_vs_control"] == pytest.approx(0.03, abs=0.002)
        assert 0.02 < found["short_context_cost_vs_control_low"] < found["short_context_cost_vs_control_high"] < 0.04
    assert row(verdicts, "sp")["short_context_cost"] == pytest.approx(0.06, abs=0.002)
    for arm in ("base", "control"):
        assert row(verdicts, arm)["short_context_cost_vs_control"] is None
    metrics = json.loads((tmp_path / "comparison/metrics.json").read_text())
    assert metrics["m"]["sp"]["short_context_cost_vs_control"] == pytest.approx(0.03, abs=0.002)
    assert metrics["m"]["sp"]["fails_beyond"] is True
    without = tmp_path / "without"
    evaluations = [write_evaluation(without, arm, 0, excess=0.5) for arm in ("base", "sp")]
    assert row(run(without, evaluations, ["base", "sp"])["verdicts"], "sp")["short_context_cost_vs_control"] is None


def test_a_share_does_not_depend_on_the_number_of_resamples(tmp_path):
    """The base's excess is above zero by its interval, and below zero in a few of many resamples."""
    found = {}
    for resamples in (100, 5000):
        root = tmp_path / str(resamples)
        evaluations = [
            write_evaluation(root, "base", 0, excess=0.65, noise=1.0),
            write_evaluation(root, "sp", 0, excess=0.0),
        ]
        verdicts = run(root, evaluations, ["base", "sp"], resamples=resamples)["verdicts"]
        assert row(verdicts, "base")["excess_nll_low"] > 0
        found[resamples] = row(verdicts, "sp")
    assert found[100]["removed"] == found[5000]["removed"] == pytest.approx(1.0, abs=0.05)
    assert found[5000]["removed_low"] < found[5000]["removed"] < found[5000]["removed_high"]
    nothing = [write_evaluation(tmp_path / "n", arm, 0, excess=0.1, noise=1.0) for arm in ("base", "sp")]
    assert row(run(tmp_path / "n", nothing, ["base", "sp"])["verdicts"], "sp")["removed"] is None


def test_losses_too_large_for_a_perplexity(tmp_path):
    evaluations = [write_evaluation(tmp_path, arm, 0, excess=excess) for arm, excess in (("base", 800.0), ("sp", 0.1))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tables = run(tmp_path, evaluations, ["base", "sp"])
    base = row(tables["verdicts"], "base")
    assert base["verdict"] == "FAIL"
    for name in ("ppl_far", "ppl_ratio"):
        assert base[name] == base[f"{name}_low"] == base[f"{name}_high"] == np.inf
    assert base["excess_nll"] == pytest.approx(800.0, rel=1e-3)
    assert curve(tables["curves"], "base", "ppl")["value"].is_infinite().to_list() == (BINS.low > CONTEXT).tolist()
    assert np.isfinite(row(tables["verdicts"], "sp")["ppl_far"])


def test_differences_are_paired(figure):
    """The level of a text, common to all arms, is 30 times the noise of a difference and must not enter it."""
    passing = row(figure[1]["verdicts"], "state_passing")
    far = curve(figure[1]["curves"], "state_passing", "ppl").tail(1)
    alone = np.log(far["high"].item() / far["low"].item())
    assert alone > 20 * (passing["short_context_cost_high"] - passing["short_context_cost_low"])


def test_intervals_over_seeds(figure):
    verdicts = figure[1]["verdicts"]
    passing = row(verdicts, "state_passing")
    assert passing["n_seeds"] == 3
    assert passing["excess_nll_seeds_low"] < 0.12 < passing["excess_nll_seeds_high"]
    assert passing["excess_nll_seeds_high"] - passing["excess_nll_seeds_low"] == pytest.approx(2 * 4.303 * 0.02 / 3**0.5, rel=0.3)
    for arm, seed in (("noise", None), ("base", None), ("state_passing", 1)):
        only = row(verdicts, arm, seed)
        assert only["n_seeds"] == 1
        assert only["excess_nll_seeds_low"] is None


def test_ages(figure):
    ages = figure[1]["ages"]
    assert ages.schema == AGE_SCHEMA
    passing = ages.filter((pl.col("arm") == "state_passing") & (pl.col("seed") == 0))
    assert passing.select("age", "share").rows() == [(0, 0.625), (8, 0.375)]
    assert ages.filter(pl.col("arm") == "noise").select("age", "share").rows() == [(None, 1.0)]


def test_metrics(figure):
    metrics = json.loads((figure[0] / "comparison/metrics.json").read_text())
    assert metrics["m"]["state_passing"]["removed"] == pytest.approx(0.88, abs=0.02)
    assert metrics["m"]["base"]["verdict"] == "FAIL"
    assert "removed" not in metrics["m"]["base"]


def test_deterministic(figure, tmp_path):
    evaluations = [write_evaluation(tmp_path, "base", 0, excess=1.0), write_evaluation(tmp_path, "control", 0, excess=0.8)]
    first = run(tmp_path, evaluations, ["base", "control"])
    second = run(tmp_path, evaluations[::-1], ["base", "control"])
    for name, table in first.items():
        assert table.equals(second[name]), name


def test_a_broken_seed_is_not_averaged_away(tmp_path):
    evaluations = [write_evaluation(tmp_path, "base", 0, excess=1.0), write_evaluation(tmp_path, "sp", 0, excess=0.1)]
    evaluations.append(write_evaluation(tmp_path, "sp", 1, excess=0.1, broken_at=300))
    tables = run(tmp_path, evaluations, ["base", "sp"])
    mean = row(tables["verdicts"], "sp")
    assert (mean["verdict"], mean["worst_position"], mean["broken_at"], mean["excess_nll"]) == ("FAIL", 300, 300, None)
    assert row(tables["verdicts"], "sp", 0)["broken_at"] is None
    broken = BINS.high >= 300
    assert curve(tables["curves"], "sp", "ppl")["value"].is_nan().to_list() == broken.tolist()
    assert curve(tables["curves"], "sp", "ppl")["low"].is_nan().to_list() == broken.tolist()


def test_few_documents_are_said_to_be_few(tmp_path):
    evaluations = [
        write_evaluation(tmp_path, arm, 0, excess=excess, documents=4, stretches=6)
        for arm, excess in (("base", 1.0), ("sp", 0.0))
    ]
    verdict = row(run(tmp_path, evaluations, ["base", "sp"])["verdicts"], "sp")
    assert verdict["interval"] == "95 % two-level bootstrap over 4 documents and their 24 stretches"
    assert verdict["verdict_split"] == "stretches"
    assert (verdict["n_documents"], verdict["n_stretches"]) == (4, 24)


def test_one_text_has_no_interval(tmp_path):
    evaluations = [write_evaluation(tmp_path, arm, 0, excess=excess, documents=1) for arm, excess in (("base", 1.0), ("sp", 0.0))]
    tables = run(tmp_path, evaluations, ["base", "sp"])
    verdict = row(tables["verdicts"], "sp")
    assert verdict["verdict"] == "UNDECIDED"
    assert verdict["removed"] == pytest.approx(1.0, abs=0.05)
    assert verdict["removed_low"] is None
    assert tables["curves"]["low"].is_nan().all()


def test_an_undecided_arm_says_how_much_text_would_decide(tmp_path):
    evaluations = [
        write_evaluation(tmp_path, arm, 0, excess=excess, documents=24, noise=0.2) for arm, excess in (("base", 1.0), ("sp", 0.1))
    ]
    verdict = row(run(tmp_path, evaluations, ["base", "sp"])["verdicts"], "sp")
    assert (verdict["verdict"], verdict["would_be"]) == ("UNDECIDED", "FAIL")
    needed = 24 * ((verdict["gap_high"] - verdict["gap_low"]) / 2 / (verdict["gap"] - 0.02)) ** 2
    assert 24 < verdict["documents_to_decide"] <= np.ceil(needed)


def test_nothing_to_remove(tmp_path):
    evaluations = [write_evaluation(tmp_path, "base", None, excess=0.0), write_evaluation(tmp_path, "sp", 0, excess=0.0)]
    verdicts = run(tmp_path, evaluations, ["base", "sp"])["verdicts"]
    assert row(verdicts, "sp")["removed"] is None
    assert verdicts.filter(pl.col("arm") == "base").height == 1  # a published checkpoint has no seed, and so one row


def test_far_positions_of_a_short_evaluation(tmp_path):
    short = log_bins(100, CONTEXT, 2)
    evaluations = [write_evaluation(tmp_path / "a", arm, 0, excess=0.5, bins=short) for arm in ("base", "sp")]
    found = row(run(tmp_path / "a", evaluations, ["base", "sp"])["verdicts"], "sp")
    assert found["far_from"] >= 50
    assert found["far_to"] == 100
    only = log_bins(CONTEXT, CONTEXT, 2)
    evaluations = [write_evaluation(tmp_path / "b", arm, 0, excess=0.5, bins=only) for arm in ("base", "sp")]
    found = row(run(tmp_path / "b", evaluations, ["base", "sp"])["verdicts"], "sp")
    assert (found["far_from"], found["excess_nll"]) == (None, None)


def test_two_models_of_different_context(tmp_path):
    evaluations = [write_evaluation(tmp_path, "base", 0, excess=1.0)]
    evaluations.append(write_evaluation(tmp_path, "base", 0, excess=1.0, model="n", context=32, bins=log_bins(LENGTH, 32, 2)))
    verdicts = run(tmp_path, evaluations, ["base"], models=("n", "m"))["verdicts"]
    assert verdicts.select("model", "train_length").unique(maintain_order=True).rows() == [("n", 32), ("m", 8)]


@pytest.mark.parametrize(
    ("second", "arms", "message"),
    [
        ({"documents": 23}, ["base", "sp"], "different texts"),
        ({"first": 1}, ["base", "sp"], "different texts"),
        ({"bins": log_bins(LENGTH, CONTEXT, 3)}, ["base", "sp"], "different bins"),
        ({"context": 32}, ["base", "sp"], "different bins or training lengths"),
        ({}, ["base", "sp", "control"], "no evaluation of m / control"),
        ({}, ["base"], "evaluates m / sp, which the figure does not show"),
        ({}, ["sp"], "'base' must be among the arms"),
    ],
)
def test_evaluations_that_do_not_fit(tmp_path, second, arms, message):
    evaluations = [write_evaluation(tmp_path, "base", 0, excess=1.0), write_evaluation(tmp_path, "sp", 0, excess=0.1, **second)]
    with pytest.raises(FarstateError, match=message):
        run(tmp_path, evaluations, arms)
    assert not (tmp_path / "comparison/manifest.json").exists()


def test_the_same_evaluation_twice(tmp_path):
    evaluation = write_evaluation(tmp_path, "base", 0, excess=1.0)
    with pytest.raises(FarstateError, match="a second evaluation of m / base, seed 0"):
        run(tmp_path, [evaluation, evaluation], ["base"])


def test_a_damaged_training(tmp_path):
    evaluation = write_evaluation(tmp_path, "base", 0, excess=1.0)
    training = write_training(tmp_path, "base", 0, ages=[])
    (Path(training["directory"]) / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(FarstateError, match=r"metrics\.jsonl: damaged"):
        run(tmp_path, [evaluation], ["base"], [training])


def test_a_variant_is_held_against_the_control_of_its_own_budget(tmp_path):
    arms = ["base", "control", "control-steps-9", "passing", "passing-steps-9", "passing-steps-2"]
    costs = dict(zip(arms, (0.0, 0.1, 0.3, 0.15, 0.37, 0.5), strict=True))
    evaluations = [write_evaluation(tmp_path, arm, 0, excess=1.0, cost=cost) for arm, cost in costs.items()]
    controls = {"passing": "control", "passing-steps-9": "control-steps-9", "passing-steps-2": None}
    compare(
        evaluations=evaluations,
        trainings=[],
        compare=Compare(resamples=200),
        figure={"models": ["m"], "arms": arms, "controls": controls},
        output=tmp_path / "out",
    )
    verdicts = pl.read_parquet(tmp_path / "out/verdicts.parquet")
    against = {arm: row(verdicts, arm)["short_context_cost_vs_control"] for arm in arms}
    assert against["passing"] == pytest.approx(0.05, abs=1e-3)
    assert against["passing-steps-9"] == pytest.approx(0.07, abs=1e-3)
    assert [against[arm] for arm in ("base", "control", "control-steps-9", "passing-steps-2")] == [None] * 4
    assert {arm: row(verdicts, arm)["control"] for arm in arms if row(verdicts, arm)["control"]} == {
        "passing": "control",
        "passing-steps-9": "control-steps-9",
    }


def test_differences_are_paired_by_texts_and_by_seeds(tmp_path):
    """Seeds move both by the same amount: what is left is the difference, far more certain than either."""
    evaluations = []
    for seed in (0, 1, 2):
        evaluations.append(write_evaluation(tmp_path, "base", seed, model="a", excess=0.5 + 0.3 * seed, noise=0.0))
        evaluations.append(write_evaluation(tmp_path, "base", seed, model="b", excess=0.7 + 0.31 * seed, cost=0.04, noise=0.0))
    evaluations.append(write_evaluation(tmp_path, "base", 7, model="b", excess=9.0))
    pair = {"model": "b", "arm": "base", "against_model": "a", "against_arm": "base"}
    compare(
        evaluations=evaluations,
        trainings=[],
        compare=Compare(resamples=200),
        figure={"models": ["a", "b"], "arms": ["base"], "pairs": [pair]},
        output=tmp_path / "out",
    )
    table = pl.read_parquet(tmp_path / "out/differences.parquet")
    assert table.schema == DIFFERENCE_SCHEMA
    assert table["seed"].unique().sort().to_list() == [None, 0, 1, 2], "a seed that only one has is left out"
    far = row(table.filter(pl.col("quantity") == "excess_nll"), "base")
    assert far["n_seeds"] == 3
    assert far["value"] == pytest.approx(0.21, abs=1e-6)
    assert far["low"] <= far["value"] <= far["high"]
    assert far["seeds_low"] == pytest.approx(0.21 - 4.3027 * 0.01 / 3**0.5, abs=1e-4)
    near = row(table.filter(pl.col("quantity") == "short_context_nll"), "base")
    assert near["value"] == pytest.approx(0.04, abs=1e-3)
    one = pl.read_parquet(tmp_path / "out/differences.parquet").filter(pl.col("seed") == 1, pl.col("quantity") == "excess_nll")
    assert one["seeds_low"].to_list() == [None]


def test_a_model_may_lack_an_arm_that_others_have(tmp_path):
    evaluations = [write_evaluation(tmp_path, arm, 0, model="a", excess=1.0) for arm in ("base", "early")]
    evaluations.append(write_evaluation(tmp_path, "base", 0, model="b", excess=1.0))
    figure = {"models": ["a", "b"], "arms": ["base", "early"]}

    def joined(name: str, **options):
        compare(
            evaluations=evaluations, trainings=[], compare=Compare(resamples=100), figure=figure | options, output=tmp_path / name
        )
        return pl.read_parquet(tmp_path / name / "verdicts.parquet")

    verdicts = joined("out", absent=[{"model": "b", "arm": "early"}])
    assert sorted(set(zip(verdicts["model"], verdicts["arm"], strict=True))) == [("a", "base"), ("a", "early"), ("b", "base")]
    with pytest.raises(FarstateError, match="no evaluation of b / early, which the figure shows"):
        joined("other")
