# Reports: pages that read offline. A figure reads tables and computes no science.
#
# Inputs:  results/evaluate/<figure>-<key>/ (params: report), and a small file with the keys that the page must show
# Outputs: reports/<figure>.html and, beside it, .svg .png .json .parquet .csv


rule report:
    """Draw a figure's page."""
    input:
        unpack(page_inputs),
    output:
        html="reports/{figure}.html",
        svg="reports/{figure}.svg",
        png="reports/{figure}.png",
        spec="reports/{figure}.json",
        table="reports/{figure}.parquet",
        csv="reports/{figure}.csv",
    log:
        "logs/reports/{figure}.log",
    benchmark:
        "logs/benchmarks/reports/{figure}.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=15,
    message:
        "Drawing {wildcards.figure}"
    shell:
        "farstate report {input.wanted:q} --output reports 2>&1 | tee {log:q}"


rule reports:
    """Every page."""
    input:
        PAGES,
