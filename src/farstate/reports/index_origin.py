"""Where the results of the page of all results come from: what changed since the one before, and what their sidecars record.

Nothing here is part of a key: wall times, commits and machines differ from clone to clone.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from farstate.errors import FarstateError
from farstate.files import read_json, write_json
from farstate.keys import digest
from farstate.params import flatten, validate
from farstate.plan import PHASES, SCRATCH
from farstate.provenance import commit, sidecar

HISTORY = SCRATCH / "reports"
CURRENT, PREVIOUS = "current.json", "previous.json"
Change = dict[str, Any]
"""`key`, dotted; `old` and `new` values, None where there is none."""


def changes_since(params: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """What changed since the last report drawn here with other parameters, else since `params.yaml` of the last commit.

    The parameters are kept in `.farstate/reports/`; drawing the same ones again leaves what was before them.

    Returns:
        `since`, in words, empty where there is nothing to compare with; `changes`, a list of Change.
    """
    here = root / HISTORY
    last = _kept(here / CURRENT)
    if last is None or digest(last["params"]) != digest(params):
        if last is not None:
            write_json(here / PREVIOUS, last)
        now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        write_json(here / CURRENT, {"drawn": now, "commit": commit().get("commit", ""), "params": dict(params)})
    previous = _kept(here / PREVIOUS)
    if previous is not None:
        at = f", at commit {previous['commit'][:10]}" if previous["commit"] else ""
        return {"since": f"the report drawn here {previous['drawn']}{at}", "changes": differences(previous["params"], params)}
    committed = _committed(root)
    if committed is not None:
        return {"since": "params.yaml as last committed", "changes": differences(committed, params)}
    return {"since": "", "changes": []}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The leaves that differ, by key."""
    before, after = flatten(dict(old)), flatten(dict(new))
    return [
        {"key": key, "old": before.get(key), "new": after.get(key)}
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _kept(path: Path) -> dict[str, Any] | None:
    """Parameters that were kept; None where there are none, or a file that says something else."""
    try:
        found: dict[str, Any] = read_json(path)
    except (FarstateError, OSError):
        return None
    return found if isinstance(found, dict) and {"drawn", "commit", "params"} <= found.keys() else None


def _committed(root: Path) -> dict[str, Any] | None:
    """The parameters of the last commit, or None outside of git and where they are not valid now."""
    try:
        done = subprocess.run(
            ["git", "show", "HEAD:./params.yaml"], cwd=root, capture_output=True, text=True, timeout=10, check=False
        )
        given = yaml.safe_load(done.stdout) if done.returncode == 0 else None
        return validate(given, "params.yaml").model_dump(mode="json") if isinstance(given, dict) else None
    except (OSError, subprocess.TimeoutExpired, yaml.YAMLError, FarstateError):
        return None


def records_of(directories: Iterable[str], root: Path) -> dict[str, dict[str, Any]]:
    """By directory the sidecar that its stage wrote; those that have none here are left out."""
    found = {}
    for directory in directories:
        path = root / sidecar(Path(directory))
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        if isinstance(record, dict) and isinstance(record.get("wall_seconds"), int | float):
            found[directory] = record
    return found


def origin(directories: Sequence[str], records: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any]) -> dict[str, Any]:
    """What the sidecars of all results say together.

    Returns:
        `phases` (results, recorded, seconds, joules by phase), `commits`, `machines`, `versions` (each with how many results), `seeds`
        by parameter, `keys` by phase.
    """
    phases = []
    for phase in PHASES:
        mine = [directory for directory in directories if directory.split("/")[1] == phase]
        told = [records[directory] for directory in mine if directory in records]
        if mine:
            phases.append(
                {
                    "phase": phase,
                    "results": len(mine),
                    "recorded": len(told),
                    "seconds": _sum(told, "wall_seconds"),
                    "joules": _joules(told),
                }
            )
    commits = Counter((str(record.get("commit", "not a git checkout")), bool(record.get("dirty"))) for record in records.values())
    machines = Counter(
        (str(record.get("processor", "")), record.get("cores"), str(record.get("device", ""))) for record in records.values()
    )
    versions: dict[str, Counter[str]] = {}
    for record in records.values():
        for package, number in record.get("versions", {}).items():
            versions.setdefault(package, Counter())[number] += 1
    return {
        "phases": phases,
        "commits": [{"commit": name, "dirty": dirty, "results": count} for (name, dirty), count in commits.most_common()],
        "machines": [
            {"processor": processor, "cores": cores, "device": device, "results": count}
            for (processor, cores, device), count in machines.most_common()
        ],
        "versions": {package: dict(numbers.most_common()) for package, numbers in sorted(versions.items())},
        "seeds": {
            key: value
            for key, value in flatten(dict(params)).items()
            if key.rpartition(".")[2] in ("seed", "seeds") and value is not None
        },
        "keys": {
            phase: sorted(directory.rsplit("/", 1)[-1] for directory in directories if directory.split("/")[1] == phase)
            for phase in PHASES
        },
    }


def _sum(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(record[name] for record in records))


def _joules(records: Sequence[Mapping[str, Any]]) -> float | None:
    """What the devices told; None where none did."""
    told = [record for record in records if isinstance(record.get("energy_joules"), int | float)]
    return _sum(told, "energy_joules") if told else None


def duration(seconds: float) -> str:
    """`42 s`, `3.5 min`, `2.1 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"
