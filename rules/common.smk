# Shared by all of these files. The plan of this call, wildcard constraints, functions for inputs and parameters.

import os
import sys
from pathlib import Path

from farstate import workflow as farstate_workflow
from farstate.errors import FarstateError
from farstate.plan import PAGE_NAME
from farstate.planner.resources import (
    Asks,
    jobs_together,
    over_nodes,
    refuse_what_cannot_fit,
    torchrun,
)
from snakemake.exceptions import WorkflowError


# With `--software-deployment-method apptainer` the commands run in this image; else where Snakemake runs (docs/cluster.md).
container: "containers/farstate.sif"


wildcard_constraints:
    key="[0-9a-f]{8}",
    run="[A-Za-z0-9][A-Za-z0-9_.+-]*",
    model=r"(?!checkpoint\.)[a-z0-9][a-z0-9_.-]*",
    arm="[a-z0-9][a-z0-9_-]*",
    seed="[0-9]+",
    figure=PAGE_NAME,


TARGETS = farstate_workflow.targets_of(sys.argv)

try:
    OPENED = farstate_workflow.open_plan(
        configfiles=[Path(path) for path in workflow.config_settings.configfiles],
        overrides=workflow.config_settings.config,
        repository=Path(workflow.basedir).parent,
        main=workflow.is_main_process,
        targets=TARGETS,
    )
except FarstateError as error:
    raise WorkflowError(str(error))

PLAN = OPENED.plan
THREADS = OPENED.settings.threads
ELSEWHERE = farstate_workflow.runs_elsewhere(sys.argv, os.environ)
ASKS = Asks(
    PLAN,
    OPENED.settings,
    # A cluster's job is a process of its own; it sees the allocation that it asked for.
    elsewhere=ELSEWHERE or not workflow.is_main_process,
    root=Path.cwd(),
    together=jobs_together(
        workflow.group_settings.overwrite_groups,
        workflow.group_settings.group_components,
    ),
)

# A training is one process, or started by torchrun as one a GPU (config/settings.yaml, distributed:).
SPREAD = over_nodes(OPENED.settings.distributed)
PROCESSES = OPENED.settings.distributed.processes

if ELSEWHERE:
    # Threads of a cluster job are bounded by its node, not by the cores of the machine that submits it.
    workflow.global_resources["_cores"] = 4096
    if workflow.is_main_process and farstate_workflow.command_of(sys.argv) == "run":
        try:
            refuse_what_cannot_fit(PLAN, OPENED.settings, Path.cwd(), TARGETS)
        except FarstateError as error:
            raise WorkflowError(str(error))

PAGES = [path for page in PLAN.pages.values() for path in page.outputs.values()]
INDEX = PLAN.index.outputs


def upstream(pattern, manifests_only=()):
    """Inputs by role of the stage whose directory follows the pattern."""
    return farstate_workflow.input_function(
        PLAN, pattern, ancient, manifests_only=manifests_only
    )


def record(pattern):
    """The file with the resolved parameters of the stage whose directory follows the pattern."""
    return farstate_workflow.record_function(pattern)


def asks(what, pattern):
    """A resource of the stage whose directory follows the pattern, as planned; more at each attempt."""
    return ASKS.function(what, pattern)


def threads_of_one(wildcards, threads):
    """CPU threads of each process of a training."""
    return max(1, threads // PROCESSES)


def launch(wildcards, threads):
    """The command before `pretrain`, `posttrain` or `tune`."""
    return torchrun(OPENED.settings.distributed, threads)


def one_of(names):
    """A wildcard constraint: one of the names, or nothing at all where there are none."""
    return farstate_workflow.alternatives(names)


def manifests(phase):
    """The manifests of every result of a phase."""
    return [stage.manifest for stage in PLAN.of(phase=phase)]


def page_inputs(wildcards):
    """The page's small manifest, which is not ancient: it is dated before a page that already shows its keys."""
    page = PLAN.pages.get(wildcards.figure)
    if page is None:
        known = ", ".join(PLAN.pages)
        raise WorkflowError(
            f"reports/{wildcards.figure}.html: no such page; these parameters have {known}"
        )
    return {
        "wanted": page.manifest,
        "shown": [ancient(path) for stage in page.shown for path in stage.outputs],
    }


def index_pages(wildcards):
    """All pages. One that is drawn again draws the page of all results again: Snakemake passes over a job whose
    inputs all are ancient and there, whatever its other inputs say, when one of them is made anew.
    """
    root = Path.cwd()
    return [
        ancient(page.outputs["html"]) if page.is_current(root) else page.outputs["html"]
        for page in PLAN.pages.values()
    ]


def refuse_incomplete():
    """Hold what was asked for against what is there, unless the call itself left something out."""
    left_out = workflow.dag_settings.until or workflow.dag_settings.omit_from
    if workflow.is_main_process and not left_out:
        try:
            asked = sorted(map(str, workflow.dag_settings.targets))
            PLAN.refuse_incomplete(Path.cwd(), asked)
        except FarstateError as error:
            raise WorkflowError(str(error))
