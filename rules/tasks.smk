# Tasks: data sets of long-context tasks, and models trained on them.
#
# Inputs:  the tokenizer and the token store (background text), models of results/pretrain and results/posttrain
#          (params: tasks, posttrain.arms, figures)
# Outputs: results/tasks/data.<task>.<set>-<key>/examples.arrow,
#          results/tasks/model.<model>.<arm>.<task>[.<initial state>].s<seed>-<key>/ with config.json, model.safetensors


rule task_data:
    """Make the examples of a task: prompts of exact length, and their answers."""
    input:
        unpack(upstream("results/tasks/data.{run}-{key}")),
    output:
        multiext(
            "results/tasks/data.{run}-{key}/",
            manifest="manifest.json",
            examples="examples.arrow",
        ),
    log:
        "logs/tasks/data.{run}-{key}.log",
    benchmark:
        "logs/benchmarks/tasks/data.{run}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=240,
    params:
        stage=record("results/tasks/data.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Making the examples of {wildcards.run}"
    shell:
        "farstate task-data {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule tune:
    """Train a model on a task's examples, from one arm's initial states."""
    input:
        unpack(upstream("results/tasks/model.{run}-{key}")),
    output:
        multiext(
            "results/tasks/model.{run}-{key}/",
            manifest="manifest.json",
            config="config.json",
            weights="model.safetensors",
            metrics="metrics.jsonl",
            ages="ages.parquet",
        ),
    log:
        "logs/tasks/model.{run}-{key}.log",
    cache: True
    threads: THREADS.posttrain * PROCESSES
    resources:
        **SPREAD,
        mem_mb=asks("mem_mb", "results/tasks/model.{run}-{key}"),
        runtime=asks("runtime", "results/tasks/model.{run}-{key}"),
        gpu=asks("gpu", "results/tasks/model.{run}-{key}"),
    params:
        stage=record("results/tasks/model.{run}-{key}"),
        threads=threads_of_one,
        launch=launch,
        output=subpath(output.manifest, parent=True),
    message:
        "Training on a task: {wildcards.run}"
    shell:
        "OMP_NUM_THREADS={params.threads} {params.launch} tune {params.stage:q} --output {params.output:q} 2>&1"
        " | (trap '' INT TERM; tee {log:q})"


rule tasks:
    """Every data set of a task, and every model trained on one."""
    input:
        # A rule without input would run each time: where no figure has a task, the token store stands for nothing to do.
        manifests("tasks") or [PLAN.store.manifest],
