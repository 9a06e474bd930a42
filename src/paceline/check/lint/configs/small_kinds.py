"""Small configurations that set variables: environment files and Dockerfiles."""

import re

from paceline.check.lint.configs.variables import Variable

_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*")


def is_environment(text: str) -> bool:
    """Whether every line that says something is `NAME=value`."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(#|$)", line)]
    return bool(lines) and all(map(_ASSIGNMENT.fullmatch, lines))


def environment_variables(text: str) -> list[Variable]:
    """The variables of an environment file such as `.deepspeed_env` or `nccl.conf`."""
    return [
        Variable(name=match[1], value=match[2].strip("\"'"), line=number, column=1)
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := _ASSIGNMENT.fullmatch(line)) is not None
    ]


def is_dockerfile(text: str) -> bool:
    """Whether it is a Dockerfile: its first instruction is FROM or ARG."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return re.match(r"(?i)(FROM\s+\S+|ARG\s+\w+)", first) is not None and (
        re.search(r"(?im)^\s*FROM\s+\S+", text) is not None
    )


def dockerfile_variables(text: str) -> list[Variable]:
    """The variables of ENV lines, which a `\\` at the end continues."""
    found: list[Variable] = []
    is_env = goes_on = False
    for number, line in enumerate(text.split("\n"), start=1):
        body = line.strip()
        if not goes_on:
            start = re.match(r"(?i)ENV\s", body)
            is_env, body = start is not None, body[4:].strip() if start else body
        goes_on, body = body.endswith("\\"), body.removesuffix("\\").strip()
        if is_env:
            pairs = re.findall(r"([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)", body)
            old = re.match(r"([A-Za-z_]\w*)\s+(.+)", body)  # ENV NAME value
            for name, value in pairs or ([(old[1], old[2])] if old else []):
                found.append(Variable(name=name, value=value.strip("\"'"), line=number))
    return found
