"""The command line of `paceline run`: what it says of a run, and where each option leads."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.cli.run_preflight import Looking
    from paceline.job import Job, Script
    from paceline.plan import Plan
    from paceline.record.run import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says of a run, whatever it is of."""

    place: str | None
    hosts: str | None
    alerts: Path | None
    looking: "Looking"
    dry_run: bool
    source: Path | None
    out: Path | None
    runs: Path
    ranks: str | None
    reports: bool
    verbose: bool
    json: bool

    def check_is_job(self) -> None:
        """
        Raises:
            UsageError: An option was given that is for scripts.
        """
        if self.ranks is not None:
            raise click.UsageError("--ranks goes with --script; see `paceline logs RUN --rank N`.")

    def attend(
        self, program: "Script", run: "RunFolder", place: str = "local", *, is_new: bool = False
    ) -> int:
        """Run a script to its end from here. A new one that is refused leaves nothing behind."""
        from paceline.cli.run_script import discard, nodes_of, ranks_shown, run_program
        from paceline.errors import JobError

        ranks = ranks_shown(self.ranks, program)
        try:
            nodes = nodes_of(program, run, place)
        except JobError:
            if is_new:
                discard(run)
            raise
        return run_program(
            program, run, ranks=ranks, reports=self.reports, as_json=self.json, nodes=nodes
        )

    def show(self, place: str, job: "Job | Script", plan: "Plan | None", folder: Path) -> int:
        """What would be submitted or started there."""
        from paceline.cli.run_submission import show_submission

        return show_submission(place, job, plan, folder, self.looking.options, as_json=self.json)

    def submit(
        self,
        place: str,
        job: "Job | Script",
        plan: "Plan | None",
        run: "RunFolder",
        *,
        is_new: bool,
    ) -> int:
        """Put it into that place's queue."""
        from paceline.cli.run_submission import hand_to_place

        options = self.looking.options
        return hand_to_place(place, job, plan, run, options, is_new=is_new, as_json=self.json)
