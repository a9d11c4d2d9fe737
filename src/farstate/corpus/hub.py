"""Data sets on the hub, file by file: what a revision holds, and one of its files, read as it was registered."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, cast

from farstate.corpus.compressed import SUFFIXES
from farstate.corpus.sources import matches
from farstate.corpus.trail import Followed, Trail
from farstate.errors import FarstateError

_KINDS = (".txt", ".jsonl", ".parquet")


class ChangedInput(FarstateError):
    """What was read is not what was registered: nothing made of it may be used."""


@dataclass(frozen=True)
class HubFile:
    """One file of a data set at a revision.

    Attributes:
        repository: `owner/name`.
        revision: the commit, 40 hexadecimal digits.
        path: inside the repository.
        size: in bytes.
        checksum: `sha256:…`, or `git:…` (SHA-1 of a git blob) of a file that the hub keeps in git itself.
    """

    repository: str
    revision: str
    path: str
    size: int
    checksum: str

    @property
    def name(self) -> PurePosixPath:
        """What messages call it; its suffixes tell its kind."""
        return PurePosixPath(self.repository, self.path)

    def open(self, trail: Trail) -> IO[bytes]:
        """Its bytes, from the hub's cache on this machine if it is there, streamed otherwise; its checksum is compared at the end.

        Args:
            trail: what is read of it is noted there.

        Raises:
            FarstateError: it is not here and the hub cannot be reached; ChangedInput: its content is not what was registered.
        """
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(self.repository, self.path, revision=self.revision, repo_type="dataset")
        if isinstance(cached, str):
            return cast(IO[bytes], io.BufferedReader(_Watched(open(cached, "rb"), self, f"the cached copy {cached}", trail)))
        place = f"datasets/{self.repository}@{self.revision}/{self.path}"
        try:
            # No size of blocks: one connection from the beginning to the end, taken up again where it breaks.
            stream = huggingface_hub.HfFileSystem().open(place, "rb", block_size=0)
        except Exception as error:  # the client raises many kinds; to the user they are one
            raise self.unreadable(error) from None
        return cast(IO[bytes], io.BufferedReader(_Watched(stream, self, "what the hub sent", trail)))

    def unreadable(self, error: Exception) -> FarstateError:
        return FarstateError(
            f"{self.name}: not in the hub's cache here and cannot be fetched ({_reason(error)}); run `hf download {self.repository} "
            f"{self.path} --repo-type dataset --revision {self.revision}` where there is a network, with HF_HOME on a disk "
            "that this machine sees"
        )


class _Watched(Followed):
    """A stream of bytes whose checksum is taken on the way and compared at its end."""

    def __init__(self, stream: io.BufferedReader, file: HubFile, what: str, trail: Trail) -> None:
        super().__init__(stream, trail)
        self._file = file
        self._what = what
        algorithm, _, self._expected = file.checksum.partition(":")
        git = algorithm == "git"
        trail.begin(str(file.name), "sha1" if git else algorithm, f"blob {file.size}\0".encode() if git else b"")

    def _take(self, view: memoryview) -> int:
        try:
            data = self._stream.read(len(view))
        except Exception as error:  # as above
            raise self._file.unreadable(error) from None
        view[: len(data)] = data
        return len(data)

    def _at_end(self) -> None:
        count, digest = self._trail.count, self._trail.digest
        if count != self._file.size or digest != self._expected:
            raise ChangedInput(
                f"{self._file.name}: {self._what} is not what was registered ({count} of {self._file.size} bytes, "
                f"checksum {digest[:12]}…, {self._expected[:12]}… expected); remove a cached copy, or run `farstate register`"
            )


def describe(where: str) -> dict[str, Any]:
    """The newest revision of a data set and its data files, as an entry of `config/sources.lock`.

    Args:
        where: `owner/name@subset/split`, whose files the `datasets` library resolves; `owner/name:glob`, the files of the
            repository that the glob names; or `owner/name`, the revision alone.

    Returns:
        `revision`, and `files`: path, size and checksum of each. Without `files` where a file is of a kind that is not
        read by itself: such a data set is streamed as a whole.

    Raises:
        FarstateError: the hub cannot be asked, or has no such files.
    """
    import huggingface_hub

    name, pattern, choice = split_name(where)
    try:
        info = huggingface_hub.HfApi().dataset_info(name, files_metadata=True)
        held = {each.rfilename: each for each in info.siblings or ()}
        if pattern is not None:
            paths = sorted(path for path in held if matches(path, pattern))
        elif choice is not None:
            paths = _data_files(name, *choice, str(info.sha))
        else:
            return {"revision": str(info.sha)}
    except Exception as error:  # the client raises many kinds; to the user they are one
        raise FarstateError(
            f"hub data set '{name}': cannot be asked what it holds ({_reason(error)}); download it elsewhere, give its local "
            "path in the parameters (corpus.sources: files), and run `farstate register` again"
        ) from None
    if pattern is not None and not paths:
        example = ", ".join(sorted(held)[:3]) or "nothing"
        raise FarstateError(
            f"hub data set '{name}': members '{pattern}' names no file of it; it has {len(held)}, such as {example}"
        )
    strange = [path for path in paths if not readable(path)]
    if pattern is not None and strange:
        raise FarstateError(
            f"hub data set '{name}': members '{pattern}' names {strange[0]}, which is of no kind that holds documents; "
            f"allowed: {', '.join(_KINDS)}, each also with {', '.join(SUFFIXES)}"
        )
    if strange or not paths:
        return {"revision": str(info.sha)}
    return {"revision": str(info.sha), "files": [{"path": path, **_content(held[path])} for path in paths]}


def readable(path: str) -> bool:
    """Whether the name is one of a file that is read by itself."""
    inner = PurePosixPath(path)
    return (inner.with_suffix("") if inner.suffix in SUFFIXES else inner).suffix in _KINDS


def split_name(where: str) -> tuple[str, str | None, tuple[str, str] | None]:
    """`owner/name`, and either the glob of its files or its subset and split."""
    if "@" not in where.partition(":")[0]:
        name, _, pattern = where.partition(":")
        return name, pattern or None, None
    name, _, choice = where.partition("@")
    subset, _, split = choice.partition("/")
    return name, None, (subset, split)


def _data_files(name: str, subset: str, split: str, revision: str) -> list[str]:
    import datasets

    builder = datasets.load_dataset_builder(name, None if subset == "default" else subset, revision=revision)
    files = builder.config.data_files or {}
    if split not in files:
        raise FarstateError(
            f"it has no split '{split}'; it has {', '.join(map(str, files)) or 'none'}; or name its files: members"
        )
    paths = [str(file).partition(f"{name}@{revision}/")[2] for file in files[split]]
    return paths if all(paths) else []  # a data set may point to files of another


def _content(file: Any) -> dict[str, Any]:
    if file.lfs is not None:
        return {"bytes": file.lfs.size, "sha256": file.lfs.sha256}
    return {"bytes": file.size, "git_sha1": file.blob_id}


def _reason(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return first[:160]
