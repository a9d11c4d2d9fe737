"""Faults: what they do to a run, and that nothing is lost or silently wrong (docs/reliability.md)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import faults
from conftest import REPOSITORY, environment, make_clone, run
from farstate import integrity
from farstate.errors import FarstateError
from farstate.files import only_one, write_manifest
from farstate.params import load
from farstate.plan import RUN_LOCK, Plan
from farstate.sources import read_lock
from farstate.stages import Stage
from test_workflow import planned, record_of, weights

pytestmark = pytest.mark.workflow


def flip(path: Path, place: float = 0.5) -> None:
    """Change one bit of one byte."""
    with open(path, "r+b") as handle:
        handle.seek(int(path.stat().st_size * place))
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 1]))


def test_7_a_run_killed_three_times_ends_as_the_undisturbed_one(finished_clone: Path, tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    shutil.copytree(finished_clone / "results/corpus", clone / "results/corpus")
    faults.often(clone)
    drawn = random.Random(7)
    instants = [
        (("pretrain",), "pretrain/*/checkpoint-*.safetensors", drawn.uniform(0, 0.3)),
        (("posttrain",), "posttrain/*/checkpoint-*.safetensors", drawn.uniform(0, 0.3)),
        (("perplexity",), "", drawn.uniform(0, 3)),
    ]
    for stages, scratch, delay in instants:
        with faults.started(clone) as process:
            assert faults.wait_for(process, clone, stages, delay, scratch), (clone / "run.log").read_text()[-3000:]
            faults.kill(process, clone)
    done = run(clone, "snakemake", timeout=1200)
    log = (clone / "run.log").read_text() + done.stdout
    assert "pretrain goes on after step" in log
    assert "posttrain goes on after step" in log
    assert faults.differences(clone, faults.contents(finished_clone)) == []


def test_a_flipped_byte_is_found_named_and_made_again(clone_with_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = clone_with_results
    expected = faults.contents(clone)
    shard = next((clone / "results/corpus").glob("tokens.*/tokens.bin"))
    record, directory = record_of(clone, "posttrain.tiny.control")
    measuring, table = record_of(clone, "evaluate.perplexity.tiny.control")
    comparing, _ = record_of(clone, "evaluate.fig5")
    for path in (shard, directory / "model.safetensors", table / "perplexity.parquet"):
        flip(path)
    monkeypatch.chdir(clone)
    for stage, rule, damaged in (
        (record, "posttrain", shard),
        (measuring, "perplexity", directory / "model.safetensors"),
        (comparing, "compare", table / "perplexity.parquet"),
    ):
        with pytest.raises(FarstateError, match=rf"{damaged.relative_to(clone)}: its checksum differs from its manifest"):
            Stage(stage, None, rule)
    done = run(clone, "farstate", "verify", check=False)
    assert done.returncode == 1
    assert done.stdout.count("damaged: ") == 3
    assert planned(clone, "corpus", "posttrained", "evaluated") == {}, "sizes and dates do not show it"
    done = run(clone, "farstate", "verify", "--remove", check=False)
    assert done.returncode == 0
    assert done.stdout.count("removed results/") == 3
    run(clone, "snakemake", "corpus", "posttrained", "evaluated")
    assert faults.differences(clone, expected) == []
    assert "0 damaged" in run(clone, "farstate", "verify").stdout


def test_a_clock_that_jumps_changes_nothing(clone_with_results: Path) -> None:
    """Results get dates between 1990 and 2050, pages dates in the future: as after pulls, copies and a clock set anew."""
    clone, drawn = clone_with_results, random.Random(3)
    for pattern, first in (("results/*/*/*", 631e6), ("reports/*", 2.2e9)):
        for path in clone.glob(pattern):
            date = drawn.uniform(first, 2.52e9)
            os.utime(path, (date, date))
    assert planned(clone) == {}
    assert planned(clone, "--config", 'evaluate={"length": 128}') == {"perplexity": 6, "compare": 1, "report": 1, "index": 1}
    run(clone, "snakemake", "--config", 'compare={"tolerance": 0.03}')
    assert planned(clone, "--config", 'compare={"tolerance": 0.03}') == {}


def test_two_trainings_at_once_without_locks(finished_clone: Path, tmp_path: Path) -> None:
    """A file system without locks cannot keep two runs apart; each writes whole files, and they are the same."""
    clone = make_clone(tmp_path / "clone")
    for kept in ("results/corpus", ".farstate/stages"):
        shutil.copytree(finished_clone / kept, clone / kept)
    faults.often(clone)
    directory = next((finished_clone / "results/pretrain").glob("tiny*"))
    record = next((clone / ".farstate/stages").glob(f"pretrain.{directory.name}.json"))
    code = (
        "import errno, fcntl\n"
        "def flock(*_):\n    raise OSError(errno.ENOLCK, 'No locks available')\n"
        "fcntl.flock = flock\n"
        "from farstate.cli import main\nmain()\n"
    )
    command = [sys.executable, "-c", code, "pretrain", str(record)]
    both = [
        subprocess.Popen(command, cwd=clone, env=environment(clone), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=900)[0] for process in both]
    assert 0 in [process.returncode for process in both], told
    for process, text in zip(both, told, strict=True):
        assert process.returncode == 0 or "Traceback" not in text, text
    run(clone, "farstate", "pretrain", str(record))  # the one that came second may have found half of the other's
    assert weights(clone, "pretrain") == weights(finished_clone, "pretrain")
    assert integrity.damaged(clone / "results/pretrain" / directory.name) == []


def test_two_clones_that_fill_one_cache_at_once(finished_clone: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    clones = [make_clone(tmp_path / name) for name in ("one", "two")]
    running = []
    for clone in clones:
        shutil.copytree(finished_clone / "results/corpus", clone / "results/corpus")
        running.append(
            subprocess.Popen(
                ["snakemake", "--profile", "profiles/cache", "pretrained"],
                cwd=clone, env=environment(clone, SNAKEMAKE_OUTPUT_CACHE=str(cache)),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    for process in running:
        told = process.communicate(timeout=900)[0]
        assert process.returncode == 0, told[-3000:]
    for clone in clones:
        assert weights(clone, "pretrain") == weights(finished_clone, "pretrain")
        assert integrity.damaged(next((clone / "results/pretrain").glob("tiny*"))) == []
    assert not [path for path in cache.iterdir() if path.is_dir()], "no unfinished copy is left in the cache"


def test_only_what_may_have_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = Path("results/evaluate/a-00000000")
    result.mkdir(parents=True)
    (result / "table").write_bytes(b"numbers")
    write_manifest(result, {}, ["table"])
    read = []
    monkeypatch.setattr(integrity, "sha256_file", lambda path, real=integrity.sha256_file: (read.append(path), real(path))[1])
    integrity.note(result)
    integrity.hold(result)
    assert read == [], "it was just written here"
    os.utime(result / "table", (1, 1))
    integrity.hold(result)
    integrity.hold(result)
    assert len(read) == 1, "another date: read once more"
    integrity.hold(result, always=True)
    assert len(read) == 2
    before = os.stat(result / "table")
    flip(result / "table")
    os.utime(result / "table", ns=(before.st_atime_ns, before.st_mtime_ns))
    integrity.hold(result)  # bytes that changed under the old date: this is what `verify` is for
    with pytest.raises(FarstateError, match="results/evaluate/a-00000000/table: its checksum differs"):
        integrity.hold(result, always=True)
    integrity.remove(result)
    assert not result.exists()


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    result = tmp_path / "results/evaluate/a-00000000"
    result.mkdir(parents=True)
    (result / "table").write_bytes(b"numbers")
    write_manifest(result, {"params": {"steps": 3, "lengths": {8: 0.5, 16: None}}, "stage": "é"}, ["table"])
    whole = (result / "manifest.json").read_bytes()
    renamed = 0
    for place in range(len(whole)):
        for bit in range(8):
            spoilt = whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :]
            (result / "manifest.json").write_bytes(spoilt)
            if not integrity.damaged(result):
                found = json.loads(spoilt)
                renamed += found != json.loads(whole)
                assert {key: found[key] for key in ("params", "stage", "files")} == {
                    key: value for key, value in json.loads(whole).items() if key in ("params", "stage", "files")
                }
    assert renamed <= 8 * len("manifest_sha256"), "only a checksum under another name is taken for a manifest that never had one"
    for content in ("{}", "[]", '{"files": {}}', '{"files": {"table": {"bytes": 7}}}', "3"):
        (result / "manifest.json").write_text(content)
        assert len(integrity.damaged(result)) == 1


def test_verify_removes_nothing_but_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = [Path("results/evaluate/a-00000000"), Path("results/posttrain/unfinished-00000000"), Path("elsewhere/b-00000000")]
    for folder in (*kept, Path("results/evaluate/bad-00000001"), Path(".superseded/posttrain/bad-00000002")):
        folder.mkdir(parents=True)
        (folder / "table").write_bytes(b"numbers")
        if "unfinished" not in folder.name:
            write_manifest(folder, {}, ["table"])
        if "bad" in folder.name:
            flip(folder / "table")
    Path("results/corpus").mkdir()
    Path("results/corpus/link-00000003").symlink_to(tmp_path / "elsewhere/b-00000000")

    def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["farstate", "verify", *arguments], capture_output=True, text=True, env=environment(REPOSITORY))

    for folder in ("elsewhere", "elsewhere/b-00000000", "results/posttrain", "results/nothing", "/", "..", "results/corpus"):
        done = verify("--remove", folder)
        assert done.returncode == 1
        assert "neither a finished result of this folder nor a folder that holds some" in done.stderr
    assert verify("results/evaluate").returncode == 1
    done = verify("--remove", "results/evaluate")
    assert done.stdout.splitlines()[-1] == "2 results read, 1 damaged"
    done = verify("--remove")
    assert "removed .superseded/posttrain/bad-00000002" in done.stdout
    assert all((folder / "table").exists() for folder in kept)
    assert sorted(path.name for path in tmp_path.rglob("bad-*")) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with only_one(tmp_path / "lock", "a run"), only_one(tmp_path / "lock", "a run"):
        pass


def test_locks_of_a_run_that_may_live_on_another_host_stay(tmp_path: Path) -> None:
    """Snakemake's lock files of a run killed on this host are cleared; those of one that another host began are not."""
    stale = tmp_path / ".snakemake/locks/0.input.lock"
    code = (
        f"import pathlib\nfrom farstate.workflow import _only_main_process\n_only_main_process(pathlib.Path({str(tmp_path)!r}))\n"
    )
    for host, stays in ((socket.gethostname(), False), ("node017", True), ("", False)):
        stale.parent.mkdir(parents=True, exist_ok=True)
        stale.touch()
        (tmp_path / RUN_LOCK).parent.mkdir(exist_ok=True)
        (tmp_path / RUN_LOCK).write_text(f"4711 on {host}" if host else "")
        subprocess.run([sys.executable, "-c", code], check=True, env=environment(REPOSITORY))
        assert stale.exists() == stays
        assert (tmp_path / RUN_LOCK).read_text() == "", "ended in order"


def test_a_success_that_left_something_undone(finished_clone: Path, tmp_path: Path) -> None:
    plan = Plan(load(finished_clone / "params.yaml"), read_lock(finished_clone / "config/sources.lock"))
    for targets in ([], ["reports/fig5.html"], ["posttrained"], ["results/posttrain"]):
        plan.refuse_incomplete(finished_clone, targets)
    directory = plan.of(rule="posttrain")[0].directory
    for targets in ([], ["posttrained"], [f"{directory}/manifest.json"]):
        with pytest.raises(
            FarstateError, match=r"^results/.* more: asked for, not made, and no job failed; run the same command again"
        ):
            plan.refuse_incomplete(tmp_path, targets)


def test_kills_are_recorded_where_the_documentation_says() -> None:
    """docs/reliability.md shows what `make faults` last recorded."""
    root = REPOSITORY
    record = json.loads((root / "docs/faults.json").read_text())
    text = (root / "docs/reliability.md").read_text()
    assert record["differ"] == []
    assert len(record["kills"]) >= 20
    assert record["inside_training"] >= 12
    assert re.search(rf"seed {record['seed']}\b.*{len(record['kills'])} kills.*{record['inside_training']} inside", text, re.S)
