"""The Python files that are linted together: which file an import means, and its tree."""

import sys
from collections.abc import Mapping

from paceline.check.lint.facts.names import KNOWN_LIBRARIES
from paceline.check.lint.facts.source import Source, Unreadable, parse

MOST_PARSED_BYTES = 4 * 2**20
"""Sources whose trees are kept for the next program that imports them; a tree takes about 40 times
the text's bytes (measured, CPython 3.11)."""


class Files:
    """The Python files that are linted together, each parsed when it is asked for. The trees of
    those that were asked for last are kept."""

    def __init__(self, texts: Mapping[str, bytes | str]) -> None:
        self.texts = texts
        self.parsed: dict[str, Source | None] = {}
        self.held_bytes = 0
        self.asked: set[str] = set()
        """Files that `source` was asked for; whoever wants to know of a while clears it before."""

    def source(self, path: str) -> Source | None:
        """A file that can be read; None for one that is broken, which is reported by itself."""
        self.asked.add(path)
        if path in self.parsed:
            self.parsed[path] = found = self.parsed.pop(path)  # the last that was asked for
            return found
        try:
            made = parse(path, self.texts[path])
        except Unreadable:
            made = None
        self.parsed[path] = made
        self.held_bytes += len(self.texts[path])
        while self.held_bytes > MOST_PARSED_BYTES and len(self.parsed) > 1:
            oldest = next(iter(self.parsed))
            del self.parsed[oldest]
            self.held_bytes -= len(self.texts[oldest])
        return made

    def find(self, importer: str, module: str, level: int = 0) -> str | None:
        """The file that `module` means in the file `importer`; None where it is none of these.

        Args:
            module: As it is written, `utils.comm`; empty for `from . import x`.
            level: Leading dots.
        """
        folder = importer.rpartition("/")[0]
        steps = module.split(".") if module else []
        if level:
            for _ in range(level - 1):
                folder = folder.rpartition("/")[0]
            return self.file_in(folder, steps)
        if not steps or steps[0] in sys.stdlib_module_names | KNOWN_LIBRARIES:
            return None
        while True:
            found = self.file_in(folder, steps)
            if found is not None and found != importer:
                return found
            if not folder:
                return None
            folder = folder.rpartition("/")[0]

    def file_in(self, folder: str, steps: list[str]) -> str | None:
        stem = "/".join([folder, *steps] if folder else steps)
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self.texts:
                return path
        return None
