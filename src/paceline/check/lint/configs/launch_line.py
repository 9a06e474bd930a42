"""What a command line starts: the launcher with its options, the script with its arguments."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.check.lint.configs.shell import ESCAPED, Command, Script, Word
from paceline.check.lint.configs.variables import Variable
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

    environment: Mapping[str, Variable] = field(default_factory=dict)
    """What is exported above it, or stands before it."""

    on_node: bool = False
    """Whether variables in it are expanded on each node."""

    def option(self, *names: str) -> Word | None:
        """The value of the first of these options that is given."""
        return next((self.options[name] for name in names if name in self.options), None)

    def number(self, *names: str) -> int | None:
        """An option as a whole number; None when it is none, or a variable."""
        word = self.option(*names)
        return whole(word.text) if word is not None else None

    def argument(self, *names: str) -> Word | None:
        """The value of an argument of the script; flags have their own word as value."""
        for index, word in enumerate(self.arguments):
            if not word.text.startswith("-"):
                name, sign, value = word.text.partition("=")
                if sign and name.replace("-", "_").split(".")[-1] in names:  # hydra's a.b=c
                    return Word(value, word.line, word.column, word.source)
                continue
            name, sign, value = word.text.lstrip("-").partition("=")
            if name.replace("-", "_").split(".")[-1] not in names:
                continue
            if sign:
                return Word(value, word.line, word.column, word.source)
            after = self.arguments[index + 1] if index + 1 < len(self.arguments) else None
            return after if after is not None and not after.text.startswith("--") else word
        return None

    def wrapper(self, name: str, *options: str) -> Word | None:
        """The value of an option of a wrapper: `wrapper("srun", "ntasks", "n")`."""
        return _wrapper_option(self.wrappers.get(name, ()), options)

    def variable(self, name: str) -> str | None:
        """The text of an environment variable of the processes, where it is known."""
        return self.environment[name].value if name in self.environment else None


def whole(text: str) -> int | None:
    """`8` of "8"; None of a range, a variable, "auto" or "gpu"."""
    return int(text) if re.fullmatch(r"\d{1,9}", text.strip()) else None


WRAPPERS = words_of("launch", "wrappers")
_LAUNCHERS = {
    "torchrun": "torchrun",
    "deepspeed": "deepspeed",
    "mlx.launch": "mlx",
    "horovodrun": "horovod",
    "accelerate-launch": "accelerate",
    "colossalai": "torchrun",
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.elastic": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
    "mlx.launch": "mlx",
}
_FLAGS = words_by_section("launch", "flags")
_ALIASES = {"nproc": "nproc_per_node", "nnode": "nnodes"}


def _is_python(text: str) -> bool:
    return bool(
        re.search(r"(^|/)python[\d.]*$", text)
        or re.fullmatch(r"\$\{?PYTHON\w*(:-[^}]*)?\}?|\$\{?python\}?", text)
    )


def file_name(path: str) -> str:
    """The last part of a path as a launch line spells it."""
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def launches_in(script: Script) -> list[Launch]:
    """Every start of training processes in a shell script."""
    found = []
    for command in script.commands:
        if _start((*command.outer, *command.words), len(command.outer)) is None:
            continue
        environment = {
            each.name: each for each in script.variables if each.line <= command.line
        } | {each.name: each for each in command.environment}
        launch = read_launch(script.path, command, environment)
        if launch is not None:
            found.append(launch)
    return found


def read_launch(path: str, command: Command, environment: Mapping[str, Variable]) -> Launch | None:
    """The launch that one command is; None when it starts no training that is known."""
    words = (*command.outer, *command.words)
    start = _start(words, len(command.outer))
    if start is None:
        return None
    program, options_at = start
    options, target, arguments = _read_options(program, words[options_at:])
    if program in {"python"} and target is None:
        return None
    return Launch(
        path=path,
        program=program,
        line=words[0].line if words[0].line <= command.line else command.line,
        words=words,
        options=options,
        target=target,
        arguments=arguments,
        wrappers=dict(_wrappers(words[: options_at - 1])),
        environment=environment,
        on_node=command.on_node,
    )


def _start(words: Sequence[Word], from_index: int) -> tuple[str, int] | None:
    """The launcher's kind, and the index of the word after its name."""
    if not words:
        return None
    first = file_name(words[from_index].text if from_index < len(words) else words[0].text)
    head = words[from_index] if from_index < len(words) else words[0]
    known = first in WRAPPERS | set(_LAUNCHERS) | {"accelerate", "ray"} or _is_python(head.text)
    if not known and not head.text.startswith("$"):
        return None
    for index in range(from_index, len(words)):
        text = file_name(words[index].text)
        after = [word.text for word in words[index + 1 : index + 4]]
        if text in _LAUNCHERS:
            return _LAUNCHERS[text], index + 1
        if text == "accelerate" and after[:1] == ["launch"]:
            return "accelerate", index + 2
        if text == "ray" and after[:2] == ["job", "submit"]:
            return "ray", index + 3
        if _is_python(words[index].text):
            for skip, word in enumerate(after):
                if word == "-m" and skip + 1 < len(after) and after[skip + 1] in _MODULES:
                    return _MODULES[after[skip + 1]], index + skip + 3
                if not word.startswith("-"):
                    break
            return "python", index + 1
    return None


def _read_options(
    program: str, words: Sequence[Word]
) -> tuple[dict[str, Word], Word | None, tuple[Word, ...]]:
    flags = _FLAGS.get(program, frozenset())
    options: dict[str, Word] = {}
    index = 0
    while index < len(words):
        word = words[index]
        text = word.text
        if text == "--":
            index += 1
            break
        if not text.startswith("-") or text == "-":
            break
        index += 1
        name, sign, value = text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if program == "python" and name == "m":
            if index < len(words):
                return options, words[index], tuple(words[index + 1 :])
            return options, None, ()
        if program == "python" and name == "c":
            return options, None, ()
        name = _ALIASES.get(name, name)
        if sign:
            options[name] = Word(value, word.line, word.column, word.source)
        elif name in flags:
            options[name] = word
        elif index < len(words):
            options[name] = words[index]
            index += 1
    target = words[index] if index < len(words) else None
    return options, target, tuple(words[index + 1 :])


def _wrappers(words: Sequence[Word]) -> Iterator[tuple[str, tuple[Word, ...]]]:
    current: str | None = None
    kept: list[Word] = []
    for word in words:
        name = file_name(word.text)
        if name in WRAPPERS and (current is None or name not in {"time", "command"}):
            if current is not None:
                yield current, tuple(kept)
            current, kept = name.replace("mpiexec.hydra", "mpiexec"), []
        elif current is not None:
            kept.append(word)
    if current is not None:
        yield current, tuple(kept)


def _wrapper_option(words: Sequence[Word], names: Sequence[str]) -> Word | None:
    for index, word in enumerate(words):
        if not word.text.startswith("-"):
            continue
        name, sign, value = word.text.lstrip("-").partition("=")
        short = re.fullmatch(r"-([A-Za-z])(\d+)", word.text)
        if short is not None and short[1] in names:
            return Word(short[2], word.line, word.column, word.source)
        if name.replace("_", "-") not in names:
            continue
        if sign:
            return Word(value, word.line, word.column, word.source)
        return words[index + 1] if index + 1 < len(words) else word
    return None


def shown(text: str) -> str:
    """A text as the reader wrote it."""
    return text.replace(ESCAPED, "\\")
