"""Scripts that are not rewritten at all: what they are, and what to do instead."""

import ast
import json
from collections.abc import Iterator, Mapping

from paceline.adapt.result import Left, Refusal
from paceline.adapt.roles import Roles
from paceline.adapt.script import Script
from paceline.catalog.load import read_shipped
from paceline.check.lint.facts.names import canonical

_TABLES = read_shipped("software.toml")["adapt"]
_OWN_DISTRIBUTION: Mapping[str, list[str]] = _TABLES["distributed"]
_OWNERS: Mapping[str, list[str]] = _TABLES["owners"]
"""What is imported -> what the script is, and how it is started on several devices."""

_OTHER_FRAMEWORKS = ("tensorflow", "keras", "jax", "mlx", "flax")


def read(source: str) -> Script:
    """The script's facts.

    Raises:
        Refusal: It is no Python, or empty.
    """
    if not source.strip():
        raise Refusal(Left(1, "the file is empty", "give a training script"))
    if _is_notebook(source):
        raise Refusal(
            Left(
                1,
                "this is a notebook",
                "export it first: jupyter nbconvert --to script NOTEBOOK, and "
                "take out what only a notebook has",
            )
        )
    try:
        script = Script(source)
    except SyntaxError as error:
        raise Refusal(
            Left(error.lineno or 1, f"no valid Python: {error.msg}", "correct this line first")
        ) from None
    except (RecursionError, ValueError, MemoryError) as error:
        raise Refusal(
            Left(1, f"cannot be read as Python: {error}", "give a script of ordinary size")
        ) from None
    return script


def _is_notebook(source: str) -> bool:
    if not source.lstrip().startswith("{"):
        return False
    try:
        data = json.loads(source)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "cells" in data


def check_is_single_device(script: Script, roles: Roles) -> None:
    """It has one training loop of plain PyTorch, with one model and one optimizer.

    Raises:
        Refusal: It is distributed already, or has nothing that could be.
    """
    found = list(_distributed(script))
    if found:
        raise Refusal(*found)
    if not script.backwards:
        frameworks = [
            n for n in _OTHER_FRAMEWORKS if n in {v.split(".")[0] for v in script.imports.values()}
        ]
        if frameworks:
            raise Refusal(
                Left(
                    1,
                    f"no loop of plain PyTorch, and it imports {frameworks[0]}",
                    "only plain PyTorch scripts are adapted",
                )
            )
        raise Refusal(
            Left(
                1,
                "no training loop: nothing calls .backward()",
                "give the script that holds the loop; a library module needs no change",
            )
        )
    if not roles.optimizers:
        raise Refusal(
            Left(
                script.backwards[0].lineno,
                "no optimizer of torch.optim is made here",
                "give the script that makes the model and the optimizer",
            )
        )
    _check_one_model(script, roles)
    if not roles.train_loaders and any(roles.makes_loader(call) for call in script.calls):
        loader = next(call for call in script.calls if roles.makes_loader(call))
        raise Refusal(
            Left(
                loader.lineno,
                "which DataLoader the training loop reads cannot be followed",
                "loaders in a dict or a list, or one loop for training and validation by phase: "
                "give the training loader a name, and a loop of its own",
            )
        )
    if not roles.train_loaders:
        where = roles.other_loops[0].lineno if roles.other_loops else script.backwards[0].lineno
        raise Refusal(
            Left(
                where,
                "the loop does not read its samples from a torch DataLoader",
                "every rank would train on the same samples: put them into a Dataset and a "
                "DataLoader "
                "that this script makes",
            )
        )


def _distributed(script: Script) -> list[Left]:
    """What the script uses that distributes it, each once. An import that nothing uses is none."""
    found: dict[str, Left] = {}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.ImportFrom) and any(each.name == "*" for each in node.names):
            names = [f"{node.module}.*"]
        elif isinstance(node, ast.Name | ast.Attribute):
            names = [canonical(script.qualified(node) or "")]
        else:
            continue
        for what, why in (row for name in names for row in _rows_of(name)):
            if what not in found or node.lineno < found[what].line:
                found[what] = Left(node.lineno, what, why)
    return sorted(found.values(), key=lambda each: each.line)


def _rows_of(name: str) -> Iterator[list[str]]:
    for prefix, row in _OWN_DISTRIBUTION.items():
        if name == prefix or name.startswith(f"{prefix}."):
            yield row
    if name in _OWNERS:
        yield _OWNERS[name]


def _check_one_model(script: Script, roles: Roles) -> None:
    places: dict[tuple[str, str], int] = {}
    for optimizer in roles.optimizers:
        names = roles.model_names_in(optimizer)
        if not names:
            raise Refusal(
                Left(
                    optimizer.lineno,
                    "which model this optimizer trains cannot be read",
                    "give it model.parameters() of a model made in this script",
                )
            )
        for name in names:
            for root in _roots(script, name):
                places.setdefault(root, optimizer.lineno)
    if len(places) > 1:
        raise Refusal(
            *(
                Left(
                    line,
                    f"{name} is one of {len(places)} models that are trained",
                    "how their steps alternate is yours to say: wrap each, with its own optimizer, "
                    "by hand; or put them into one nn.Module with one forward()",
                )
                for (_, name), line in places.items()
            )
        )


def _roots(script: Script, name: ast.expr) -> set[tuple[str, str]]:
    """The places where the named model is kept first: a parameter is its argument."""
    place = script.place(name)
    if place is None:
        return set()
    bound = script.bindings.get(place, [])
    given = [b.value for b in bound if isinstance(b.stmt, ast.Call)]
    found: set[tuple[str, str]] = set()
    for value in given:
        if isinstance(value, (ast.Name, ast.Attribute)) and script.place(value) != place:
            found |= _roots(script, value)
    if found:
        return found
    for each in bound:  # `self.model = model`
        if isinstance(each.value, ast.Name) and script.place(each.value) != place:
            return _roots(script, each.value)
    return {place}
