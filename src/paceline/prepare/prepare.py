"""Prepare a job's data: what is asked, whether it is there, and making it.

One process prepares, under a lock; others wait for it. A kill loses the file that was being
tokenized. Other settings, another tokenizer or other contents make another folder.
"""

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from paceline.job import Job
from paceline.job.sources import Source, find_held_out, find_sources
from paceline.prepare.before import read_job_tokenizer, recipes_of
from paceline.prepare.contents import contents_of
from paceline.prepare.documents import Recipe
from paceline.prepare.index import (
    FORM,
    INDEX,
    Index,
    LeftOut,
    Pack,
    SourceIndex,
    data_type,
    open_arrays,
    open_index,
    write_index,
)
from paceline.prepare.join import Cut, Joined, Side, join_parts, split_sides
from paceline.prepare.parts import Part, PartArrays, read_part
from paceline.prepare.refuse import (
    check_broken,
    check_classes,
    check_disk,
    check_samples,
    check_too_long,
    example_of,
    make_cache,
    places_of,
)
from paceline.prepare.tokenize import Workers, make_part, start_processes
from paceline.prepare.tokenizer import TokenizerFiles

_RULES = 5
"""Changes when rows are read as other documents than before: what was prepared is left alone."""


class Step(NamedTuple):
    """How far the preparation is."""

    files_done: int
    num_files: int
    num_bytes: int
    """Bytes of text that were tokenized."""


Report = Callable[[Step], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a job asks to be prepared."""

    job: Job
    sources: tuple[Source, ...]
    held_out: Source | None
    contents: dict[str, str]
    tokenizer: TokenizerFiles
    folder: Path
    """Where it is kept; its name is the hash of all that it depends on."""

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """Those of training first."""
        return self.sources if self.held_out is None else (*self.sources, self.held_out)

    @property
    def parts(self) -> Path:
        """Folder of the files that are tokenized, until they are joined."""
        return self.folder.with_name(f"{self.folder.name}.parts")


def ask(job: Job) -> Request:
    """What a job asks to be prepared, and the folder that it is prepared in.

    Raises:
        JobError: A file or the tokenizer is missing, or the tokenizer is not the model's.
    """
    tokenizer = read_job_tokenizer(job)
    sources, held_out = find_sources(job), find_held_out(job)
    cache = job.folder / os.path.expanduser(job.spec.data.cache or ".paceline/data")
    everything = (*sources, *([held_out] if held_out is not None else []))
    contents = contents_of([file for source in everything for file in source.files], cache)
    key = xxhash.xxh3_128_hexdigest(
        msgspec.json.encode(
            [
                [FORM, _RULES, _settings(job), tokenizer.digest, tokenizer.template],
                [tokenizer.tool_template, tokenizer.special_tokens],
                [
                    [source.name, source.weight, dict(source.columns)]
                    + [[_name(job, file), contents[file]] for file in source.files]
                    for source in everything
                ],
                sorted(contents[file] for file in contents if file.endswith(".idx")),
            ],
            order="deterministic",
        )
    )
    return Request(
        job=job,
        sources=sources,
        held_out=held_out,
        contents=contents,
        tokenizer=tokenizer,
        folder=cache / key,
    )


def _settings(job: Job) -> dict[str, Any]:
    data = job.spec.data
    fields = ("kind", "seq_len", "pack", "too_long", "train_on", "held_out", "broken_rows")
    given = {"labels": data.labels} if data.labels is not None else {}
    return {field: getattr(data, field) for field in fields} | given


def _name(job: Job, file: str) -> str:
    """Relative to the job file, so that a job's folder may be moved."""
    return file if "://" in file else os.path.relpath(file, job.folder)


def find_prepared(job: Job) -> Path | None:
    """The folder of the job's prepared data; None where they are not prepared yet.

    Raises:
        JobError: As `ask`.
    """
    folder = ask(job).folder
    return folder if (folder / INDEX).exists() else None


def prepared(job: Job, report: Report | None = None, *, processes: int | None = None) -> Path:
    """The folder of the job's prepared data, which are prepared now where they are not there.

    Args:
        processes: That tokenize; None: one a core.

    Raises:
        JobError: The data cannot be prepared, with file and line.
    """
    request = ask(job)
    if not (request.folder / INDEX).exists():
        make_cache(job, request.folder.parent)
        with _locked(request.folder):
            if not (request.folder / INDEX).exists():  # another process has prepared it meanwhile
                _prepare(request, report or (lambda step: None), processes)
    index = open_index(request.folder)
    for source in (*index.train, *index.held_out):
        open_arrays(request.folder, index, source)  # what is damaged is said before any rank starts
    return request.folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The right to prepare a folder, after whoever has it; a process that ends gives it back."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(request: Request, report: Report, processes: int | None) -> None:
    sizes = _sizes(request)
    dtype = data_type(request.tokenizer.vocab)
    check_disk(request.job, request.folder.parent, sizes, dtype)
    recipes, pack = recipes_of(request.job, request.tokenizer, request.all_sources)
    with start_processes(sum(sizes.values()), processes) as (pool, count):
        parts = _Maker(request, recipes, report).make_all(pool, count)
    _join(request, parts, pack, recipes)


def _sizes(request: Request) -> dict[str, int]:
    files = [file for source in request.all_sources for file in source.files]
    return {file: 0 if "://" in file else os.stat(file).st_size for file in files}


class _Maker:
    """Tokenizes every file that has no part yet."""

    def __init__(self, request: Request, recipes: dict[str, Recipe], report: Report) -> None:
        self._request = request
        self._recipes = recipes
        self._report = report
        self._step = Step(0, sum(len(source.files) for source in request.all_sources), 0)

    def make_all(self, pool: ProcessPoolExecutor | None, count: int) -> dict[str, list[Part]]:
        """The parts of each source, by its name."""
        made: dict[str, list[Part]] = {}
        for source in self._request.all_sources:
            workers = Workers(self._recipes[source.name], pool, count)
            parts = made[source.name] = []
            for file in source.files:
                parts.append(self._make(source, file, workers))
                check_broken(self._request.job, source, self._recipes[source.name], parts)
        return made

    def _make(self, source: Source, file: str, workers: Workers) -> Part:
        folder = part_folder(self._request, source, file)
        part = read_part(folder)
        if part is None:
            part = make_part(folder, file, self._recipes[source.name], workers, self._done)
        self._step = self._step._replace(files_done=self._step.files_done + 1)
        self._report(self._step)
        return part

    def _done(self, num_bytes: int) -> None:
        self._step = self._step._replace(num_bytes=self._step.num_bytes + num_bytes)
        self._report(self._step)


def part_folder(request: Request, source: Source, file: str) -> Path:
    """Where a file's part is kept; a file may be in two sources."""
    name = xxhash.xxh3_64_hexdigest(f"{source.name}\0{file}".encode())
    return request.parts / name


def _join(
    request: Request, parts: dict[str, list[Part]], pack: Pack, recipes: dict[str, Recipe]
) -> None:
    unfinished = request.folder.with_name(f"{request.folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    data = request.job.spec.data
    cut = Cut(pack=pack, seq_len=data.seq_len, too_long=data.too_long, share=data.held_out)
    if request.held_out is not None:
        cut = replace(cut, share=0.0)
    train: list[SourceIndex] = []
    held_out: list[SourceIndex] = []
    left_out: list[LeftOut] = []
    for number, source in enumerate(request.all_sources):
        is_own = source is request.held_out
        dtype = recipes[source.name].dtype
        arrays = [PartArrays(part_folder(request, source, file), dtype) for file in source.files]
        sides = split_sides(arrays, cut)
        if source is not request.held_out:
            check_classes(request.job, source, recipes[source.name], sides[0], arrays)
        both = list(_join_sides(request, unfinished, number, source, arrays, sides, cut, is_own))
        check_too_long(request.job, source, cut, [joined for _, joined in both])
        train += [index for index, _ in both[:1] if not is_own]
        held_out += [index for index, _ in (both if is_own else both[1:]) if index.documents]
        left_out += _left_out(source, parts[source.name], [joined for _, joined in both])
    index = _index(request, cut, train, held_out, left_out, recipes)
    check_samples(request.job, index)
    write_index(unfinished, index)
    unfinished.rename(request.folder)
    shutil.rmtree(request.parts, ignore_errors=True)


def _join_sides(
    request: Request,
    root: Path,
    number: int,
    source: Source,
    arrays: Sequence[PartArrays],
    sides: tuple[Side, Side],
    cut: Cut,
    is_own: bool,
) -> Iterator[tuple[SourceIndex, Joined]]:
    """Training and held out; of held-out files of their own, only these."""
    names = ("held_out",) if is_own else ("train", "held_out")
    hashes = {_name(request.job, file): request.contents[file] for file in source.files}
    for name, side in zip(names, sides, strict=False):
        folder = f"{name}/{number}"
        joined = join_parts(root / folder, arrays, side, cut)
        yield (
            SourceIndex(
                name=source.name,
                weight=source.weight,
                folder=folder,
                documents=joined.documents,
                tokens=joined.tokens,
                targets=joined.targets,
                samples=joined.samples,
                source_files=hashes,
            ),
            joined,
        )


def _left_out(source: Source, parts: Sequence[Part], joined: Sequence[Joined]) -> Iterator[LeftOut]:
    counts: Counter[str] = Counter()
    places: dict[str, str] = {}
    for part in parts:
        counts.update(part.left_out)
        counts["broken row"] += part.broken
        for reason in part.examples:
            places.setdefault(reason, example_of(part, reason))
        if part.broken:
            places.setdefault("broken row", places_of(part)[0])
    for side in joined:
        counts.update(side.left_out)
    for reason, count in counts.items():
        if count:
            place = places.get(reason, "")
            yield LeftOut(source=source.name, reason=reason, documents=count, example=place)


def _index(
    request: Request,
    cut: Cut,
    train: list[SourceIndex],
    held_out: list[SourceIndex],
    left_out: list[LeftOut],
    recipes: dict[str, Recipe],
) -> Index:
    files = request.tokenizer
    return Index(
        tokenizer=files.digest,
        vocab=files.vocab,
        eos=files.eos,
        seq_len=cut.seq_len,
        pack=cut.pack,
        dtype=data_type(files.vocab),
        train=tuple(train),
        held_out=tuple(held_out),
        settings={
            **_settings(request.job),
            "bos": files.bos,
            "template": files.template and xxhash.xxh3_128_hexdigest(files.template.encode()),
            "sources": {
                name: {"kind": recipe.kind, "columns": dict(recipe.columns)}
                | ({"not_read": recipe.unread} if recipe.unread else {})
                for name, recipe in recipes.items()
            },
        },
        versions={name: _version(name) for name in ("paceline", "tokenizers", "jinja2")},
        left_out=tuple(left_out),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
