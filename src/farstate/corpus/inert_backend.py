"""A PEP 517 back-end that runs nothing of the package it is asked about.

Before pip hands out a source archive it asks the package's build back-end for the metadata, which for most packages runs
their `setup.py`. `fetch` puts a copy of this file in the place of setuptools for that one call: the answer is
the name and the version that were asked for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

__legacy__ = sys.modules[__name__]  # how pip names the back-end of a package that names none


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    name, _, version = os.environ["FARSTATE_PIN"].partition("==")
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    target = Path(metadata_directory, folder)
    target.mkdir()
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    return folder
