"""Loading trained weights of the 8B shape: peak host memory of a rank, and bytes read by all ranks.

    .venv/bin/python benchmarks/pretrained.py --layers 8     4 real ranks over gloo, 8 of 32 layers
    .venv/bin/python benchmarks/pretrained.py --alone        all 32 layers, one rank after another

The files are bf16 and sparse: headers and holes, which take no disk and read as zeros. Parameters
are float32 in memory. Each layout loads in new processes; the peak is of resident memory (VmHWM)
above what the process had before the model was built, page cache left out, as files are read and
not mapped. With --alone each rank of a fake world of 4 reads for itself, so it needs the memory of
one shard; what several ranks hold alike (norms under tensor ranks) is then read by each.

Exit code 1: a rank's peak is above 1.1 x its shard + 200 MB, or all ranks read more than 1.05 x the
files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

RANKS = 4
WITHIN, BESIDE, READ_WITHIN = 1.1, 200_000_000, 1.05
"""The limits of issue 15."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2 x 4": {"data": 4, "sharding": "full"},
    "TP 2 x FSDP2 2": {"data": 2, "sharding": "full", "tensor": 2},
}
_FILE_BYTES = 5 * 10**9


def main() -> None:
    """Print both layouts; exit with 1 where one is over a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--alone", action="store_true", help="one rank after another")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        print(json.dumps(measure(asked.rank, asked.layout, asked.folder, asked.alone)))
        return
    from figures import machine

    print(f"{machine()}, transformers {version('transformers')}")
    with tempfile.TemporaryDirectory() as name:
        num_bytes = write_sparse(Path(name), asked.layers)
        is_within = [show(each, run(each, Path(name), asked), num_bytes) for each in LAYOUTS]
    sys.exit(0 if all(is_within) else 1)


def write_sparse(folder: Path, layers: int) -> int:
    """Files of the shape of Llama 3 8B, of so many layers; returns their bytes."""
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict[str, Any]] = [{}]
    for name, shape in _tensors(layers):
        begin = max((each["data_offsets"][1] for each in files[-1].values()), default=0)
        if begin > _FILE_BYTES:
            files.append({})
            begin = 0
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        files[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, begin + size]}
    places = {}
    for number, entries in enumerate(files, 1):
        path = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header = json.dumps(entries).encode()
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            last = max(each["data_offsets"][1] for each in entries.values())
            file.truncate(8 + len(header) + last)
        places |= dict.fromkeys(entries, path.name)
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _tensors(layers: int) -> Iterator[tuple[str, list[int]]]:
    yield "model.embed_tokens.weight", [128256, 4096]
    for layer in range(layers):
        before = f"model.layers.{layer}."
        yield before + "input_layernorm.weight", [4096]
        for name, rows in (("q", 4096), ("k", 1024), ("v", 1024), ("o", 4096)):
            yield f"{before}self_attn.{name}_proj.weight", [rows, 4096]
        yield before + "post_attention_layernorm.weight", [4096]
        yield before + "mlp.gate_proj.weight", [14336, 4096]
        yield before + "mlp.up_proj.weight", [14336, 4096]
        yield before + "mlp.down_proj.weight", [4096, 14336]
    yield "model.norm.weight", [4096]
    yield "lm_head.weight", [128256, 4096]


def run(layout: str, folder: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank measured."""
    words = [sys.executable, __file__, "--layout", layout, "--folder", str(folder)]
    words += ["--alone"] if asked.alone else []
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    (folder / "store").unlink(missing_ok=True)
    told, running = [], []
    for rank in range(RANKS):
        each = subprocess.Popen([*words, "--rank", str(rank)], env=env, stdout=subprocess.PIPE)
        if asked.alone:
            told.append(each.communicate()[0])
        else:
            running.append(each)
    told += [each.communicate()[0] for each in running]
    return [json.loads(each.splitlines()[-1]) for each in told]


def show(layout: str, seen: list[dict[str, Any]], num_bytes: int) -> bool:
    """One line; whether all is within the limits."""
    worst = max(seen, key=lambda each: each["peak"] - WITHIN * each["shard"])
    read = sum(each["read"] for each in seen) / num_bytes
    beside = (worst["peak"] - worst["shard"]) / 1e6
    print(
        f"{layout:15} files {num_bytes / 1e9:.2f} GB: shard {worst['shard'] / 1e9:.3f} GB, peak "
        f"{worst['peak'] / worst['shard']:.3f} x ({beside:+.0f} MB); read in all {read:.4f} x the "
        f"files; {max(each['seconds'] for each in seen):.1f} s, n = {len(seen)} ranks"
    )
    return worst["peak"] <= WITHIN * worst["shard"] + BESIDE and read <= READ_WITHIN


def measure(rank: int, name: str, folder: Path, alone: bool) -> dict[str, Any]:
    """Bytes of one rank."""
    import torch
    import torch.distributed as dist

    from paceline.job import parse_job
    from paceline.job.pretrained import find_pretrained
    from paceline.parallel.layout import Layout
    from paceline.profile.runnable import shape_of_config
    from paceline.runtime import strategy
    from paceline.runtime.decoder import Decoder
    from paceline.runtime.initial.blueprint import Blueprint
    from paceline.runtime.initial.fill import Filler, give_memory
    from paceline.runtime.pretrained import FromPretrained, Weights

    if alone:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    else:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    layout = Layout(micro_batch=1, accumulation=1, **LAYOUTS[name])
    meshes = strategy.make_meshes(layout, "cpu")
    text = "model: {pretrained: .}\ndata: {path: x}\ntrain: {global_batch: 4, steps: 1}\n"
    found = find_pretrained(parse_job(text, source="job.yaml", folder=folder))
    assert found is not None
    make = FromPretrained(lambda: Decoder(shape_of_config(found.config), 256), found)

    class Alone(Weights):
        """Reads without asking what other ranks hold."""

        def fill(self, boxes: Any, *, is_shared: bool = True) -> None:
            super().fill(boxes, is_shared=False)

    # Imports and pools of the first model do not count.
    strategy.apply(_small(), layout, meshes, precision="fp32", sends=False, fill=give_memory)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    start, begun = _status("VmRSS"), time.perf_counter()
    blueprint = Blueprint(make, 0)
    whole = blueprint.take_model()
    weights = make.weights_of(whole)
    if alone:
        weights.__class__ = Alone
    model = strategy.apply(
        whole,
        layout,
        meshes,
        precision="fp32",
        sends=not alone,
        fill=Filler(blueprint, torch.device("cpu"), weights=weights),
    )
    seconds, peak = time.perf_counter() - begun, _status("VmHWM") - start
    from paceline.runtime.state import local_part

    shard = sum(local_part(parameter)[1].nbytes for parameter in model.parameters())
    return {"peak": peak, "shard": shard, "read": weights.bytes_read, "seconds": seconds}


def _small() -> Any:
    import torch

    from paceline.profile import DecoderShape
    from paceline.runtime.decoder import Decoder

    with torch.device("meta"):
        return Decoder(
            DecoderShape(
                layers=1,
                hidden=64,
                heads=4,
                kv_heads=4,
                head_dim=16,
                ffn=64,
                vocab=64,
                tied_embeddings=False,
            ),
            256,
        )


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main()
