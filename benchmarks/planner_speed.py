"""How fast the planner looks at layouts: the search alone, and whole processes.

OMP_NUM_THREADS=1 taskset -c 0 .venv/bin/python benchmarks/planner_speed.py [n]

The space is every layout that the job leaves open. Every one is priced in bytes, and in seconds
where one of its grid (one tensor and pipeline degree) fits.
Below stand figures of other planners, which were measured on another machine and with other models
of what a step costs: they tell orders of magnitude.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import machine, spread

from paceline.catalog.engines import load_engines
from paceline.estimate import case_of
from paceline.job import parse_job
from paceline.plan.search import search
from paceline.plan.search_inputs import space_of
from paceline.profile import resolve_profile
from paceline.topology import find_cluster

LARGE = """\
name: large
model: {preset: llama-3-405b}
data: {path: x, seq_len: 8192}
cluster: {accelerator: H100-SXM, nodes: 2048, per_node: 8}
train: {global_batch: 2048, steps: 1000}
"""
SMALL = """\
name: small
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, per_node: 8}
train: {global_batch: 64, steps: 1000}
"""
PEERS = """\
cited: each was measured by running it, on another machine, one core unless said:
  Calculon, GPT-3 175B on 4,096 A100, 7,126,368 executions   307 a second; 2,336 without logs
  llm-analysis, no search                                    3,480 evaluations a second
  SimuMax, 175B                                              7 to 23 a second
  Aceso, GPT 13B on 32 GPUs                                  about 6 a second and process
  Galvatron, Llama-2 7B on 8 GPUs, 122 tasks                 206 s
  AMP, GPT-2 on 16 GPUs, 53 configurations                   431 s"""


def main() -> None:
    """Search the large space n times, and start the command on the small one n times."""
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"measured; {machine()}, numpy {np.__version__}")
    for name, text in (("Llama-3-405B on 16,384 H100", LARGE), ("Llama-3-8B on 8 H100", SMALL)):
        found, taken = _search(text, num_runs)
        print(f"{name}: {found.num_layouts:,} layouts, {found.num_fitting:,} fit")
        print(f"  search {spread(taken)}")
        rates = [found.num_layouts / seconds / 1e6 for seconds in taken]
        print(f"  priced {spread(rates, 'million a second', 2)}")
    print(f"paceline plan, Llama-3-8B on 8 H100, whole process: {spread(_shell(SMALL, num_runs))}")
    print(f"paceline plan, Llama-3-405B, whole process: {spread(_shell(LARGE, num_runs))}")
    print(PEERS)


def _search(text, num_runs):
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    cluster, profile = find_cluster(job.spec.cluster, job), resolve_profile(job)
    case = case_of(profile, cluster, precision="bf16", engine=load_engines()["paceline"])
    space, taken = space_of(job, cluster, profile), []
    for run in range(num_runs + 1):
        start = time.perf_counter()
        found = search(space, case, limit_bytes=0.9 * cluster.usable_bytes, margin=0.05)
        if run:
            taken.append(time.perf_counter() - start)
    return found, taken


def _shell(text, num_runs):
    paceline, taken = str(Path(sys.executable).parent / "paceline"), []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(text)
        for run in range(num_runs + 1):
            start = time.perf_counter()
            subprocess.run([paceline, "plan", str(job)], check=True, capture_output=True)
            if run:
                taken.append(time.perf_counter() - start)
    return taken


if __name__ == "__main__":
    main()
