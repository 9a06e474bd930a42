"""The prompts of `evaluate.prompts`: a file of rows or of lines."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import JobError, Problem
from paceline.job.job import Job

_MOST = 1000
"""Prompts of a file; more are surely data. A guess."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is to continue: a text, or a conversation that it answers."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None

    @property
    def shown(self) -> str:
        """As a person reads it."""
        if self.messages is None:
            return self.text or ""
        return "\n".join(f"{each['role']}: {each['content']}" for each in self.messages)


def read_prompts(job: Job) -> tuple[Prompt, ...]:
    """The prompts in the job's file; none where it names no file.

    Raises:
        JobError: `J014`, the file or some of its lines cannot be read, with their numbers.
    """
    named = job.spec.evaluate.prompts
    if named is None:
        return ()
    path = job.folder / os.path.expanduser(named)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(_problem(job, f"{path} cannot be read: {reason}", str(path))) from None
    problems: list[Problem] = []
    prompts = list(_prompts(job, path, lines, problems))
    JobError.raise_for(problems[:10])
    if not 0 < len(prompts) <= _MOST:
        what = f"{path} has {len(prompts)} prompts, and 1 to {_MOST} are taken"
        raise JobError(_problem(job, what, str(path)))
    return tuple(prompts)


def _prompts(job: Job, path: Path, lines: list[str], problems: list[Problem]) -> Iterator[Prompt]:
    is_rows = path.suffix in (".jsonl", ".ndjson")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not is_rows:
            yield Prompt(text=line)
            continue
        try:
            yield _prompt(json.loads(line))
        except ValueError as error:
            what = f"a prompt of evaluate.prompts cannot be read: {error}"
            problems.append(_problem(job, what, f"{path} line {number}"))


def _prompt(row: Any) -> Prompt:
    """
    Raises:
        ValueError: The row is no prompt.
    """
    if not isinstance(row, dict) or len({"prompt", "messages"} & set(row)) != 1:
        raise ValueError("the row has neither `prompt` nor `messages`, or both")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError("`prompt` is no text")
        return Prompt(text=row["prompt"])
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("`messages` is no list of messages")
    for number, turn in enumerate(turns, 1):
        keys = ("role", "content")
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in keys):
            raise ValueError(f"message {number} has no role and content")
    if turns[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's, and the model is to write it")
    return Prompt(messages=[{key: turn[key] for key in ("role", "content")} for turn in turns])


def _problem(job: Job, what: str, where: str) -> Problem:
    return Problem(
        code="J014",
        what=what,
        where=f"{where} ({job.where('evaluate.prompts')})",
        fix='give lines such as {"prompt": "Once upon a time"} or {"messages": [{"role": "user", '
        '"content": "Who are you?"}]} in a .jsonl file, or a text file with a prompt a line',
    )
