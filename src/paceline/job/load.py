"""Read a job file: YAML text to a `JobSpec`, or every problem at once with its line."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from paceline.errors import JobError, Problem, did_you_mean
from paceline.job.alerts import AlertsSpec, check_alerts, check_plain
from paceline.job.data_fields import check_data_fields
from paceline.job.engine import read_engine
from paceline.job.evaluate import check_evaluation
from paceline.job.job import MODEL_WAYS, JobSpec
from paceline.job.length import CountSamples, Length, check_length, in_steps, keep_overridden
from paceline.job.metrics import check_metrics
from paceline.job.places import RaySpec, SlurmSpec, SshSpec
from paceline.job.script import Script, ScriptSpec
from paceline.job.secrets import check_secrets
from paceline.job.section import section_in
from paceline.job.training import check_phases, check_training
from paceline.job.wanted import wanted

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Path = tuple[str | int, ...]
Where = Callable[[_Path], str]
_DEEPEST, _MOST_KEYS = 20, 10_000
"""Far above any job; a YAML alias to itself, or to many aliases, would never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job file as it was read: what is asked, and where it came from."""

    spec: JobSpec
    """What is asked."""

    folder: Path
    """Absolute folder that relative paths and `module:function` names start from."""

    source: str
    """The file's name as the reader gave it, for messages."""

    lines: Mapping[_Path, int]
    """Line of each key, counted from 1, for messages; 0 for what `--set` gave."""

    length: Length | None = None
    """What `train.steps` was made of; None where the job gives it."""

    def where(self, field: str) -> str:
        """The place of a dotted field for a message: `train.global_batch, job.yaml line 7`."""
        path: _Path = tuple(field.split("."))
        while path and path not in self.lines:
            path = path[:-1]
        line = self.lines.get(path)
        if line == 0:
            return f"{field}, --set"
        return f"{field}, {self.source}" + (f" line {line}" if line else "")


def load_job(
    path: Path | str, overrides: Sequence[str] = (), *, count: CountSamples | None = None
) -> Job:
    """The job in a YAML file, with `key.key=value` overrides applied over it.

    Args:
        path: The job file.
        overrides: Dotted assignments such as `train.global_batch=64`; values are YAML.
        count: Counts the samples of a job with `train.epochs`; without it, that is an error.

    Raises:
        JobError: Every problem of the file at once, each with its line and the fix.
    """
    path = Path(path)
    folder = path.resolve().parent
    return parse_job(_read(path), source=str(path), folder=folder, overrides=overrides, count=count)


def parse_job(
    text: str,
    *,
    source: str,
    folder: Path,
    overrides: Sequence[str] = (),
    count: CountSamples | None = None,
) -> Job:
    """The job in a text; `source` names it in messages, `folder` is where its paths start."""
    values, lines = _parse_yaml(text, source)
    for assignment in overrides:
        _override(values, lines, assignment)
    keep_overridden(values, lines)
    _refuse_secrets(values, lines, source)
    if "command" in values:
        raise JobError.of(
            code="J012",
            what="`command` is a program of its own, which Paceline only starts and watches",
            where=source,
            fix="give it to `paceline run`; for everything else describe model, data and train",
        )
    for field in fields(JobSpec):  # a section whose lines are all comments is an empty one
        if field.name in values and values[field.name] is None and section_in(field.type):
            values[field.name] = {}
    try:
        spec = _ADAPTER.validate_python(values)
    except ValidationError as error:
        raise JobError(*problems_in(error, values, lines, source)) from None
    job = _with_engine(Job(spec=spec, folder=folder, source=source, lines=lines))
    JobError.raise_for(_check_choices(job))
    if job.spec.train.steps:
        return job
    job = in_steps(job, count)
    JobError.raise_for(_check_steps(job))
    return job


def _with_engine(job: Job) -> Job:
    """The job with its engine's name in the catalog, and the version apart."""
    spec, where = job.spec, job.where("engine")
    engine, version = read_engine(spec.engine, version=spec.engine_version, where=where)
    return replace(job, spec=replace(spec, engine=engine, engine_version=version))


def load_script(path: Path, overrides: Sequence[str] = ()) -> Script | None:
    """The program to start that a job file names with `command`; None when it is a training job.

    Raises:
        JobError: Every problem of the file at once.
    """
    source = str(path)
    values, lines = _parse_yaml(_read(path), source)
    for assignment in overrides:
        _override(values, lines, assignment)
    _refuse_secrets(values, lines, source)
    if "command" not in values:
        return None
    if values.get("recovery", {}) is None:
        values["recovery"] = {}
    try:
        spec = _SCRIPTS.validate_python(values)
    except ValidationError as error:
        raise JobError(*problems_in(error, values, lines, source, ScriptSpec)) from None
    where = where_in(lines, source, "alerts")
    JobError.raise_for(check_alerts(spec.alerts, where, of_script=True))
    return Script(spec=spec, folder=path.resolve().parent, source=source)


def load_alerts(path: Path, *, of_script: bool) -> tuple[AlertsSpec, Where]:
    """Alert rules in a file of their own, with the keys of the job file's section `alerts`; and
    what names the place of a key in it.

    Args:
        path: The file.
        of_script: Whether they are for a program that does not use Paceline's runtime.

    Raises:
        JobError: Every problem of the file at once.
    """
    source = str(path)
    values, lines = _parse_yaml(_read(path), source)
    where = where_in(lines, source)
    JobError.raise_for([*check_secrets(values, lines, source), *check_plain(values, where)])
    try:
        spec = _ALERTS.validate_python(values)
    except ValidationError as error:
        raise JobError(*problems_in(error, values, lines, source, AlertsSpec)) from None
    JobError.raise_for(check_alerts(spec, where, of_script=of_script))
    return spec, where


def make_script(values: dict[str, Any], folder: Path, overrides: Sequence[str] = ()) -> Script:
    """The program to start, from options of the command line."""
    lines: dict[_Path, int] = {(key,): 0 for key in values}
    for assignment in overrides:
        _override(values, lines, assignment)
    _refuse_secrets(values, lines, "--script")
    try:
        spec = _SCRIPTS.validate_python(values)
    except ValidationError as error:
        raise JobError(*problems_in(error, values, lines, "--script", ScriptSpec)) from None
    where = where_in(lines, "--script", "alerts")
    JobError.raise_for(check_alerts(spec.alerts, where, of_script=True))
    return Script(spec=spec, folder=folder.resolve(), source="--script")


def dump_script(spec: ScriptSpec) -> str:
    """As YAML text that `load_script` reads back; what is not set is left out."""
    values = _what_is_set(asdict(spec))
    for name, usual in (("slurm", SlurmSpec()), ("ssh", SshSpec()), ("ray", RaySpec())):
        if getattr(spec, name) == usual:
            values.pop(name, None)
    text: str = yaml.safe_dump(values, sort_keys=False, width=100)
    return text


def _what_is_set(values: dict[str, Any]) -> dict[str, Any]:
    """Without nulls and what is empty, in every section."""
    cut = {k: _what_is_set(v) if isinstance(v, dict) else v for k, v in values.items()}
    return {key: value for key, value in cut.items() if value not in (None, {}, [], ())}


def dump_job(spec: JobSpec) -> str:
    """The job as YAML text that `load_job` reads back to an equal `JobSpec`."""
    text: str = yaml.safe_dump(asdict(spec), sort_keys=False, width=100)
    return text


def job_schema() -> dict[str, Any]:
    """JSON Schema of the job file, for editors."""
    schema = _ADAPTER.json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_ADAPTER: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)
_SCRIPTS: TypeAdapter[ScriptSpec] = TypeAdapter(ScriptSpec)
_ALERTS: TypeAdapter[AlertsSpec] = TypeAdapter(AlertsSpec)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(
            path.name, sorted(p.name for p in path.parent.glob("*.y*ml")), n=1, cutoff=0.3
        )
        fix = (
            f"did you mean {path.parent / near[0]}?"
            if near
            else "write one: paceline init job.yaml"
        )
        what = f"there is no file {path}"
        raise JobError.of(code="J001", what=what, where=str(path), fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError.of(
            code="J001",
            what=f"{path} cannot be read: {reason}",
            where=str(path),
            fix="give the path of a readable YAML file",
        ) from None


def _parse_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[_Path, int]]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[_Path, int] = {}
        repeated = list(_walk(node, (), lines))
        values = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        mark, opened = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if mark and opened and opened.line != mark.line:
            context = getattr(error, "context", None) or "what is open there"
            line += f" ({context}, begun on line {opened.line + 1})"
        raise JobError.of(
            code="J002",
            what=f"not YAML: {getattr(error, 'problem', None) or error}",
            where=f"{source}{line}",
            fix="mend the line; keys need a space after the colon, and spaces (no tabs) before",
        ) from None
    if repeated:
        raise JobError(
            *(
                Problem(
                    code="J002",
                    what=f"`{_dotted(path)}` is written twice, on line {first} and line {again}",
                    where=f"{source} line {again}",
                    fix="keep one of them",
                )
                for path, first, again in repeated
            )
        )
    if not isinstance(values, dict):
        raise JobError.of(
            code="J002",
            what=f"a job is keys and values, this is a {type(values).__name__}",
            where=source,
            fix="start from `paceline init job.yaml`",
        )
    return values, lines


def _walk(node: Any, path: _Path, lines: dict[_Path, int]) -> Iterator[tuple[_Path, int, int]]:
    """Note the line of every key, and yield the keys written twice."""
    if len(path) > _DEEPEST or len(lines) > _MOST_KEYS:
        problem = "this goes deeper, or has more keys, than a job can: an alias to itself?"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is a word", problem_mark=key.start_mark)
            inner = (*path, key.value)
            if inner in lines:
                yield inner, lines[inner], line
            lines[inner] = line
            yield from _walk(value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            yield from _walk(item, (*path, index), lines)


def _refuse_secrets(values: dict[str, Any], lines: Mapping[_Path, int], source: str) -> None:
    where = where_in(lines, source, "alerts")
    in_alerts = check_plain(values.get("alerts"), where)
    JobError.raise_for([*check_secrets(values, lines, source), *in_alerts])


def where_in(lines: Mapping[_Path, int], source: str, *before: str) -> Where:
    """What names the place of a key below `before`: `alerts.rules[0].to, job.yaml line 7`."""

    def where(path: _Path) -> str:
        whole = (*before, *path)
        line = next(
            (lines[whole[:end]] for end in range(len(whole), 0, -1) if whole[:end] in lines), None
        )
        place = "--set" if line == 0 else source if line is None else f"{source} line {line}"
        return f"{_dotted(whole) or 'the whole file'}, {place}"

    return where


def _override(values: dict[str, Any], lines: dict[_Path, int], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise JobError.of(
            code="J003",
            what=f"{assignment!r} is not an override",
            where="--set",
            fix="write it like --set train.global_batch=64",
        )
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        value = text
    inner: dict[str, Any] = values
    for name in keys[:-1]:
        if not isinstance(inner.get(name), dict):
            inner[name] = {}
        inner = inner[name]
    inner[keys[-1]] = value
    for known in [path for path in lines if path[: len(keys)] == keys]:
        del lines[known]
    lines[keys] = 0
    # A section that only --set has is of --set, too.
    for end in range(1, len(keys)):
        lines.setdefault(keys[:end], 0)


def _dotted(path: _Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def problems_in(
    error: ValidationError,
    values: dict[str, Any],
    lines: Mapping[_Path, int],
    source: str,
    root: Any = JobSpec,
) -> list[Problem]:
    """Pydantic's findings in the reader's words, one for each field.

    Args:
        error: What it found.
        values: What it was given.
        lines: Of each key, as far as they are known.
        source: Names the file.
        root: The dataclass that it was read as, for the known keys and their help.
    """
    found: dict[_Path, Problem] = {}
    where_is = where_in(lines, source)
    for detail in error.errors(include_url=False):
        path, field_path = _file_path(tuple(detail["loc"]), values)
        problem = _problem(detail, path, where_is(path), root)
        if path in found and field_path:  # the other side of a union: keep the more telling one
            continue
        found[path] = problem
    return sorted(found.values(), key=lambda p: _line_of(p.where))


def _line_of(where: str) -> int:
    tail = where.rpartition(" line ")[2]
    return int(tail) if tail.isdigit() else 0


def _file_path(loc: tuple[Any, ...], values: Any) -> tuple[_Path, bool]:
    """The part of pydantic's location that is in the file, without its names of union members."""
    path: list[str | int] = []
    here: Any = values
    for index, part in enumerate(loc):
        if isinstance(here, dict) and isinstance(part, str):
            known = part in here
            if not known and index < len(loc) - 1:
                return tuple(path), True
            path.append(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            path.append(part)
            here = here[part] if part < len(here) else None
        else:
            return tuple(path), True
    return tuple(path), False


_REMOVED = {
    ("recovery.state", "shadow"): "choose memory or checkpoint, or auto for what the plan expects "
    "most of; with layout.sharding hybrid each shard has a live copy, and a failure costs no step",
}
"""Field and value of an older version -> what to write instead."""


def _problem(detail: Any, path: _Path, where: str, root: Any) -> Problem:
    kind, value = detail["type"], detail["input"]
    name = str(path[-1]) if path else ""
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key(name, path[:-1], where, root)
    if kind in ("missing", "missing_argument"):
        return Problem(
            code="J005",
            what=f"`{_dotted(path)}` is missing",
            where=where,
            fix=f"add it: {_help_of(path, root) or 'it has no default'}",
        )
    message = detail["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message[:1].isupper() else message
    if kind in ("dataclass_type", "dataclass_exact_type", "dict_type"):
        message = "this is a section with keys of its own"
    if isinstance(value, str) and (instead := _REMOVED.get((_dotted(path), value))):
        what = f"`{_dotted(path)}` is {value!r}, which was taken out"
        return Problem(code="J006", what=what, where=where, fix=instead)
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    return Problem(
        code="J006",
        what=f"`{_dotted(path)}` is {shown}: {message}" if path else message,
        where=where,
        fix=_wanted_at(path, root) or _help_of(path, root) or "see `paceline schema`",
    )


def _wanted_at(path: _Path, root: Any) -> str | None:
    """How to write the value at a path; of a list's item, how to write the list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    section = _section_at(path[:-1], root) if path else None
    found = [field for field in fields(section) if field.name == path[-1]] if section else []
    return wanted(found[0].type) if found else None


_WHOLE = {JobSpec: "a job", ScriptSpec: "a job", AlertsSpec: "a file of alerts"}


def _unknown_key(name: str, parent: _Path, where: str, root: Any) -> Problem:
    section = _section_at(parent, root)
    known = [field.name for field in fields(section)] if section is not None else []
    meant = did_you_mean(name, known, cutoff=0.5)
    whole = _WHOLE.get(root, "the contract")
    inside = f"section `{_dotted(parent)}`" if parent else whole
    elsewhere = [path for path in _all_fields(root, ()) if path[-1] == name]
    if elsewhere:
        fix = meant or f"it belongs under `{_dotted(elsewhere[0][:-1]) or 'the top level'}`"
    else:
        fix = meant or f"known keys are {', '.join(known)}"
    return Problem(code="J004", what=f"{inside} has no key `{name}`", where=where, fix=fix)


def _all_fields(section: Any, path: _Path) -> Iterator[_Path]:
    for field in fields(section):
        yield (*path, field.name)
        inner = section_in(field.type)
        if inner is not None:
            yield from _all_fields(inner, (*path, field.name))


def _section_at(path: _Path, root: Any) -> Any:
    section: Any = root
    is_key = False  # of a mapping, whose keys are the reader's own
    for part in path:
        if is_key or isinstance(part, int):
            is_key = False
            continue
        by_name = {field.name: field for field in fields(section)}
        if part not in by_name:
            return None
        is_key = get_origin(by_name[part].type) is dict
        section = _section_of(by_name[part].type)
        if section is None:
            return None
    return section


def _section_of(annotation: Any) -> Any:
    """The section that a field of this type holds, or that each item of its list is, or None."""
    inner = (_section_of(each) for each in get_args(annotation))
    return section_in(annotation) or next(filter(None, inner), None)


def _help_of(path: _Path, root: Any) -> str | None:
    """The text under the field, on one line."""
    section = _section_at(path[:-1], root) if path else None
    if section is None:
        return None
    info = cast(Any, section).__pydantic_fields__.get(path[-1])
    return " ".join(info.description.split()) if info is not None and info.description else None


def _check_choices(job: Job) -> Iterator[Problem]:
    """Rules between fields that need nothing but the job itself."""
    spec = job.spec
    yield from _check_sizes(job)
    yield from check_training(spec, job.where)
    yield from check_length(job)
    yield from check_evaluation(spec, job.where)
    yield from check_alerts(spec.alerts, where_in(job.lines, job.source, "alerts"))
    yield from check_metrics(spec.metrics, job.where)
    if spec.train.steps:
        yield from _check_steps(job)
    given = [way for way in MODEL_WAYS if getattr(spec.model, way) is not None]
    if len(given) != 1:
        yield Problem(
            code="J007",
            what=f"the model is said {len(given)} ways"
            + (f": {' and '.join(given)}" if given else ""),
            where=job.where("model"),
            fix=f"give exactly one of {', '.join(MODEL_WAYS)}",
        )
    if spec.model.revision is not None and spec.model.pretrained is None:
        yield Problem(
            code="J007",
            what=f"model.revision {spec.model.revision} is given without model.pretrained",
            where=job.where("model.revision"),
            fix="remove it, or name the model by model.pretrained",
        )
    # Another engine is planned for and has a program of its own.
    needs_program = spec.program is None and spec.engine == "paceline"
    yield from check_data_fields(job)
    if spec.model.factory is not None and needs_program:
        yield Problem(
            code="J007",
            what=f"the built-in trainer does not know how to train {spec.model.factory}",
            where=job.where("model.factory"),
            fix="add program: your_module:train (docs/guides/own-code.md), or use model.decoder",
        )
    decoder = spec.model.decoder
    if spec.program is None and decoder is not None and decoder.vocab < 256:
        yield Problem(
            code="J007",
            what=f"model.decoder.vocab is {decoder.vocab}, and the built-in trainer reads bytes, "
            "which have 256 values",
            where=job.where("model.decoder.vocab"),
            fix="leave it out, or set it to 256 or more",
        )


_MOST_SAMPLES, _MOST_RANKS, _MOST_PARAMETERS = 10_000_000, 1_000_000, 10**15
_MOST_TOKENS, _MOST_STEPS = 10**9, 10**12
"""Beyond these a number has surely a digit too many: the largest published batch is some 60 million
tokens, the largest cluster some 200,000 accelerators, the largest model some 10^13 parameters, the
longest sequence some 10^7 tokens."""


def _check_sizes(job: Job) -> Iterator[Problem]:
    """Numbers that no cluster has and no search would come to the end of."""
    train, cluster, size = job.spec.train, job.spec.cluster, job.spec.model.size
    if train.global_batch > _MOST_SAMPLES:
        yield _too_many(job, "train.global_batch", train.global_batch, _MOST_SAMPLES, "samples")
    if cluster.nodes > _MOST_RANKS:
        yield _too_many(job, "cluster.nodes", cluster.nodes, _MOST_RANKS, "ranks")
    elif cluster.per_node != "auto" and cluster.nodes * cluster.per_node > _MOST_RANKS:
        ranks = cluster.nodes * cluster.per_node
        yield _too_many(job, "cluster.per_node", ranks, _MOST_RANKS, "ranks on all nodes")
    if size is not None and size > _MOST_PARAMETERS:
        yield _too_many(job, "model.size", size, _MOST_PARAMETERS, "parameters")
    if job.spec.data.seq_len > _MOST_TOKENS:
        yield _too_many(
            job, "data.seq_len", job.spec.data.seq_len, _MOST_TOKENS, "tokens in a sequence"
        )


def _check_steps(job: Job) -> Iterator[Problem]:
    """The number of steps, once it is known, and the phases of the run."""
    steps = job.spec.train.steps
    if steps > _MOST_STEPS:
        field = "steps" if job.length is None else "epochs" if job.length.epochs else "tokens"
        yield _too_many(job, f"train.{field}", steps, _MOST_STEPS, "steps")
    yield from check_phases(job.spec, job.where)


def _too_many(job: Job, field: str, number: int, most: int, unit: str) -> Problem:
    return Problem(
        code="J010",
        what=f"{field} makes {number:.6g} {unit}, and {most:,} are the most that are planned for",
        where=job.where(field),
        fix=f"set {field} so that there are {most:,} {unit} at most",
    )
