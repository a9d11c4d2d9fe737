"""What every format reads into and writes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from farstate.models.config import Config

Origin = dict[str, Any]
"""Where weights came from, in JSON: `format` and what that format needs to be written back (`config`, `storage`, …).

`storage` is read by all: `dtype`, and `dtypes` for the tensors (under our names) that differ from it.
`token_ids` (ids of special tokens) is all that a format is told of weights that came from another one. Empty: trained here.
"""


@dataclass(frozen=True)
class Checkpoint:
    """Weights as a format read them, not yet held against the model.

    Attributes:
        config: sizes and architecture.
        tensors: under the names of `LanguageModel`, in the dtypes of the file; of a tied head either name, or both.
        origin: what is needed to write them back.
        source: the file or folder that a message about the tensors names.
    """

    config: Config
    tensors: dict[str, Tensor]
    origin: Origin
    source: Path


class Format(Protocol):
    """A kind of folder (or file) that holds a model. A module with these names is one."""

    @property
    def name(self) -> str: ...

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures that it can express."""
        ...

    def detects(self, path: Path) -> bool:
        """Whether `path` is of this format, judged by names and configuration; a damaged file is no reason to raise."""
        ...

    def read(self, path: Path) -> Checkpoint:
        """The weights at `path`. Raises FarstateError: in one line, what is wrong with which file."""
        ...

    def write(self, config: Config, tensors: Mapping[str, Tensor], folder: Path, origin: Origin) -> None:
        """Put the files of a model into the empty folder `folder`.

        `tensors` have the names of `LanguageModel`, both names of a tied head included, and the dtypes that are to be stored.
        `origin` is that of this format, or no more than `token_ids`. Raises FarstateError: the format cannot express `config`.
        """
        ...
