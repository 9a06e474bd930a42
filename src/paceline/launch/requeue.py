"""What is left of a Slurm job whose first node is lost: put the job back into the queue.

    python -m paceline.launch.requeue

A job that outlives its nodes (`--no-kill`) outlives the one with its batch step, too: Slurm lets
it run on with nothing that controls it, and it holds its nodes until its time is over (seen, Slurm
22.05).
Each node runs this when its agent has ended for want of a controller. It waits until Slurm itself
says that the first node is no longer the job's, so that a network that is cut between nodes ends
nothing. A job that may not go back is cancelled.
"""

import os
import re
import time

from paceline.launch.tools import Answer, ask_tool

_LOOK_S = 5.0
"""Between two looks. Slurm gives up a silent node after SlurmdTimeout, 300 s by default."""


def main() -> None:
    """Entry point; ends when the job is no longer a running one."""
    job_id = os.environ["SLURM_JOB_ID"]
    while True:
        said = _ask("show", "job", job_id).stdout
        if (state := value_of(said, "JobState")) not in (None, "RUNNING"):
            print(f"the job is {state}", flush=True)
            return
        head, nodes = value_of(said, "BatchHost"), value_of(said, "NodeList")
        if head is not None and nodes is not None:
            left = _ask("show", "hostnames", nodes).stdout.split()
            if left and head not in left:
                print(f"{head} is lost: the job goes back into the queue", flush=True)
                if _ask("requeue", job_id).returncode:
                    ask_tool(["scancel", job_id])
                return
        time.sleep(_LOOK_S)


def _ask(*words: str) -> Answer:
    return ask_tool(["scontrol", "--oneliner", *words])


def value_of(line: str, name: str) -> str | None:
    """One value of a line of scontrol, `NAME=VALUE`."""
    found = re.search(rf"(?:^|\s){name}=(\S+)", line)
    return found[1] if found else None


if __name__ == "__main__":
    main()
