"""Write requirements.lock: every package that `make env` would install here, with version and SHA-256, for `pip --require-hashes`.

    python containers/lock.py [--output requirements.lock]

pip resolves `requirements.txt` under `constraints.txt` for this platform and Python and downloads only what it must look into. The lock
holds for machines of the same kind: on Linux the wheels of torch, and so their checksums, differ between indexes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def report() -> dict[str, Any]:
    """What pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "--dry-run",
                    "--ignore-installed",
                    "--quiet",
                    "--disable-pip-version-check",
                ),
                *("--report", str(path), "-r", str(ROOT / "requirements.txt"), "-c", str(ROOT / "constraints.txt")),
            ],
            check=True,
        )
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def lines(found: dict[str, Any]) -> list[str]:
    """`name==version --hash=sha256:…`, sorted.

    Raises:
        SystemExit: a package without a checksum; it could not be held to anything.
    """
    locked = []
    for item in found["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            sys.exit(f"lock.py: {name}=={version}: the index gives no SHA-256 ({item['download_info']['url']})")
        locked.append(f"{name.lower().replace('_', '-')}=={version} --hash=sha256:{digest}")
    return sorted(locked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "requirements.lock")
    output = parser.parse_args().output
    locked = lines(report())
    output.write_text("# pip install --require-hashes --no-deps -r requirements.lock\n" + "\n".join(locked) + "\n")
    print(f"{output}: {len(locked)} packages")


if __name__ == "__main__":
    main()
