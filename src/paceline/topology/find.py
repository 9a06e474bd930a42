"""The cluster of a job: this machine where it is what the job asks for, else as declared."""

from dataclasses import replace
from pathlib import Path

from paceline.catalog import (
    Accelerator,
    Catalog,
    accelerator_named,
    catalog_name,
    find_accelerator,
    find_catalog_file,
    load_catalog,
)
from paceline.catalog.mig import RATES_WITHIN
from paceline.errors import JobError
from paceline.job import ClusterSpec, Job
from paceline.topology.cards import (
    check_declared,
    check_gpus_seen,
    check_memory,
    check_one_kind,
    check_slices,
    different_gpus,
    memory_of_gpus,
    memory_problem,
    uses_host_memory,
)
from paceline.topology.cluster import Cluster, Known
from paceline.topology.levels import (
    Level,
    find_levels,
    host_bytes_per_s,
    node_bytes_per_s,
    usual_network_bytes_per_s,
)
from paceline.topology.machine import Machine, find_local_machine, with_links
from paceline.topology.places import lacks_rdma
from paceline.topology.read_nvidia import FoundGpu, GpuTopology, read_matrices
from paceline.topology.unknown import EstimatedCard, estimate_card, pcie_bytes_per_s, pcie_link
from paceline.topology.wiring import levels_of_node
from paceline.units import counted

_MAX_AUTO_CPU_RANKS = 2
"""As `cluster.per_node` says in its help."""

_OTHER_GPU = "A100-80"
"""Its process overhead is taken for a GPU of which nothing but its memory is known: it is the same
for every NVIDIA card of the catalog."""


def find_cluster(spec: ClusterSpec, job: Job, machine: Machine | None = None) -> Cluster:
    """The cluster that a job asks for.

    `cpu`, and accelerators that this machine has enough of, are this machine. Any other cluster
    is taken as declared: it can be planned for, not run on here.

    Args:
        spec: The job's `cluster` section.
        job: For the places of fields in messages.
        machine: This machine, if already looked at, `with_links`.

    Raises:
        JobError: The accelerator is unknown, the nodes differ, this machine has fewer than asked
            for or cannot show its GPUs, or the job's own catalog file is wrong.
    """
    catalog = load_catalog(find_catalog_file(job.folder, spec.catalog))
    cluster = _find(spec, job, machine, catalog)
    if not (cluster.uses_rdma and lacks_rdma(job)):
        return cluster
    wired = [link for link in catalog.links.values() if link.kind == "tcp"]
    usual = min(wired, key=lambda link: abs(link.bytes_per_s - (cluster.network_bytes_per_s or 0)))
    estimated: dict[str, Known] = {"network_bytes_per_s": "estimated"}
    return replace(cluster.over_network(usual), known={**cluster.known, **estimated})


def _find(spec: ClusterSpec, job: Job, machine: Machine | None, catalog: Catalog) -> Cluster:
    declared = matrix_of(spec, job)
    links_of = with_links if machine is None and declared is None else (lambda seen: seen)
    machine = machine or find_local_machine()
    if declared is not None:
        machine = replace(machine, topology=declared)
    if spec.accelerator == "auto":
        check_gpus_seen(machine, job.where("cluster.accelerator"), "set cluster.accelerator to cpu")
    here = spec.accelerator in ("auto", "cpu")
    if here:
        check_memory(job)
    if here and spec.rdma != "auto":
        raise _no_rdma(job, "the ranks are on this machine, without a network between them")
    if spec.accelerator == "cpu" or (spec.accelerator == "auto" and not machine.gpus):
        return _cpu_cluster(spec, machine, catalog)
    if spec.accelerator == "auto":
        return _gpu_cluster(spec, job, links_of(machine), catalog)
    where = job.where("cluster.accelerator")
    check_one_kind(spec.accelerator, catalog, where)
    known = find_accelerator(spec.accelerator, where=where, catalog=catalog)
    check_slices(known, spec, job.where("cluster.per_node"))
    check_declared(known, job, host_bytes_per_s(known, catalog.links))
    check_memory(job)
    if known.slice_of is not None:
        spec = replace(spec, per_node=1)
    num_here = sum(_is_of(gpu, known, catalog) for gpu in machine.gpus)
    per_node = spec.per_node if spec.per_node != "auto" else max(1, num_here // spec.nodes)
    if num_here and num_here == len(machine.gpus) and spec.nodes * per_node <= num_here:
        return _gpu_cluster(spec, job, links_of(machine), catalog, known)
    if declared is not None:
        if spec.per_node == "auto":
            spec = replace(spec, per_node=len(declared.gpus))
        else:
            _enough(declared, spec.per_node, job)
    return _declared_cluster(spec, _with_rdma(known, job, catalog), catalog, declared)


def _is_of(gpu: FoundGpu, known: Accelerator, catalog: Catalog) -> bool:
    """Whether a GPU is of a kind; one with unlike slices (MIG) may be any of them."""
    name = catalog_name(gpu.name, catalog)
    return name == known.name or (gpu.is_mig and name is not None and name == known.slice_of)


_WITHOUT_RDMA = ("tcp", "tcpx")
"""Kinds of networks whose NICs do not move data without the CPU."""


def _with_rdma(known: Accelerator, job: Job, catalog: Catalog) -> Accelerator:
    """The accelerator with a network that has or lacks RDMA, as `cluster.rdma` says."""
    asked, usual = job.spec.cluster.rdma, catalog.links.get(known.network or "")
    kind, through = _kind(job.spec.cluster), job.spec.cluster.mlx_backend
    if through != "auto" and usual is not None:
        if asked is True:
            raise JobError.of(
                code="T024",
                what=f"cluster.rdma is true, and cluster.mlx_backend {through} is without RDMA",
                where=job.where("cluster.mlx_backend"),
                fix="leave one of them out",
            )
        asked = False if usual.is_rdma else asked
    if asked != "auto" and kind not in (None, "thunderbolt") and asked == (kind in _WITHOUT_RDMA):
        raise _no_rdma(job, f"cluster.network names {kind}")
    if asked == "auto" or (usual is not None and usual.is_rdma == asked):
        return known
    links = [each for each in catalog.links.values() if each.is_rdma == asked]
    if usual is not None:
        alike = (usual.kind, usual.bytes_per_s)
        same = [each for each in links if (each.kind, each.bytes_per_s) == alike]
        if same:  # Thunderbolt 5 on Macs, which has both
            return replace(known, network=same[0].name)
    wired = [each for each in links if each.kind == "tcp"]
    if asked or usual is None or not wired:
        raise _no_rdma(job, f"the network of {known.name}, {known.network or 'unknown'}, has none")
    link = min(wired, key=lambda each: abs(each.bytes_per_s - usual.bytes_per_s))
    return replace(known, network=link.name, network_node_bytes_per_s=link.bytes_per_s)


def _no_rdma(job: Job, why: str) -> JobError:
    return JobError.of(
        code="T024",
        what=f"cluster.rdma is {str(job.spec.cluster.rdma).lower()}, and {why}",
        where=job.where("cluster.rdma"),
        fix="leave cluster.rdma out, or write the network that the nodes have into "
        "paceline-catalog.toml: `network` of the accelerator",
    )


def matrix_of(spec: ClusterSpec, job: Job) -> GpuTopology | None:
    """The matrix that a job names; None where it names none.

    Raises:
        JobError: `T019`, the file cannot be read, has no matrix or nodes that differ, or the ranks
            run on CPUs.
    """
    if spec.topology is None:
        return None
    path, what = job.folder / Path(spec.topology).expanduser(), None
    try:
        found = read_matrices(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        found, what = {}, f"cannot be read: {error}"
    kinds: dict[str, list[str]] = {}
    for node, topology in found.items():
        kinds.setdefault(str(topology.cells), []).append(node)
    if len(kinds) > 1:
        listed = " and ".join(", ".join(nodes[:3]) for nodes in kinds.values())
        what = f"has nodes whose GPUs are not joined alike: {listed}"
    first = next(iter(found.values()), None)
    if what is None and first is None:
        what = "has no matrix of `nvidia-smi topo -m`"
    if what is None and spec.accelerator == "cpu":
        what = "joins GPUs, and the job's ranks run on CPUs"
    if what is not None:
        raise _bad_matrix(job, what)
    return first


def _enough(topology: GpuTopology, num_ranks: int, job: Job) -> GpuTopology:
    if len(topology.gpus) < num_ranks:
        raise _bad_matrix(job, f"has {len(topology.gpus)} GPUs for {counted(num_ranks, 'rank')}")
    return topology


def _bad_matrix(job: Job, what: str) -> JobError:
    return JobError.of(
        code="T019",
        what=f"{job.spec.cluster.topology} {what}",
        where=job.where("cluster.topology"),
        fix="keep what a node prints: nvidia-smi topo -m > topology.txt",
    )


def _cpu_cluster(spec: ClusterSpec, machine: Machine, catalog: Catalog) -> Cluster:
    """Ranks of all simulated nodes share this machine's cores and memory."""
    known = catalog.accelerators["cpu"]
    per_node = (
        spec.per_node
        if spec.per_node != "auto"
        else max(1, min(_MAX_AUTO_CPU_RANKS, int(machine.num_cores)))
    )
    num_ranks = spec.nodes * per_node
    cores = machine.num_cores / num_ranks
    memory = machine.memory_bytes // num_ranks
    usable = machine.available_bytes // num_ranks
    if spec.memory != "auto":
        memory = usable = spec.memory // per_node
    # Simulated nodes are one machine: their network is its memory, as inside a node.
    link_rate = node_bytes_per_s(known, catalog.links) or 0.0
    network = link_rate * per_node if spec.network == "auto" else spec.network
    network_known: Known = "estimated" if spec.network == "auto" else "declared"
    return Cluster(
        accelerator="cpu",
        is_local=True,
        num_nodes=spec.nodes,
        ranks_per_node=per_node,
        backend=known.backend,
        cores_per_rank=cores,
        memory_bytes=memory,
        usable_bytes=usable,
        overhead_bytes=known.overhead_bytes,
        peak_flops_per_s=cpu_peak_flops_per_s(machine, cores),
        memory_bytes_per_s=_share(known.memory_bytes_per_s, num_ranks),
        link_bytes_per_s=link_rate,
        network_bytes_per_s=network,
        levels=find_levels(
            replace(known, network=known.link) if spec.network == "auto" else known,
            catalog.links,
            num_nodes=spec.nodes,
            ranks_per_node=per_node,
            network_node_bytes_per_s=network,
            network_known=network_known,
            network_kind=_kind(spec),
        ),
        host_bytes=(
            machine.memory_bytes // spec.nodes if spec.host_memory == "auto" else spec.host_memory
        ),
        known=_known(
            spec,
            "measured",
            cores_per_rank="measured",
            peak_flops_per_s="estimated",
            network_bytes_per_s=network_known,
        ),
    )


def _kind(spec: ClusterSpec) -> str | None:
    return None if spec.network_kind == "auto" or spec.network == "auto" else spec.network_kind


def _share(rate: float | None, num_ranks: int) -> float | None:
    return None if rate is None else rate / num_ranks


def cpu_peak_flops_per_s(machine: Machine, num_cores: float) -> dict[str, float]:
    """Estimated peak of some cores: cores x clock x vector lanes x 2 (multiply and add).

    One vector pipe a core is assumed, at the clock the kernel reports; some cores have two, and
    most clock higher for a while. bf16 counts twice where it has instructions of its own, and the
    same elsewhere. Empty when clock or vector width is unknown.
    """
    if machine.clock_hz is None or machine.simd_bytes is None:
        return {}
    fp32 = num_cores * machine.clock_hz * (machine.simd_bytes // 4) * 2
    return {"fp32": fp32, "bf16": fp32 * (2 if machine.has_bf16 else 1)}


def _gpu_cluster(
    spec: ClusterSpec,
    job: Job,
    machine: Machine,
    catalog: Catalog,
    known: Accelerator | None = None,
) -> Cluster:
    """The GPUs of this machine; several nodes divide them. What they are is looked up where the job
    does not name it."""
    if (different := different_gpus(machine.gpus, job.where("cluster.accelerator"))) is not None:
        raise JobError(different)
    known = known or accelerator_named(machine.gpus[0].name, catalog.accelerators)
    is_slice = known is not None and known.slice_of is not None
    num_here = 1 if is_slice else len(machine.gpus)  # a CUDA process sees one slice
    if known is not None:
        check_slices(known, spec, job.where("cluster.per_node"))
    per_node = spec.per_node if spec.per_node != "auto" else max(1, num_here // spec.nodes)
    if spec.nodes * per_node > num_here:
        raise JobError.of(
            code="T002",
            what=f"{counted(spec.nodes, 'node')} x {per_node} is {spec.nodes * per_node} GPUs, "
            f"this machine has {num_here}",
            where=job.where("cluster.per_node"),
            fix=f"set per_node to {num_here // spec.nodes}"
            if num_here >= spec.nodes
            else "set nodes to 1, or name another machine's accelerator",
        )
    gpu, num_ranks = machine.gpus[0], spec.nodes * per_node
    name = known.name if known is not None else gpu.name
    memory = memory_of_gpus(machine.gpus, known, machine.memory_bytes)
    if (memory is None and spec.memory == "auto") or (gpu.is_mig and not is_slice):
        raise JobError(memory_problem(machine.gpus, job.where("cluster.memory")))
    card = None if known is not None else estimate_card(gpu, per_node, catalog)
    row = known or (card.accelerator if card else catalog.accelerators[_OTHER_GPU])
    topology = None if gpu.is_mig else machine.topology
    if known is not None and known.link_bytes_per_s is not None and spec.topology is None:
        topology = None  # a catalog file of one's own states the rate
    in_node = None
    if topology is not None:
        in_node = levels_of_node(
            _enough(topology, num_ranks, job),
            row,
            catalog,
            num_ranks=num_ranks,
            ranks_per_node=per_node,
            pcie=pcie_link(gpu, row, catalog.links),
        )
    cluster = _from_catalog(
        spec,
        row,
        catalog,
        in_node=in_node,
        name=name,
        has_rates=known is not None or card is not None,
        is_local=True,
        per_node=per_node,
        memory_bytes=memory or 0,  # declared where it is None
        cores_per_rank=machine.num_cores / num_ranks,
        host_bytes=machine.memory_bytes // spec.nodes,
    )
    link = catalog.links.get((known.host_link or known.link or "") if known else "")
    if gpu.pcie_generation and (link is None or link.kind == "pcie"):
        rate = pcie_bytes_per_s(gpu, catalog.links)
        cluster = replace(cluster, host_link_bytes_per_s=rate)
    if spec.memory == "auto" and gpu.memory_bytes is None:
        cluster = _unreported(cluster, known, machine)
    return cluster if card is None else _estimated(cluster, card)


def _unreported(cluster: Cluster, known: Accelerator | None, machine: Machine) -> Cluster:
    """The cluster of cards that do not report their memory: what is free of the host's is what
    they may use, or the catalog says what they have."""
    if uses_host_memory(machine.gpus[0].name, known):
        free = machine.available_bytes // len(machine.gpus)
        return replace(cluster, usable_bytes=min(cluster.usable_bytes, free))
    cited: dict[str, Known] = dict.fromkeys(("memory_bytes", "usable_bytes"), "cited")
    return replace(cluster, known={**cluster.known, **cited})


def _estimated(cluster: Cluster, card: EstimatedCard) -> Cluster:
    """The cluster of a card that the catalog does not have: every rate is estimated."""
    rates: dict[str, Known] = dict.fromkeys(
        ("peak_flops_per_s", "memory_bytes_per_s", "overhead_bytes"),
        "estimated",
    )
    return replace(
        cluster,
        rates_within=card.rates_within,
        resembles=card.like,
        known={**cluster.known, **rates},
    )


def _declared_cluster(
    spec: ClusterSpec, known: Accelerator, catalog: Catalog, topology: GpuTopology | None
) -> Cluster:
    assert known.memory_bytes is not None, "only a CPU's memory is not in the catalog"
    per_node = known.num_per_node if spec.per_node == "auto" else spec.per_node
    in_node = None
    if topology is not None:
        in_node = levels_of_node(
            topology,
            known,
            catalog,
            num_ranks=per_node,
            ranks_per_node=per_node,
            pcie=pcie_link(FoundGpu(name=known.name, memory_bytes=None), known, catalog.links),
        )
    return _from_catalog(
        spec,
        known,
        catalog,
        name=known.name,
        has_rates=True,
        is_local=False,
        per_node=per_node,
        in_node=in_node,
        memory_bytes=known.memory_bytes,
        cores_per_rank=None,
    )


def _from_catalog(
    spec: ClusterSpec,
    known: Accelerator,
    catalog: Catalog,
    *,
    name: str,
    has_rates: bool,
    is_local: bool,
    per_node: int,
    memory_bytes: int,
    cores_per_rank: float | None,
    host_bytes: int | None = None,
    in_node: tuple[Level, ...] | None = None,
) -> Cluster:
    memory = memory_bytes if spec.memory == "auto" else spec.memory
    usual = usual_network_bytes_per_s(known, catalog.links, per_node)
    network = usual if spec.network == "auto" else spec.network
    network_known: Known = "cited" if spec.network == "auto" else "declared"
    levels: tuple[Level, ...] = ()
    if has_rates:
        levels = find_levels(
            known,
            catalog.links,
            num_nodes=spec.nodes,
            ranks_per_node=per_node,
            network_node_bytes_per_s=network,
            network_known=network_known,
            network_kind=_kind(spec),
            in_node=in_node,
        )
    measured: dict[str, Known] = {"cores_per_rank": "measured"} if is_local else {}
    if known.slice_of is not None:
        measured |= dict.fromkeys(("peak_flops_per_s", "memory_bytes_per_s"), "estimated")
    if in_node:
        measured["link_bytes_per_s"] = "measured"
    if host_bytes is None and known.host_memory_bytes is not None:
        host_bytes = known.host_memory_bytes * per_node
        measured["host_bytes"] = "cited" if spec.host_memory == "auto" else "declared"
    around = [level.bytes_per_s for level in levels if level.name != "network"]
    link_bytes_per_s = around[-1] if around else node_bytes_per_s(known, catalog.links)
    return Cluster(
        accelerator=name,
        is_local=is_local,
        num_nodes=spec.nodes,
        ranks_per_node=per_node,
        backend=known.backend,
        cores_per_rank=cores_per_rank,
        memory_bytes=memory,
        usable_bytes=memory,
        overhead_bytes=known.overhead_bytes,
        peak_flops_per_s=known.peak_flops_per_s if has_rates else {},
        memory_bytes_per_s=known.memory_bytes_per_s if has_rates else None,
        link_bytes_per_s=link_bytes_per_s if has_rates else None,
        network_bytes_per_s=network if has_rates or spec.network != "auto" else None,
        host_link_bytes_per_s=host_bytes_per_s(known, catalog.links) if has_rates else None,
        host_bytes=host_bytes if spec.host_memory == "auto" else spec.host_memory,
        levels=levels,
        num_multiprocessors=known.num_multiprocessors if has_rates else None,
        rates_within=1.0 if known.slice_of is None else RATES_WITHIN,
        resembles=() if known.slice_of is None else (known.slice_of,),
        known=_known(
            spec,
            "measured" if is_local else "cited",
            network_bytes_per_s=network_known,
            **measured,
        ),
    )


def _known(spec: ClusterSpec, memory: Known, **others: Known) -> dict[str, Known]:
    """How the numbers of a cluster are known: `memory` where the job declares none."""
    memory = memory if spec.memory == "auto" else "declared"
    cited = ("overhead_bytes", "peak_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s")
    return {
        **dict.fromkeys(cited, "cited"),
        **dict.fromkeys(("memory_bytes", "usable_bytes"), memory),
        "host_bytes": "measured" if spec.host_memory == "auto" else "declared",
        **others,
    }
