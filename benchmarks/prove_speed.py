"""How long `paceline prove` takes, as whole processes, and whether few blocks stand for all.

    .venv/bin/python benchmarks/prove_speed.py [n]          # every job n times, 3 when left out
    .venv/bin/python benchmarks/prove_speed.py --whole      # each once more with every block traced

Wall time from the start of the process to its end, with the imports of torch. The largest memory is
that of the larger of the two processes, the command and its helper.

`--whole` takes minutes a job.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import machine, spread

COMMON = "data: {corpus: python-stdlib, seq_len: 8192}"
JOBS = {
    "8B, FSDP2 over 64": (
        "llama-3-8b", 8, 64, "tensor: 1, pipeline: 1, context: 1, recompute_every: 1", 5,
    ),
    "70B, FSDP2 over 32 x tensor 8": (
        "llama-3-70b", 32, 256, "tensor: 8, pipeline: 1, context: 1, recompute_every: 1", 8,
    ),
    "405B, FSDP2 over 128 x tensor 8": (
        "llama-3-405b", 128, 1024, "tensor: 8, pipeline: 1, context: 1, recompute_every: 1", 8,
    ),
    "70B, pipeline 8 interleaved x FSDP2 over 4 x tensor 8": (
        "llama-3-70b", 32, 128,
        "tensor: 8, pipeline: 8, schedule: interleaved, chunks: 2, context: 1, recompute_every: 1",
        15,
    ),
    "Mixtral 8x7B, FSDP2 over 64 x experts 8": (
        "mixtral-8x7b", 8, 64,
        "tensor: 1, expert: 8, pipeline: 1, context: 1, recompute_every: 1", 10,
    ),
}  # fmt: skip
"""Preset, nodes of 8 H100, samples in a batch, what the layout fixes, and the bar in seconds."""


def main() -> None:
    """Prove every job, and print what it took."""
    whole = "--whole" in sys.argv
    counts = [argument for argument in sys.argv[1:] if argument.isdigit()]
    num_runs = int(counts[0]) if counts else 1 if whole else 3
    print(f"measured; {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in JOBS.items():
            job = Path(folder) / "job.yaml"
            job.write_text(_job(*parts[:4]))
            runs = [_prove(job) for _ in range(num_runs)]
            taken = [seconds for _, seconds, _ in runs]
            proof = runs[-1][0]
            print(f"{name} (bar {parts[4]} s)")
            print(f"  wall {spread(taken)}, largest process {max(r for *_, r in runs):.0f} MiB")
            _print_stages(proof)
            if whole:
                _compare(proof, *_prove(job, "--whole"))


def _job(preset: str, nodes: int, batch: int, layout: str) -> str:
    fixed = f"sharding: full, recompute: full, micro_batch: 1, {layout}"
    return "\n".join(
        (
            "name: proved",
            f"model: {{preset: {preset}}}",
            COMMON,
            f"cluster: {{accelerator: H100-SXM, nodes: {nodes}, per_node: 8}}",
            f"train: {{global_batch: {batch}, steps: 1000}}",
            f"layout: {{{fixed}}}",
        )
    )


def _prove(job: Path, *options: str) -> tuple[dict[str, Any], float, float]:
    """The proof, seconds of the whole process, and MiB of its largest one."""
    command = [sys.executable, "-m", "paceline", "prove", str(job), "--json", *options]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    taken = time.perf_counter() - started
    if not printed:
        assert process.stderr is not None
        raise SystemExit(process.stderr.read().decode())
    process.returncode = os.waitstatus_to_exitcode(status)  # 3 says that it does not fit
    return json.loads(printed)["proof"], taken, usage.ru_maxrss / 1024


def _print_stages(proof: dict[str, Any]) -> None:
    stages = proof["stages"]
    peaks = ", ".join(f"{stage['peak_bytes']:,}" for stage in stages)
    print(f"  peak bytes {peaks}")
    for how in dict.fromkeys(stage["how"] for stage in stages):
        print(f"  {how}")


def _compare(proof: dict[str, Any], whole: dict[str, Any], seconds: float, _: float) -> None:
    """Each rank's peak beside that of the whole trace."""
    print(f"  traced whole in {seconds:.1f} s")
    for few, all_of_them in zip(proof["stages"], whole["stages"], strict=True):
        one, other = few["peak_bytes"], all_of_them["peak_bytes"]
        print(f"    rank {few['rank']}: {one:,} and {other:,} bytes, {one / other - 1:+.4%}")


if __name__ == "__main__":
    main()
