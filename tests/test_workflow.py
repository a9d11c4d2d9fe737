"""The workflow as a workflow: Snakemake and DVC as a user calls them, in clones of the working tree.

The numbers in the names are those of the list in docs/architecture.md, "What holds".
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from conftest import REPOSITORY, environment, make_clone, run
from farstate.files import only_one, sha256_file
from farstate.params import merge
from farstate.plan import RUN_LOCK

pytestmark = pytest.mark.workflow

TRAINING = {"pretrain", "posttrain"}
NOTHING = "Nothing to be done"


def planned(clone: Path, *arguments: str, check: bool = True) -> dict[str, int]:
    """Rules and how many jobs of each a dry run plans."""
    done = run(clone, "snakemake", "-n", *arguments, check=check)
    if NOTHING in done.stdout:
        return {}
    table = re.search(r"^job +count\n[- ]+\n(.*?)\n\n", done.stdout, re.S | re.M)
    assert table, done.stdout[-3000:]
    rows = dict(line.split() for line in table.group(1).splitlines())
    return {rule: int(count) for rule, count in rows.items() if rule not in ("total", "all")}


def edit(clone: Path, changes: dict[str, object]) -> None:
    """Lay values over the clone's `params.yaml`."""
    path = clone / "params.yaml"
    path.write_text(yaml.safe_dump(merge(yaml.safe_load(path.read_text()), changes), sort_keys=False, default_flow_style=None))


def record_of(clone: Path, start: str) -> tuple[Path, Path]:
    """The record of the one existing result whose `<phase>.<name>` begins so, and its directory."""
    for record in sorted((clone / ".farstate/stages").glob(f"{start}*.json")):
        directory = clone / json.loads(record.read_text())["directory"]
        if directory.exists():
            return record, directory
    raise AssertionError(f"no result of {start}")


def weights(clone: Path, phase: str) -> dict[str, str]:
    return {path.parent.name: sha256_file(path) for path in sorted((clone / "results" / phase).glob("*/model.safetensors"))}


def test_the_whole_pipeline_and_a_second_call(finished_clone: Path) -> None:
    for kind in ("html", "svg", "png", "json", "parquet", "csv"):
        assert (finished_clone / f"reports/fig5.{kind}").stat().st_size > 0
    for kind in ("html", "json", "csv"):
        assert (finished_clone / f"reports/index.{kind}").stat().st_size > 0
    assert planned(finished_clone) == {}
    assert len(list((finished_clone / "results/posttrain").glob("*/manifest.json"))) == 5
    for manifest in finished_clone.glob("results/*/*/manifest.json"):
        for name, record in json.loads(manifest.read_text())["files"].items():
            assert sha256_file(manifest.parent / name) == record["sha256"]
    leftovers = [
        path for path in (finished_clone / ".farstate/scratch").rglob("*") if path.is_file() and path.stat().st_size > 64
    ]
    assert leftovers == [], "checkpoints for resuming are deleted at success"
    assert list((finished_clone / "logs").rglob("*.provenance.json"))


EDITS = {
    "nothing": ({}, {}),
    "corpus": (
        {"corpus": {"split": {"salt": "other"}}},
        {
            "documents": 1,
            "tokenizer": 1,
            "tokens": 1,
            "store": 1,
            "pretrain": 1,
            "posttrain": 5,
            "perplexity": 6,
            "compare": 1,
            "report": 1,
            "index": 1,
        },
    ),
    "tokenizer": (
        {"tokenizer": {"vocabulary_size": 300}},
        {
            "tokenizer": 1,
            "tokens": 1,
            "store": 1,
            "pretrain": 1,
            "posttrain": 5,
            "perplexity": 6,
            "compare": 1,
            "report": 1,
            "index": 1,
        },
    ),
    "store": (
        {"store": {"dtype": "uint32"}},
        {"tokens": 1, "store": 1, "pretrain": 1, "posttrain": 5, "perplexity": 6, "compare": 1, "report": 1, "index": 1},
    ),
    "models": (
        {"models": {"tiny": {"shape": {"layers": 1}}}},
        {"pretrain": 1, "posttrain": 5, "perplexity": 6, "compare": 1, "report": 1, "index": 1},
    ),
    "pretrain": (
        {"pretrain": {"seed": 4}},
        {"pretrain": 1, "posttrain": 5, "perplexity": 6, "compare": 1, "report": 1, "index": 1},
    ),
    "posttrain": ({"posttrain": {"steps": 21}}, {"posttrain": 5, "perplexity": 5, "compare": 1, "report": 1, "index": 1}),
    "one arm": (
        {"posttrain": {"arms": {"random_noise": {"sigma": 0.5}}}},
        {"posttrain": 1, "perplexity": 1, "compare": 1, "report": 1, "index": 1},
    ),
    "evaluate": ({"evaluate": {"length": 128}}, {"perplexity": 6, "compare": 1, "report": 1, "index": 1}),
    "compare": ({"compare": {"tolerance": 0.03}}, {"compare": 1, "report": 1, "index": 1}),
    "figures": ({"figures": {"fig5": {"arms": ["base", "control", "state_passing"]}}}, {"compare": 1, "report": 1, "index": 1}),
    "report": ({"report": {"note": "other"}}, {"report": 1, "index": 1}),
}


@pytest.mark.parametrize("group", EDITS)
def test_1_an_edit_plans_exactly_the_rules_that_depend_on_it(group: str, finished_clone: Path) -> None:
    changes, expected = EDITS[group]
    overrides = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    assert planned(finished_clone, *(["--config", *overrides] if overrides else [])) == expected


def test_2_and_4_dvc_repro_after_snakemake_and_an_edit_reverted(clone_with_results: Path) -> None:
    clone = clone_with_results
    before = weights(clone, "posttrain")
    done = run(clone, "dvc", "repro")
    assert done.stdout.count(NOTHING) == 6, "by hand first, then dvc repro: nothing runs again"
    assert "Finished jobid" not in done.stdout
    recorded = (clone / "dvc.lock").read_text()
    run(clone, "dvc", "status", "-q")

    original = (clone / "params.yaml").read_text()
    edit(clone, {"posttrain": {"arms": {"random_noise": {"sigma": 0.5}}}})
    run(clone, "dvc", "repro")
    changed = weights(clone, "posttrain")
    assert len(set(changed) - set(before)) == len(set(before) - set(changed)) == 1, (
        "the superseded result has left results/posttrain"
    )
    assert (clone / "dvc.lock").read_text() != recorded
    (clone / "params.yaml").write_text(original)
    assert set(planned(clone)) == {"report", "index"}, "reverted: nothing is trained or measured the second time"
    done = run(clone, "dvc", "repro")
    assert not any(f"(Rule: {rule})" in done.stdout for rule in (*TRAINING, "perplexity", "compare"))
    assert weights(clone, "posttrain") == before
    assert (clone / "dvc.lock").read_text() == recorded, "the same parameters record the same results"


def test_dvc_repro_goes_through_after_an_edit_of_an_early_phase(clone_with_results: Path) -> None:
    """In the middle of a repro the lock holds new and old phases side by side; nothing may be refused then."""
    clone = clone_with_results
    edit(clone, {"figures": {"fig5": {"arms": ["base", "control"]}}})
    run(clone, "dvc", "repro")
    edit(clone, {"pretrain": {"tokens": 20_000}, "posttrain": {"steps": 2}})
    run(clone, "dvc", "repro")
    assert planned(clone) == {}
    recorded = json.loads((clone / "config/recorded/posttrain.json").read_text())
    assert sorted(recorded) == sorted(f"results/posttrain/{name}" for name in weights(clone, "posttrain"))


def test_10_recorded_but_absent_results_are_never_recomputed_silently(clone_with_results: Path) -> None:
    clone = clone_with_results
    run(clone, "dvc", "repro")
    for phase in ("corpus", "pretrain", "posttrain"):
        shutil.rmtree(clone / "results" / phase)
    assert planned(clone) == {}, "tables and pages alone: nothing to do"
    assert planned(clone, "--config", 'report={"note": "x"}') == {"report": 1, "index": 1}
    done = run(clone, "snakemake", "-n", "--config", 'evaluate={"length": 128}', check=False)
    assert done.returncode != 0
    assert re.search(
        r"recorded in dvc\.lock but absent here; run `dvc pull results/corpus results/pretrain results/posttrain`", done.stdout
    )
    assert planned(clone, "evaluated") == {}, "nothing absent is needed for what was asked for"
    done = run(clone, "snakemake", "-n", "corpus", check=False)
    assert "run `dvc pull results/corpus`, or add" in done.stdout, "only what was asked for"
    plan = planned(clone, "--config", 'evaluate={"length": 128}', "recompute=true")
    assert plan["pretrain"] == 1
    assert plan["perplexity"] == 6
    shutil.rmtree(clone / "results")
    assert planned(clone) == {}, "pages alone: nothing to do"


def test_8_the_slurm_profile_plans_on_a_clean_checkout(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    shutil.copy(REPOSITORY / "params.yaml", clone / "params.yaml")
    done = run(clone, "snakemake", "--profile", "slurm", "-n", "reports/fig5.html")
    assert re.search(r"^posttrain +32$", done.stdout, re.M)
    done = run(clone, "snakemake", "-n", "reports/fig5.html", "--configfile", "config/paper.yaml")
    assert re.search(r"^import_checkpoint +3$", done.stdout, re.M)
    assert re.search(r"^posttrain +48$", done.stdout, re.M)


def test_9_clones_that_share_an_output_cache_train_once(finished_clone: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    made = []
    for name in ("one", "two"):
        clone = make_clone(tmp_path / name)
        shutil.copytree(finished_clone / "results/corpus", clone / "results/corpus")
        done = run(clone, "snakemake", "--profile", "profiles/cache", "pretrained", SNAKEMAKE_OUTPUT_CACHE=str(cache))
        made.append(weights(clone, "pretrain"))
        assert ("Moving output file" in done.stdout) == (name == "one"), done.stdout[-2000:]
        assert ("tokens/s" in done.stdout) == (name == "one")
    assert made[0] == made[1]


def test_unregistered_sources_plan_and_a_real_run_names_the_command(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    (clone / "config/sources.lock").write_text("")
    assert planned(clone)["documents"] == 1
    done = run(clone, "snakemake", "corpus", check=False)
    assert done.returncode != 0
    assert "farstate: tests/data/corpus.jsonl: not registered in config/sources.lock; run `farstate register`" in done.stdout


def test_a_dry_run_never_loads_torch(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    code = (
        "import runpy, sys\n"
        "sys.argv = ['snakemake', '-n', '-q']\n"
        "try:\n    runpy.run_module('snakemake', run_name='__main__')\n"
        "except SystemExit as leave:\n    assert not leave.code, leave.code\n"
        "heavy = [name for name in ('torch', 'transformers', 'datasets', 'altair') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    run(clone, "python", "-c", code)


def test_bad_parameters_stop_the_workflow_in_one_line(finished_clone: Path) -> None:
    done = run(finished_clone, "snakemake", "-n", "--config", 'posttrain={"stps": 3}', check=False)
    assert done.returncode != 0
    assert "params.yaml: posttrain.stps: unknown parameter (did you mean 'steps'?)" in done.stdout
    assert "Traceback" not in done.stdout


def test_it_runs_from_another_working_directory(finished_clone: Path, tmp_path: Path) -> None:
    """`--directory` puts results elsewhere; parameters and settings of the repository serve where none lie there."""
    (tmp_path / "elsewhere").mkdir()
    elsewhere = tmp_path / "elsewhere"
    done = run(finished_clone, "snakemake", "--directory", str(elsewhere), "-n")
    assert re.search(r"^pretrain +1$", done.stdout, re.M)
    run(finished_clone, "snakemake", "--directory", str(elsewhere), "corpus")
    for path in (finished_clone / "results/corpus").glob("tokens.*/tokens.bin"):
        assert sha256_file(elsewhere / path.relative_to(finished_clone)) == sha256_file(path)


def test_a_half_written_result_is_made_again(clone_with_results: Path) -> None:
    """A kill between two files leaves no manifest; a lost file leaves a manifest that does not hold."""
    comparison = next((clone_with_results / "results/evaluate").glob("fig5-*"))
    before = sha256_file(comparison / "curves.parquet")
    (comparison / "manifest.json").unlink()
    (comparison / "verdicts.parquet").write_bytes(b"half")
    assert planned(clone_with_results, "evaluated") == {"compare": 1, "evaluated": 1}
    run(clone_with_results, "snakemake", "evaluated")
    assert sha256_file(comparison / "curves.parquet") == before
    stage = next((clone_with_results / "results/posttrain").glob("tiny.control*"))
    weight = stage / "model.safetensors"
    weight.write_bytes(weight.read_bytes()[:-1])
    record, _ = record_of(clone_with_results, "evaluate.perplexity.tiny.control")
    done = run(clone_with_results, "farstate", "perplexity", str(record), check=False)
    assert done.returncode == 1
    assert re.search(r"model\.safetensors: \d+ bytes, its manifest says \d+; delete .* and run again", done.stdout)


def test_a_second_snakemake_in_the_same_folder_is_refused_in_one_line(clone_with_results: Path) -> None:
    with only_one(clone_with_results / RUN_LOCK, "this test"):
        done = run(clone_with_results, "snakemake", check=False)
        assert done.returncode != 0
        assert "a Snakemake run in this folder is already running (process" in done.stdout
        assert planned(clone_with_results) == {}, "a dry run disturbs nobody"
        done = run(clone_with_results, "farstate", "supersede", "posttrain", check=False)
        assert done.returncode == 1
        assert "already running" in done.stdout


def test_two_runs_at_once_are_refused(clone_with_results: Path) -> None:
    clone = clone_with_results
    record, directory = record_of(clone, "pretrain.tiny")
    shutil.rmtree(directory)
    # The first run is this process: it holds the lock for as long as the second tries, whatever the machine's speed.
    with only_one(clone / ".farstate/scratch/pretrain" / directory.name / "lock", "a training"):
        second = run(clone, "farstate", "pretrain", str(record), check=False)
    assert second.returncode == 1
    assert "already running (process" in second.stdout
    run(clone, "farstate", "pretrain", str(record))
    assert (directory / "manifest.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="as an ordinary user the folder's owner could not be changed")
def test_a_read_only_results_folder_is_named(clone_with_results: Path) -> None:
    """As root permission tests cannot fail, so the command runs as an unprivileged user."""
    clone = clone_with_results
    record, directory = record_of(clone, "evaluate.fig5")
    shutil.rmtree(directory)
    for path in [clone, *clone.parents]:
        if path.stat().st_mode & 0o005 != 0o005 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "farstate", "compare", str(record)],
        cwd=clone,
        env=environment(clone, HOME="/tmp"),
        text=True,
        capture_output=True,
        check=False,
        timeout=120,
    )
    if "setpriv" in done.stderr or "ModuleNotFoundError" in done.stderr or done.returncode == 127:
        pytest.skip("the environment itself cannot be read by an unprivileged user here")
    assert done.returncode == 1
    assert re.search(r"no permission to write '.*results/evaluate", done.stderr), done.stderr


def test_every_architecture_reaches_its_page(finished_clone: Path, tmp_path: Path) -> None:
    """Figures 1 and 10: single models with their own budget and steps, results shared between figures, backends recorded."""
    clone = shutil.copytree(finished_clone, tmp_path / "clone", symlinks=True)
    wanted = (
        *("reports/fig1.html", "reports/fig10.html"),
        *("--configfile", "config/test.yaml", "config/test_architectures.yaml"),
    )
    jobs = planned(clone, *wanted)
    assert jobs["pretrain"] + jobs["pretrain_2"] == 5, "the first model is there already"
    assert jobs["compare"] == jobs["report"] == 2
    run(clone, "snakemake", *wanted)
    assert planned(clone, *wanted) == {}
    assert planned(clone) == {}, "the other figure's results are untouched"
    page = (clone / "reports/fig1.html").read_text()
    for model in ("tiny", "tiny-mamba1", "tiny-gla", "tiny-deltanet", "tiny-hybrid"):
        assert f"{model} (" in page
    operations = set()
    for sidecar in (clone / "logs/evaluate").glob("perplexity.tiny*.provenance.json"):
        ran = json.loads(sidecar.read_text())["operations"]
        assert all(choice["requested"] == "auto" and set(choice["resolved"]) == {"chunked"} for choice in ran.values())
        operations |= set(ran)
    assert operations == {"ssd", "selective_scan", "gla", "gated_delta", "wkv6"}


def test_every_figure_of_the_diagnostics_is_drawn(finished_clone: Path, tmp_path: Path) -> None:
    """All measures, snapshots, variants and tasks of one model, sharing what they can with the figure that is there."""
    clone = shutil.copytree(finished_clone, tmp_path / "clone", symlinks=True)
    wanted = ("--configfile", "config/test.yaml", "config/test_figures.yaml")
    jobs = planned(clone, *wanted)
    assert (sum(jobs[rule] for rule in jobs if rule.startswith("pretrain")), jobs["posttrain"]) == (6, 6)
    assert (jobs["remembrance"], jobs["states"], jobs["shift"]) == (2, 2, 2), "shared by Figures 4 and 9"
    assert (jobs["tune"], jobs["task"]) == (5, 4 + 2 * 4 + 2), "passkey one job a cell"
    run(clone, "snakemake", *wanted)
    assert planned(clone, *wanted) == {}
    assert planned(clone) == {"index": 1}, "Figure 5 is untouched; the page of all results was that of the others"
    for name in ("fig1", "fig2", "fig3", "fig4", "fig6", "fig7", "fig9", "fig11", "fig12", "fig13", "table1", "shift", "cost"):
        for kind in ("html", "svg", "png", "json", "parquet", "csv"):
            assert (clone / f"reports/{name}.{kind}").stat().st_size > 0
