"""Rules between the fields of `data` and `model.tokenizer`; no file is read."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.errors import Problem

if TYPE_CHECKING:
    from paceline.spec.load import Job

COLUMNS = (
    *("text", "messages", "conversations", "prompt", "completion"),
    *("instruction", "input", "output", "tools", "tokens"),
)
"""What a column can be."""

BYTES = "bytes"
"""`model.tokenizer`: one token a byte."""


def is_prepared(job: "Job") -> bool:
    """Whether the job's data are tokenized, or read as rows, before the run; else bytes of text are
    read as they are, or a program reads data of its own."""
    data = job.spec.data
    if job.spec.program is not None or job.spec.engine != "paceline":
        return False
    if data.sources is not None or data.kind in ("chat", "completion", "tokens"):
        return True
    has_text = data.path is not None or data.corpus is not None
    return has_text and _has_tokenizer(job)


def _has_tokenizer(job: "Job") -> bool:
    named = job.spec.model.tokenizer
    return named != BYTES and (named != "auto" or job.spec.model.pretrained is not None)


def check_data_fields(job: "Job") -> Iterator[Problem]:
    """Fields of `data` that go together, or that nothing would use; reads no file."""
    data = job.spec.data
    ways = [way for way in ("path", "corpus", "sources") if getattr(data, way) is not None]
    if len(ways) > 1:
        texts = " and ".join(f"data.{way}" for way in ways)
        yield _clash(job, f"{texts} are both given", f"data.{ways[-1]}", "keep one of them")
    if data.sources == []:
        yield _clash(job, "data.sources is an empty list", "data.sources", "name a source")
    yield from _check_weights(job)
    yield from _check_unused(job)


def _check_weights(job: "Job") -> Iterator[Problem]:
    sources = job.spec.data.sources or []
    for number, source in enumerate(sources):
        unknown = sorted(set(source.columns) - set(COLUMNS))
        if unknown:
            yield _clash(
                job,
                f"data.sources[{number}].columns has {', '.join(unknown)}",
                f"data.sources.{number}.columns",
                f"left of the colon stands one of {', '.join(COLUMNS)}",
            )
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        without = weighted.index(False)
        yield _clash(
            job,
            f"{sum(weighted)} of {len(weighted)} sources have a weight",
            f"data.sources.{without}",
            "give every source a weight, or none: then each counts by its size",
        )


_DEFAULTS = {
    "kind": "auto",
    "pack": "auto",
    "too_long": "refuse",
    "train_on": "assistant",
    "held_out_path": None,
    "broken_rows": 0.01,
    "cache": None,
}
"""Fields of prepared data, with what they are where nobody gives them."""


def _check_unused(job: "Job") -> Iterator[Problem]:
    """What was given and nothing would read."""
    data, model = job.spec.data, job.spec.model
    changed = [f"data.{name}" for name, usual in _DEFAULTS.items() if getattr(data, name) != usual]
    if data.sources is not None:
        changed.insert(0, "data.sources")
    changed += [
        f"model.{name}" for name in ("tokenizer", "chat_template") if getattr(model, name) != "auto"
    ]
    if job.spec.program is not None and changed:
        what = (
            f"program {job.spec.program} reads its own data: {', '.join(changed)} would be unused"
        )
        yield _clash(job, what, changed[0], "remove them, or remove program")
        return
    if data.kind in ("chat", "completion") and not _has_tokenizer(job):
        what = f"data.kind {data.kind} needs a tokenizer, and the job has none"
        fix = "give model.tokenizer, a folder with a tokenizer.json"
        yield _clash(job, what, "data.kind", fix)
    elif job.spec.engine == "paceline" and not is_prepared(job):
        unused = [name for name in changed if name not in ("data.kind", "model.tokenizer")]
        if unused:
            name = "corpus" if data.corpus is not None else "path"
            what = f"data.{name} is read as bytes: {', '.join(unused)} would be unused"
            yield _clash(job, what, unused[0], "remove them, or give model.tokenizer")
    yield from _check_packing(job)


def _check_packing(job: "Job") -> Iterator[Problem]:
    data = job.spec.data
    is_chat = data.kind in ("chat", "completion")
    if is_chat and data.pack == "windows":
        what = f"data.pack windows cuts through data.kind {data.kind}, whose turns would be lost"
        yield _clash(job, what, "data.pack", "use documents, which is auto")
    if is_chat and data.too_long == "split":
        what = f"data.too_long split cuts data.kind {data.kind} in the middle, without its prompt"
        yield _clash(job, what, "data.too_long", "use cut, or drop")
    if data.kind in ("text", "tokens") and data.train_on != "assistant":
        what = f"data.train_on {data.train_on}: of data.kind {data.kind} every token is trained on"
        yield _clash(job, what, "data.train_on", "leave it out")
    if data.held_out_path is not None and data.held_out != type(data)().held_out:
        what = "data.held_out and data.held_out_path are both given"
        yield _clash(job, what, "data.held_out", "keep one of them")
    if data.pack == "windows" and data.too_long != "refuse":
        what = f"data.too_long {data.too_long}: windows join documents of any length"
        yield _clash(job, what, "data.too_long", "leave it out, or set data.pack: documents")


def _clash(job: "Job", what: str, field: str, fix: str) -> Problem:
    return Problem(code="J007", what=what, where=job.where(field), fix=fix)
