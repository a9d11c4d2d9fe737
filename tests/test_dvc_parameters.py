"""Every single parameter edited in turn: what DVC would rerun against what Snakemake would.

The numbers in the names are those of the list in docs/architecture.md, "What holds". Both sides are asked in this process: DVC's own
comparison of parameters and graph of stages, and the plan that the rules read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx
import pytest
from dvc.dependency import ParamsDependency
from dvc.repo import Repo

from conftest import REPOSITORY
from farstate.errors import FarstateError
from farstate.params import flatten, merge, read_yaml, validate
from farstate.plan import PHASES, Plan
from farstate.sources import read_lock
from test_params import put

LOCK = read_lock(REPOSITORY / "config/sources.lock")
STAGES = (*PHASES, "report")
ONE_OF_MANY = ("models.", "pretrain.by_model.", "posttrain.arms.", "tasks.", "figures.")
"""Parameters of one model, arm, task or figure. DVC sees their whole section, whose other parts other stages read: it may name stages
where Snakemake then finds nothing to do."""
WITHOUT_ANOTHER_VALUE = {
    **dict.fromkeys(("architecture", "initial_state", "kind"), "another one has other parameters beside it"),
    **dict.fromkeys(("noise", "models"), "there is no other"),
    **dict.fromkeys(("sources", "published"), "needs a registered set"),
}
OTHERS: dict[str, list[Any]] = {
    **{"dtype": ["uint32"], "damaged_records": ["skip"], "split": ["validation"], "streams": ["concatenated"]},
    **{"softmax": ["padded"], "precision": ["bf16-mixed"], "reset_unit": ["batch"], "previous": ["micro_batch"]},
    **{"scale": ["demo"], "jobs": ["cell", "model"], "split_labels": ["refuse"], "packing": ["packed"], "alphabet": ["abcdef"]},
    **{"filler": ["text"], "training_lengths": ["uniform", [2, 6]], "confidence": [0.9], "snapshots": [[65_536]]},
    **{"seeds": [[0, 3], [3]], "steps": [37], "context": [64], "contexts": [[8, 32]], "heads": [[[0, 1]]], "block_tokens": [512]},
    **{"documents": [3], "paper_models": [{"tiny": "mamba2-130m"}], "at_document_end": ["keep"], "swap_position": [32]},
    **{
        "arms": [["base", "control"], ["base", "state_passing"], ["base"], ["control"]],
        "vary": [["control"]],
        "vary_peak_learning_rate": [[1.0e-3]],
    },
    **{"starts": [[1, 16]], "positions": [[16, 32]], "prompting": [["fine_tuned"]], "length": [128], "seed": [1]},
    **{"rest_weight": [0.5], "reset_probability": [0.25], "vary_reset_probability": [[0.25]]},
}


def candidates(key: str, value: Any) -> Iterator[Any]:
    """Values to try in place of `value`; not all of them are allowed."""
    yield from OTHERS.get(key.rpartition(".")[2], [])
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2, value / 2 if isinstance(value, float) else value // 2, value + 1, value * 0.9)
    elif isinstance(value, str):
        yield value + "x"
    elif isinstance(value, list) and value:
        if all(isinstance(item, int | float) for item in value):
            yield from ([item * 2 for item in value], [*value[:-1], value[-1] * 2], [item * 0.9 for item in value])
        yield from (value[:-1], value[1:])
    elif value is None:
        yield from (1, 7, [1])


def planned_phases(before: Plan, after: Plan) -> set[str]:
    """What Snakemake runs after an edit where all results of `before` are there: keys that are new, pages that show others."""
    found = {stage.phase for directory, stage in after.stages.items() if directory not in before.stages}
    for name, page in after.pages.items():
        if name not in before.pages or page.wanted() != before.pages[name].wanted():
            found.add("report")
    return found


class Front:
    """DVC's side: its stages, their graph and their parameters as it reads them from `dvc.yaml`."""

    def __init__(self, root: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copy(REPOSITORY / "dvc.yaml", root)
        shutil.copy(REPOSITORY / "params.yaml", root)
        repo = Repo.init(str(root), no_scm=True)
        self._monkeypatch = monkeypatch
        self._graph = repo.index.graph
        self._stages = {stage.name: stage for stage in repo.index.stages}
        self._read(data)
        for stage in self._stages.values():
            for dependency in self._parameters(stage):
                dependency.save()

    def _read(self, data: dict[str, Any]) -> None:
        """What the file holds; that both loaders read the same of it is tested elsewhere, and parsing is slow."""
        self._monkeypatch.setattr("dvc.dependency.param.load_path", lambda path, fs, **given: data)

    @staticmethod
    def _parameters(stage: Any) -> list[ParamsDependency]:
        return [dependency for dependency in stage.deps if isinstance(dependency, ParamsDependency)]

    def named(self, data: dict[str, Any]) -> set[str]:
        """Stages that `dvc status` names for these parameters."""
        self._read(data)
        return {name for name, stage in self._stages.items() if any(one.status() for one in self._parameters(stage))}

    def with_descendants(self, names: set[str]) -> set[str]:
        # DVC's edges run from a stage to those that it stands on.
        return names.union(*({one.name for one in networkx.ancestors(self._graph, self._stages[name])} for name in sorted(names)))


def test_11_each_parameter_reruns_in_dvc_at_least_and_where_sections_allow_exactly_what_snakemake_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = merge(read_yaml(REPOSITORY / "config/test.yaml"), read_yaml(REPOSITORY / "config/test_figures.yaml"))  # every figure
    data = put(data, "figures.fig6.steps", None)  # so that the tasks' models, too, are post-trained for `posttrain.steps`
    before = Plan(validate(data, "test"), LOCK)
    front = Front(tmp_path, data, monkeypatch)
    assert front.named(data) == set()
    edited, unedited, leaks, inexact, by_section = 0, [], {}, {}, {}
    for key, value in flatten(data).items():
        for other in (one for one in candidates(key, value) if one != value):
            changed = put(data, key, other)
            try:
                after = Plan(validate(changed, "test"), LOCK)
            except FarstateError:
                continue
            break
        else:
            unedited.append(key)
            continue
        edited += 1
        ours, theirs = planned_phases(before, after), front.with_descendants(front.named(changed))
        if ours - theirs:
            leaks[key] = ours - theirs
        if theirs != ours and not key.startswith(ONE_OF_MANY):
            inexact[key] = sorted(theirs - ours)
        ours_so_far, theirs_so_far = by_section.setdefault(key.split(".")[0], (set(), set()))
        ours_so_far |= ours
        theirs_so_far |= theirs
    print(f"{edited} parameters edited")
    assert leaks == {}, "dvc repro would leave these stale"
    assert inexact == {}
    assert {section: ours for section, (ours, _) in by_section.items()} == {s: theirs for s, (_, theirs) in by_section.items()}
    assert {key for key in unedited if key.rpartition(".")[2] not in WITHOUT_ANOTHER_VALUE} == set()
    assert edited > 200
