"""Small configurations: environment files, TF_CONFIG, MLX's and MPI's hostfiles, Dockerfiles,
compose files."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.variables import Variable, check_variables
from paceline.check.lint.context import Context

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$")


def is_environment(text: str) -> bool:
    """Whether every line that says something is `NAME=value`."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    return bool(lines) and all(_ASSIGNMENT.match(line) for line in lines)


def read_environment(path: str, text: str) -> list[Variable]:
    """The variables of an environment file such as `.deepspeed_env` or `nccl.conf`."""
    found_ones = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        match = _ASSIGNMENT.match(line)
        if match is not None:
            value = match[2].strip("\"'")
            found_ones.append(
                Variable(name=match[1], value=value, path=path, line=number, column=1)
            )
    return found_ones


def check_environment(path: str, text: str, context: Context) -> Iterator[Finding]:
    """The variables, and a TF_CONFIG among them."""
    variables = read_environment(path, text)
    yield from check_variables(variables, context)


def is_dockerfile(text: str) -> bool:
    """Whether it is a Dockerfile: its first instruction is FROM or ARG."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return re.match(r"(?i)(FROM\s+\S+|ARG\s+\w+)", first) is not None and (
        re.search(r"(?im)^\s*FROM\s+\S+", text) is not None
    )


def check_dockerfile(path: str, text: str, context: Context) -> Iterator[Finding]:
    """ENV lines, and what CMD and ENTRYPOINT start."""
    variables: list[Variable] = []
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        start, line = number + 1, lines[number].strip()
        pieces = [(start, line)]
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = lines[number].strip()
            pieces.append((number + 1, line))
        number += 1
        if not re.match(r"(?i)ENV\s", pieces[0][1]):
            continue
        pieces[0] = (start, pieces[0][1][3:].strip())
        for place, piece in pieces:
            body = piece.removesuffix("\\").strip()
            pairs = re.findall(r"([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)", body)
            if not pairs and (old := re.match(r"([A-Za-z_]\w*)\s+(.+)", body)):
                pairs = [(old[1], old[2])]
            variables += [
                Variable(name=name, value=value.strip("\"'"), path=path, line=place)
                for name, value in pairs
            ]
    yield from check_variables(variables, context)
