"""Counts the processes that a launcher really starts, then becomes the program.

Launchers say that all is well where one process runs alone, or several that know nothing of each
other. `paceline run --script PROGRAM --with ENGINE` lets the launcher start this file instead: it
becomes `$PACELINE_SCRIPT` with the same arguments where there are as many ranks as
`$PACELINE_RANKS`, and leaves `started/RANK` in this folder; otherwise it leaves `refused` and ends
with 3. Once the launcher has ended, `python -c "import counted; counted.check()"` ends with 3 where
a rank is missing.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Never comes back."""
    wanted, found = int(os.environ["PACELINE_RANKS"]), int(os.environ.get("WORLD_SIZE", "1"))
    if found != wanted:
        refuse(f"a process was started as one of {found}, the plan has {wanted}")
    started = FOLDER / "started"
    started.mkdir(exist_ok=True)
    (started / os.environ.get("RANK", "0")).write_text(str(os.getpid()))
    program = os.environ["PACELINE_SCRIPT"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, program, *sys.argv[1:]])


def check() -> None:
    """After the launcher has ended with 0."""
    wanted, started = int(os.environ["PACELINE_RANKS"]), FOLDER / "started"
    ranks = {each.name for each in started.iterdir()} if started.is_dir() else set()
    if ranks != {str(rank) for rank in range(wanted)}:
        refuse(f"{len(ranks)} of {wanted} processes started the program")


def refuse(said: str) -> None:
    """Leaves the reason where `paceline run` finds it."""
    (FOLDER / "refused").write_text(said)
    print(said, file=sys.stderr, flush=True)
    raise SystemExit(3)


if __name__ == "__main__":
    main()
