# Pre-training: the models whose length generalisation is in question.
#
# Inputs:  the token store (params: models, pretrain), or a published checkpoint
# Outputs: results/pretrain/<model>.s<seed>-<key>/ or checkpoint.<model>-<key>/, with config.json and model.safetensors
#
# Rules with `cache:` may have no `benchmark:`; the time they took stands in their provenance, beside the log.


# One rule for each list of snapshots, since a rule declares its outputs: `pretrain`, `pretrain_2`, …
for BUDGET, TRAINED in PLAN.budgets.items():

    rule:
        name:
            BUDGET
        input:
            unpack(upstream("results/pretrain/{model}.s{seed}-{key}")),
        output:
            multiext(
                "results/pretrain/{model}.s{seed}-{key}/",
                manifest="manifest.json",
                config="config.json",
                weights="model.safetensors",
                metrics="metrics.jsonl",
                **TRAINED["snapshots"],
            ),
        log:
            "logs/pretrain/{model}.s{seed}-{key}.log",
        wildcard_constraints:
            model=one_of(TRAINED["models"]),
        cache: True
        threads: THREADS.pretrain * PROCESSES
        resources:
            **SPREAD,
            mem_mb=asks("mem_mb", "results/pretrain/{model}.s{seed}-{key}"),
            runtime=asks("runtime", "results/pretrain/{model}.s{seed}-{key}"),
            gpu=asks("gpu", "results/pretrain/{model}.s{seed}-{key}"),
        params:
            stage=record("results/pretrain/{model}.s{seed}-{key}"),
            threads=threads_of_one,
            launch=launch,
            output=subpath(output.manifest, parent=True),
        message:
            "Pre-training {wildcards.model}, seed {wildcards.seed}"
        shell:
            "OMP_NUM_THREADS={params.threads} {params.launch} pretrain {params.stage:q} --output {params.output:q} 2>&1"
            " | (trap '' INT TERM; tee {log:q})"


rule import_checkpoint:
    """Bring a published checkpoint into Farstate's format."""
    output:
        multiext(
            "results/pretrain/checkpoint.{model}-{key}/",
            manifest="manifest.json",
            config="config.json",
            weights="model.safetensors",
        ),
    log:
        "logs/pretrain/checkpoint.{model}-{key}.log",
    benchmark:
        "logs/benchmarks/pretrain/checkpoint.{model}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=asks("mem_mb", "results/pretrain/checkpoint.{model}-{key}"),
        runtime=asks("runtime", "results/pretrain/checkpoint.{model}-{key}"),
    params:
        stage=record("results/pretrain/checkpoint.{model}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Importing the checkpoint of {wildcards.model}"
    shell:
        "farstate import-checkpoint {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule pretrained:
    """Every model before post-training."""
    input:
        manifests("pretrain"),
