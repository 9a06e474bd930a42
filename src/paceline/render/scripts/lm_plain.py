"""What the example program is in every engine: the samples, the schedule of the learning rate, and
what it prints at each step and at the end.

Needs Python alone; text with a tokenizer also needs transformers. Everything that is counted comes
from `train.json` beside this file.
"""

import glob
import hashlib
import json
import math
import mmap
import struct
import sysconfig
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SPLITS = ("tensor", "pipeline", "context", "expert")


def read_settings() -> dict[str, Any]:
    """`train.json`."""
    settings: dict[str, Any] = json.loads((FOLDER / "train.json").read_text())
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
    elif settings["lacks_model"] is not None:
        found.append(f"model {settings['lacks_model']}")
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
    if settings["data"]["paths"] is None and settings["data"]["corpus"] is None:
        raise SystemExit("train.json names no data: set data.path in the job and render again")


class Text:
    """Sample number -> its tokens, cut from all files in the order of their names.

    A token is a byte of text, a token of the tokenizer that `train.json` names, or a number in a
    file of tokens: nanoGPT's `.bin`, llm.c's, or Megatron's with its `.idx`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        data = settings["data"]
        self.seq_len: int = data["seq_len"]
        self.batch: dict[str, int] = settings["batch"]
        self.vocab: int = settings["vocab"]
        self.parts = _parts(_files(data), data)
        self.starts = [0]
        for part in self.parts:
            self.starts.append(self.starts[-1] + len(part))
        self.num = (self.starts[-1] - 1) // self.seq_len
        if self.num < 1:
            raise SystemExit(f"the data have {self.starts[-1]} tokens: less than one sample")

    def take(self, numbers: Iterable[int]) -> list[list[int]]:
        """Samples of seq_len + 1 tokens; the last of one is the first of the next."""
        starts = (number % self.num * self.seq_len for number in numbers)
        return [self._cut(start, start + self.seq_len + 1) for start in starts]

    def _cut(self, start: int, stop: int) -> list[int]:
        tokens: list[int] = []
        place = bisect_right(self.starts, start) - 1
        while start < stop:
            first = start - self.starts[place]
            tokens += self.parts[place][first : first + stop - start]
            start, place = self.starts[place + 1], place + 1
        if max(tokens) >= self.vocab:
            raise SystemExit(f"token {max(tokens)} in the data: the model knows {self.vocab}")
        return tokens

    def micro_batches(
        self, step: int, data_rank: int, num_data_ranks: int
    ) -> Iterator[list[list[int]]]:
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


def _files(data: dict[str, Any]) -> list[Path]:
    patterns = data["paths"]
    if patterns is None:  # a text that every Python has, which was asked for
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    named = {
        Path(name) for each in patterns for name in glob.glob(str(FOLDER / each), recursive=True)
    }
    below = {path for each in named for path in ([each] if each.is_file() else each.rglob("*"))}
    files = {path.resolve() for path in below if path.is_file()}
    found = sorted(each for each in files if each.suffix != ".idx" or not _are_tokens(files, data))
    if not found:
        raise SystemExit(f"no file matches {patterns} in {FOLDER}")
    return found


def _parts(files: Sequence[Path], data: dict[str, Any]) -> list[Sequence[int]]:
    """The tokens of each file."""
    if _are_tokens(files, data):
        return [_tokens_in(path) for path in files]
    if data["tokenizer"] is None:
        return [path.read_bytes() for path in files]
    rows = [path for path in files if path.suffix in _ROWS]
    if rows:
        raise SystemExit(f"{rows[0]} holds rows, or is compressed: train.py reads plain text")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        data["tokenizer"], revision=data["tokenizer_revision"]
    )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return [
        array("I", tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end)
        for text in texts
    ]


def _are_tokens(files: Iterable[Path], data: dict[str, Any]) -> bool:
    """Whether the files hold token numbers: as the job says, or all by their names."""
    return data["kind"] == "tokens" or (
        data["kind"] == "auto" and all(each.suffix in (".bin", ".idx") for each in files)
    )


_ROWS = (
    ".jsonl",
    ".json",
    ".ndjson",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".feather",
    ".gz",
    ".zst",
)
_LLM_C = struct.pack("<i", 20240520)
"""How llm.c's files begin, with a header of 1024 bytes (karpathy/llm.c, `dataloader.h`)."""

_MEGATRON_TYPES = {4: "i", 5: "q", 8: "H"}
"""Codes of types that hold token numbers (Megatron-LM, `core/datasets/indexed_dataset.py`)."""


def _tokens_in(path: Path) -> Sequence[int]:
    """A file of tokens, mapped into memory; uint16 where no index has another type."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    index, kind = path.with_suffix(".idx"), 8
    if index.is_file():
        head = index.read_bytes()[:18]  # name, version, type
        kind = head[17] if head.startswith(b"MMIDIDX") and len(head) == 18 else -1
    elif view[:4] == _LLM_C:
        view = view[1024:]
    if kind not in _MEGATRON_TYPES or len(view) % struct.calcsize(_MEGATRON_TYPES[kind]):
        raise SystemExit(f"{path} is no file of tokens: nanoGPT's, llm.c's or Megatron's")
    return view.cast(_MEGATRON_TYPES[kind])


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
    """One line of JSON after an optimizer step, counted from 1, with the global batch's loss.

    A loss that is not finite ends the run: every later step would be lost, and saved.
    """
    _say({"step": step, "loss": loss})
    if not math.isfinite(loss):
        raise SystemExit(f"step {step}: the loss is {loss}; the newest checkpoint is from before")


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
