"""Do what a skill's contract asks: train, search, look, compile, run. One module for each skill.

Each has `run(request, folder) -> answer`: the request is its `Request`, paths in it start from
`folder`, and the answer is its `Answer`. Bad input is a `JobError` before anything is started; work
that fails is an answer whose status is `error`, with its reason in `message`.
"""

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paceline.contracts.skills.messages.read import answer_json, read_request
from paceline.errors import JobError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """One row of the table of skills."""

    title: str
    """What it does, for people."""

    name: str
    """Name of the module of its `run`, imported only when it is asked for; in `messages`, the
    module of its `Request` and `Answer` has the same."""

    needs: str
    """What to install for it: `pip install ...`."""

    without_work: Mapping[str, Any] = field(default_factory=dict)
    """The keys that an answer must have, of a request that starts nothing."""

    repeats: Sequence[str] = ()
    """Keys of the request that its answer must have as well."""

    @property
    def request(self) -> type[Any]:
        """What goes in."""
        return self._message("Request")

    @property
    def answer(self) -> type[Any]:
        """What comes out."""
        return self._message("Answer")

    def _message(self, kind: str) -> type[Any]:
        module = importlib.import_module(f"{__name__}.messages.{self.name}")
        found: type[Any] = getattr(module, kind)
        return found

    def refusal(self, message: str, text: str | None) -> dict[str, Any] | None:
        """What it answers to a request that is wrong, as JSON values of its schema.

        Args:
            message: Why it is wrong.
            text: The request; None where it could not be read.

        Returns:
            None where the answer must repeat a key that the request does not have as it should.
        """
        values = {"status": "error", "message": message, **self.without_work}
        try:
            asked = json.loads(text or "") if self.repeats else {}
            values |= {key: asked[key] for key in self.repeats}
            return answer_json(TypeAdapter(self.answer).validate_python(values))
        except (ValueError, TypeError, KeyError):
            return None


SKILLS: Mapping[str, Skill] = {
    "ray-distributed-trainer": Skill(
        title="train on Ray's workers, search with ASHA, or look at the cluster",
        name="ray",
        needs='"ray[default,train,tune]" torch',
        without_work={"results": {}},
    ),
    "pytorch-trainer": Skill(
        title="train a PyTorch model on one or several processes, epoch by epoch",
        name="pytorch",
        needs="torch",
        without_work={"metrics": {}, "checkpointPath": ""},
    ),
    "tensorflow-trainer": Skill(
        title="train a Keras model, on one device or mirrored, and export it",
        name="tensorflow",
        needs="tensorflow",
        without_work={"metrics": {}},
    ),
    "kubeflow-pipeline-executor": Skill(
        title="compile, run, schedule, list, get or delete a pipeline of Kubeflow",
        name="kubeflow",
        needs='"kfp>=2.17,<2.18"',
        repeats=("action",),
    ),
}
"""The contracts' own names -> the skill."""


def find_skill(name: str) -> Skill:
    """The skill of that name.

    Raises:
        JobError: `H031`, naming the nearest.
    """
    skill = SKILLS.get(name)
    if skill is None:
        raise JobError.of(
            code="H031",
            what=f"there is no contract {name!r}",
            where="paceline contract NAME",
            fix=did_you_mean(name, SKILLS, cutoff=0.5) or f"one of {', '.join(SKILLS)}",
        )
    return skill


def run_skill(name: str, text: str, *, source: str, folder: Path) -> dict[str, Any]:
    """What a skill answers to a request, as JSON values of its schema.

    Args:
        name: One of `SKILLS`.
        text: The request, one JSON object.
        folder: Where its relative paths start.

    Raises:
        JobError: The name, the text or a value is wrong, or a package is missing; nothing was
            started.
    """
    skill = find_skill(name)
    request = read_request(skill.request, text, source=source)
    return answer_json(importlib.import_module(f"{__name__}.{skill.name}").run(request, folder))


def need(package: str, install: str) -> None:
    """Nothing, when a package can be imported.

    Raises:
        JobError: `H032`, it cannot.
    """
    if importlib.util.find_spec(package) is None:
        raise JobError.of(
            code="H032",
            what=f"this contract needs {package}, which is not installed",
            where="this Python",
            fix=f"pip install {install}",
        )
