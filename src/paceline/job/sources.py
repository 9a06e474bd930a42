"""Which files a job's data are prepared from, and with which tokenizer: names, no contents.

Leaves out: text that is trained on as bytes (`corpus.py`).
"""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import JobError, Problem
from paceline.job.corpus import expand, holds_rows, match_all, stdlib_files
from paceline.job.data_rules import BYTES
from paceline.job.job import Job, SourceSpec
from paceline.job.packages import import_package
from paceline.job.pretrained import find_pretrained


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Files that are read together."""

    name: str
    weight: float | None
    files: tuple[str, ...]
    """Absolute paths and URLs, sorted."""

    columns: Mapping[str, str]
    where: str
    """Its place in the job."""


def find_tokenizer(job: Job) -> Path | None:
    """The folder or file of the job's tokenizer; None for bytes.

    Raises:
        JobError: D010, there is none by that name, or the pretrained model has none.
    """
    named = job.spec.model.tokenizer
    if named == BYTES:
        return None
    if named == "auto":
        return _of_pretrained(job)
    path = job.folder / os.path.expanduser(named)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    raise JobError.of(
        code="D010",
        what=f"model.tokenizer {named}: there is no file {file}",
        where=job.where("model.tokenizer"),
        fix="first run the program that makes it; or name a folder that has a tokenizer.json (made "
        "by `AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`); or set it to bytes",
    )


def tokenizer_folder(job: Job) -> str | None:
    """Folder of the tokenizer that the job names, on the machines of the run; None where it names
    none. Nothing is looked at."""
    named = job.spec.model.tokenizer
    if named in ("auto", BYTES):
        return None
    path = job.folder / named
    return str(path.parent if named.endswith(".json") else path)


def names_absent_tokenizer(job: Job) -> bool:
    """Whether the job names a tokenizer by an absolute path that this machine does not have."""
    named = Path(job.spec.model.tokenizer)
    return named.is_absolute() and not named.exists()


def absolute_paths(job: Job) -> list[str]:
    """The tokenizer and the data of the job that it names by absolute paths: every node has them
    under the same."""
    named = [tokenizer_folder(job)] if job.spec.model.tokenizer.startswith("/") else []
    return sorted({each for each in [*named, *patterns_of(job)] if each and each.startswith("/")})


def _of_pretrained(job: Job) -> Path | None:
    pretrained = find_pretrained(job)
    if pretrained is None:
        return None
    file = (pretrained.tokenizer or pretrained.folder) / "tokenizer.json"
    if file.is_file():
        return file
    raise JobError.of(
        code="D010",
        what=f"{pretrained.folder} has no tokenizer.json, and a pretrained model knows the tokens "
        "of its own tokenizer",
        where=job.where("model.pretrained"),
        fix="put the model's tokenizer.json there; or name a folder that has it: model.tokenizer",
    )


def patterns_of(job: Job) -> list[str]:
    """Every path and URL that the job names for its prepared data."""
    data = job.spec.data
    named = [each.path for each in data.sources or ()] + [data.path, data.held_out_path]
    return [each for some in named for each in ([some] if isinstance(some, str) else some or [])]


def find_sources(job: Job) -> tuple[Source, ...]:
    """The files of every source that the job trains on.

    Raises:
        JobError: D001, a pattern matches no file.
    """
    data = job.spec.data
    if data.corpus is not None:
        files = tuple(str(path) for path in stdlib_files(job))
        where = job.where("data.corpus")
        name = data.corpus
        return (Source(name=name, weight=None, files=files, columns={}, where=where),)
    if data.sources is None:
        asked = SourceSpec(path=data.path or [])
        return (_source(job, asked, "data.path", "data"),)
    found = [
        _source(job, asked, f"data.sources.{number}", f"source-{number + 1}")
        for number, asked in enumerate(data.sources)
    ]
    JobError.raise_for(_check_names(job, found))
    return tuple(found)


def find_held_out(job: Job) -> Source | None:
    """The files that are kept for evaluation, where the job names some.

    Raises:
        JobError: D001, a pattern matches no file; J007, one is trained on too.
    """
    named = job.spec.data.held_out_path
    if named is None:
        return None
    held_out = _source(job, SourceSpec(path=named), "data.held_out_path", "held-out")
    trained = {file for source in find_sources(job) for file in source.files}
    for file in held_out.files:
        if file in trained:
            raise JobError.of(
                code="J007",
                what=f"{file} is trained on and held out",
                where=held_out.where,
                fix="leave it out of one of them, or give data.held_out in place of "
                "data.held_out_path",
            )
    return held_out


def find_files(patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files that paths, globs, folders and URLs mean, sorted; and those of folders that hold rows
    which are none themselves, as a README is, and are left out.

    Raises:
        JobError: D001, one means no file.
    """
    found: dict[str, None] = {}
    others: list[str] = []
    for pattern in patterns:
        files = sorted(_matches(pattern, Path()))
        if not files:
            raise JobError.of(
                code="D001",
                what=f"{pattern} is no file, and no folder or pattern with files",
                where=pattern,
                fix="give a file, a folder with files, or a pattern in quotes: 'data/*.jsonl'",
            )
        plain = {file: file.removesuffix(".gz").removesuffix(".zst") for file in files}
        rows = [file for file in files if holds_rows(plain[file], b"") or file.endswith(".bin")]
        if rows and os.path.isdir(os.path.expanduser(pattern)):
            others += [file for file in files if file not in rows and not _is_index(file, files)]
            files = rows
        found |= dict.fromkeys(file for file in files if not _is_index(file, files))
    return list(found), others


def by_split(files: Sequence[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files to train on, and those of folders and patterns that their names say to be evaluated on:
    `eval.jsonl`, `data/test-00000-of-00001.parquet`, `val/part-0.jsonl`.

    All are to train on where nothing else is left. The words are those by which the library
    `datasets` (data_files.py, `SPLIT_KEYWORDS`) finds splits, and `holdout`.

    >>> by_split(["/d/train.jsonl", "/d/my-test-1.jsonl", "/d/latest.jsonl"], ["/d"])
    (['/d/train.jsonl', '/d/latest.jsonl'], ['/d/my-test-1.jsonl'])
    """
    named = {_absolute(pattern) for pattern in patterns}
    roots = [os.path.dirname(each.partition("*")[0] + "x") for each in named]
    roots += [each for each in named if os.path.isdir(each)]

    def is_evaluated(file: str) -> bool:
        whole = _absolute(file)
        below = [whole.removeprefix(root) for root in roots if whole.startswith(root)]
        inside = min(below, key=len, default=os.path.basename(whole))
        return whole not in named and _SPLIT.search(inside) is not None

    train = [file for file in files if not is_evaluated(file)]
    return (train, [file for file in files if file not in train]) if train else (list(files), [])


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


_SPLIT = re.compile(
    r"(?i)(?<![a-z])(eval(uation)?|val(id(ation)?)?|dev|test(ing)?|held[-_]?out|holdout)(?![a-z])"
)


def _source(job: Job, asked: SourceSpec, field: str, fallback: str) -> Source:
    patterns = [asked.path] if isinstance(asked.path, str) else asked.path
    files = match_all(job, patterns, field, _matches)
    return Source(
        name=asked.name or _name_of(patterns[0], fallback),
        weight=asked.weight,
        files=tuple(file for file in files if not _is_index(file, files)),
        columns=dict(asked.columns),
        where=job.where(field),
    )


def _is_index(file: str, files: Sequence[str]) -> bool:
    """Whether a file is Megatron's index of another one."""
    return file.endswith(".idx") and f"{file[:-4]}.bin" in files


def _matches(pattern: str, folder: Path) -> Iterator[str]:
    """Absolute names; a URL with a glob or a folder is listed by fsspec."""
    if "://" not in pattern:
        below = folder / os.path.expanduser(pattern)
        if (below / "state.json").is_file() and (below / "dataset_info.json").is_file():
            yield from (str(path) for path in sorted(below.glob("*.arrow")))  # datasets' own folder
            return
        if (below / "dataset_dict.json").is_file():
            raise _several_splits(pattern, below)
        yield from (str(path) for path in expand(pattern, folder))
        return
    protocol = pattern.partition("://")[0]
    for name in _names_in_storage(pattern):
        yield f"{protocol}://{name.removeprefix(f'{protocol}://')}"


def _names_in_storage(url: str) -> list[str]:
    """What a URL means, as its storage names it.

    Raises:
        JobError: R010, the storage's package is not installed; D002, it cannot be asked.
    """
    fsspec = import_fsspec(url)
    try:
        files, path = fsspec.core.url_to_fs(url)
        if glob.has_magic(path):
            return [str(name) for name in files.glob(path)]
        return [path] if files.isfile(path) else [str(name) for name in files.find(path)]
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or error.name or "its package"
        what = f"{url} is read through {package}, which is not installed"
        fix = f"pip install {package}"
        raise JobError.of(code="R010", what=what, where="data", fix=fix) from None
    except Exception as error:  # noqa: BLE001 - each storage's package has errors of its own
        raise JobError.of(
            code="D002",
            what=f"{url} cannot be read: {error or type(error).__name__}",
            where="data",
            fix="see that the address is right and can be reached from here with your credentials",
        ) from None


def _several_splits(pattern: str, folder: Path) -> JobError:
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    return JobError.of(
        code="D016",
        what=f"{pattern} holds the splits {', '.join(splits)} of a data set",
        where=str(folder),
        fix=f"name the one to train on: {pattern.rstrip('/')}/{(splits or ['train'])[-1]}",
    )


def import_fsspec(url: str) -> Any:
    """The package that reads object storage.

    Raises:
        JobError: R010, it is not installed.
    """
    need = f"{url} is read through fsspec"
    return import_package("fsspec", need, where="data", extra="storage")


def _name_of(pattern: str, fallback: str) -> str:
    """`chats` of `data/chats/*.jsonl`, `faq` of `faq.parquet`."""
    parts = [part for part in pattern.split("/") if part and not glob.has_magic(part)]
    name = parts[-1].split(".")[0] if parts else ""
    return name if name not in ("", ".", "..") else fallback


def _check_names(job: Job, sources: Sequence[Source]) -> Iterator[Problem]:
    names = [source.name for source in sources]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield Problem(
                code="J007",
                what=f"two sources are called {name}",
                where=job.where(f"data.sources.{number}"),
                fix=f"give one of them another name: {name}-2",
            )
