"""What is printed and logged: once, with its numbers computed on every rank all the same."""

import ast

from paceline.adapt.adaptation import Work

_WRITERS = (
    "torch.utils.tensorboard.SummaryWriter", "torch.utils.tensorboard.writer.SummaryWriter",
    "tensorboardX.SummaryWriter",
)  # fmt: skip


def print_once(work: Work) -> None:
    """Prints, progress bars, TensorBoard, W&B and log files speak for rank 0 alone."""
    script, edits = work.script, work.edits
    printed = False
    for call in script.calls:
        full = script.qualified(call.func) or ""
        name = script.dotted(call.func) or ""
        if name == "print" and "print" not in script.functions:
            if any(each in work.removed for each in script.up(call)):
                continue
            edits.replace(
                call.func, "accelerator.print" if work.accelerate else work.use("print_once")
            )
            if work.accelerate:
                work.use("accelerator")
            if not printed:
                work.say(call, "printed by rank 0 alone; what is printed is computed on every rank")
            printed = True
        elif full.startswith("tqdm") and full.rsplit(".", 1)[-1] in ("tqdm", "trange"):
            _add_keyword(work, call, "disable", work.is_other)
            work.say(call, "one progress bar")
        elif full in _WRITERS:
            work.use("Silent")
            plain = isinstance(script.parents[call], ast.Assign)
            before, after = ("", "") if plain else ("(", ")")
            edits.wrap(call, before, f" if {work.is_main} else Silent(){after}")
            work.say(call, "one writer")
        elif full == "wandb.init":
            given = next((k.value for k in call.keywords if k.arg == "mode"), None)
            mode = f'"disabled" if {work.is_other} else '
            if given is not None:
                edits.wrap(given, mode, "")
            else:
                _add_keyword(work, call, "mode", mode + "None")
            work.say(call, "one W&B run")
        elif full == "evaluate.load":
            number = "accelerator.process_index" if work.accelerate else "RANK"
            work.use("accelerator" if work.accelerate else "RANK")
            _add_keyword(work, call, "experiment_id", f"str({number})")
            work.say(call, "ranks that share a metric's file would lock each other out")
        elif full == "logging.FileHandler" and call.args:
            edits.wrap(call.args[0], f"{work.use('once')}(", ")")
            work.say(call, "one log file")
        elif full == "logging.basicConfig":
            for keyword in call.keywords:
                if keyword.arg == "filename":
                    edits.wrap(keyword.value, f"{work.use('once')}(", ")")
                    work.say(call, "one log file")
        elif full.startswith(("mlflow.", "comet_ml.", "neptune.", "aim.")):
            work.leave(call, f"every rank would log: do it under `if {work.is_main}:`")


def _add_keyword(work: Work, call: ast.Call, name: str, value: str) -> None:
    if any(k.arg == name for k in call.keywords):
        given = next(k.value for k in call.keywords if k.arg == name)
        if name != "disable":
            return
        work.edits.wrap(given, f"{value} or (", ")")
        return
    everything = [*call.args, *(k.value for k in call.keywords)]
    if not everything:
        at = work.edits.end(call) - 1
        work.edits.replace_span(at, at, f"{name}={value}")
        return
    if any(isinstance(each, ast.GeneratorExp) for each in call.args):
        return
    last = max(everything, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0))
    work.edits.wrap(last, "", f", {name}={value}")
