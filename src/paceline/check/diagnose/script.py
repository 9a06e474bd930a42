"""What the script that ran says about a failure: the operation where a rank stood, and what `lint`
finds there that explains the failure. The files are handed over; nothing is opened."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.catalog.failure import Effect, load_failures
from paceline.check.diagnose.candidate import GENERAL, SYMPTOMS
from paceline.check.diagnose.conclusion import Cause, Confidence, Diagnosis
from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.files import Files
from paceline.check.lint.facts.program import read_program
from paceline.check.lint.facts.source import Unreadable, path_of
from paceline.check.lint.lint import lint_files
from paceline.check.lint.rules.agreement import NEEDS, joint_kind

_MOST = 3
"""Places of the script that are shown."""


def with_script(diagnosis: Diagnosis, script: str, files: Mapping[str, bytes]) -> Diagnosis:
    """The diagnosis with line and operation of the script.

    A finding of `lint` that explains what is seen (the failure of a cause, or one that makes ranks
    wait where they did) is a likely cause: the first, unless another is certain, or the ranks are
    known to have stood elsewhere.

    Args:
        script: Its name among the files.
        files: The script and those that it may import, by the names to show.

    Raises:
        Unreadable: The script is no Python program.
    """
    helpers = read_program(script, files[script], Files(files)).helpers
    python = {path: files[path] for path in (script, *helpers)}
    found = list(_explaining(diagnosis, lint_files(python, Context()).findings))
    told = [f"{each.place or ''} {each.what}" for each in diagnosis.causes]
    stood = set(_places(told, diagnosis, python))
    by_script = [_cause(each, diagnosis.causes, python) for each in _once(found)]
    named = {each.id for each in by_script}
    rest = [each for each in diagnosis.causes if each.id not in named]
    is_elsewhere = bool(stood) and not any(stood & set(_lines(each)) for each in found)
    first = 1 if rest and (is_elsewhere or _is_decided(rest[0])) else 0
    causes = [*rest[:first], *by_script, *rest[first:]]
    facts = dict(diagnosis.facts)
    if shown := list(_operations(causes, diagnosis, python)):
        facts["script"] = "; ".join(shown[:_MOST])
    return replace(diagnosis, causes=causes, facts=facts)


def _explaining(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Iterator[Finding]:
    seen = {each.id for each in diagnosis.causes} | {each.id for each in diagnosis.consequences}
    waits = any(map(_waits, seen))
    for each in findings:
        keeps_away = waits and _waits(each.id)
        if each.severity is not Severity.INFO and (each.id in seen or keeps_away):
            yield each


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """The first finding of each failure."""
    kept: dict[str, Finding] = {}
    for each in findings:
        kept.setdefault(each.id, each)
    return list(kept.values())[:_MOST]


def _lines(finding: Finding) -> Iterator[tuple[str, int]]:
    for place in (finding.where, *(each.where for each in finding.evidence)):
        yield place.path, place.line or 0


def _cause(finding: Finding, causes: Sequence[Cause], files: Mapping[str, bytes]) -> Cause:
    """A finding as a cause, with the rank and the lines of the logs that show it where they do."""
    lines = set(_lines(finding))
    known = next(
        (
            each
            for each in causes
            if each.id == finding.id or lines & set(_read_places(each.place or "", files))
        ),
        None,
    )
    if known is not None and known.id == finding.id and known.confidence is Confidence.CERTAIN:
        return replace(known, place=known.place or str(finding.where))
    return Cause(
        id=finding.id,
        confidence=Confidence.LIKELY,
        what=f"{finding.where}: {finding.what}",
        title=load_failures()[finding.id].title,
        rank=known.rank if known else _rank_at(lines, causes, files),
        host=known.host if known else None,
        ranks=known.ranks if known else (),
        evidence=[*finding.evidence, *(known.evidence if known else ())],
        place=(known.place if known else None) or str(finding.where),
    )


def _rank_at(
    lines: set[tuple[str, int]], causes: Sequence[Cause], files: Mapping[str, bytes]
) -> int | None:
    """The rank that a cause says stood on one of these lines."""
    for each in (part for cause in causes for part in cause.what.split(";")):
        rank = re.search(r"\brank (\d+)\b", each)
        if rank is not None and lines & set(_read_places(each, files)):
            return int(rank[1])
    return None


def _is_decided(cause: Cause) -> bool:
    says_why = cause.id not in SYMPTOMS | GENERAL
    return cause.confidence is Confidence.CERTAIN and says_why and not _waits(cause.id)


def _operations(
    causes: Sequence[Cause], diagnosis: Diagnosis, files: Mapping[str, bytes]
) -> Iterator[str]:
    """The statement at each place of the script that the diagnosis names."""
    for path, number in _places([each.place or "" for each in causes], diagnosis, files):
        lines = files[path].decode(errors="replace").splitlines()
        if 0 < number <= len(lines):
            needs = _needs(path, number, files)
            statement = f"{path}:{number}: {lines[number - 1].strip()}"
            yield f"{statement} ({needs})" if needs else statement


def _places(
    told: Sequence[str], diagnosis: Diagnosis, files: Mapping[str, bytes]
) -> list[tuple[str, int]]:
    """Every place of the script where a rank is known to have stood or failed, once."""
    collectives = diagnosis.facts.get("collectives", "")
    return list(dict.fromkeys(_read_places(" ".join([*told, collectives]), files)))


def _read_places(text: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, int]]:
    for name, number in re.findall(r"([^\s,;:]+\.py):(\d+)", text):
        path = _same_file(name, files)
        if path is not None:
            yield path, int(number)


def _needs(path: str, number: int, files: Mapping[str, bytes]) -> str | None:
    """What the operation of this line needs of the other ranks."""
    try:
        program = read_program(path, files[path], Files(files))
    except Unreadable:
        return None
    here = [each for each in program.all_calls if each.line == number]
    here = [each for each in here if path_of(each.node) in (None, path)]
    kinds = [kind for each in here if (kind := joint_kind(program, each)) is not None]
    if kinds:
        return NEEDS[kinds[0]]
    models = [model for each in here if each.forward_of for model in each.forward_of.any()]
    is_joint = any(model.wrapper not in (None, "dp") for model in models)
    return "every rank has to run the forward pass of a wrapped model" if is_joint else None


def _same_file(name: str, files: Mapping[str, bytes]) -> str | None:
    """The file that a log names, by the longest end of its path that fits one file alone."""
    steps = name.split("/")
    for start in range(len(steps)):
        end = "/".join(steps[start:])
        fits = [path for path in files if f"/{path}".endswith(f"/{end}")]
        if len(fits) == 1:
            return fits[0]
    return None


def _waits(name: str) -> bool:
    """Whether ranks wait for each other in this failure: what keeps one away explains it."""
    failure = load_failures()[name]
    return failure.category == "hang" or failure.effect in {Effect.HANG, Effect.SECONDARY}
