"""What lies here that no current parameter needs: found with its size, removed only when told to.

Looked through: `results/`, `.superseded/`, the scratch of trainings, the records and small manifests under `.farstate/`, and
`logs/`. Needed is what a given set of parameters asks for, and what the last `dvc repro` recorded. DVC's cache and shared output
caches serve other folders too and are left alone (`dvc gc`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from farstate.errors import FarstateError
from farstate.files import MANIFEST, only_one
from farstate.keys import KEY_LENGTH
from farstate.plan import PHASES, RUN_LOCK, SCRATCH, SUPERSEDED, Plan, record_path, recorded_directories

KEYED = re.compile(rf"(.+-[0-9a-f]{{{KEY_LENGTH}}})(\..*)?")
"""A name with a key, and what a log or a record adds to it."""
HELD = "lock"
"""The file in a training's scratch that is locked while it runs."""


@dataclass(frozen=True)
class Unneeded:
    """A file or folder that nothing current needs.

    Attributes:
        kind: results, superseded, scratch, records or logs.
        size: bytes of its files, links as links; a file with several names counts in full.
    """

    kind: str
    path: Path
    size: int


def unneeded(root: Path, plans: Iterable[Plan], scratch: Path) -> list[Unneeded]:
    """All that lies under `root` and that none of `plans` and nothing recorded needs; the largest of a kind first.

    Args:
        plans: of every set of parameters that is still in use.
        scratch: where trainings keep their resume state (`scratch` in config/settings.yaml), relative to `root` or absolute.
    """
    wanted = recorded_directories(root)
    pages: set[str] = set()
    for plan in plans:
        wanted |= plan.stages.keys()
        pages |= {Path(page.manifest).name for page in plan.drawn}
    found = [
        Unneeded(kind, path, _size(path))
        for kind, paths in {
            "results": _keyed(root / "results", wanted),
            "superseded": [*_keyed(root / SUPERSEDED, wanted), *_inside(root / SUPERSEDED / "reports")],
            "scratch": [*_keyed(root / scratch, wanted), *_inside(root / scratch / "by_hand")],
            "records": [*_records(root, wanted), *(path for path in _inside(root / SCRATCH / "pages") if path.name not in pages)],
            "logs": [*_keyed(root / "logs", wanted), *_keyed(root / "logs" / "benchmarks", wanted)],
        }.items()
        for path in paths
    ]
    kinds = list(dict.fromkeys(item.kind for item in found))
    return sorted(found, key=lambda item: (kinds.index(item.kind), -item.size, item.path))


def remove(root: Path, plans: Iterable[Plan], scratch: Path) -> tuple[list[Unneeded], list[Unneeded]]:
    """Remove what `unneeded` finds, and say what was removed and what was left because a training still holds it.

    Raises:
        FarstateError: a Snakemake run is alive in this folder.
    """
    removed, held = [], []
    with only_one(root / RUN_LOCK, "a Snakemake run in this folder"):
        for item in unneeded(root, plans, scratch):
            try:
                if item.kind == "scratch" and (item.path / HELD).exists():
                    with only_one(item.path / HELD, "a training"):
                        _delete(item.path)
                else:
                    _delete(item.path)
            except FarstateError:
                held.append(item)
            else:
                removed.append(item)
    return removed, held


def _delete(path: Path) -> None:
    """A folder's manifest goes first: whoever finds a manifest may rely on a complete result, also after a kill."""
    if path.is_dir() and not path.is_symlink():
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink()


def _keyed(folder: Path, wanted: set[str]) -> Iterator[Path]:
    """What lies in the folders of the phases under `folder`, carries a key and belongs to nothing wanted."""
    for phase in PHASES:
        for path in _inside(folder / phase):
            match = KEYED.fullmatch(path.name)
            if match and f"results/{phase}/{match.group(1)}" not in wanted:
                yield path


def _records(root: Path, wanted: set[str]) -> Iterator[Path]:
    needed = {record_path(directory).name for directory in wanted}
    return (path for path in _inside(root / SCRATCH / "stages") if path.name not in needed)


def _inside(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.iterdir())) if folder.is_dir() else iter(())


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_symlink() or not file.is_dir())


def report(items: list[Unneeded], *, verb: str) -> Iterator[str]:
    """Results and scratch one by one, the many small files of the other kinds as sums; then the whole."""
    for kind in dict.fromkeys(item.kind for item in items):
        several = [item for item in items if item.kind == kind]
        yield f"{kind}: {len(several)}, {in_units(sum(item.size for item in several))}"
        if kind not in ("records", "logs"):
            yield from (f"  {in_units(item.size):>9}  {item.path}" for item in several)
    yield f"{verb} {len(items)} file(s) and folder(s), {in_units(sum(item.size for item in items))}"


def in_units(size: int) -> str:
    """Bytes in the unit that suits them, 1 MB = 10⁶ bytes."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
