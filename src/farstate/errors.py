"""The one kind of error that is meant for the person at the keyboard."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches


class FarstateError(Exception):
    """A problem the user can solve, told in one line: what, where, what is allowed, what to do.

    The command line prints the message without a traceback and exits with status 1.
    """


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint like `` (did you mean 'steps'?)``, or an empty string when nothing is close."""
    close = get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


def explain_os_error(error: OSError) -> str:
    """One line for the operating system's refusals that a long computation meets."""
    where = f" '{error.filename}'" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no space left on the device while writing{where}: free some space and run the same command again, finished work is kept"
    if error.errno == errno.EDQUOT:
        return f"disk quota exceeded while writing{where}: free some space and run the same command again, finished work is kept"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to write{where}: make the folder writable or run Farstate where it is"
    if error.errno == errno.ENOENT:
        return f"no such file:{where}"
    return f"{error.strerror or error}{where}"
