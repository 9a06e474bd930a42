"""What the small language model's program is in every engine: the samples, the schedule of the
learning rate, and what is said at each step and at the end.

Needs Python alone. Everything that is counted comes from `train.json` beside this file.
"""

import glob
import hashlib
import json
import math
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SPLITS = ("tensor", "pipeline", "context", "expert")
_DEFAULT_MODEL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 256}


def read_settings() -> dict[str, Any]:
    """`train.json`."""
    settings: dict[str, Any] = json.loads((FOLDER / "train.json").read_text())
    settings["model"] = settings["model"] or _DEFAULT_MODEL
    return settings


def check(
    settings: dict[str, Any],
    *,
    lacks: Iterable[str] = (),
    optimizers: Sequence[str] = ("adamw",),
    splits: Sequence[str] = (),
) -> None:
    """Ends where an example program would train something else than `train.json` says.

    Args:
        settings: `train.json`.
        lacks: What else the engine's program has not.
        optimizers: Those that it has.
        splits: Ways to split the model that it has.
    """
    layout = settings["layout"]
    found = [f"{way} {layout[way]}" for way in SPLITS if layout[way] > 1 and way not in splits]
    if settings["program"] is not None:
        found.append(f"program {settings['program']}")
    if settings["other_model"] is not None:
        found.append(f"model {settings['other_model']}")
    found += settings["needs"]
    if settings["optimizer"] not in optimizers:
        found.append(f"optimizer {settings['optimizer']}")
    if settings["adapter"] is not None:
        found.append(f"adapters ({settings['adapter']})")
    if settings["gradient_compression"] != "none":
        found.append(f"gradients sent as {settings['gradient_compression']}")
    if settings["compile"]:
        found.append("compiled blocks")
    found += lacks
    if found:
        raise SystemExit(f"train.py has no {', '.join(found)}: set TRAIN_SCRIPT to one that has")


class Text:
    """Sample number -> its bytes, cut from the text of all files in the order of their names."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.seq_len: int = settings["data"]["seq_len"]
        self.batch: dict[str, int] = settings["batch"]
        patterns = settings["data"]["paths"]
        if patterns is None and settings["data"]["corpus"] is None:
            raise SystemExit("train.json names no data: set data.path in the job and render again")
        if patterns is None:  # a text that every Python has, which was asked for
            library = Path(sysconfig.get_paths()["stdlib"])
            paths = sorted(library.glob("*.py"))[:80]
        else:
            found = {
                Path(name)
                for each in patterns
                for name in glob.glob(str(FOLDER / each), recursive=True)
            }
            below = {
                path for each in found for path in ([each] if each.is_file() else each.rglob("*"))
            }
            paths = sorted({path.resolve() for path in below if path.is_file()})
        if not paths:
            raise SystemExit(f"no file matches {patterns} in {FOLDER}")
        self.text = b"".join(path.read_bytes() for path in paths)
        self.num = (len(self.text) - 1) // self.seq_len
        if not self.num:
            raise SystemExit(f"{len(self.text)} bytes of text are less than one sample")

    def take(self, numbers: Iterable[int]) -> list[bytes]:
        """Samples of seq_len + 1 bytes; a token is a byte modulo the vocabulary."""
        starts = [number % self.num * self.seq_len for number in numbers]
        return [self.text[start : start + self.seq_len + 1] for start in starts]

    def micro_batches(
        self, step: int, data_rank: int, num_data_ranks: int
    ) -> Iterator[list[bytes]]:
        """What a data rank reads for one optimizer step, from 0."""
        batch = self.batch
        share = batch["global"] // num_data_ranks
        if share * num_data_ranks != batch["global"] or share % batch["micro"]:
            raise SystemExit(
                f"{num_data_ranks} data ranks do not divide the global batch of {batch['global']} "
                f"into micro-batches of {batch['micro']}"
            )
        first = step * batch["global"] + data_rank * share
        for start in range(first, first + share, batch["micro"]):
            yield self.take(range(start, start + batch["micro"]))


def learning_rate(settings: dict[str, Any], step: int) -> float:
    """At a step, counted from 0: a linear warm-up, then the schedule."""
    peak, warm_up = float(settings["learning_rate"]), int(settings["warmup_steps"])
    if step < warm_up:
        return peak * (step + 1) / warm_up
    last = settings["steps"] - 1
    begin = max(warm_up, last - int(settings["decay_steps"]))
    done = 1.0 if last <= begin else min(1.0, max(0, step - begin) / (last - begin))
    end = float(settings["final_learning_rate"])
    share = {
        "constant": 1.0,
        "linear": 1 - (1 - end) * done,
        "wsd": 1 - (1 - end) * done,
        "cosine": end + (1 - end) * (1 + math.cos(math.pi * done)) / 2,
    }[settings["schedule"]]
    return peak * share


def digest(tensors: Iterable[tuple[str, tuple[int, ...], bytes]]) -> str:
    """SHA-256 of whole tensors, each its name, shape and bytes, by their names."""
    found = hashlib.sha256()
    for name, shape, values in sorted(tensors):
        found.update(name.encode() + b"\0" + str(tuple(shape)).encode())
        found.update(values)
    return found.hexdigest()


def say_step(step: int, loss: float) -> None:
    """One line of JSON after an optimizer step, counted from 1, with the global batch's loss."""
    _say({"step": step, "loss": loss})


def say_end(*, rank: int, world_size: int, wrapper: str, sharded: int, sha256: str | None) -> None:
    """What proves that the run was what it was asked to be: every rank says it.

    Args:
        rank: This one's.
        world_size: As the process group counts.
        wrapper: Name of the outermost class around the model.
        sharded: Parameters of which this rank holds a part only.
        sha256: Of the whole parameters, which must be the same on all ranks; None where they are
            too many to be gathered.
    """
    _say(
        {
            "rank": rank,
            "world_size": world_size,
            "wrapper": wrapper,
            "sharded": sharded,
            "sha256": sha256,
        }
    )


def _say(line: dict[str, Any]) -> None:
    # In one write: ranks may share the terminal.
    print(json.dumps(line) + "\n", end="", flush=True)
