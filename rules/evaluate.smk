# Evaluation: tidy tables of measurements, and their comparison with intervals.
#
# Inputs:  models of results/pretrain, results/posttrain and results/tasks, the token store, the examples of tasks
#          (params: evaluate, remembrance, states, shift, tasks, compare, figures)
# Outputs: results/evaluate/{perplexity,remembrance,states,shift}.<run>-<key>/ with a table of the same name,
#          results/evaluate/task.<run>[.<cell>]-<key>/ with the answers,
#          results/evaluate/[compare_{reach,remembrance,states,task}.]<figure>-<key>/ with the tables that a figure draws


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
        mem_mb=asks("mem_mb", "results/evaluate/perplexity.{run}-{key}"),
        runtime=asks("runtime", "results/evaluate/perplexity.{run}-{key}"),
        gpu=asks("gpu", "results/evaluate/perplexity.{run}-{key}"),
    params:
        stage=record("results/evaluate/perplexity.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Measuring the perplexity of {wildcards.run}"
    shell:
        "OMP_NUM_THREADS={threads} farstate perplexity {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule remembrance:
    """Effective remembrance of one model: what the first tokens of a text still change."""
    input:
        unpack(upstream("results/evaluate/remembrance.{run}-{key}")),
    output:
        multiext(
            "results/evaluate/remembrance.{run}-{key}/",
            manifest="manifest.json",
            remembrance="remembrance.parquet",
        ),
    log:
        "logs/evaluate/remembrance.{run}-{key}.log",
    cache: True
    threads: THREADS.evaluate
    resources:
        mem_mb=asks("mem_mb", "results/evaluate/remembrance.{run}-{key}"),
        runtime=asks("runtime", "results/evaluate/remembrance.{run}-{key}"),
        gpu=asks("gpu", "results/evaluate/remembrance.{run}-{key}"),
    params:
        stage=record("results/evaluate/remembrance.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Measuring the effective remembrance of {wildcards.run}"
    shell:
        "OMP_NUM_THREADS={threads} farstate remembrance {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule states:
    """Statistics of one model's states at every position."""
    input:
        unpack(upstream("results/evaluate/states.{run}-{key}")),
    output:
        multiext(
            "results/evaluate/states.{run}-{key}/",
            manifest="manifest.json",
            states="states.parquet",
            positions="positions.parquet",
            samples="samples.parquet",
        ),
    log:
        "logs/evaluate/states.{run}-{key}.log",
    cache: True
    threads: THREADS.evaluate
    resources:
        mem_mb=asks("mem_mb", "results/evaluate/states.{run}-{key}"),
        runtime=asks("runtime", "results/evaluate/states.{run}-{key}"),
        gpu=asks("gpu", "results/evaluate/states.{run}-{key}"),
    params:
        stage=record("results/evaluate/states.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Measuring the states of {wildcards.run}"
    shell:
        "OMP_NUM_THREADS={threads} farstate states {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule shift:
    """One model's states on long texts against those that its training met; swapped states."""
    input:
        unpack(upstream("results/evaluate/shift.{run}-{key}")),
    output:
        multiext(
            "results/evaluate/shift.{run}-{key}/",
            manifest="manifest.json",
            shift="shift.parquet",
            association="association.parquet",
            swaps="swaps.parquet",
        ),
    log:
        "logs/evaluate/shift.{run}-{key}.log",
    cache: True
    threads: THREADS.evaluate
    resources:
        mem_mb=asks("mem_mb", "results/evaluate/shift.{run}-{key}"),
        runtime=asks("runtime", "results/evaluate/shift.{run}-{key}"),
        gpu=asks("gpu", "results/evaluate/shift.{run}-{key}"),
    params:
        stage=record("results/evaluate/shift.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Comparing the states with those met in training: {wildcards.run}"
    shell:
        "OMP_NUM_THREADS={threads} farstate shift {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule task:
    """What one model answers to the examples of a task."""
    input:
        unpack(upstream("results/evaluate/task.{run}-{key}")),
    output:
        multiext(
            "results/evaluate/task.{run}-{key}/",
            manifest="manifest.json",
            answers="answers.parquet",
        ),
    log:
        "logs/evaluate/task.{run}-{key}.log",
    cache: True
    threads: THREADS.evaluate
    resources:
        mem_mb=asks("mem_mb", "results/evaluate/task.{run}-{key}"),
        runtime=asks("runtime", "results/evaluate/task.{run}-{key}"),
        gpu=asks("gpu", "results/evaluate/task.{run}-{key}"),
    params:
        stage=record("results/evaluate/task.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Asking {wildcards.run}"
    shell:
        "OMP_NUM_THREADS={threads} farstate task {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


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
            differences="differences.parquet",
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


rule compare_reach:
    """How far the arms of a figure hold: the verdict to every octave."""
    input:
        unpack(upstream("results/evaluate/compare_reach.{figure}-{key}")),
    output:
        multiext(
            "results/evaluate/compare_reach.{figure}-{key}/",
            manifest="manifest.json",
            reach="reach.parquet",
        ),
    log:
        "logs/evaluate/compare_reach.{figure}-{key}.log",
    benchmark:
        "logs/benchmarks/evaluate/compare_reach.{figure}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        stage=record("results/evaluate/compare_reach.{figure}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Finding how far the arms of {wildcards.figure} hold"
    shell:
        "farstate compare-reach {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule compare_remembrance:
    """Compare the effective remembrance of a figure's arms, with intervals."""
    input:
        unpack(upstream("results/evaluate/compare_remembrance.{figure}-{key}")),
    output:
        multiext(
            "results/evaluate/compare_remembrance.{figure}-{key}/",
            manifest="manifest.json",
            remembrance="remembrance.parquet",
        ),
    log:
        "logs/evaluate/compare_remembrance.{figure}-{key}.log",
    benchmark:
        "logs/benchmarks/evaluate/compare_remembrance.{figure}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        stage=record("results/evaluate/compare_remembrance.{figure}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Comparing the effective remembrance of {wildcards.figure}"
    shell:
        "farstate compare-remembrance {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule compare_states:
    """Compare the states of a figure's arms, with intervals; rank the heads by drift."""
    input:
        unpack(upstream("results/evaluate/compare_states.{figure}-{key}")),
    output:
        multiext(
            "results/evaluate/compare_states.{figure}-{key}/",
            manifest="manifest.json",
            states="states.parquet",
            heads="heads.parquet",
        ),
    log:
        "logs/evaluate/compare_states.{figure}-{key}.log",
    benchmark:
        "logs/benchmarks/evaluate/compare_states.{figure}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        stage=record("results/evaluate/compare_states.{figure}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Comparing the states of {wildcards.figure}"
    shell:
        "farstate compare-states {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule compare_task:
    """Score the answers of a figure's models, with intervals."""
    input:
        unpack(upstream("results/evaluate/compare_task.{figure}-{key}")),
    output:
        multiext(
            "results/evaluate/compare_task.{figure}-{key}/",
            manifest="manifest.json",
            scores="scores.parquet",
        ),
    log:
        "logs/evaluate/compare_task.{figure}-{key}.log",
    benchmark:
        "logs/benchmarks/evaluate/compare_task.{figure}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        stage=record("results/evaluate/compare_task.{figure}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Scoring the answers of {wildcards.figure}"
    shell:
        "farstate compare-task {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule evaluated:
    """Every measurement and every comparison."""
    input:
        manifests("evaluate"),
