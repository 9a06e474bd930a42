"""Find other programs' checkpoints, and what their names and headers tell to be wrong. No torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import JobError, Problem
from paceline.job.adapters import WEIGHTS
from paceline.job.pretrained import INDEX, weight_files
from paceline.job.safetensors import StoredTensor, stored_tensors
from paceline.profile.fitting import listed
from paceline.record.checkpoints import list_checkpoints
from paceline.record.external_checkpoints import ForeignCheckpoint, find_foreign
from paceline.record.find_checkpoints import is_ours

COPY_AGAIN = "copy or download the files again, all of them"


def find_other(path: Path) -> ForeignCheckpoint | None:
    """Another program's checkpoint at a path; None where it is ours, or there is none.

    Raises:
        JobError: `C011`, the folder cannot be read.
    """
    try:
        below = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        if is_ours(path) or any(is_ours(each.path) for each in _entries(below)):
            return None
        return find_foreign(path)
    except OSError as error:
        raise JobError.of(
            code="C011",
            what=f"{error.filename or path} cannot be read: {error.strerror}",
            where=str(path),
            fix="give a path that you may read, or change its permissions",
        ) from None


def _entries(folder: Path) -> Sequence[Any]:
    return list_checkpoints(folder) if folder.is_dir() else ()


def damage_in(found: ForeignCheckpoint) -> list[Problem]:
    """What is wrong with the files as far as their names and headers tell."""
    if found.missing:
        what = f"{found.path.name} is not whole: {listed(list(found.missing))} is not there"
        return [Problem(code="M012", what=what, where=str(found.path), fix=COPY_AGAIN)]
    try:
        return list(_index_against(found, stored_in(found)))
    except JobError as error:
        return list(error.problems)


def no_weights(found: ForeignCheckpoint) -> Problem:
    """That a checkpoint has nothing to read."""
    return Problem(
        code="M012",
        what=f"{found.path.name}, {found.wrote}, has no file of weights that can be read",
        where=str(found.path),
        fix="give a folder with .safetensors files, pytorch_model*.bin or .distcp files",
    )


def stored_in(found: ForeignCheckpoint) -> Mapping[str, StoredTensor]:
    """The tensors of safetensors files by their headers; none for other forms.

    Raises:
        JobError: `M012`, one is damaged.
    """
    form, path = found.source
    file = path / WEIGHTS if form == "adapter" else path
    if form == "safetensors" and path.is_dir():
        return stored_tensors(weight_files(path, str(path)), where=str(path))
    is_one = file.is_file() and file.suffix == ".safetensors"
    return stored_tensors((file,), where=str(path)) if is_one else {}


def _index_against(
    found: ForeignCheckpoint, stored: Mapping[str, StoredTensor]
) -> Iterator[Problem]:
    """`M012`: tensors that the index puts into a file that has them not, or does not name."""
    index = found.path / INDEX
    if found.source[0] != "safetensors" or not index.is_file():
        return
    places: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    has = {name: each.path.name for name, each in stored.items()}
    wrong = sorted(n for n in places.keys() | has.keys() if places.get(n) != has.get(n))
    if wrong and set(has.values()) & set(places.values()):
        what = f"{INDEX} has {len(wrong)} tensors otherwise than the files: {listed(wrong)}"
        yield Problem(code="M012", what=what, where=str(index), fix=COPY_AGAIN)
