"""The tools that start and stop runs. They exist only with `--control`."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError
from paceline.mcp.answers import Answers
from paceline.mcp.bounds import below

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.plan import Plan


@dataclass(frozen=True, slots=True)
class Control:
    """What may be changed, by the same functions as the commands'."""

    answers: Answers

    def run_start(
        self, path: str, changes: Sequence[str] = (), digest: str | None = None
    ) -> dict[str, Any]:
        """Start a job on this machine.

        The first call starts nothing: it returns the plan in six lines, its cost and its `digest`.
        Show them to the person; call again with that digest to start exactly this plan.
        """
        from paceline.launch.background import start_in_background
        from paceline.launch.plannable import planned
        from paceline.report.plan_text import plan_summary

        answers = self.answers
        job = answers.job(path, None, changes)
        plan = planned(job, answers.facts(job))
        lines, now = plan_summary(plan), plan_digest(job, plan)
        usd = plan.cost.usd if plan.cost is not None else None
        shown = {"plan": lines, "usd": usd, "digest": now, "started": None}
        if digest is None:
            return shown
        if digest != now:
            raise JobError.of(
                code="V033",
                what="the job's plan is not the one of that digest",
                where=path,
                fix="call run_start without a digest, and look at the plan as it is now",
            )
        started = start_in_background(
            below(answers.root, path), job.spec.name, changes, answers.runs_folder.resolve()
        )
        return shown | {"started": asdict(started)}

    def run_stop(self, run: str) -> dict[str, Any]:
        """Ask a run to save at the next step boundary and end; one that waits leaves its queue."""
        from paceline.launch.run_status import stop

        answers = self.answers
        return {"asked": stop(str(answers.run(run).path), answers.runs_folder)}


def plan_digest(job: "Job", plan: "Plan") -> str:
    """SHA-256 of what a person agrees to: the whole job, the layout, and whose price it has. What
    is free on this machine at the moment is not in it."""
    from paceline.job import dump_job

    cost = plan.cost
    price = (cost.provider, cost.instance, cost.per_instance_hour_usd) if cost else None
    parts = [dump_job(job.spec), str(asdict(plan.layout)), str(price)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
