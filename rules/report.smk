# Reports: pages that read offline. A figure reads tables and computes no science.
#
# Inputs:  results/evaluate/<figure>-<key>/ (params: report), and a small file with the keys that the page must show
# Outputs: reports/<figure>.html and, beside it, .svg .png .json .parquet .csv; reports/index.{html,json,csv}


rule report:
    """Draw a figure's page."""
    input:
        unpack(page_inputs),
    output:
        html=report(
            "reports/{figure}.html",
            caption="../workflow/report/page.rst",
            category="Figures",
            subcategory="{figure}",
            labels={"figure": "{figure}", "what": "page"},
        ),
        svg=report(
            "reports/{figure}.svg",
            caption="../workflow/report/picture.rst",
            category="Figures",
            subcategory="{figure}",
            labels={"figure": "{figure}", "what": "picture"},
        ),
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


rule index:
    """What was asked, what was found, how sure it is: one page, made of the finished ones."""
    input:
        wanted=PLAN.index.manifest,
        pages=index_pages,
    output:
        html=report(
            INDEX["html"],
            caption="../workflow/report/index.rst",
            category="All results",
            labels={"figure": "all", "what": "page"},
        ),
        json=INDEX["json"],
        csv=INDEX["csv"],
    log:
        "logs/reports/index.log",
    benchmark:
        "logs/benchmarks/reports/index.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=15,
    message:
        "Putting all results on one page"
    shell:
        "farstate index {input.wanted:q} --output reports 2>&1 | tee {log:q}"


rule reports:
    """Every page, and the one of all results."""
    input:
        PAGES,
        INDEX.values(),
