"""What lint found before, taken again where nothing that it depends on has changed.

A text that is no program depends on itself. A program depends on itself, on the programs that were
read for it, on the names of all programs (an import may mean another file), on the configurations
and on what is known of the run. Configurations are few and are judged anew.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from paceline.check.lint.context import Context
from paceline.check.lint.judged import Judged


@dataclass(slots=True, kw_only=True)
class Kept:
    """What one file gave, and what that depends on."""

    judged: Judged
    digests: dict[str, str]
    """File -> digest of its content, of each that was read for it."""

    around: str = ""
    """Digest of what all programs depend on; empty for a text."""


class Memory:
    """What each file gave in the run before, and in this one.

    Args:
        kept: What was found before, by file.
        is_on: Whether anything is kept.
    """

    def __init__(self, kept: Mapping[str, Kept] | None = None, *, is_on: bool = False) -> None:
        self.before = dict(kept or {})
        self.now: dict[str, Kept] = {}
        self.is_on = is_on
        self.digests: dict[str, str] = {}
        self.around = ""

    def begin(self, sources: Mapping[str, bytes]) -> None:
        """Take the digest of every file of this run."""
        self.now = {}
        if self.is_on:
            self.digests = {path: digest(data) for path, data in sources.items()}

    def surround(self, context: Context, programs: Iterable[str], configs: Iterable[str]) -> None:
        """Note what the result of every program depends on."""
        if self.is_on:
            parts = [repr(context), *sorted(programs)]
            parts += [f"{path} {self.digests[path]}" for path in sorted(configs)]
            self.around = digest("\n".join(parts).encode(errors="surrogateescape"))

    def of(self, path: str, *, is_program: bool = False) -> Judged | None:
        """What a program, or a text that is no configuration, gave before; None where it was not
        seen, or something that it depends on changed."""
        kept = self.before.get(path)
        if not self.is_on or kept is None or kept.around != (self.around if is_program else ""):
            return None
        if any(self.digests.get(each) != was for each, was in kept.digests.items()):
            return None
        self.now[path] = kept
        return kept.judged

    def keep(self, judged: Judged, *, is_program: bool = False) -> None:
        """Keep what a program gave, or such a text."""
        if self.is_on and all(map(is_utf8, judged.read)):  # JSON has no other names
            digests = {path: self.digests[path] for path in judged.read}
            around = self.around if is_program else ""
            self.now[judged.path] = Kept(judged=judged, digests=digests, around=around)

    @property
    def has_changed(self) -> bool:
        """Whether this run found anything that the run before did not leave."""
        return self.now.keys() != self.before.keys() or any(
            kept is not self.before[path] for path, kept in self.now.items()
        )


def digest(data: bytes) -> str:
    """Which content it is."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def is_utf8(name: str) -> bool:
    """Whether a file's name is one; others come with surrogates (PEP 383)."""
    return name.encode(errors="replace").decode() == name


def memory_as_bytes(memory: Memory, version: str) -> bytes:
    """What this run left, for `memory_of_bytes`.

    Args:
        version: Of the rules, and of all else that is the same for every file.
    """
    body = msgspec.json.encode(memory.now)
    return f"{version} {digest(body)}\n".encode() + body


def memory_of_bytes(data: bytes, version: str) -> Memory:
    """What a run left; nothing where it is of another version, damaged or cut short."""
    head, _, body = data.partition(b"\n")
    kept: dict[str, Kept] = {}
    if head.decode(errors="replace") == f"{version} {digest(body)}":
        try:
            kept = msgspec.json.decode(body, type=dict[str, Kept])
        except (msgspec.MsgspecError, ValueError):
            kept = {}
    return Memory(kept, is_on=True)
