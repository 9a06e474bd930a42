"""Every interpreter that a test starts imports this; those of `python -m` a program that imports
torch become a stand-in for the fork of a warm one (`warm.py`)."""

import os
import sys

PROGRAMS = (
    *("paceline.control.agent", "paceline.prove", "paceline.runtime.bench"),
    *("paceline.runtime.calibrate",),
    *("paceline.runtime.checkpoint.export", "paceline.runtime.checkpoint.inspect_external"),
    *("paceline.runtime.checkpoint.logits", "paceline.runtime.device_check"),
    *("paceline.runtime.epochs", "paceline.runtime.fork_server", "paceline.runtime.generate"),
    *("paceline.runtime.harness", "paceline.runtime.measure_module", "paceline.runtime.try_batch"),
    *("paceline.runtime.verify", "tests.sim.fork_server"),
)

if (
    sys.orig_argv[1:2] == ["-m"]
    and sys.orig_argv[2] in PROGRAMS
    and "PACELINE_TESTS_SESSION" in os.environ
):
    import warm

    if warm.is_as_usual():
        warm.stand_in()
