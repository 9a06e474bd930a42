"""A single-device training script in its distributed form.

Text in, text out. The script is read once (`script.py`); each concern adds its edits; they are made
together, so that everything no edit names stays as it was, byte for byte.
"""

import ast

from paceline.adapt.adaptation import Work
from paceline.adapt.data import share_data
from paceline.adapt.devices import place_on_device
from paceline.adapt.edits import Edits
from paceline.adapt.launch_command import job_file, start_command
from paceline.adapt.loop import adapt_loop
from paceline.adapt.metrics import reduce_numbers
from paceline.adapt.printing import print_once
from paceline.adapt.program import check_goes_on
from paceline.adapt.rank_invariant import Alike
from paceline.adapt.refuse import check_is_single_device, read
from paceline.adapt.result import Adapted, Left, Refusal, Target
from paceline.adapt.roles import Roles
from paceline.adapt.saving import save_and_load
from paceline.adapt.setup import MARK, meet_and_leave
from paceline.adapt.wrapping import wrap_model

_CONCERNS = (
    share_data,
    reduce_numbers,
    place_on_device,
    wrap_model,
    adapt_loop,
    save_and_load,
    print_once,
    meet_and_leave,
)


def adapt(source: str, to: Target, *, name: str = "train.py") -> Adapted:
    """`source`, changed to train on several devices as it trained on one.

    The global batch, the learning rate, the number of steps and the format of checkpoints stay.
    What could only be guessed is not changed; it is listed in `left`, with its line.

    Args:
        source: The text of a Python script. Line ends are `\\n`.
        name: Of the file that it becomes, for what is said of how to start it.

    Returns:
        The new text and what was done; with `refused`, the same text and why.
    """
    mark = _mark(source)
    if mark == to:
        return Adapted(text=source, already=True)
    if mark is not None:
        why = f"adapt the script it was made from; this one runs as it is, as {mark}"
        return _refused(source, Left(1, f"was adapted to {mark} before", why))
    try:
        script = read(source)
        roles = Roles(script)
        check_is_single_device(script, roles)
        form = Target.DDP if to is Target.PACELINE else to
        work = Work(
            script=script,
            roles=roles,
            alike=Alike(script, roles),
            edits=Edits(source),
            target=form,
            mark=to,
            name=name,
        )
        for concern in _CONCERNS:
            concern(work)
        for node in work.edits.lost:
            work.leave(
                node,
                "its place inside this string is not known: take it out of the string, into a line "
                "of its own, and adapt again",
                ast.unparse(node),
            )
        if to is Target.PACELINE:
            check_goes_on(work)
        text = work.edits.apply()
    except Refusal as refusal:
        return _refused(source, *refusal.left)
    try:
        ast.parse(text)
    except SyntaxError as error:
        why = f"the form that was written would not be valid Python ({error.msg}): adapt it by hand"
        return _refused(
            source, Left(1, "the statements of this script stand in an unusual way", why)
        )
    return Adapted(
        text=text,
        done=tuple(sorted(set(work.done))),
        left=tuple(sorted(work.left)),
        job_file=job_file(name) if to is Target.PACELINE else None,
        start=start_command(to, name),
    )


def judge(source: str, *, name: str = "train.py") -> dict[Target, Adapted]:
    """What `adapt` would do with a script, for every form; one that is no single-device training
    is refused once for all of them."""
    if _mark(source) is None:
        try:
            script = read(source)
            check_is_single_device(script, Roles(script))
        except Refusal as refusal:
            return dict.fromkeys(Target, _refused(source, *refusal.left))
    return {to: adapt(source, to, name=name) for to in Target}


def _mark(source: str) -> str | None:
    for line in source.split("\n"):
        if line.startswith(MARK):
            return line.removeprefix(MARK).split(".")[0].strip()
    return None


def _refused(source: str, *left: Left) -> Adapted:
    return Adapted(text=source, left=tuple(sorted(set(left))), refused=True)
