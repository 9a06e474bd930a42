"""What a command line starts: the launcher with its options, the script with its arguments."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest

from paceline.catalog.load import read_shipped
from paceline.check.lint.configs.shell import Command, Script, Word
from paceline.check.lint.words import words_by_section, words_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of training processes, as a command line says it."""

    path: str
    program: str
    """`torchrun`, `accelerate`, `deepspeed`, `mlx`, `horovod`, `python` or `ray`."""

    line: int
    """Line of the first word of the command, wrappers such as srun included."""

    words: tuple[Word, ...]
    """All words, wrappers first."""

    options: Mapping[str, Word]
    """The launcher's own options, dashes as underscores -> the value's word."""

    target: Word | None = None
    arguments: tuple[Word, ...] = ()
    wrappers: Mapping[str, tuple[Word, ...]] = field(default_factory=dict)
    """`srun`, `mpirun`, `docker`, `nohup`, ... -> the words from it to the next one."""

    is_told: bool = False
    """Whether an operator of Kubernetes tells its launcher of the nodes (PET_NNODES)."""

    def option(self, *names: str) -> Word | None:
        """The value of the first of these options that is given."""
        return next((self.options[name] for name in names if name in self.options), None)

    def argument(self, *names: str) -> Word | None:
        """The value of an argument of the script; flags have their own word as value."""
        return _value(self.arguments, names, has_plain=True)

    def wrapper(self, name: str, *options: str) -> Word | None:
        """The value of an option of a wrapper: `wrapper("srun", "ntasks", "n")`."""
        return _value(self.wrappers.get(name, ()), options)


def _value(words: Sequence[Word], names: Sequence[str], *, has_plain: bool = False) -> Word | None:
    """The value of the first option of one of these names, dashes as underscores.

    Args:
        has_plain: Whether `a.b=c` without dashes is one, as Hydra's are.
    """
    for word, after in zip_longest(words, words[1:]):
        is_option = word.text.startswith("-")
        name, sign, value = word.text.lstrip("-").partition("=")
        short = re.fullmatch(r"-([A-Za-z])(\d+)", word.text)
        if short is not None and short[1] in names:
            return replace(word, text=short[2])
        if name.replace("-", "_").split(".")[-1] not in names or not (
            is_option or (sign and has_plain)
        ):
            continue
        if sign:
            return replace(word, text=value)
        return after if after is not None and not after.text.startswith("--") else word
    return None


def whole(text: str) -> int | None:
    """`8` of "8"; None of a range, a variable, "auto" or "gpu"."""
    return int(text) if re.fullmatch(r"\d{1,9}", text.strip()) else None


WRAPPERS = words_of("launch", "wrappers")
_LAUNCHERS: Mapping[str, str] = read_shipped("software.toml")["launch"]["launchers"]
_MODULES: Mapping[str, str] = read_shipped("software.toml")["launch"]["modules"]
_FLAGS = words_by_section("launch", "flags")
_ALIASES = {"nproc": "nproc_per_node", "nnode": "nnodes"}


_PYTHON = re.compile(r"(.*/)?python[\d.]*|\$\{?PYTHON\w*(:-[^}]*)?\}?|\$\{?python\}?")


def file_name(path: str) -> str:
    """The last part of a path as a launch line spells it."""
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def launches_in(script: Script) -> list[Launch]:
    """Every start of training processes in a shell script."""
    found = (read_launch(script.path, command) for command in script.commands)
    return [launch for launch in found if launch is not None]


def read_launch(path: str, command: Command, *, is_told: bool = False) -> Launch | None:
    """The launch that one command is; None when it starts no training that is known."""
    words = (*command.outer, *command.words)
    start = _start(words, len(command.outer))
    if start is None:
        return None
    program, options_at = start
    options, target, arguments = _read_options(program, words[options_at:])
    if program == "python" and target is None:
        return None
    return Launch(
        path=path,
        program=program,
        line=min(words[0].line, command.line),
        words=words,
        options=options,
        target=target,
        arguments=arguments,
        wrappers=_wrappers(words[: options_at - 1]),
        is_told=is_told,
    )


def _start(words: Sequence[Word], from_index: int) -> tuple[str, int] | None:
    """The launcher's kind, and the index of the word after its name."""
    if not words:
        return None
    head = words[from_index if from_index < len(words) else 0].text
    known = {*WRAPPERS, *_LAUNCHERS, "accelerate", "ray"}
    if file_name(head) not in known and not _PYTHON.fullmatch(head) and not head.startswith("$"):
        return None
    for index, word in enumerate(words[from_index:], start=from_index):
        text = file_name(word.text)
        after = [one.text for one in words[index + 1 : index + 4]]
        if text in _LAUNCHERS:
            return _LAUNCHERS[text], index + 1
        if text == "accelerate" and after[:1] == ["launch"]:
            return "accelerate", index + 2
        if text == "ray" and after[:2] == ["job", "submit"]:
            return "ray", index + 3
        if _PYTHON.fullmatch(word.text):
            for skip, (option, module) in enumerate(pairwise(after)):
                if option == "-m" and module in _MODULES:
                    return _MODULES[module], index + skip + 3
                if not option.startswith("-"):
                    break
            return "python", index + 1
    return None


def _read_options(
    program: str, words: Sequence[Word]
) -> tuple[dict[str, Word], Word | None, tuple[Word, ...]]:
    """The launcher's options, what it starts, and the arguments of that."""
    flags = _FLAGS.get(program, frozenset())
    options: dict[str, Word] = {}
    index = 0
    while index < len(words) and words[index].text.startswith("-") and words[index].text != "-":
        word = words[index]
        index += 1
        if word.text == "--":
            break
        name, sign, value = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        name = _ALIASES.get(name, name)
        if program == "python" and name == "c":
            return options, None, ()
        if program == "python" and name == "m":
            break
        if sign or name in flags:
            options[name] = replace(word, text=value) if sign else word
        elif index < len(words):
            options[name] = words[index]
            index += 1
    target = words[index] if index < len(words) else None
    return options, target, tuple(words[index + 1 :])


def _wrappers(words: Sequence[Word]) -> dict[str, tuple[Word, ...]]:
    """Wrapper -> the words from it to the next one."""
    found: dict[str, tuple[Word, ...]] = {}
    current: str | None = None
    for word in words:
        name = file_name(word.text)
        if name in WRAPPERS and (current is None or name not in {"time", "command"}):
            current = name.replace("mpiexec.hydra", "mpiexec")
            found[current] = ()
        elif current is not None:
            found[current] += (word,)
    return found
