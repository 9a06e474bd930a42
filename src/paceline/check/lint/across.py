"""What several files say together: launch lines, the scripts they start, and their configurations.

The nodes and processes that a launch line or a batch script says become the context of the files
it names.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.check.lint.configs import Config
from paceline.check.lint.configs.kubernetes import read_jobs
from paceline.check.lint.configs.launch_line import Launch, file_name, launches_in
from paceline.check.lint.configs.scene import job_of, started
from paceline.check.lint.configs.variables import Variable
from paceline.check.lint.context import Context, merged, version_numbers
from paceline.check.lint.facts.program import Program


@dataclass(frozen=True, slots=True)
class Start:
    """A launch line and the job it belongs to."""

    launch: Launch
    job: Context


def starts_in(configs: Sequence[Config], context: Context) -> list[Start]:
    """Every launch line of the files."""
    starts: list[Start] = []
    for config in configs:
        if config.script is not None:
            job = job_of(config.script, context)
            starts += [Start(launch, job) for launch in launches_in(config.script)]
        elif config.kind == "manifest":
            for each in read_jobs(config.path, config.documents):
                starts += [Start(launch, each.known(context)) for launch in each.launches]
    return starts


def names_file(launch: Launch, path: str) -> bool:
    """Whether a launch line names this file."""
    parts = (part for word in launch.words for part in (word.text, word.text.partition("=")[2]))
    return file_name(path) in {file_name(part) for part in parts if part}


def context_for(
    path: str, context: Context, starts: Sequence[Start], configs: Sequence[Config]
) -> Context:
    """The context of a file: what the launch lines that name it know, where they agree, and the
    packages that requirements files above it pin."""
    context = merged(context, Context(versions=_pinned(path, configs)))
    lines = (one for one in starts if one.launch.path != path and names_file(one.launch, path))
    said = [_said(one, path) for one in lines]
    for config in (one.document for one in configs if one.kind == "accelerate"):
        named = config.text("deepspeed_config", "deepspeed_config_file") or ""
        if file_name(named) == file_name(path):
            nodes, world = config.number("num_machines") or 1, config.number("num_processes")
            devices = world // nodes if world else None
            said.append(Context(nodes=nodes, world_size=world, devices=devices))
    return merged(context, said[0]) if said and all(one == said[0] for one in said) else context


_NAMED = re.compile(
    r"(?m)^[\s\"'-]*(?:py)?(torch|deepspeed)(?![\w.-])\s*(?:(==?|<=|~=|<)\s*(\d+(?:\.\d+)*))?"
)
"""A package in requirements.txt or conda's environment.yml, and what bounds it."""

_INSTALLED = re.compile(r"\b(?:py)?torch(?:==?|-|:)(\d+\.\d+(?:\.\d+)*)")
"""torch in a Dockerfile: `pip install torch==1.8`, a wheel's name, `FROM pytorch/pytorch:1.13`."""


def _pinned(path: str, configs: Sequence[Config]) -> dict[str, str]:
    """Package -> the highest version that requirements files allow, empty where one sets no bound.

    Those in the folders around a file count first, then a Dockerfile there, then all others.
    """
    around: dict[str, str] = {}
    elsewhere: dict[str, list[str]] = {}
    image = ""
    for one in sorted(configs, key=lambda config: len(config.path)):
        folder = one.path.rpartition("/")[0]
        is_around = not folder or path.startswith(f"{folder}/")
        if one.kind == "dockerfile" and is_around:
            image = (_INSTALLED.findall(one.text) or [image])[-1]
        for name, sign, version in _NAMED.findall(one.text) if one.kind == "requirements" else ():
            if sign == "<":
                numbers = [int(part) for part in re.sub(r"(\.0)+$", "", version).split(".")]
                version = ".".join(map(str, [*numbers[:-1], max(0, numbers[-1] - 1), 99]))
            if is_around:
                around[name] = version
            else:
                elsewhere.setdefault(name, []).append(version)
    known = {name: max(all_, key=version_numbers) for name, all_ in elsewhere.items() if all(all_)}
    return known | ({"torch": image} if image else {}) | around


def _said(start: Start, path: str) -> Context:
    """What a launch line says of a file; of a configuration, not what the line sets itself."""
    config = start.launch.option("config_file")
    overrides = start.launch.option("num_machines") is not None
    if overrides and config is not None and file_name(config.text) == file_name(path):
        return Context()
    how, job = started(start.launch, start.job), start.job
    return replace(how, nodes=how.nodes or job.nodes, gpus_per_node=job.gpus_per_node)


def variables_in(program: Program) -> Iterator[Variable]:
    """`os.environ["NAME"] = "text"`, setdefault, update, `|=` and putenv, where name and text are
    written out."""
    if "environ" not in program.text and "putenv" not in program.text:
        return
    for node in program.source.nodes:
        for key, value in _set_in(node):
            match key, value:
                case ast.Constant(value=str(name)), ast.Constant(value=str(text)):
                    at = node if getattr(node, "lineno", 0) == key.lineno else key
                    column = getattr(at, "col_offset", 0) + 1
                    yield Variable(name=name, value=text, line=key.lineno, column=column)


def _set_in(node: ast.AST) -> Iterator[tuple[ast.AST | None, ast.AST]]:
    """Name and value of each variable that a node sets."""
    match node:
        case ast.Assign(targets=[ast.Subscript(value=owner, slice=key), *_], value=value):
            if _names_environment(owner):
                yield key, value
        case ast.AugAssign(target=owner, op=ast.BitOr(), value=ast.Dict(keys=keys, values=values)):
            if _names_environment(owner):
                yield from zip(keys, values, strict=True)
        case ast.Call(func=ast.Attribute(attr="putenv"), args=[key, value]):
            yield key, value
        case ast.Call(func=ast.Attribute(attr="setdefault", value=owner), args=[key, value]):
            if _names_environment(owner):
                yield key, value
        case ast.Call(func=ast.Attribute(attr="update", value=owner), args=args, keywords=named):
            if _names_environment(owner):
                for given in args:
                    if isinstance(given, ast.Dict):
                        yield from zip(given.keys, given.values, strict=True)
                for each in named:
                    name = ast.Constant(each.arg, lineno=each.lineno, col_offset=each.col_offset)
                    yield name, each.value


def _names_environment(node: ast.AST) -> bool:
    """`os.environ`, or `environ` alone."""
    return getattr(node, "attr", getattr(node, "id", None)) == "environ"
