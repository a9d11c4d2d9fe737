"""The pipeline on a real Slurm of one node: what jobs ask for, what kills them, what a user is told.

One run of the test configuration, with one of its arms, does it all; a figure beside it has an arm whose training cannot succeed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from conftest import REPOSITORY, environment, make_clone, run
from farstate.params import merge

sys.path.insert(0, str(REPOSITORY / "tests/slurm"))
import cluster

pytestmark = pytest.mark.workflow

FIGURE = {"models": ["tiny"], "steps": None, "seeds": None, "length": None}
PARAMETERS = {
    # sigma is finite and the first loss is not: the one line that the trainer has for that must reach the user.
    "posttrain": {"arms": {"broken": {"initial_state": "random_noise", "sigma": 1.0e38}}},
    "figures": {
        "fig5": {**FIGURE, "arms": ["base", "state_passing"]},
        "fig4": {**FIGURE, "arms": ["base", "broken"]},
    },
}
# The executor looks 10 s later each time that no job ended; here every second.
SNAKEMAKE = """
import asyncio
from snakemake_executor_plugin_slurm import Executor
from snakemake.cli import main
async def sleep(self):
    await asyncio.sleep(1)
Executor.sleep = sleep
main()
"""
PATIENCE = 1200.0  # seconds; a bound for machines that do much else


@dataclass
class Seen:
    """What a run on the cluster left: Snakemake's output, Slurm's record of each job, and what was done to which job."""

    clone: Path
    output: str
    jobs: dict[int, dict[str, str]]
    cancelled: int
    timed_out: int

    def named(self, start: str) -> list[dict[str, str]]:
        """Slurm's records of the jobs whose rule and wildcards begin so, in the order of submission."""
        return [self.jobs[number] for number in sorted(self.jobs) if self.jobs[number]["Comment"].startswith(start)]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a running cluster."""
    if reason := cluster.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(cluster.MARK)
    # Twice the cores that there are: the test's jobs spend most of their time waiting.
    variables = cluster.start(folder, cores=2 * (os.cpu_count() or 1), kill_wait=5)
    yield variables
    cluster.stop(folder)


def fill_in(clone: Path) -> None:
    """The profile as a site fills it in: its names, at the top. What follows is cut to the test's size."""
    path = clone / "slurm/config.yaml"
    text = path.read_text()
    for old, new in (
        ("  # slurm_partition: cpu ", "  slurm_partition: cpu "),
        ("  # constraint: avx2 ", "  constraint: fast "),
        ('    slurm_partition: ""', "    slurm_partition: gpu"),
    ):
        assert old in text, f"{old!r} is no line of slurm/config.yaml any more"
        text = text.replace(old, new)
    profile = yaml.safe_load(text)
    profile["set-threads"] = dict.fromkeys(profile["set-threads"], 1)
    profile["resources"] = ["gpu=2"]  # the node's, both for the measurements
    profile["latency-wait"] = 5
    profile["slurm-init-seconds-before-status-checks"] = 1
    path.write_text(yaml.safe_dump(profile, sort_keys=False))


def jobs_of(variables: dict[str, str]) -> dict[int, dict[str, str]]:
    """What `scontrol` says of every job, by number."""
    told = subprocess.run(
        ["scontrol", "--oneliner", "show", "job"], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    ).stdout
    found = (dict(re.findall(r"(\S+?)=(\S*)", line)) for line in told.splitlines() if line.startswith("JobId="))
    return {int(job["JobId"]): job for job in found}


def running(variables: dict[str, str], start: str) -> int | None:
    """The number of the running job whose comment begins so."""
    for number, job in jobs_of(variables).items():
        if job.get("Comment", "").startswith(start) and job["JobState"] == "RUNNING":
            return number
    return None


def checkpoints(clone: Path, start: str) -> bool:
    return any((clone / ".farstate/scratch").glob(f"*/{start}*/*.safetensors"))


def trainers(record: str) -> list[int]:
    """Processes of `farstate` that train what a record of this name says."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(record.encode() in word for word in words) and any(word.endswith(b"/farstate") for word in words[:2]):
            found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="session")
def seen(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    clone = make_clone(tmp_path_factory.mktemp("on_slurm") / "clone")
    fill_in(clone)
    params = clone / "params.yaml"
    params.write_text(yaml.safe_dump(merge(yaml.safe_load(params.read_text()), PARAMETERS), sort_keys=False))
    run(clone, "snakemake", "corpus")  # here, and quicker than by jobs of their own
    settings = {"checkpoint_seconds": 0.05}
    given = ["--profile", "slurm", "--retries", "1", "--config", f"settings={json.dumps(settings)}"]
    command = [sys.executable, "-c", SNAKEMAKE, *given]
    log = clone / "snakemake.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=clone, env=environment(clone, **slurm), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    cancelled = timed_out = 0
    deadline = time.monotonic() + PATIENCE
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if not cancelled and checkpoints(clone, "tiny.s0"):
                number = running(slurm, "rule_pretrain")
                if number is not None:
                    subprocess.run(["scancel", str(number)], env={**os.environ, **slurm}, check=True)
                    cancelled = number
            if not timed_out and checkpoints(clone, "tiny.state_passing") and (pids := trainers("posttrain.tiny.state_passing")):
                number = running(slurm, "rule_posttrain_wildcards_tiny_state_passing")
                if number is not None:
                    # Held until Slurm looks at the clock, every half minute; its SIGTERM comes with a SIGCONT.
                    for pid in pids:
                        os.kill(pid, signal.SIGSTOP)
                    now = time.strftime("%Y-%m-%dT%H:%M:%S")
                    subprocess.run(
                        ["scontrol", "update", f"JobId={number}", f"EndTime={now}"], env={**os.environ, **slurm}, check=True
                    )
                    timed_out = number
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = log.read_text()
    assert time.monotonic() < deadline, f"not done after {PATIENCE} s:\n{text[-4000:]}"
    return Seen(clone, text, jobs_of(slurm), cancelled, timed_out)


def test_the_whole_dag_runs_and_jobs_ask_for_what_the_planner_reckons(seen: Seen) -> None:
    assert (seen.clone / "reports/fig5.html").stat().st_size > 0, seen.output[-4000:]
    assert not (seen.clone / "reports/fig4.html").exists(), "its arm could not be trained"
    planned = json.loads(run(seen.clone, "farstate", "plan", "reports/fig5.html", "--device-rate", "a100-40gb", "--json").stdout)
    pretrain = next(job for job in planned["jobs"] if job["rule"] == "pretrain")
    first, second = seen.named("rule_pretrain")[:2]
    assert first["Partition"] == "gpu"
    assert first["Features"] == "fast"
    assert first["TresPerJob"] == "gres:gpu:1"
    minutes = 20 + -(-90 * pretrain["hours"] // 1)
    assert first["TimeLimit"] == f"00:{minutes:.0f}:00"
    assert second["TimeLimit"] == f"00:{2 * minutes:.0f}:00", "more at each attempt"
    megabytes = -(-(6000 + 1.5 * 16 * pretrain["parameters"] / 1e6) // 100) * 100
    assert first["MinMemoryNode"] in (f"{megabytes:.0f}M", f"{megabytes / 1024:.2f}G".rstrip("0"))
    (page,) = seen.named("rule_page")
    assert (page["Partition"], page["Features"]) == ("cpu", "fast")
    assert "TresPerJob" not in page


def test_many_small_measurements_are_one_job(seen: Seen) -> None:
    assert [job["JobState"] for job in seen.named("rule_perplexity")] == ["COMPLETED"]
    assert seen.output.count("(Rule: perplexity)") == 2


def test_a_cancelled_job_is_retried_and_resumes(seen: Seen) -> None:
    assert seen.cancelled, seen.output[-4000:]
    assert seen.jobs[seen.cancelled]["JobState"] == "CANCELLED"
    assert [job["JobState"] for job in seen.named("rule_pretrain")] == ["CANCELLED", "COMPLETED"]
    (log,) = (seen.clone / "logs/pretrain").glob("tiny.s0-*.log")
    assert "pretrain goes on after step" in log.read_text()


def test_a_job_out_of_time_is_retried_and_resumes(seen: Seen) -> None:
    assert seen.timed_out, seen.output[-4000:]
    assert seen.jobs[seen.timed_out]["JobState"] == "TIMEOUT"
    states = [job["JobState"] for job in seen.named("rule_posttrain_wildcards_tiny_state_passing")]
    assert states == ["TIMEOUT", "COMPLETED"]
    (log,) = (seen.clone / "logs/posttrain").glob("tiny.state_passing.s0-*.log")
    assert "posttrain goes on after step" in log.read_text()


def test_a_failed_job_says_what_is_wrong(seen: Seen) -> None:
    broken = seen.named("rule_posttrain_wildcards_tiny_broken")
    assert [job["JobState"] for job in broken] == ["FAILED"] * 2, "one retry"
    assert re.search(r"farstate: posttrain: the loss is nan .* in step 1 of 20", seen.output), seen.output[-6000:]
    number = broken[-1]["JobId"]
    (slurm_log,) = (seen.clone / "logs/slurm").glob(f"rule_posttrain/tiny_broken_0_*/{number}.log")
    assert "Error in rule posttrain" in slurm_log.read_text()


def test_nothing_of_a_site_is_replaced(slurm: dict[str, str], tmp_path: Path) -> None:
    """A running cluster, ours or not, is never started over."""
    with pytest.raises(RuntimeError, match="runs already"):
        cluster.start(tmp_path / cluster.MARK)
    assert Path(slurm["SLURM_CONF"]).exists()


def test_a_site_with_a_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0 or any(shutil.which(name, path=cluster._PATH) is None for name in cluster.NEEDED):
        pytest.skip(cluster.why_not() or "Slurm is not installed")
    (tmp_path / "slurm.conf").write_text("ClusterName=site\n")
    monkeypatch.setattr(cluster, "ETC", tmp_path)
    with pytest.raises(RuntimeError, match=r"slurm\.conf exists: a cluster's configuration is never replaced"):
        cluster.start(tmp_path / cluster.MARK)
    assert (tmp_path / "slurm.conf").read_text() == "ClusterName=site\n"
