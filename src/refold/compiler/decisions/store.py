"""Decisions kept in this process, and on disk for the next (design decision 19).

On disk a decision is one small JSON file, ``FOLDER/PLACE/KIND-KEY.json``. The place names the versions and the machine
that the decision holds for, so what another version wrote is never read. A file is first written under another name and
then renamed, so no reader sees half of a file. A file that cannot be read counts as absent, and the report says so.
Nothing in a file is executed: it holds names and numbers, and which rewrites to apply, never a program. When the folder
is larger than `LIMIT`, the files that were not used for longest are removed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...cache import at_home, default_folder, write_whole
from ...errors import ArgumentError

FORMAT = 1
# Bytes that the folder may hold, and decisions that a process keeps.
LIMIT = 64 << 20
KEPT = 4096

_kept: dict[tuple[str, str, str, str], Any] = {}


def folder_for(cache: Any) -> Path | None:
    """Return the folder that the option ``cache`` names: True for the default, False for none, or a path.

    Raises:
        ArgumentError: It is something else.
    """
    if isinstance(cache, bool):
        return default_folder() if cache else None
    if isinstance(cache, (str, os.PathLike)):
        return at_home(cache, "cache")
    raise ArgumentError(f"cache must be True, False or a folder, not {cache!r}")


def forget() -> None:
    """Forget what this process has decided; what is on disk stays."""
    _kept.clear()


class Store:
    """Decisions that hold in one place; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None, place: str) -> None:
        self.folder, self.place = folder, place
        self.notes: list[str] = []

    def get(self, kind: str, key: str) -> tuple[Any, str] | None:
        """Look up what was decided, and whether ``this process`` or ``the disk`` knew it; None if neither did."""
        if self.folder is None:
            return None
        if (kept := _kept.get((str(self.folder), self.place, kind, key))) is not None:
            return kept, "this process"
        path = self._path(kind, key)
        try:
            read = json.loads(path.read_bytes())
            if not isinstance(read, dict) or (read.get("format"), read.get("kind"), read.get("key")) != (
                FORMAT,
                kind,
                key,
            ):
                raise ValueError("it is not a decision of refold")
            data = read["data"]
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            self._note(f"{path} is ignored: {error}")
            return None
        return data, "the disk"

    def put(self, kind: str, key: str, data: Any, *, lasting: bool = True) -> None:
        """Keep a decision, for later processes too if it is lasting."""
        if self.folder is None:
            return
        while len(_kept) >= KEPT:
            del _kept[next(iter(_kept))]
        _kept[str(self.folder), self.place, kind, key] = data
        if not lasting:
            return
        path = self._path(kind, key)
        text = json.dumps({"format": FORMAT, "kind": kind, "key": key, "data": data})
        try:
            write_whole(path, text)
            _trim(self.folder)
        except OSError as error:
            self._note(f"decisions are not kept on disk: {error}")

    def drop(self, kind: str, key: str) -> None:
        """Forget a decision that turned out not to fit."""
        _kept.pop((str(self.folder), self.place, kind, key), None)

    def _path(self, kind: str, key: str) -> Path:
        assert self.folder is not None
        return self.folder / self.place / f"{kind}-{key}.json"

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _trim(folder: Path) -> None:
    """Remove the files that were not used for longest, down to three quarters of the limit."""
    found = []
    for path in folder.glob("*/*"):
        if path.is_dir():  # machine code
            continue
        try:
            found.append((path.stat().st_mtime, path.stat().st_size, path))
        except OSError:  # another process removed it
            continue
    size = sum(bytes for _, bytes, _ in found)
    if size <= LIMIT:
        return
    for _, bytes, path in sorted(found):
        path.unlink(missing_ok=True)
        size -= bytes
        if size <= LIMIT * 3 // 4:
            break
