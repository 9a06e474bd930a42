"""What the command line of `paceline run` says of the look before the run."""

from dataclasses import dataclass

import click

_OWN_AGENTS = ("local", "ssh", "srun", "ray", "slurm")
"""Places where Paceline itself is on the machines, and can look at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """What the command line says of the look."""

    wanted: bool | None
    """None is as far as it costs nothing; True lets nodes call each other too."""

    allowed: tuple[str, ...]
    """Names of checks, or of failures, that may be there."""

    def check(self, place: str, *, is_job: bool) -> None:
        """
        Raises:
            BadParameter: A name is of no check.
            UsageError: Nobody looks at such a run, so it cannot be told how.
        """
        from paceline.cli.preflight import check_allowed

        check_allowed(self.allowed)
        if not self.wanted and not self.allowed:
            return
        if not is_job:
            raise click.UsageError(
                "--preflight and --allow are for Paceline's own runtime: what a script or another "
                "engine needs is not known."
            )
        if place not in _OWN_AGENTS:
            raise click.UsageError(
                f"--preflight and --allow do nothing with --on {place}: its machines are not there "
                "before the job is, and run the program of its files. Put `paceline preflight JOB` "
                "where they set themselves up (`paceline explain preflight`)."
            )

    @property
    def options(self) -> tuple[str, ...]:
        """Preflight options for the command that a queue starts, as they were given."""
        wanted = {None: (), True: ("--preflight",), False: ("--no-preflight",)}[self.wanted]
        return *wanted, *(word for name in self.allowed for word in ("--allow", name))
