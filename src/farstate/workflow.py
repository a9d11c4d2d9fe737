"""What the rule files need from the package: the plan, and thin input functions. Loads no torch.

`rules/common.smk` calls `open_plan` once; the functions it returns are ordinary Python and tested as such.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from farstate.errors import FarstateError, explain_os_error
from farstate.files import only_one
from farstate.params import Params, load, merge, read_yaml, validate
from farstate.plan import RUN_LOCK, Plan, command_line_overrides, record_path
from farstate.settings import Settings, load_settings
from farstate.sources import INPUTS_ROOT, LOCK, read_lock

_OWN = ("recompute", "verify", "settings")


@dataclass(frozen=True)
class Opened:
    """The plan of this call and where-and-how settings."""

    plan: Plan
    settings: Settings


def open_plan(
    *,
    configfiles: list[Path],
    overrides: Mapping[str, Any],
    repository: Path,
    main: bool,
    targets: list[str],
) -> Opened:
    """Read the parameters, build the plan and, in the main process only, make the working folder agree with it.

    Args:
        configfiles: files given with `--configfile`; each is laid over the one before. None: `params.yaml`.
        overrides: what `--config` gave; `recompute`, `verify` and `settings` are ours, the rest are parameters.
        repository: the folder that holds the workflow, used where the working directory has no `params.yaml`.
        main: False in the processes that Snakemake starts for single jobs.
        targets: what was asked for, rule names or files.

    Raises:
        FarstateError: the parameters are wrong, results that dvc.lock records would be computed again, or the job that this process
            was started for belongs to other parameters.
    """
    root = Path.cwd()
    command = command_of(sys.argv)
    own = command_line_overrides({key: overrides[key] for key in _OWN if key in overrides})
    given = command_line_overrides({key: value for key, value in overrides.items() if key not in _OWN})
    params = parameters(configfiles, given, repository)
    settings = load_settings(_beside("config/settings.yaml", repository), own.get("settings") or {})
    lock = _beside(str(LOCK), repository)
    # Outside inputs are named relative to the folder whose lock file describes them.
    os.environ[INPUTS_ROOT] = str(lock.resolve().parent.parent)
    plan = Plan(params, read_lock(lock))
    if not main:
        refuse_other_parameters(plan, sys.argv)
    try:
        if main and command == "run":
            _only_main_process(root)
        if main:
            plan.restore(root)
            plan.date_back(root)
            plan.write_records(root)
            plan.write_pages(root)
    except OSError as error:
        raise FarstateError(explain_os_error(error)) from None
    if main and command in ("run", "dry run") and not own.get("recompute"):
        plan.refuse_silent_recomputation(root, targets)
    os.environ["FARSTATE_SETTINGS"] = json.dumps({**settings.model_dump(mode="json"), "verify": bool(own.get("verify"))})
    # The rules call `farstate`; it lies beside the Python that runs Snakemake, whether or not the environment is active.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = beside + os.pathsep + os.environ.get("PATH", "")
    return Opened(plan, settings)


def command_of(arguments: list[str]) -> str:
    """What Snakemake was called for: "run", "dry run", or "look" (lint, graphs, unlocking: nothing is planned to run)."""
    looks = ("--lint", "--unlock", "--rulegraph", "--dag", "--filegraph", "--list", "--summary", "--detailed-summary", "--report")
    if any(argument.startswith(looks) for argument in arguments[1:]):
        return "look"
    dry = any(re.fullmatch(r"-[a-zA-Z]*n[a-zA-Z]*|--dry-?run", argument) for argument in arguments[1:])
    return "dry run" if dry else "run"


def targets_of(arguments: list[str]) -> list[str]:
    """The rules and files that Snakemake was called for, read as it reads its command line; none: every page.

    It knows them itself only after the rules are read.
    """
    return sorted(map(str, _parser().parse_known_args(arguments[1:])[0].targets))


def refuse_other_parameters(plan: Plan, arguments: list[str]) -> None:
    """Stop the process of a single job whose parameters were edited since Snakemake planned it.

    Raises:
        FarstateError: naming the job, and what to do.
    """
    keys = {directory.rpartition("-")[2] for directory in plan.stages}
    for job in _parser().parse_known_args(arguments[1:])[0].target_jobs or []:
        key = job.wildcards_dict.get("key")
        if key is not None and key not in keys:
            raise FarstateError(
                f"{job.rulename} with key {key}: no current parameter asks for this result; the parameters or the code changed after "
                "Snakemake was called: end it and call it again, and let a run that lasts have a clone of its own"
            )


def runs_elsewhere(arguments: list[str], environment: Mapping[str, str]) -> bool:
    """Whether jobs are sent to a cluster: an executor other than the local ones, on the command line or in a profile.

    A profile is given by `--profile`, SNAKEMAKE_PROFILE or `--workflow-profile`; the last goes before the others.
    """
    from snakemake.cli import get_profile_dir

    told = _parser().parse_known_args(arguments[1:], env_vars=dict(environment))[0]
    own = [str(told.workflow_profile), f"profiles/{told.workflow_profile}"] if told.workflow_profile else []
    found = [
        next((at for name in own if (at := get_profile_dir(name))), None),
        *map(get_profile_dir, reversed(told.profile or [])),
    ]
    executors = [told.executor, *(read_yaml(at[1]).get("executor") for at in found if at is not None)]
    return next((executor for executor in executors if executor), None) not in (None, "local", "dryrun", "touch")


@cache
def _parser() -> Any:
    """Snakemake's own; building it takes a quarter of a second."""
    from snakemake.cli import get_argument_parser

    return get_argument_parser()


def _only_main_process(root: Path) -> None:
    """Hold this folder's run lock until the process ends, and clear what a killed Snakemake left of its own locks.

    Snakemake's lock files survive a kill -9 and would refuse the next call. Ours is dropped by the kernel: whoever
    holds it knows that no other main process lives on this host. One that did not end in order on another host may live
    there still, where the file system keeps locks to one host: then Snakemake's own stay, and it says what to do.
    """
    holder = only_one(root / RUN_LOCK, "a Snakemake run in this folder")
    before = holder.__enter__()
    _HELD.append(holder)
    atexit.register(holder.__exit__, None, None, None)
    if before not in ("", socket.gethostname()):
        return
    for stale in (root / ".snakemake" / "locks").glob("*"):
        stale.unlink(missing_ok=True)


_HELD: list[Any] = []  # locks of this process, never released before it ends


def parameters(configfiles: list[Path], overrides: dict[str, Any], repository: Path) -> Params:
    """The checked parameters: `params.yaml`, or the files laid over each other in order, and `overrides` over them."""
    if not configfiles:
        return load(_beside("params.yaml", repository), overrides)
    data: dict[str, Any] = {}
    for path in configfiles:
        data = merge(data, read_yaml(path))
    return validate(merge(data, overrides), ", ".join(map(str, configfiles)))


def _beside(name: str, repository: Path) -> Path:
    """A file of the working directory, or the repository's where the working directory has none."""
    here = Path(name)
    return here if here.exists() or not (repository / name).exists() else repository / name


def directory_of(output: str) -> str:
    """`results/<phase>/<name>-<key>` of a file inside it."""
    return "/".join(output.split("/")[:3])


def input_function(
    plan: Plan, pattern: str, mark: Callable[[Any], Any], *, manifests_only: tuple[str, ...] = ()
) -> Callable[[Any], dict[str, Any]]:
    """An input function for the rule whose directories follow `pattern`, like ``results/corpus/tokens.{run}-{key}``.

    It returns, by role, all declared files of the upstreams, the manifest first, marked as ancient (their paths carry
    keys); of roles in `manifests_only` the manifests alone.
    """

    def inputs(wildcards: Any) -> dict[str, Any]:
        stage = plan.at(pattern.format(**wildcards))
        found: dict[str, Any] = {}
        for role, stages in stage.upstream.items():
            files = [
                file for upstream in stages for file in ([upstream.manifest] if role in manifests_only else upstream.outputs)
            ]
            found[role] = [mark(file) for file in files]
        return found

    return inputs


def alternatives(names: Iterable[str]) -> str:
    """A regular expression that matches each of `names` and nothing else; without names it matches nothing."""
    return "|".join(re.escape(name) for name in names) or r"(?!)"


def record_function(pattern: str) -> Callable[[Any], str]:
    """A params function: the file with the stage's resolved parameters."""

    def record(wildcards: Any) -> str:
        return str(record_path(pattern.format(**wildcards)))

    return record
