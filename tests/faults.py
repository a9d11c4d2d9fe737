"""`make faults`: kill -9 at random instants over the whole pipeline, resume each time, and hold the end against an undisturbed run.

    python tests/faults.py [--seed 0] [--kills 20] [--inside 12] [--config config/test.yaml] [--record FILE]

Instants are drawn from the seed; those inside a training are drawn from the moment such a process is seen. A round ends when the
pipeline is through; its results must then be those of the undisturbed run, byte for byte. Rounds go on until there were enough kills.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from conftest import REPOSITORY, environment, make_clone, run
from farstate.files import sha256_file

TRAINING = ("pretrain", "posttrain", "tune")
MEASURING = ("perplexity", "remembrance", "states", "shift", "task", "compare")
_POLL = 0.01


@dataclass(frozen=True)
class Kill:
    """A kill: seconds since Snakemake's start, and the stages whose commands it met."""

    round: int
    seconds: float
    running: list[str]

    @property
    def inside_training(self) -> bool:
        return any(command in TRAINING for command in self.running)


def stages_running(clone: Path) -> list[str]:
    """The stages whose commands run in `clone` now."""
    found = []
    for command in _commands(clone).values():
        words = [Path(word).name for word in command]
        if "farstate" in words:
            found += words[words.index("farstate") + 1 :][:1]
    return sorted(found)


@contextmanager
def started(clone: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Snakemake in a process group of its own."""
    with open(clone / "run.log", "ab") as log:
        process = subprocess.Popen(
            ["snakemake", *arguments], cwd=clone, env=environment(clone), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill(process, clone)


def kill(process: subprocess.Popen[bytes], clone: Path) -> None:
    """SIGKILL to Snakemake and all it started, at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while survivors := _commands(clone):  # what had left the group
        for pid in survivors:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL)


def wait_for(process: subprocess.Popen[bytes], clone: Path, stages: Collection[str], delay: float, scratch: str = "") -> bool:
    """Wait until one of `stages` runs (and a file in the scratch folder matches `scratch`), then `delay` seconds; False: it ended."""
    while process.poll() is None:
        met = set(stages_running(clone)) & set(stages) if stages else True
        if met and (not scratch or any((clone / ".farstate/scratch").glob(scratch))):
            break
        time.sleep(_POLL)
    until = time.monotonic() + delay
    while process.poll() is None and time.monotonic() < until:
        time.sleep(_POLL)
    return process.poll() is None


def contents(clone: Path) -> dict[str, str]:
    """SHA-256 of every file of every result, and of every page's data."""
    paths = [path for path in clone.glob("results/*/*/*") if path.is_file() and not path.name.startswith(".")]
    paths += clone.glob("reports/*.parquet")
    return {str(path.relative_to(clone)): sha256_file(path) for path in sorted(paths)}


def differences(clone: Path, expected: dict[str, str]) -> list[str]:
    """Files that are not as in an undisturbed run."""
    found = contents(clone)
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def often(clone: Path) -> None:
    """Checkpoints as often as can be, so that a kill meets one being written."""
    path = clone / "config/settings.yaml"
    path.write_text(path.read_text().replace("checkpoint_seconds: 60.0", "checkpoint_seconds: 0.05"))


def _commands(clone: Path) -> dict[int, list[str]]:
    """Command lines of the processes that work in `clone`."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if os.readlink(folder / "cwd") == str(clone.resolve()):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if words != [""]:  # a process that has ended and is not yet waited for
                    found[int(folder.name)] = words
        except OSError:  # it ended meanwhile
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--inside", type=int, default=12, help="of them inside a training")
    parser.add_argument("--config", default="config/test.yaml")
    parser.add_argument("--target", nargs="*", default=[], help="what to make; default: every page")
    parser.add_argument("--within", type=float, default=5.0, help="seconds after a training is seen in which it is killed")
    parser.add_argument(
        "--undisturbed", type=Path, help="a folder with results of an undisturbed run, and others; default: one is made"
    )
    parser.add_argument("--record", type=Path, help="write what was done as JSON")
    given = parser.parse_args()
    drawn = random.Random(given.seed)
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="farstate-faults-") as folder:
        clone = make_clone(Path(folder) / "clone")
        shutil.copy(REPOSITORY / given.config, clone / "params.yaml")
        often(clone)
        pristine = shutil.copytree(clone, Path(folder) / "pristine")
        began = time.monotonic()
        if given.undisturbed is None:
            run(clone, "snakemake", *given.target, timeout=24 * 3600)
        whole = time.monotonic() - began
        expected = contents(given.undisturbed or clone)
        print(f"undisturbed: {len(expected)} files" + ("" if given.undisturbed else f", {whole:.0f} s"), flush=True)
        kills: list[Kill] = []
        rounds, wrong = 0, list[str]()
        while len(kills) < given.kills or sum(kill.inside_training for kill in kills) < given.inside:
            rounds += 1
            shutil.rmtree(clone)
            shutil.copytree(pristine, clone)
            _round(clone, rounds, given, drawn, kills, whole)
            done = run(clone, "snakemake", *given.target, timeout=24 * 3600)
            made = contents(clone)
            wanted = {name: digest for name, digest in expected.items() if given.undisturbed is None or name in made}
            wrong += [f"round {rounds}: {name}" for name in differences(clone, wanted)]
            print(f"round {rounds}: {len(made)} files, {len(wrong)} differ", *wrong, sep="\n  ", flush=True)
            if wrong:
                print((clone / "run.log").read_text()[-4000:], done.stdout[-4000:], sep="\n")
        inside = sum(kill.inside_training for kill in kills)
        print(f"{len(kills)} kills, {inside} inside a training, {rounds} rounds: {len(wrong)} files differ")
        if given.record:
            told = {
                "seed": given.seed,
                "config": given.config,
                "date": time.strftime("%Y-%m-%d"),
                "python": platform.python_version(),
            }
            told |= {"files": len(expected), "rounds": rounds, "inside_training": inside, "differ": wrong}
            given.record.write_text(json.dumps({**told, "kills": [asdict(kill) for kill in kills]}, indent=1) + "\n")
        sys.exit(bool(wrong))


def _round(clone: Path, number: int, given: argparse.Namespace, drawn: random.Random, kills: list[Kill], whole: float) -> None:
    """Kill and resume until the pipeline is through, or there were enough kills."""
    while True:
        missing = given.inside - sum(kill.inside_training for kill in kills)
        left = given.kills - len(kills)
        if left <= 0 and missing <= 0:
            return
        inside = missing >= left or drawn.random() < given.inside / given.kills
        delay = drawn.uniform(0, given.within) if inside else drawn.uniform(0, max(10, whole / 2))
        began = time.monotonic()
        with started(clone, *given.target) as process:
            if not wait_for(process, clone, TRAINING if inside else (), delay):
                return
            running = stages_running(clone)
            kill(process, clone)
        kills.append(Kill(number, round(time.monotonic() - began, 2), running))
        print(f"kill {len(kills)} after {kills[-1].seconds} s: {', '.join(running) or 'Snakemake alone'}", flush=True)


if __name__ == "__main__":
    main()
