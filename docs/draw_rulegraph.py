"""Draw `docs/rulegraph.svg`, the README's picture of the workflow, from what Snakemake itself says. Needs Graphviz."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> None:
    if shutil.which("dot") is None:
        sys.exit("make graph needs Graphviz (the command `dot`); install it and run again")
    done = subprocess.run(["snakemake", "--rulegraph", "dot", "--forceall", "all"], capture_output=True, text=True, check=True)
    graph = done.stdout[done.stdout.index("digraph") :]
    # One quiet colour instead of a rainbow, left to right so that it fits a page's width.
    graph = re.sub(r'color = "[^"]*"', 'color = "#0072B2"', graph)
    graph = graph.replace("graph[bgcolor=white, margin=0];", 'graph[bgcolor="transparent", margin=0, rankdir=LR];')
    graph = graph.replace("fontsize=10", "fontsize=12")
    target = Path(__file__).with_name("rulegraph.svg")
    svg = subprocess.run(["dot", "-Tsvg"], input=graph, capture_output=True, text=True, check=True).stdout
    target.write_text(svg, encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
