"""How many damaged checkpoints are refused, whether the tensor is named, and what plain torch does.

    .venv/bin/python benchmarks/checkpoint_corruption.py [trials] [loads by torch]

A real run on four ranks (FSDP2) writes two checkpoints. Every trial damages one file of the newer
one in one of the ways below, drawn at random from a fixed seed; a damage that changes no byte is
drawn again. `named` counts the trials in which exactly the tensors that torch's own table of
contents puts at the damaged bytes are named. torch's loader is given a sample of the same damages.
"""

import collections
import pickle
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import machine
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from training import run_job

from paceline.record.checkpoints import damaged_in, find_damage

JOB = {
    "name": "corruption",
    "model": {"decoder": {"layers": 4, "hidden": 64, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 32},
    "cluster": {"accelerator": "cpu", "per_node": 4},
    "train": {"global_batch": 4, "steps": 20, "precision": "fp32"},
    "layout": {"sharding": "full", "data": 4},
    "checkpoint": {"every": 10},
    "evaluate": {"every": 10**6},
}

Content = bytearray
Damage = tuple[dict[str, bytes | None], list[tuple[str, int, int]]]
"""New contents by file (None is gone), and the damaged ranges as (file, start, end)."""


class Scene(NamedTuple):
    """The checkpoint that is damaged, as it was written, and the one before it."""

    files: Mapping[str, bytes]
    older: Mapping[str, bytes]
    shards: list[str]


def flip(scene: Scene, draw: random.Random, name: str) -> Damage:
    content = Content(scene.files[name])
    at = draw.randrange(len(content))
    content[at] ^= 1 << draw.randrange(8)
    return {name: bytes(content)}, [(name, at, at + 1)]


def burst(scene: Scene, draw: random.Random, name: str) -> Damage:
    content = Content(scene.files[name])
    at = draw.randrange(len(content))
    end = min(len(content), at + draw.randrange(1, 513))
    content[at:end] = draw.randbytes(end - at)
    return {name: bytes(content)}, [(name, at, end)]


def truncate(scene: Scene, draw: random.Random, name: str) -> Damage:
    content = scene.files[name]
    keep = draw.randrange(len(content))
    return {name: content[:keep]}, [(name, keep, len(content))]


def zero_tail(scene: Scene, draw: random.Random, name: str) -> Damage:
    content = scene.files[name]
    keep = draw.randrange(len(content))
    return {name: content[:keep] + bytes(len(content) - keep)}, [(name, keep, len(content))]


def swap(scene: Scene, draw: random.Random, name: str) -> Damage:
    other = draw.choice([each for each in scene.files if each != name])
    files = {name: scene.files[other], other: scene.files[name]}
    return files, [(each, 0, len(scene.files[each])) for each in files]


def stale(scene: Scene, draw: random.Random, name: str) -> Damage:
    return {name: scene.older[name]}, [(name, 0, len(scene.files[name]))]


def missing(scene: Scene, draw: random.Random, name: str) -> Damage:
    return {name: None}, [(name, 0, len(scene.files[name]))]


WAYS: Mapping[str, tuple[Callable[[Scene, random.Random, str], Damage], float]] = {
    "bit flipped": (flip, 0.4),
    "bytes overwritten": (burst, 0.15),
    "cut off": (truncate, 0.15),
    "tail zeroed": (zero_tail, 0.15),
    "two files swapped": (swap, 0.05),
    "file of the step before": (stale, 0.05),
    "file missing": (missing, 0.05),
}
"""How a checkpoint is damaged, and the share of the trials."""


def main() -> None:
    """Print, for every way: trials, refused, tensor named, and torch's silent loads."""
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    loads = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    print(f"measured; {machine()}")
    with tempfile.TemporaryDirectory() as temporary:
        run = run_job(Path(temporary), "run", JOB)
        older, newer = sorted((run / "checkpoints").iterdir())
        scene = Scene(read(newer), read(older), sorted(p.name for p in newer.glob("*.distcp")))
        whole = sum(map(len, scene.files.values()))
        print(f"{newer.name} of 4 ranks, {len(scene.files)} files, {whole / 1e6:.1f} MB")
        measure(newer, scene, trials, loads)


def measure(path: Path, scene: Scene, trials: int, loads: int) -> None:
    """Damage, look, and repair again, as often as asked."""
    draw, start = random.Random(0), time.perf_counter()
    owners = owners_of(path)
    expected = loaded_by_torch(path)
    seen: dict[str, collections.Counter[str]] = {way: collections.Counter() for way in WAYS}
    for trial in range(trials):
        way = draw.choices(list(WAYS), [share for _, share in WAYS.values()])[0]
        files, ranges = redraw(scene, draw, way)
        for name, content in files.items():
            put(path / name, content)
        count = seen[way]
        count["trials"] += 1
        problems = list(find_damage(path))
        count["refused"] += bool(problems)
        hit = {
            owner
            for file, begin, end in ranges
            for owner, first, last in owners.get(file, ())
            if begin < last and first < end and is_changed(scene, files, file, first, last)
        }
        sealed = not set(files) & {"manifest.json", "COMMIT", "tensors.json"}
        if hit and sealed:
            count["of tensors"] += 1
            named = set().union(*(damaged_in(path, file) for file, _, _ in ranges))
            told = [owner for owner in hit if any(owner in each.what for each in problems)]
            count["named"] += named == hit and bool(told)
        if trial < loads:
            count["by torch"] += 1
            count["silent"] += is_silent(path, expected)
        for name in files:
            put(path / name, scene.files[name])
    assert not list(find_damage(path)), "it was not repaired"
    columns = ("trials", "refused", "of tensors", "named", "by torch", "silent")
    print(f"{'damage':26}" + "".join(f"{column:>12}" for column in columns))
    for way, count in seen.items():
        print(f"{way:26}" + "".join(f"{count[column]:12}" for column in columns))
    total = sum(seen.values(), collections.Counter())
    print(f"{'all':26}" + "".join(f"{total[column]:12}" for column in columns))
    print(
        f"refused {total['refused'] / total['trials']:.2%}, tensors named exactly "
        f"{total['named'] / total['of tensors']:.2%}, torch loads other values in silence "
        f"{total['silent'] / total['by torch']:.1%}; {time.perf_counter() - start:.0f} s"
    )


def redraw(scene: Scene, draw: random.Random, way: str) -> Damage:
    """A damage that changes something: half of them of data files, half of any file."""
    while True:
        names = scene.shards if draw.random() < 0.5 else sorted(scene.files)
        files, ranges = WAYS[way][0](scene, draw, draw.choice(names))
        if any(content != scene.files[name] for name, content in files.items()):
            return files, ranges


def is_changed(
    scene: Scene, files: Mapping[str, bytes | None], name: str, first: int, last: int
) -> bool:
    content = files[name]
    return content is None or content[first:last] != scene.files[name][first:last]


def owners_of(path: Path) -> dict[str, list[tuple[str, int, int]]]:
    """By file: which tensor is where, by torch's own table of contents."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    owners: dict[str, list[tuple[str, int, int]]] = {}
    for index, place in metadata.storage_data.items():
        at = (index.fqn, place.offset, place.offset + place.length)
        owners.setdefault(place.relative_path, []).append(at)
    return owners


def loaded_by_torch(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor as torch.distributed.checkpoint loads it, with nothing of ours."""
    facts = FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.zeros(each.size, dtype=each.properties.dtype)
        for name, each in facts.items()
        if isinstance(each, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


def is_silent(path: Path, expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether torch loads it without a word and the values are others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = loaded_by_torch(path)
    except BaseException:  # noqa: BLE001 - whatever it raises is not silence
        return False
    if found.keys() != expected.keys():
        return True
    return any(
        found[name].numpy().tobytes() != each.numpy().tobytes() for name, each in expected.items()
    )


def read(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(path.iterdir())}


def put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


if __name__ == "__main__":
    main()
