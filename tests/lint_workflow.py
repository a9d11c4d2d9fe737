"""`snakemake --lint` as a gate: every lint fails."""

from __future__ import annotations

import subprocess
import sys


def main() -> None:
    done = subprocess.run(["snakemake", "--lint"], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if "Congratulations" not in said:
        sys.exit(f"snakemake --lint: complaints\n{said}")
    print("snakemake --lint: no complaint")


if __name__ == "__main__":
    main()
