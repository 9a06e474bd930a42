"""Write the versions of Megatron-LM that have each flag of tests/render/megatron_flags.txt.

python scripts/megatron_flags.py CHECKOUT    a clone of NVIDIA/Megatron-LM with its tags

The file names the flags; a new one is a new line. One that core_v0.16.1 lacks ends this with 1.

A flag is an `add_argument` of megatron/training/arguments.py, or a field of a class that it hands
to ArgumentGroupFactory (core_v0.16 and newer). Nothing of Megatron's is imported.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MINORS = ("12.0", "13.0", "14.0", "15.0", "16.1", "17.1", "18.2", "19.0")
NAMED = "16.1"
"""Whose flags are written."""

FLAGS = Path(__file__).parent.parent / "tests" / "render" / "megatron_flags.txt"


def main() -> None:
    """One line a flag: its name, and the first and the last version that has it."""
    checkout = sys.argv[1]
    known = {minor: flags_of(checkout, f"core_v0.{minor}") for minor in MINORS}
    lines = [
        f"# Flags of Megatron-LM core_v0.{NAMED}, with the first and last version that has each:",
        f"# scripts/megatron_flags.py, of core_v0.{', 0.'.join(MINORS)}.",
    ]
    words = [line.split()[0] for line in FLAGS.read_text().splitlines() if line[:2] == "--"]
    if lacking := sorted(set(words) - known[NAMED]):
        raise SystemExit(f"core_v0.{NAMED} has no {', '.join(lacking)}")
    for flag in sorted(set(words)):
        having = [f"0.{minor.partition('.')[0]}" for minor in MINORS if flag in known[minor]]
        lines.append(f"{flag} {having[0]} {having[-1]}")
    FLAGS.write_text("\n".join(lines) + "\n")


def flags_of(checkout: str, tag: str) -> set[str]:
    """Every flag of one version."""
    tree = ast.parse(text_of(checkout, f"{tag}:megatron/training/arguments.py"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = {
        word.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for word in call.args
        if isinstance(word, ast.Constant) and str(word.value).startswith("--")
    }
    lists = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    made = [
        (call.args[0].id, excluded_of(call, lists))
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id.endswith("Factory")
        and isinstance(call.args[0], ast.Name)
    ]
    classes: dict[str, ast.ClassDef] = {}
    for path in git(checkout, "ls-tree", "-r", "--name-only", tag, "megatron").split():
        if made and "config" in path and path.endswith(".py"):
            for node in ast.walk(ast.parse(text_of(checkout, f"{tag}:{path}"))):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, node)
    return found | {
        flag for name, excluded in made for flag in field_flags(name, classes, excluded)
    }


def excluded_of(call: ast.Call, lists: dict[str, ast.expr]) -> set[str]:
    """Fields of which a call makes no flags."""
    found = [word.value for word in call.keywords if word.arg == "exclude"]
    values = [lists[each.id] if isinstance(each, ast.Name) else each for each in found]
    return {name for value in values for name in ast.literal_eval(value)}


def field_flags(name: str, classes: dict[str, ast.ClassDef], excluded: set[str]) -> Iterator[str]:
    """Flags of a class's fields, and of those that it inherits."""
    own = classes.get(name)
    for base in own.bases if own is not None else ():
        yield from field_flags(ast.unparse(base), classes, excluded)
    for node in own.body if own is not None else ():
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id in excluded:
            continue
        named = [
            ast.literal_eval(value)
            for each in ast.walk(node)
            if isinstance(each, ast.Dict)
            for key, value in zip(each.keys, each.values, strict=True)
            if isinstance(key, ast.Constant) and key.value == "arg_names"
        ]
        dashed = node.target.id.replace("_", "-")
        is_on = isinstance(node.value, ast.Constant) and node.value.value is True
        usual = [f"--no-{dashed}", f"--disable-{dashed}"] if is_on else [f"--{dashed}"]
        yield from named[0] if named else usual


def text_of(checkout: str, name: str) -> str:
    """A file of a version."""
    return git(checkout, "show", name)


def git(checkout: str, *words: str) -> str:
    """What git prints."""
    done = subprocess.run(["git", "-C", checkout, *words], capture_output=True, check=True)
    return done.stdout.decode()


if __name__ == "__main__":
    main()
