"""A script as a program that Paceline starts, watches and starts again.

The script itself takes the form of DDP, which is what a restarted group of processes needs. It is
not turned into a function for `paceline.runtime.Session`: there the session owns epochs, order of
samples, schedule, evaluation and checkpoints, and which of the script's own lines stand for which
of these could only be guessed. docs/guides/own-code.md shows the five lines that do it by hand.
"""

import ast

from paceline.adapt.adaptation import Work


def check_goes_on(work: Work) -> None:
    """After a failure the program is started again: it has to find its own checkpoint."""
    script = work.script
    loads = [call for call in script.calls if script.qualified(call.func) == "torch.load"]
    first = work.roles.batch_loops[0] if work.roles.batch_loops else script.backwards[0]
    if not loads:
        work.leave(
            first,
            "after a failure it would begin anew: load the newest checkpoint above the loop, where "
            "there is one",
            "no checkpoint is ever loaded",
        )
    for call in script.calls:
        is_option = isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        names = [each.value for each in call.args if isinstance(each, ast.Constant)]
        if is_option and any("resume" in str(name) for name in names):
            work.leave(
                call,
                "a restart gives the same arguments: put it into `command` in the job file, and "
                "let the script begin anew where there is no checkpoint",
            )
