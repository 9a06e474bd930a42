"""Rules between the fields of `data` and `model.tokenizer`; no file is read."""

from collections.abc import Iterator

from paceline.errors import Problem
from paceline.job.job import Job, JobSpec
from paceline.job.train import ObjectiveSpec
from paceline.units import counted

COLUMNS = (
    *("text", "messages", "conversations", "prompt", "completion"),
    *("instruction", "input", "output", "history", "system", "tools", "tokens"),
    *("chosen", "rejected", "label"),
)
"""What a column can be."""

WITH_ANSWERS = ("chat", "completion", "preference", "classification")
"""Kinds of rows of which some tokens are trained on: they need a tokenizer."""

_OBJECTIVES = {"preference": "dpo", "classification": "classification"}
"""Kind of data -> what the built-in trainer's loss is for it, if not of the next token."""

BYTES = "bytes"
"""`model.tokenizer`: one token a byte."""


def is_prepared(job: Job) -> bool:
    """Whether the job's data are tokenized, or read as rows, before the run; else bytes of text are
    read as they are, or a program reads data of its own."""
    data = job.spec.data
    if job.spec.program is not None or job.spec.engine != "paceline":
        return False
    if data.sources is not None or data.kind in (*WITH_ANSWERS, "tokens"):
        return True
    has_text = data.path is not None or data.corpus is not None
    return has_text and has_tokenizer(job)


def has_tokenizer(job: Job) -> bool:
    """Whether text becomes tokens of a tokenizer; else a byte is a token."""
    named = job.spec.model.tokenizer
    return named != BYTES and (named != "auto" or job.spec.model.pretrained is not None)


def names_data(job: Job) -> bool:
    """Whether the job says what to read, in one of the three ways."""
    data = job.spec.data
    return any(way is not None for way in (data.path, data.corpus, data.sources))


def check_names_data(job: Job) -> Iterator[Problem]:
    """`J007` where the built-in trainer would have nothing to train on.

    A run needs data; a plan does not. A program has data of
    its own, and another engine is asked when it is started (`check_has_data`).
    """
    if job.spec.engine == "paceline":
        yield from check_has_data(job)


def check_has_data(job: Job) -> Iterator[Problem]:
    """`J007` where neither the job nor a program of its own names data."""
    if job.spec.program is None and not names_data(job):
        yield Problem(
            code="J007",
            what="there is nothing to train on: none of data.path, data.sources and data.corpus "
            "is given",
            where=job.where("data"),
            fix="add data.path: your files, such as corpus/*.txt; to try the job out, data.corpus: "
            "python-stdlib (30 MB of text) will do; plan, prove and simulate need none",
        )


def check_data_fields(job: Job) -> Iterator[Problem]:
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
    yield from _check_objective(job)


def _check_weights(job: Job) -> Iterator[Problem]:
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
    "labels": None,
    "broken_rows": 0.01,
    "cache": None,
}
"""Fields of prepared data, with what they are where nobody gives them."""


def _check_unused(job: Job) -> Iterator[Problem]:
    """What was given and nothing would read."""
    data, model = job.spec.data, job.spec.model
    changed = [f"data.{name}" for name, usual in _DEFAULTS.items() if getattr(data, name) != usual]
    if data.sources is not None:
        changed.insert(0, "data.sources")
    changed += [
        f"model.{name}" for name in ("tokenizer", "chat_template") if getattr(model, name) != "auto"
    ]
    if job.spec.train.objective is not None:
        changed.append("train.objective")
    if job.spec.program is not None and changed:
        what = (
            f"program {job.spec.program} reads its own data: {', '.join(changed)} would be unused"
        )
        yield _clash(job, what, changed[0], "remove them, or remove program")
        return
    if data.kind in WITH_ANSWERS and not has_tokenizer(job):
        what = f"data.kind {data.kind} needs a tokenizer, and the job has none"
        fix = "give model.tokenizer, a folder with a tokenizer.json"
        yield _clash(job, what, "data.kind", fix)
    elif job.spec.engine == "paceline" and not is_prepared(job):
        read = ("data.kind", "model.tokenizer", "train.objective")
        unused = [name for name in changed if name not in read]
        if unused:
            name = "corpus" if data.corpus is not None else "path"
            what = f"data.{name} is read as bytes: {', '.join(unused)} would be unused"
            yield _clash(job, what, unused[0], "remove them, or give model.tokenizer")
    yield from _check_packing(job)


def _check_packing(job: Job) -> Iterator[Problem]:
    data = job.spec.data
    is_chat, is_pairs = data.kind in WITH_ANSWERS, data.kind == "preference"
    if is_pairs and data.pack != "auto":
        what = f"data.pack {data.pack}: of data.kind preference a sample is a pair"
        yield _clash(job, what, "data.pack", "leave it out")
    elif is_chat and data.pack == "windows":
        what = f"data.pack windows cuts through data.kind {data.kind}, whose turns would be lost"
        yield _clash(job, what, "data.pack", "use documents, which is auto")
    if data.kind in _OBJECTIVES and data.train_on != "assistant":
        trained = "the answers are compared" if is_pairs else "the label is trained on"
        what = f"data.train_on {data.train_on}: of data.kind {data.kind} {trained}"
        yield _clash(job, what, "data.train_on", "leave it out")
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


def objective_of(spec: JobSpec) -> str:
    """What the built-in trainer's loss is: `next_token`, `dpo` or `classification`."""
    asked = spec.train.objective
    if asked is not None and asked.kind != "auto":
        return asked.kind
    return "next_token" if spec.program else _OBJECTIVES.get(spec.data.kind, "next_token")


def _check_objective(job: Job) -> Iterator[Problem]:
    """The loss goes with the data, the layout and what is trained."""
    asked, data = job.spec.train.objective or ObjectiveSpec(), job.spec.data
    if job.spec.program is not None:
        return
    objective = objective_of(job.spec)
    wanted = _OBJECTIVES.get(data.kind, "next_token")
    if objective != wanted:
        what = f"train.objective.kind {objective} does not go with data.kind {data.kind}"
        fix = f"set train.objective.kind to {wanted}, or leave it out"
        kind = next((kind for kind, each in _OBJECTIVES.items() if each == objective), None)
        if kind is not None:
            fix = f"set data.kind: {kind}"
        elif wanted == "dpo":
            fix += "; to train on the chosen answers alone, set data.kind: completion with "
            fix += "columns: {completion: chosen}"
        yield _clash(job, what, "train.objective.kind", fix)
    if objective != "dpo" and asked.beta != ObjectiveSpec().beta:
        what = f"train.objective.beta {asked.beta:g} is of dpo alone"
        yield _clash(job, what, "train.objective.beta", "leave it out")
    context = job.spec.layout.context
    if objective == "dpo" and context not in ("auto", 1):
        what = f"layout.context {context} splits answers, and dpo compares their whole sums"
        yield _clash(job, what, "layout.context", "set it to 1, or leave it out")
    yield from _check_classes(job, objective)


def _check_classes(job: Job, objective: str) -> Iterator[Problem]:
    labels, spec = job.spec.data.labels, job.spec
    weights = (spec.train.objective or ObjectiveSpec()).class_weights
    field = "train.objective.class_weights"
    if objective != "classification":
        if weights is not None:
            what = f"{field}: of train.objective.kind {objective} there are no classes"
            yield _clash(job, what, field, "leave it out, or set data.kind: classification")
        if labels is not None and is_prepared(job):
            what = f"data.labels: rows of data.kind {spec.data.kind} have none"
            yield _clash(job, what, "data.labels", "leave it out, or set data.kind: classification")
        return
    names = [str(label) for label in labels or ()]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        what = "data.kind classification needs two classes or more, each named once, and "
        what += f"data.labels is {labels}"
        yield _clash(job, what, "data.labels", "name them: labels: [negative, positive]")
    elif weights is not None and len(weights) != len(names):
        what = f"{field} has {len(weights)} of them, and data.labels {counted(len(names), 'label')}"
        yield _clash(job, what, field, f"give one for each of {', '.join(names)}, in this order")
    if spec.train.adapter is not None:
        what = "train.adapter trains no new head, which classification needs"
        yield _clash(job, what, "train.adapter", "leave it out: all of the model is trained then")


def _clash(job: Job, what: str, field: str, fix: str) -> Problem:
    return Problem(code="J007", what=what, where=job.where(field), fix=fix)
