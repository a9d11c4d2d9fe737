"""`snakemake --lint` as a gate: every lint fails but one.

Snakemake asks for a conda environment or a container in each rule. The one environment of all rules is `.venv`, pinned in
requirements.txt and constraints.txt, and Snakemake itself runs in it.
"""

from __future__ import annotations

import subprocess
import sys

ACCEPTED = "Specify a conda environment or container for each rule."


def main() -> None:
    done = subprocess.run(["snakemake", "--lint"], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    lints = [line.strip() for line in said.splitlines() if line.startswith("    * ")]
    wrong = [line for line in lints if ACCEPTED not in line]
    if wrong or not (lints or "Congratulations" in said):
        sys.exit(f"snakemake --lint: {len(wrong)} complaint(s)\n{said}")
    print(f"snakemake --lint: nothing but {len(lints)} rules without an environment of their own (they share .venv)")


if __name__ == "__main__":
    main()
