# Post-training: the same checkpoint, the same recipe, other initial states.
#
# Inputs:  a model of results/pretrain, the token store (params: posttrain)
# Outputs: results/posttrain/<model>.<arm>.s<seed>-<key>/ with config.json, model.safetensors, ages.parquet


rule posttrain:
    """Post-train one model from one arm's initial states."""
    input:
        unpack(upstream("results/posttrain/{model}.{arm}.s{seed}-{key}")),
    output:
        multiext(
            "results/posttrain/{model}.{arm}.s{seed}-{key}/",
            manifest="manifest.json",
            config="config.json",
            weights="model.safetensors",
            metrics="metrics.jsonl",
            ages="ages.parquet",
        ),
    log:
        "logs/posttrain/{model}.{arm}.s{seed}-{key}.log",
    cache: True
    threads: THREADS.posttrain * PROCESSES
    resources:
        **SPREAD,
        mem_mb=asks("mem_mb", "results/posttrain/{model}.{arm}.s{seed}-{key}"),
        runtime=asks("runtime", "results/posttrain/{model}.{arm}.s{seed}-{key}"),
        gpu=asks("gpu", "results/posttrain/{model}.{arm}.s{seed}-{key}"),
    params:
        stage=record("results/posttrain/{model}.{arm}.s{seed}-{key}"),
        threads=threads_of_one,
        launch=launch,
        output=subpath(output.manifest, parent=True),
    message:
        "Post-training {wildcards.model}: {wildcards.arm}, seed {wildcards.seed}"
    shell:
        "OMP_NUM_THREADS={params.threads} {params.launch} posttrain {params.stage:q} --output {params.output:q} 2>&1"
        " | (trap '' INT TERM; tee {log:q})"


rule posttrained:
    """Every arm of every model."""
    input:
        manifests("posttrain"),
