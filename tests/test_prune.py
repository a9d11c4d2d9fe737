"""`farstate prune`: what no parameter needs is found and removed, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import REPOSITORY, run
from farstate.errors import FarstateError
from farstate.files import only_one, write_json
from farstate.params import read_yaml, validate
from farstate.plan import RECORDED, RUN_LOCK, Plan, record_path
from farstate.prune import in_units, remove, unneeded
from farstate.sources import read_lock
from test_params import put

SCRATCH = Path(".farstate/scratch")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return read_yaml(REPOSITORY / "config/test.yaml")


def plan_of(data: dict[str, Any]) -> Plan:
    return Plan(validate(data, "test"), read_lock(REPOSITORY / "config/sources.lock"))


def fill(root: Path, plan: Plan) -> None:
    """Results, scratch, records, small manifests and logs of everything in `plan`."""
    plan.write_records(root)
    plan.write_pages(root)
    for stage in plan.stages.values():
        for path in (*stage.outputs, f"logs/{stage.directory.removeprefix('results/')}.log"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(b"x" * 10)
        for beside in ("provenance.json", "tsv"):
            (root / "logs/benchmarks" / stage.phase).mkdir(parents=True, exist_ok=True)
            (root / "logs/benchmarks" / stage.phase / f"{Path(stage.directory).name}.{beside}").write_text("x")
        (root / SCRATCH / stage.phase / Path(stage.directory).name).mkdir(parents=True, exist_ok=True)


def everything(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


@pytest.fixture
def both(tmp_path: Path, data: dict[str, Any]) -> tuple[Path, Plan, Plan]:
    """A folder with all of two sets of parameters, and their plans: other post-trainings, the same pre-training."""
    before, after = plan_of(data), plan_of(put(data, "posttrain.steps", 21))
    fill(tmp_path, before)
    fill(tmp_path, after)
    return tmp_path, before, after


def test_what_is_found_is_what_only_other_parameters_need(both: tuple[Path, Plan, Plan], data: dict[str, Any]) -> None:
    root, before, after = both
    gone = before.stages.keys() - after.stages.keys()
    assert len(gone) == 11, "five post-trainings, their measurements, the comparison"
    found = unneeded(root, [after], SCRATCH)
    assert {str(item.path.relative_to(root)) for item in found if item.kind == "results"} == gone
    sizes = {str(item.path.relative_to(root)): item.size for item in found}
    assert all(sizes[directory] == 10 * len(before.stages[directory].outputs) for directory in gone)
    records = {str(record_path(directory)) for directory in gone} | {before.pages["fig5"].manifest, before.index.manifest}
    assert {str(item.path.relative_to(root)) for item in found if item.kind == "records"} == records
    assert len([item for item in found if item.kind == "scratch"]) == len(gone)
    assert len([item for item in found if item.kind == "logs"]) == 3 * len(gone)
    assert unneeded(root, [before, after], SCRATCH) == [], "both sets of parameters are in use"


def test_removing_leaves_exactly_the_rest(both: tuple[Path, Plan, Plan], data: dict[str, Any], tmp_path: Path) -> None:
    root, _, after = both
    after.supersede(root, "posttrain")
    (root / ".superseded/reports").mkdir(parents=True)
    (root / ".superseded/reports/fig9.html").write_text("page")
    (root / "results/by_hand/mine").mkdir(parents=True)
    (root / "logs/notes.txt").write_text("mine")
    (root / "results/posttrain/notes.txt").write_text("mine")
    assert {item.kind for item in unneeded(root, [after], SCRATCH)} >= {"superseded", "results"}
    removed, held = remove(root, [after], SCRATCH)
    assert removed
    assert not held
    clean = tmp_path / "clean"
    fill(clean, after)
    rest = {name for name in everything(root) - everything(clean) if not name.startswith("clean")}
    assert everything(clean) <= everything(root)
    assert (
        rest
        - {
            *(".superseded", ".superseded/posttrain", ".superseded/reports", ".farstate/run.lock"),
            *("results/by_hand", "results/by_hand/mine", "logs/notes.txt", "results/posttrain/notes.txt"),
        }
        == set()
    )


def test_what_is_recorded_stays(both: tuple[Path, Plan, Plan]) -> None:
    root, before, after = both
    recorded = sorted(stage.directory for stage in before.of(phase="posttrain"))
    write_json(root / RECORDED / "posttrain.json", recorded)
    found = {str(item.path.relative_to(root)) for item in unneeded(root, [after], SCRATCH)}
    assert not found & set(recorded)
    after.supersede(root, "posttrain")
    found = {str(item.path.relative_to(root)) for item in unneeded(root, [after], SCRATCH)}
    assert not [path for path in found if path.startswith(".superseded/posttrain")]


def test_nothing_is_removed_under_a_run_or_a_training(both: tuple[Path, Plan, Plan]) -> None:
    root, before, after = both
    there = everything(root)
    with only_one(root / RUN_LOCK, "this test"), pytest.raises(FarstateError, match="already running"):
        remove(root, [after], SCRATCH)
    assert everything(root) - {RUN_LOCK.as_posix()} == there
    stage = next(stage for stage in before.of(phase="posttrain"))
    scratch = root / SCRATCH / "posttrain" / Path(stage.directory).name
    with only_one(scratch / "lock", "a training"):
        _, held = remove(root, [after], SCRATCH)
        assert [item.path for item in held] == [scratch]
        assert (scratch / "lock").exists()


def test_links_are_removed_and_not_what_they_point_to(both: tuple[Path, Plan, Plan], tmp_path: Path) -> None:
    root, before, after = both
    stage = next(stage for stage in before.of(phase="posttrain"))
    cached = tmp_path / "cache.bin"
    cached.write_bytes(b"weights")
    weights = root / stage.directory / "model.safetensors"
    weights.unlink()
    weights.symlink_to(cached)
    remove(root, [after], SCRATCH)
    assert not weights.exists()
    assert cached.read_bytes() == b"weights"


def test_the_command_shows_and_removes_only_when_told(tmp_path: Path, data: dict[str, Any]) -> None:
    for name in ("config", "tests/data"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    (tmp_path / "src").symlink_to(REPOSITORY / "src")
    fill(tmp_path, plan_of(put(data, "posttrain.steps", 21)))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(data))
    there = everything(tmp_path)
    done = run(tmp_path, "farstate", "prune")
    assert "results: 11, " in done.stdout
    assert "could be removed with --remove: " in done.stdout
    assert everything(tmp_path) == there
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"posttrain": {"steps": 21}}))
    done = run(tmp_path, "farstate", "prune", "--remove", "--params", "params.yaml", "--params", "params.yaml+other.yaml")
    assert "removed 0 " in done.stdout
    run(tmp_path, "farstate", "prune", "--remove")
    assert len(list((tmp_path / "results/posttrain").iterdir())) == 0


def test_sizes_are_readable() -> None:
    assert [in_units(size) for size in (0, 999, 1000, 2_340_000, 5 * 10**9, 10**13)] == [
        *("0 B", "999 B", "1.0 kB", "2.3 MB", "5.0 GB", "10.0 TB")
    ]
