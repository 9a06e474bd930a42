"""Checkpoints on a disk that goes with its machine: /tmp, memory, a cloud instance's own."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import Value
from paceline.check.lint.rules.samplers import training_loops

SAVES: dict[str, tuple[int | None, str]] = {
    "torch.save": (1, "f"),
    "safetensors.torch.save_file": (1, "filename"),
    "torch.distributed.checkpoint.save": (None, "checkpoint_id"),
    "torch.distributed.checkpoint.async_save": (None, "checkpoint_id"),
    "torch.distributed.checkpoint.FileSystemWriter": (0, "path"),
    "accelerate.Accelerator.save_state": (0, "output_dir"),
    "deepspeed.DeepSpeedEngine.save_checkpoint": (0, "save_dir"),
    "transformers.TrainingArguments": (0, "output_dir"),
    "lightning.pytorch.callbacks.ModelCheckpoint": (0, "dirpath"),
}
"""Call -> position and keyword of the path that a checkpoint is written to."""

OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/local", "/scratch/local", "/mnt/local", "/raid")
"""Folders that each machine has for itself."""

JOINS = frozenset({"os.path.join", "pathlib.Path", "builtins.str", "os.path.expanduser"})

UPLOADS = ("upload_file", "upload_folder", "upload", "push_to_hub", "put", "copytree", "rsync")
"""Methods after which what was written lies elsewhere, too."""


def check_local_disk(program: Program, context: Context) -> Iterator[Finding]:
    """Training state that is saved under a literal path of one machine."""
    trains = program.is_distributed and (training_loops(program) or program.framework)
    if not trains or program.has_call(method=UPLOADS):
        return
    for call in program.all_calls:
        position, keyword = SAVES.get(call.name, (None, ""))
        path = call.argument(position, keyword) if keyword else None
        text = None if path is None else first_text(path)
        folder = next((one for one in OF_ONE_NODE if text and is_below(text, one)), None)
        if folder is None:
            continue
        what = f"checkpoints are written below {folder}, which only one machine has"
        fix = "write to storage that stays and that all nodes see, or copy each checkpoint there"
        yield program.finding("checkpoint-ephemeral", call, what, fix, level=Severity.INFO)
        return


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def first_text(value: Value) -> str | None:
    """The text that a path begins with; None where reading does not tell."""
    for one in value.any():
        text = one.likely()
        if isinstance(text, str):
            return text
        first = None
        if isinstance(one.call, Call) and one.call.name in JOINS and one.call.args:
            first = one.call.args[0]
        elif isinstance(one.node, ast.JoinedStr | ast.BinOp) and one.sources:
            first = one.sources[0]
        if first is not None and first is not one and (found := first_text(first)) is not None:
            return found
    return None


RULES = (check_local_disk,)
