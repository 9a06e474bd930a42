"""What a job's data are before they are read whole: tokenizer, files, and what the first rows hold.

`paceline plan` and `run` refuse the same here. Nothing is written; of object storage nothing is
read.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice

from paceline.errors import JobError, Problem
from paceline.job import Job
from paceline.job.corpus import find_corpus
from paceline.job.data_rules import is_prepared
from paceline.job.sources import Source, find_held_out, find_sources, patterns_of
from paceline.prepare.columns import Rows, find_kind
from paceline.prepare.documents import Encoder, Recipe
from paceline.prepare.index import Pack, data_type
from paceline.prepare.parts import Part
from paceline.prepare.refuse import (
    check_broken,
    check_forms,
    check_own_tokens,
    check_rendered,
    check_template,
    check_vocabulary,
    needs_eos,
    needs_template,
    places_of,
    windows_of_chats,
)
from paceline.prepare.rows import Row, form_of, read_rows
from paceline.prepare.tokenize import not_maskable
from paceline.prepare.tokenizer import TokenizerFiles, read_tokenizer
from paceline.profile.resolve import check_packing

_TRIED = 64
"""Files of a source that are opened, and rows that are read as a run would read them: a guess at a
tenth of a second."""


def check_data(job: Job) -> list[Problem]:
    """What looks wrong in the first rows of the job's data, and may be right in the others.

    Raises:
        JobError: What a run refuses for certain: a file or a tokenizer is missing, is not the
            model's, or the rows are none that can be trained on so.
    """
    if not is_prepared(job):
        if job.spec.data.path is not None:
            find_corpus(job)
        return []
    tokenizer = read_job_tokenizer(job)
    if any("://" in pattern for pattern in patterns_of(job)):
        return []
    held_out = find_held_out(job)
    sources = [
        replace(source, files=source.files[:_TRIED])
        for source in (*find_sources(job), *([held_out] if held_out is not None else []))
    ]
    recipes, _ = recipes_of(job, tokenizer, sources)
    return [each for source in sources for each in _try(job, source, recipes[source.name])]


def read_job_tokenizer(job: Job) -> TokenizerFiles:
    """The job's tokenizer, which is the model's.

    Raises:
        JobError: D010, it is missing; D011, it is another model's.
    """
    tokenizer = read_tokenizer(job)
    check_vocabulary(job, tokenizer)
    check_own_tokens(job, tokenizer)
    return tokenizer


def recipes_of(
    job: Job, tokenizer: TokenizerFiles, sources: Sequence[Source]
) -> tuple[dict[str, Recipe], Pack]:
    """How the rows of each source become documents, and how documents fill a sample.

    Raises:
        JobError: The rows are none that are known, or do not go with template, tokenizer or job.
    """
    data, dtype = job.spec.data, data_type(tokenizer.vocab)
    kinds = {source.name: _kind_of(job, tokenizer, source) for source in sources}
    pack = _pack_of(job, tokenizer, {rows.kind for rows in kinds.values()})
    is_cut = data.kind == "classification" and data.too_long == "cut"
    recipes = {
        name: Recipe(
            kind=rows.kind,
            columns=rows.columns,
            unread=rows.unread,
            tokenizer=tokenizer,
            train_on=data.train_on,
            dtype=dtype,
            labels=tuple(map(str, data.labels or ())) if rows.kind == "classification" else (),
            longest=data.seq_len if is_cut else None,
        )
        for name, rows in kinds.items()
    }
    return recipes, pack


def _kind_of(job: Job, tokenizer: TokenizerFiles, source: Source) -> Rows:
    check_forms(job, source)
    rows = find_kind(job, source, has_template=tokenizer.template is not None)
    if rows.kind in ("chat", "chat preference"):
        if tokenizer.template is None:
            raise needs_template(job, tokenizer)
        check_template(job, tokenizer)
    return rows


def _pack_of(job: Job, tokenizer: TokenizerFiles, kinds: set[str]) -> Pack:
    asked = job.spec.data.pack
    if job.spec.data.kind == "preference":
        if "preference" in kinds and tokenizer.eos is None:
            raise needs_eos(job, tokenizer)
        return "pairs"
    has_turns = bool(kinds & {"chat", "completion", "classification"})
    if has_turns and asked == "windows":
        raise windows_of_chats(job, kinds)
    pack: Pack = asked if asked != "auto" else "documents" if has_turns else "windows"
    if pack == "documents":
        JobError.raise_for(check_packing(job, is_text=not has_turns))
    ended = {"text", "completion"} if pack == "windows" else {"completion"}
    if kinds & ended and tokenizer.eos is None:
        raise needs_eos(job, tokenizer)
    return pack


def _try(job: Job, source: Source, recipe: Recipe) -> Iterator[Problem]:
    """`D013`, none of the first rows can be trained on.

    Raises:
        JobError: The same of all rows, where there are no more, or of the template.
    """
    file, form = source.files[0], form_of(source.files[0])
    if form in ("bin", "text"):
        return
    with closing(read_rows(file, form)) as rows:
        first = list(islice(rows, _TRIED + 1))
    is_all = len(first) <= _TRIED and len(source.files) == 1
    batch = Encoder(recipe).encode([row for row in first[:_TRIED] if isinstance(row, Row)])
    if batch.refused is not None:
        raise not_maskable(file, form, recipe.train_on, *batch.refused)
    unread = [(row.number, row.reason) for row in first[:_TRIED] if not isinstance(row, Row)]
    broken = sorted([*batch.broken, *unread])
    part = Part(
        file=file,
        rows=len(first[:_TRIED]),
        left_out=dict(batch.left_out),
        examples=batch.examples,
        broken=len(broken),
        first_broken=broken[:3],
    )
    if is_all:
        check_broken(job, source, recipe, [part])
        return
    check_rendered(job, recipe.tokenizer, part)
    if not batch.documents:
        reasons = [*places_of(part), *batch.left_out]
        yield Problem(
            code="D013",
            what=f"none of the first {part.rows} rows of {source.name} can be trained on: "
            f"{reasons[0]}",
            where=source.where,
            fix="see what becomes of all of them: paceline data prepare",
        )
