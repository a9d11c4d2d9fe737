# Evaluation: tidy tables of measurements, and their comparison with intervals.
#
# Inputs:  models of results/pretrain and results/posttrain, the token store (params: evaluate, compare, figures)
# Outputs: results/evaluate/perplexity.*-<key>/perplexity.parquet, results/evaluate/<figure>-<key>/curves.parquet


rule perplexity:
    """Position-wise perplexity of one model over carried segments, with its window references."""
    input:
        unpack(upstream("results/evaluate/perplexity.{run}-{key}")),
    output:
        multiext(
            "results/evaluate/perplexity.{run}-{key}/",
            manifest="manifest.json",
            perplexity="perplexity.parquet",
            positions="positions.parquet",
        ),
    log:
        "logs/evaluate/perplexity.{run}-{key}.log",
    cache: True
    threads: THREADS.evaluate
    resources:
        mem_mb=8000,
        runtime=480,
    params:
        stage=record("results/evaluate/perplexity.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Measuring the perplexity of {wildcards.run}"
    shell:
        "OMP_NUM_THREADS={threads} farstate perplexity {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule compare:
    """Compare the arms of a figure: curves, intervals, verdicts, state ages."""
    input:
        unpack(
            upstream(
                "results/evaluate/{figure}-{key}",
                manifests_only=("evaluations", "trainings"),
            )
        ),
    output:
        multiext(
            "results/evaluate/{figure}-{key}/",
            manifest="manifest.json",
            curves="curves.parquet",
            references="references.parquet",
            verdicts="verdicts.parquet",
            ages="ages.parquet",
            metrics="metrics.json",
        ),
    log:
        "logs/evaluate/{figure}-{key}.log",
    benchmark:
        "logs/benchmarks/evaluate/{figure}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        stage=record("results/evaluate/{figure}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Comparing the arms of {wildcards.figure}"
    shell:
        "farstate compare {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule evaluated:
    """Every measurement and every comparison."""
    input:
        manifests("evaluate"),
