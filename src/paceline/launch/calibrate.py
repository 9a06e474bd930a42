"""Measure this machine in helper processes, one for each rank.

Under torchrun (RANK and WORLD_SIZE are set) this process is one rank of many, and starts only its
own helper; only rank 0 hears what was measured.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.catalog import Catalog, catalog_name
from paceline.catalog.measured import Measurements
from paceline.errors import JobError, RunError
from paceline.job import parse_job
from paceline.job.packages import need_package
from paceline.launch.ranks import Failing, RankProcess, run_ranks
from paceline.topology import Cluster, find_cluster
from paceline.topology.machine import Machine, find_local_machine, with_links

_FIX = "try --ranks 1, and free memory and cores of this machine"
_FAILING = Failing(code="T017", where="paceline calibrate", late=_FIX, died=_FIX)

_START_S = 120.0
"""On top of what measuring may take: PyTorch's import, contexts and the last call. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which ranks measure."""

    rank: int | None
    """Rank of this process under torchrun; None when it starts all ranks itself."""

    num_nodes: int
    ranks_per_node: int | None
    """None is as many as the machine has."""


def find_place(environment: Mapping[str, str], num_ranks: int | None) -> Place:
    """What torchrun says, else one node.

    >>> find_place({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, None)
    Place(rank=9, num_nodes=2, ranks_per_node=8)
    """
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return Place(rank=None, num_nodes=1, ranks_per_node=num_ranks)
    world = int(environment["WORLD_SIZE"])
    local = int(environment.get("LOCAL_WORLD_SIZE", world))
    return Place(rank=int(environment["RANK"]), num_nodes=world // local, ranks_per_node=local)


def find_own_cluster(place: Place, folder: Path, catalog: Catalog) -> Cluster:
    """This machine as the planner would see it, with as many ranks as measure.

    Raises:
        JobError: It has fewer accelerators than asked for, or one that the catalog does not know.
    """
    machine = find_local_machine()
    name = _accelerator(machine, catalog)
    # Nodes of CPUs are simulated by the planner: what is between them is not a network's.
    nodes = 1 if name == "cpu" else place.num_nodes
    asked = place.ranks_per_node
    job = parse_job(
        "{model: {decoder: {layers: 1, hidden: 8, heads: 1}}, "
        "data: {corpus: python-stdlib, seq_len: 8}, train: {global_batch: 1, steps: 1}}",
        source="calibrate",
        folder=folder,
    )
    source = None if catalog.source is None else str(catalog.source.resolve())
    spec = replace(
        job.spec.cluster,
        accelerator=name,
        nodes=nodes,
        per_node=asked or "auto",
        catalog=source,
    )
    if name != "cpu" and asked is not None and asked > len(machine.gpus):
        raise JobError.of(
            code="T002",
            what=f"{asked} ranks were asked for, this machine has {len(machine.gpus)} GPUs",
            where="--ranks",
            fix=f"--ranks {len(machine.gpus)}, or leave it out",
        )
    return find_cluster(spec, job, with_links(machine))


def _accelerator(machine: Machine, catalog: Catalog) -> str:
    if not machine.gpus:
        return "cpu"
    name = catalog_name(machine.gpus[0].name, catalog)
    if name is not None:
        return name
    reported = machine.gpus[0].name
    raise JobError.of(
        code="T018",
        what=f"the catalog has no peak rates of `{reported}`",
        where="this machine",
        fix="add [accelerators.NAME] to your catalog file, `like` a known one, with "
        f'smi_names = ["{reported}"]',
    )


def measure_machine(
    cluster: Cluster,
    place: Place,
    *,
    seconds: float,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Measurements | None:
    """What the ranks of this machine reach; None for ranks other than 0 under torchrun.

    Args:
        seconds: That measuring may take, without starting.

    Raises:
        JobError: `R010` without PyTorch, `T017` when a rank fails or hangs.
    """
    need_package("torch", "measuring needs PyTorch")
    with tempfile.TemporaryDirectory(prefix="paceline-calibrate-") as name:
        folder = Path(name)
        ranks = [place.rank] if place.rank is not None else list(range(cluster.num_ranks))
        limit_s = seconds + _START_S
        try:
            run_ranks(
                [_rank(rank, folder, cluster, place, seconds) for rank in ranks],
                limit_s=limit_s,
                on_progress=lambda line: on_progress(f"{_MARK}{line}"),
                failing=_FAILING,
            )
        except RunError as error:
            raise JobError(*error.problems) from None
        if ranks[0] != 0:
            return None
        return msgspec.json.decode((folder / "answer").read_bytes(), type=Measurements)


_MARK = "calibrate: "


def _rank(rank: int, folder: Path, cluster: Cluster, place: Place, seconds: float) -> RankProcess:
    device = "cpu" if cluster.backend == "gloo" else "cuda"
    command = [sys.executable, "-m", "paceline.runtime.calibrate", "--device", device]
    command += ["--seconds", str(seconds), "--answer", str(folder / "answer")]
    environment = dict(os.environ)
    if cluster.backend == "gloo":
        threads = max(1, int(cluster.cores_per_rank or 1))
        command += ["--threads", str(threads)]
        # The threads wait for each other at every product: not by spinning.
        environment |= {"OMP_NUM_THREADS": str(threads)}
        peaks = cluster.peak_flops_per_s
        if peaks.get("bf16", 0) > peaks.get("fp32", 0):
            command.append("--bf16")
    if place.rank is None:
        command += ["--store", str(folder / "store")]
        environment |= _ranks_of(rank, cluster.num_ranks)
        if cluster.backend == "gloo":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    log = folder / f"log-{rank}"
    return RankProcess(rank, command, log=log, environment=environment, mark=_MARK)


def _ranks_of(rank: int, num_ranks: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return dict(zip(names, map(str, (rank, rank, num_ranks, num_ranks)), strict=True))
