"""Recording, sharing and comparing with DVC, as a user does it: real git repositories, a local remote, an S3 store on this machine.

The numbers in the names are those of the list in docs/architecture.md, "What holds"; 1, 2, 4 and 7 to 10 are in tests/test_workflow.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from conftest import run
from farstate.files import read_manifest, sha256_file
from farstate.params import load
from farstate.plan import PHASES, Plan
from farstate.sources import read_lock
from farstate.summary import OF_AN_ARM, write_summary
from test_workflow import edit, planned, record_of, weights

pytestmark = pytest.mark.workflow

RETRAINED = {"posttrain": 1, "perplexity": 1, "compare": 1, "report": 1, "index": 1}
DRAWN = {"index": 1}
"""The page of all results is made of the pages in seconds, on each machine by itself."""
LOUDER = {"posttrain": {"arms": {"random_noise": {"sigma": 0.5}}}}


def git(clone: Path, *command: str) -> None:
    subprocess.run(["git", *command], cwd=clone, check=True, capture_output=True)


def commit(clone: Path, message: str) -> None:
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", message)


def fresh(source: Path, target: Path) -> Path:
    """What a colleague has after `git clone`."""
    git(source.parent, "clone", "-q", str(source), str(target))
    git(target, "config", "user.email", "colleague@example.org")
    git(target, "config", "user.name", "colleague")
    return target


def plan_of(clone: Path) -> Plan:
    return Plan(load(clone / "params.yaml"), read_lock(clone / "config/sources.lock"))


def tables(clone: Path) -> dict[str, str]:
    """Checksums of all measurements and comparisons."""
    return {
        str(path.relative_to(clone)): sha256_file(path)
        for path in sorted((clone / "results/evaluate").glob("*/*"))
        if path.name != "manifest.json"
    }


@pytest.fixture(scope="module")
def published(finished_clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose results are recorded, committed and pushed to a folder.

    The stages' commands have done their work here already; `dvc commit` then writes the lock that `dvc repro` writes (that it is
    the same is tested below).
    """
    folder = tmp_path_factory.mktemp("published")
    clone = shutil.copytree(finished_clone, folder / "clone", symlinks=True)
    plan = plan_of(clone)
    for phase in PHASES:
        plan.supersede(clone, phase)
        plan.write_recorded(clone, phase)
    write_summary(plan, clone)
    run(clone, "dvc", "commit", "-f", "-q")
    run(clone, "dvc", "remote", "add", "-q", "-d", "shared", str(folder / "remote"))
    run(clone, "dvc", "push", "-q")
    commit(clone, "results")
    return clone


@pytest.fixture(scope="module")
def pulled(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone with everything pulled."""
    clone = fresh(published, tmp_path_factory.mktemp("pulled") / "clone")
    run(clone, "dvc", "pull", "-q")
    return clone


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """An S3 store in this process: its address and the credentials that it takes."""
    boto3 = pytest.importorskip("boto3")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    given = {"url": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret"}
    boto3.client(
        "s3", endpoint_url=given["url"], region_name="us-east-1", aws_access_key_id="someone", aws_secret_access_key="secret"
    ).create_bucket(Bucket="results")
    yield given
    server.stop()


def test_3_and_11_a_fresh_clone_that_pulled_has_nothing_to_do_and_after_an_edit_what_depends_on_it(
    published: Path, pulled: Path
) -> None:
    """Every single parameter, without whole programs, is in tests/test_dvc_parameters.py."""
    assert weights(pulled, "posttrain") == weights(published, "posttrain")
    assert len(weights(pulled, "posttrain")) == 5
    assert planned(pulled) == DRAWN
    assert run(pulled, "dvc", "status", "--json").stdout.strip() == "{}"
    original = (pulled / "params.yaml").read_text()
    edit(pulled, LOUDER)
    assert planned(pulled) == RETRAINED
    named = set(json.loads(run(pulled, "dvc", "status", "--json").stdout))
    assert named == {"posttrain", "tasks"}, (
        "the rest is below them; no figure here shows a task, so that Snakemake finds none to do"
    )
    (pulled / "params.yaml").write_text(original)


def test_5_another_history_ends_with_the_same_lock_and_an_experiment_with_the_numbers_of_a_clean_run(
    published: Path, pulled: Path, tmp_path: Path
) -> None:
    colleague = fresh(published, tmp_path / "colleague")
    for name in ("cache", "tmp"):
        (colleague / ".dvc" / name).mkdir(exist_ok=True)
    shutil.copytree(pulled / ".dvc/cache", colleague / ".dvc/cache", dirs_exist_ok=True)
    run(colleague, "dvc", "checkout", "-q")
    recorded = (colleague / "dvc.lock").read_text()

    done = run(colleague, "dvc", "exp", "run", "-n", "louder", "-S", "posttrain.arms.random_noise.sigma=0.5", "evaluate")
    assert done.stdout.count("(Rule: posttrain)") == 1
    assert "louder" in run(colleague, "dvc", "exp", "list", "--name-only").stdout
    assert (colleague / "dvc.lock").read_text() != recorded

    clean = fresh(published, tmp_path / "clean")
    shutil.copytree(published / "results", clean / "results")  # what the edit leaves as it is
    edit(clean, LOUDER)
    run(clean, "snakemake", "evaluated")
    ours, theirs = tables(clean), tables(colleague)
    assert theirs.items() <= ours.items()
    assert set(theirs) - set(tables(published)), "there are new tables"
    assert weights(colleague, "posttrain").items() <= weights(clean, "posttrain").items()

    changed = json.loads(run(colleague, "dvc", "metrics", "diff", "HEAD", "--json").stdout)
    assert set(changed) == {"summary/metrics/fig5/tiny.random_noise.json"}, "names without keys: one arm's numbers changed"
    assert "excess_nll" in changed["summary/metrics/fig5/tiny.random_noise.json"]
    assert json.loads(run(colleague, "dvc", "params", "diff", "--json").stdout)["params.yaml"] == {
        "posttrain.arms.random_noise.sigma": {"old": 0.1, "new": 0.5, "diff": 0.4}
    }
    both_revisions_are_drawn(colleague)

    git(colleague, "checkout", "params.yaml")
    done = run(colleague, "dvc", "repro", "evaluate")
    assert not any(f"(Rule: {rule})" in done.stdout for rule in ("pretrain", "posttrain", "perplexity", "compare"))
    assert (colleague / "dvc.lock").read_text() == recorded, "leftovers of other parameters are not part of what is recorded"
    assert list((colleague / ".superseded/posttrain").iterdir()), "they are there"
    git(colleague, "diff", "--exit-code")


def both_revisions_are_drawn(clone: Path) -> None:
    """`dvc plots diff`: the specification in its page is drawn, and holds the curves of both revisions."""
    import vl_convert

    run(clone, "dvc", "plots", "diff", "HEAD", "--out", "plots", "-q")
    page = (clone / "plots/index.html").read_text()
    specification, _ = json.JSONDecoder().raw_decode(page[page.index("var spec = ") + len("var spec = ") :])
    rows = specification["data"]["values"]
    assert {row["rev"] for row in rows} == {"HEAD", "workspace"}
    assert {row["quantity"] for row in rows} == {"excess_nll", "ppl"}
    assert len({row["arm"] for row in rows}) == 6
    svg = vl_convert.vegalite_to_svg(specification)
    assert svg.count("mark-line") >= 2, "a panel for each quantity"
    assert "random_noise" in svg
    assert "NaN" not in svg
    shutil.rmtree(clone / "plots")


def test_6_tables_and_pages_alone_and_one_model(published: Path, tmp_path: Path) -> None:
    clone = fresh(published, tmp_path / "clone")
    run(clone, "dvc", "pull", "-q", "results/evaluate", "reports")
    assert {path.name for path in (clone / "results").iterdir()} == {"evaluate"}
    assert tables(clone) == tables(published)
    assert planned(clone) == DRAWN
    run(clone, "snakemake")
    assert planned(clone) == {}
    assert planned(clone, "--config", 'report={"note": "x"}') == {"report": 1, "index": 1}
    model = next((published / "results/posttrain").glob("tiny.state_passing*"))
    run(clone, "dvc", "pull", "-q", f"results/posttrain/{model.name}")
    assert [path.name for path in (clone / "results/posttrain").iterdir()] == [model.name]
    read_manifest(clone / "results/posttrain" / model.name, verify=True)


def test_sharing_through_an_s3_store(published: Path, store: dict[str, str], tmp_path: Path) -> None:
    keys = {name: value for name, value in store.items() if name.startswith("AWS_")}
    one = fresh(published, tmp_path / "one")
    run(one, "dvc", "pull", "-q")
    run(one, "dvc", "remote", "add", "-q", "-d", "-f", "shared", "s3://results/farstate")
    run(one, "dvc", "remote", "modify", "-q", "shared", "endpointurl", store["url"])
    commit(one, "the remote has moved")
    run(one, "dvc", "push", "-q", **keys)
    two = fresh(one, tmp_path / "two")
    run(two, "dvc", "pull", "-q", "results/evaluate", "reports", **keys)
    assert tables(two) == tables(published)
    assert planned(two) == DRAWN
    for page in (two / "reports").iterdir():
        assert sha256_file(page) == sha256_file(published / "reports" / page.name)
    done = run(two, "dvc", "pull", "results/pretrain", check=False, AWS_ACCESS_KEY_ID="", AWS_EC2_METADATA_DISABLED="true")
    assert done.returncode != 0, "the store is asked, not some folder"


def test_a_table_in_another_repository(published: Path, tmp_path: Path) -> None:
    other = tmp_path / "paper"
    other.mkdir()
    git(other, "init", "-q")
    run(other, "dvc", "init", "-q")
    table = next((published / "results/evaluate").glob("fig5-*/verdicts.parquet")).relative_to(published)
    run(other, "dvc", "get", "-q", str(published), str(table), "-o", "got.parquet")
    run(other, "dvc", "import", "-q", str(published), str(table), "-o", "verdicts.parquet")
    for name in ("got.parquet", "verdicts.parquet"):
        assert sha256_file(other / name) == sha256_file(published / table)
    source = yaml.safe_load((other / "verdicts.parquet.dvc").read_text())["deps"][0]
    assert source["path"] == str(table)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=published, text=True, capture_output=True, check=True).stdout.strip()
    assert source["repo"]["rev_lock"] == head, "the commit that is cited"


@pytest.mark.parametrize("links", ["hardlink", "symlink"])
def test_a_run_over_read_only_links_leaves_dvcs_cache_alone(links: str, published: Path, pulled: Path, tmp_path: Path) -> None:
    clone = fresh(published, tmp_path / "clone")
    shutil.copytree(pulled / ".dvc/cache", clone / ".dvc/cache")
    run(clone, "dvc", "config", "-q", "--local", "cache.type", links)
    run(clone, "dvc", "checkout", "-q")
    plan_of(clone).write_records(clone)
    _, comparison = record_of(clone, "evaluate.fig5")
    file = comparison / "curves.parquet"
    assert file.is_symlink() if links == "symlink" else file.stat().st_nlink > 1
    assert not file.stat().st_mode & 0o222
    before = sha256_file(file)
    # By hand, so that Snakemake does not remove the outputs first; without manifests the results count as unfinished.
    by_hand = {"tokens": "corpus.tokens", "posttrain": "posttrain.tiny.control", "compare": "evaluate.fig5"}
    for command, start in by_hand.items():
        record, directory = record_of(clone, start)
        (directory / "manifest.json").unlink()
        run(clone, "farstate", command, str(record))
        assert (directory / "manifest.json").exists()
    run(clone, "farstate", "supersede", "evaluate")
    run(clone, "farstate", "summary")
    assert sha256_file(file) == before
    assert not file.is_symlink()
    assert file.stat().st_nlink == 1
    damaged = [
        path
        for path in (clone / ".dvc/cache/files/md5").glob("*/*")
        if md5(path.read_bytes()).hexdigest() != path.parent.name + path.name.removesuffix(".dir")
    ]
    assert damaged == []
    assert run(clone, "dvc", "status", "--json").stdout.strip() == "{}"


def test_the_metrics_are_the_comparisons_numbers(published: Path) -> None:
    shown = json.loads(run(published, "dvc", "metrics", "show", "--json").stdout)[""]["data"]
    verdicts = pl.read_parquet(next((published / "results/evaluate").glob("fig5-*/verdicts.parquet")))
    rows = {f"{row['model']}.{row['arm']}": row for row in verdicts.filter(pl.col("seed").is_null()).iter_rows(named=True)}
    assert len(rows) == 6
    expected: dict[str, Any] = {
        f"summary/metrics/fig5/{name}.json": {key: row[key] for key in OF_AN_ARM if row[key] is not None}
        for name, row in rows.items()
    }
    expected["summary/metrics/trainings.json"] = {"trainings": 6, "measurements": 6, "tokens": 195 * 512 + 5 * 20 * 512}
    assert {name: file["data"] for name, file in shown.items()} == expected
