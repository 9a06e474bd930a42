"""The look at this machine before `paceline run` starts on it: quick, and silent if all is well.

Other machines are looked at when that is asked for (`--preflight`): it takes seconds. Everything is
looked at by `paceline preflight`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.check.preflight.preflight import Preflight
    from paceline.plan import Plan
    from paceline.record.run import RunFolder
    from paceline.spec import Job

FILE = "preflight.json"
"""In the run's folder: every check of the last look, and what was allowed."""


def look_before(
    job: "Job",
    plan: "Plan",
    place: str,
    folder: Path,
    looks: bool | None,
    allowed: tuple[str, ...],
) -> dict[str, Any] | None:
    """What was seen of the machines; None where nobody looks.

    Args:
        job: To be started.
        plan: Its plan.
        place: Where.
        folder: Where the run will write: its own, or the folder of all runs.
        looks: Whether to look; None looks at this machine only.
        allowed: Names of checks, or of failures, that may be there.

    Raises:
        JobError: `W032`, a check fails that was not allowed; `W031`, the place has no nodes yet.
    """
    from paceline.cli.preflight import check_allowed, preflight_data

    check_allowed(allowed)
    if looks is False or (looks is None and place != "local"):
        return None
    from paceline.errors import JobError, Problem

    verdict = _look(job, plan, place, folder, allowed)
    if not verdict.is_fit:
        raise JobError(
            *(
                Problem(
                    code="W032",
                    what=f"{each.name} [{each.id}]: {each.evidence}",
                    where="this machine" if place == "local" else each.node,
                    fix=f"{each.fix}; or start all the same: --allow {each.name}",
                )
                for each in verdict.failing
            )
        )
    return preflight_data(verdict)


def _look(
    job: "Job", plan: "Plan", place: str, folder: Path, allowed: tuple[str, ...]
) -> "Preflight":
    from paceline.check.preflight.need import need_of
    from paceline.check.preflight.preflight import judge
    from paceline.launch.preflight import find_nodes, gather, left_note, look_here, question_of

    need = need_of(job, plan, place=place)
    if (folder / "checkpoints").is_dir():
        # It goes on: those that are kept are there already, and old ones make room.
        need = replace(need, num_checkpoints=1)
    question = replace(question_of(job, folder, is_quick=True), ports=())  # the place asks those
    if place == "local":
        return judge(look_here(question), need, allowed=allowed)
    nodes = find_nodes(job, plan, place)
    with left_note(question) as (asked, note):
        gathered = replace(gather(nodes, asked), is_quick=True)
    return judge(gathered, need, note=note, allowed=allowed)


def keep_look(run: "RunFolder", looked: dict[str, Any] | None) -> None:
    """Write it into the run's folder, where there was a look."""
    from paceline.record.lines import write_whole

    if looked is not None:
        write_whole(run.path / FILE, (json.dumps(looked, indent=2) + "\n").encode())
