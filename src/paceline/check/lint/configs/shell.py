"""A shell script as facts: its commands with the words they get, its variables, its #SBATCH lines.

Parsed by tree-sitter's grammar for bash, which reads on past what it does not understand. Words
know their line, also through continuations, arrays, variables that hold whole commands, and the
text given to `bash -c`. Nothing is run: a variable stands for the last text given to it above.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import Any

from paceline.check.lint.configs.marked import NoParser
from paceline.check.lint.configs.variables import Variable
from paceline.job.packages import install_line


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, its quotes taken off; `$NAME` stands as written where unknown."""

    text: str
    line: int
    column: int = 1
    source: str = ""
    """As it stands in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A simple command and where it stands."""

    words: tuple[Word, ...]
    environment: tuple[Variable, ...] = ()
    """`NAME=value` before the command."""

    line: int
    outer: tuple[Word, ...] = ()
    """The words that hand it to another shell: `srun -n 2 bash -c`, `ssh node`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a shell script says."""

    path: str
    commands: tuple[Command, ...]
    variables: tuple[Variable, ...]
    """Assignments and exports, in their order."""

    sbatch: Mapping[str, str] = field(default_factory=dict)
    """Long name of an option of the #SBATCH lines -> its value."""

    @property
    def is_batch(self) -> bool:
        return bool(self.sbatch)


_SHORT = {
    "-N": "nodes",
    "-n": "ntasks",
    "-c": "cpus-per-task",
    "-G": "gpus",
    "-C": "constraint",
}


def read_sbatch(text: str) -> dict[str, str]:
    """The options of the #SBATCH lines, which end at the first command."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line[7:], comments=True)
            except ValueError:
                words = line[7:].split()
            for word, after in zip_longest(words, words[1:], fillvalue="-"):
                name, sign, value = word.removeprefix("--").partition("=")
                if not word.startswith("--"):
                    name, sign = _SHORT.get(word[:2], ""), word[2:]
                    value = sign.lstrip("=")
                if word.startswith("-") and name:
                    found[name] = value if sign else after if not after.startswith("-") else ""
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


@cache
def _parser() -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ModuleNotFoundError as error:
        what = f"shell scripts are read with {error.name}, which is not installed: "
        raise NoParser(what + install_line("lint"), 1) from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def read_shell(path: str, text: str) -> Script:
    """The facts of a shell script, whatever the text.

    Raises:
        NoParser: What reads shell scripts is not installed.
    """
    read = _Reader(text)
    read.visit(read.root, 0)
    commands, variables = tuple(read.commands), tuple(read.variables)
    return Script(path=path, commands=commands, variables=variables, sbatch=read_sbatch(text))


def commands_of(words: tuple[Word, ...]) -> list[Command]:
    """The commands that a container's words are: those of the text that `bash -c` gets, or one."""
    if not words:
        return []
    command = Command(words=words, line=words[0].line)
    return _Reader("")._handed_on(command) or [command]


_SHELL = re.compile(r"(^|/)(ba|z|da)?sh$")
_MOST_DEPTH = 60
_MOST_LETTERS = 2**16
"""Letters of a variable's text; one that doubles itself would never end."""

_MOST_WORDS = 10_000
_MOST_SHELLS = 5
"""Shells in shells; a variable that holds its own command would never end."""


class _Reader:
    """Walks the syntax tree once, from top to bottom."""

    def __init__(self, text: str, first_line: int = 1, depth: int = 0) -> None:
        self.raw, self.first_line, self.depth = text.encode(), first_line, depth
        self.commands: list[Command] = []
        self.variables: list[Variable] = []
        self.arrays: dict[str, list[Word]] = {}
        self.holds: dict[str, Word] = {}

    @property
    def root(self) -> Any:
        return _parser().parse(self.raw).root_node

    def visit(self, node: Any, depth: int) -> None:
        if depth > _MOST_DEPTH:
            return
        kind = node.type
        if kind == "command":
            self._command(node)
        elif kind == "variable_assignment":
            self._assign(node)
        else:
            for child in node.named_children:
                self.visit(child, depth + 1)

    def _text(self, node: Any) -> str:
        return self.raw[node.start_byte : node.end_byte].decode(errors="replace")

    def _line(self, node: Any) -> int:
        return int(node.start_point[0]) + self.first_line

    def _column(self, node: Any) -> int:
        """In letters, from 1; the parser counts bytes."""
        before = self.raw[node.start_byte - int(node.start_point[1]) : node.start_byte]
        return len(before.decode(errors="replace")) + 1

    def _assign(self, node: Any) -> None:
        name_node, value_node = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = self._text(name_node) if name_node is not None else "?"
        appends = "+=" in self._text(node)[: len(name) + 2]
        if value_node is not None and value_node.type == "array":
            parts = [one for one in value_node.named_children if one.type != "comment"]
            words = self.arrays.get(name, []) if appends else []
            words = [*words, *(word for part in parts for word in self._words(part))]
            self.arrays[name] = words[:_MOST_WORDS]
            return
        word = self._word(value_node) if value_node is not None else Word("", self._line(node))
        if appends and name in self.holds:
            word = replace(word, text=self.holds[name].text + word.text)
        if len(word.text) > _MOST_LETTERS:
            word = replace(word, text=word.source[:_MOST_LETTERS])
        self.holds[name] = word
        self.variables.append(self._variable(name, word, node))
        if value_node is not None:
            self._substitutions(value_node)

    def _variable(self, name: str, word: Word | None, node: Any) -> Variable:
        value = word.text if word is not None else ""
        return Variable(name=name, value=value, line=self._line(node), column=self._column(node))

    def _command(self, node: Any) -> None:
        environment, words = [], []
        for child in node.children:
            if child.type == "variable_assignment":
                name, value = child.child_by_field_name("name"), child.child_by_field_name("value")
                if name is None:
                    continue
                word = self._word(value) if value is not None else None
                environment.append(self._variable(self._text(name), word, child))
            elif child.type == "command_name":
                for inner in child.children:
                    words += self._words(inner)
            elif child.is_named and "redirect" not in child.type:
                words += self._words(child)
            if child.is_named:
                self._substitutions(child)
        words = [word for word in words if word.text or word.source]
        if not words and not environment:
            return
        given, line = tuple(environment), self._line(node)
        command = Command(words=tuple(words), environment=given, line=line)
        self.commands += self._handed_on(command) or [command]
        if words and words[0].text == "export":  # `export "A=b"`, which is a plain command
            for word in words[1:]:
                name, sign, value = word.text.partition("=")
                if sign:
                    self.variables.append(Variable(name=name, value=value, line=word.line))

    def _substitutions(self, node: Any) -> None:
        if node.type in {"command_substitution", "process_substitution"}:
            for child in node.named_children:
                self.visit(child, _MOST_DEPTH - 5)
            return
        for child in node.named_children:
            self._substitutions(child)

    def _handed_on(self, command: Command) -> list[Command]:
        """The commands of a text that is given to another shell; nothing for other commands."""
        words = command.words
        for number, word in enumerate(words[:-1]):
            is_given_text = re.fullmatch(r"-\w*c", word.text) is not None
            if is_given_text and any(_SHELL.search(one.text) for one in words[:number]):
                script, after = words[number + 1], words[number + 3 :]
                return self._read_inner(command, words[: number + 1], script, after)
        if words and words[0].text in {"ssh", "pdsh"} and " " in words[-1].text:
            return self._read_inner(command, words[:-1], words[-1], ())
        return []

    def _read_inner(
        self, command: Command, outer: tuple[Word, ...], script: Word, after: tuple[Word, ...]
    ) -> list[Command]:
        if self.depth >= _MOST_SHELLS:
            return []
        inner = _Reader(script.text, script.line, self.depth + 1)
        inner.holds, inner.arrays = dict(self.holds), dict(self.arrays)
        inner.visit(inner.root, 0)
        given = {"$@": after, "$*": after, "${@}": after}
        return [
            replace(
                each,
                words=tuple(one for word in each.words for one in given.get(word.text, (word,))),
                outer=(*outer, *each.outer),
                environment=(*command.environment, *each.environment),
            )
            for each in inner.commands
        ]

    def _words(self, node: Any) -> list[Word]:
        """The words one argument becomes: arrays and unquoted variables may be several."""
        text = self._text(node)
        array = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', text)
        if array is not None and array[1] in self.arrays:
            return self.arrays[array[1]]
        name = re.fullmatch(r"\$\{?(\w+)\}?", text)
        if name is not None and name[1] in self.holds:
            held = self.holds[name[1]]
            if any(sign.isspace() for sign in held.text):
                return _split(held)
            return [replace(self._word(node), text=held.text)] if held.text else []
        return [self._word(node)]

    def _word(self, node: Any) -> Word:
        return Word(self._value(node), self._line(node), self._column(node), self._text(node))

    def _value(self, node: Any) -> str:
        source = self._text(node)
        match node.type:
            case "raw_string":
                return source[1:-1]
            case "string" | "concatenation":
                return self._joined(node)
            case "simple_expansion" | "expansion":
                return self._expanded(source)
            case "word":
                return re.sub(r"\\(.)", r"\1", source.replace("\\\n", ""))
        return source

    def _joined(self, node: Any) -> str:
        """The pieces of a text one after the other, with what stands between them."""
        parts, at = [], node.start_byte
        for child in node.named_children:
            parts.append(self.raw[at : child.start_byte].decode(errors="replace"))
            parts.append(self._value(child))
            at = child.end_byte
        parts.append(self.raw[at : node.end_byte].decode(errors="replace"))
        text = "".join(parts)
        if node.type == "string":
            text = text.removeprefix('"').removesuffix('"')
            return re.sub(r'\\(["`$\\])', r"\1", text)
        return text

    def _expanded(self, source: str) -> str:
        name = re.fullmatch(r"\$\{?(\w+)(?::?[-=]([^}]*))?\}?", source)
        if name is None:
            return source
        default = source if name[2] is None else name[2].strip("\"'")
        return self.holds[name[1]].text if name[1] in self.holds else default


_ARITHMETIC = re.compile(r"\$\(\([^()]*\)\)")


def _split(held: Word) -> list[Word]:
    """The words of a variable's text, each on its own line of it."""
    found = []
    for number, whole in enumerate(held.text.split("\n")):
        line = _ARITHMETIC.sub(lambda sum: sum[0].replace(" ", ""), whole)  # one word
        try:
            parts = shlex.split(line.rstrip("\\").strip())
        except ValueError:
            parts = line.rstrip("\\").split()
        found += [Word(part, held.line + number, held.column, part) for part in parts]
    return found
