"""Globs over local files and archive members. Imports nothing heavy: the workflow asks it at every dry run."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from farstate.errors import FarstateError


def resolve_files(pattern: str, exclude: Iterable[str] = ()) -> list[Path]:
    """The files that `pattern` names, sorted, without those that `exclude` names.

    `*` stays within a folder, `**` crosses folders, `~` is the home folder. An exclude glob without `/` is
    held against the file's name, one with `/` against its path as `pattern` spells it.

    Raises:
        FarstateError: nothing matches, or everything that matches is excluded.
    """
    found = sorted(Path(name) for name in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(name))
    if not found:
        raise FarstateError(f"corpus source files '{pattern}': no file matches (relative globs start at {os.getcwd()})")
    patterns = tuple(exclude)
    kept = [path for path in found if not any(matches(path.as_posix(), each) for each in patterns)]
    if not kept:
        raise FarstateError(f"corpus source files '{pattern}': all {len(found)} files that match are excluded")
    return kept


def matches(path: str, pattern: str) -> bool:
    """Whether the glob names the `/`-separated path; a glob without `/` is held against the last component."""
    subject = path if "/" in pattern else path.rpartition("/")[2]
    return _regex(pattern).fullmatch(subject) is not None


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    # fnmatch lets `*` cross folders and pathlib of Python 3.11 knows no `**`: neither means what a shell means.
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", pattern, flags=re.DOTALL)
    return re.compile("".join(map(_translate, tokens)), flags=re.DOTALL)


def _translate(token: str) -> str:
    if token in _WILDCARDS:
        return _WILDCARDS[token]
    if len(token) > 2 and token[0] == "[":
        inside = token[1:-1].replace("\\", r"\\")
        return f"[^{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"
    return re.escape(token)


_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
