"""Configurations and launch lines: recognised by what they say, read as facts, judged."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from paceline.check.finding import Finding
from paceline.check.lint.configs.accelerate import check_accelerate, is_accelerate
from paceline.check.lint.configs.deepspeed import check_deepspeed, is_deepspeed
from paceline.check.lint.configs.degrees import check_parallel, is_parallel
from paceline.check.lint.configs.kubernetes import check_manifest, is_manifest
from paceline.check.lint.configs.marked import (
    Bomb,
    Marked,
    NoParser,
    read_json,
    read_yaml,
)
from paceline.check.lint.configs.planned import (
    Planned,
    check_job,
    check_plan,
    check_planned,
    is_job,
    is_plan,
)
from paceline.check.lint.configs.say import Fault, findings
from paceline.check.lint.configs.scene import check_script
from paceline.check.lint.configs.shell import Script, read_shell
from paceline.check.lint.configs.variables import (
    check_variables,
    dockerfile_variables,
    environment_variables,
    is_dockerfile,
    is_environment,
)
from paceline.check.lint.context import Context
from paceline.check.lint.facts.source import Unreadable

__all__ = ["Config", "Planned", "check_config", "check_planned", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A file that is a configuration of a known kind."""

    path: str
    kind: str
    """`accelerate`, `deepspeed`, `shell`, `manifest` ..."""

    text: str
    documents: tuple[Marked, ...] = ()
    script: Script | None = None

    @property
    def document(self) -> Marked:
        return self.documents[0]


_TEMPLATE = re.compile(r"\{\{|\{%|<%")
"""Helm, Jinja and the like: what the file becomes is not known here."""

_MEANT = re.compile(
    r"distributed_type|fsdp_config|deepspeed_config|zero_optimization|kubeflow\.org|ray\.io"
    r"|train_micro_batch_size_per_gpu|tensor_parallel_degree|jobset\.x-k8s\.io"
    r"|\A(?=.*^model:)(?=.*^(?:train|cluster):)|\A(?=.*^apiVersion:)(?=.*^kind:)"
    r'|\A(?=.*"decisions":)(?=.*"rejected":)',
    re.M | re.S,
)
"""Words that only a training configuration, a job file, a plan or an object of Kubernetes has: such
a file is worth saying that it is broken."""


def read_config(path: str, text: str) -> Config | None:
    """The configuration that a text is; None when it is of no known kind.

    Raises:
        Unreadable: It is meant as a training configuration, and its language's parser fails.
    """
    name = path.rsplit("/", 1)[-1].lower()
    ending = name.rpartition(".")[2] if "." in name else ""
    try:
        if ending in {"yaml", "yml"}:
            return None if _TEMPLATE.search(text) else _of_yaml(path, text)
        if ending == "json":
            return _of_json(path, text)
        return _of_text(path, name, ending, text)
    except (NoParser, Bomb):
        raise
    except Unreadable:
        if _MEANT.search(text):
            raise
        return None


def _of_yaml(path: str, text: str) -> Config | None:
    documents = tuple(read_yaml(text))
    if not documents:
        return None
    first = documents[0]
    kinds = {
        "manifest": is_manifest(documents),
        "accelerate": is_accelerate(first),
        "job": is_job(first),
        "parallel": is_parallel(first),
        "requirements": re.search(r"(^|/)environment[\w.-]*\.ya?ml$", path) is not None,
    }
    return _first(path, text, documents, kinds)


def _of_json(path: str, text: str) -> Config | None:
    value = read_json(text)
    kinds = {
        "deepspeed": isinstance(value.value, dict) and is_deepspeed(value),
        "accelerate": is_accelerate(value),
        "manifest": is_manifest([value]),
        "plan": is_plan(value),
    }
    return _first(path, text, (value,), kinds)


def _first(
    path: str, text: str, documents: tuple[Marked, ...], kinds: Mapping[str, bool]
) -> Config | None:
    kind = next((name for name, matches in kinds.items() if matches), None)
    return Config(path=path, kind=kind, text=text, documents=documents) if kind else None


def _of_text(path: str, name: str, ending: str, text: str) -> Config | None:
    """Files without a telling ending."""
    if ending in {"sh", "bash", "sbatch", "slurm", "job", "zsh"} or re.search(
        r"\A#!.*\b(ba|z|da|k)?sh\b|^#SBATCH\s", text, re.M
    ):
        return Config(path=path, kind="shell", text=text, script=read_shell(path, text))
    if text.lstrip()[:1] in {"{", "["} and ending in {"", "config", "cfg"}:
        try:
            return _of_json(path, text)
        except Unreadable:
            return None
    may_set = ending in {"", "env", "conf", "deepspeed_env"} or name.startswith(".env")
    may_build = "docker" in name or ending in {"", "containerfile"}
    kinds = {
        "dockerfile": may_build and is_dockerfile(text),
        "requirements": re.fullmatch(r"[\w.-]*requirements[\w.-]*\.txt", name) is not None,
        "environment": may_set and is_environment(text),
    }
    return _first(path, text, (), kinds)


_CHECKS: dict[str, Callable[[Config, Context], Iterator[Fault]]] = {
    "shell": lambda one, context: check_script(one.script, context) if one.script else iter(()),
    "manifest": lambda one, context: check_manifest(one.path, one.documents, context),
    "accelerate": lambda one, context: check_accelerate(one.document, context),
    "parallel": lambda one, context: check_parallel(one.document, context),
    "plan": lambda one, context: check_plan(one.document, one.text),
    "job": lambda one, context: check_job(one.path, one.text),
    "deepspeed": lambda one, context: check_deepspeed(one.document, context),
    "dockerfile": lambda one, context: check_variables(dockerfile_variables(one.text), context),
    "environment": lambda one, context: check_variables(environment_variables(one.text), context),
    "requirements": lambda one, context: iter(()),
}
"""Kind -> what is wrong in a file of it."""


def check_config(config: Config, context: Context) -> Iterator[Finding]:
    """What one configuration shows by itself and in its context."""
    return findings(config.path, _CHECKS[config.kind](config, context))
