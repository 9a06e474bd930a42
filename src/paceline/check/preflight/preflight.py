"""Every check over everything that the nodes said; one verdict for each node."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.check.preflight.accelerators import check_accelerators
from paceline.check.preflight.bandwidth import NodeRate, check_devices, check_sweep, node_rates
from paceline.check.preflight.environment import check_environment, check_interfaces_named
from paceline.check.preflight.gpu_start import check_gpus_at_once, check_torch_build
from paceline.check.preflight.host import check_host
from paceline.check.preflight.need import Need
from paceline.check.preflight.network import check_alike, check_network
from paceline.check.preflight.rdma import check_rdma, check_rdma_alike
from paceline.check.preflight.result import Result, Status, failed, passed
from paceline.check.preflight.software import (
    check_data,
    check_software_alike,
    check_torch,
    check_torch_alike,
    check_versions,
)
from paceline.check.preflight.storage import check_storage
from paceline.topology.node.facts import Gathered, NodeAnswer, NodeFacts

ALL = "all nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The verdict."""

    nodes: tuple[str, ...]
    """In the job's order."""

    results: tuple[Result, ...]
    allowed: tuple[str, ...]
    """Names of checks whose fails were taken for warnings by whoever asked."""

    rates: tuple[NodeRate, ...] = ()
    """What each node's devices multiply; empty where nothing was measured."""

    hashes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Node -> code or data -> its hash there, empty where it is not there."""

    @property
    def failing(self) -> tuple[Result, ...]:
        """What keeps the job from being started."""
        return tuple(each for each in self.results if each.status is Status.FAIL)

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """Nodes with a fail of their own."""
        bad = {each.node for each in self.failing}
        return tuple(node for node in self.nodes if node in bad)

    @property
    def good_nodes(self) -> tuple[str, ...]:
        """The others."""
        bad = set(self.bad_nodes)
        return tuple(node for node in self.nodes if node not in bad)

    @property
    def is_fit(self) -> bool:
        """Whether nothing fails."""
        return not self.failing


def judge(
    gathered: Gathered, need: Need, *, note: str | None = None, allowed: Sequence[str] = ()
) -> Preflight:
    """What the nodes' facts mean for a job.

    Args:
        gathered: What the nodes said.
        note: Text that was left in the run's folder for them to read; None where nothing was.
        allowed: Names of checks, or ids of failures, whose fail is a warning here.
    """
    results: list[Result] = []
    silent: set[str] = set()
    if gathered.is_quick:  # as before a run: what this job's own ranks do, and no other program
        need = replace(need, is_strict=False)
    nodes = {each.name: each.facts for each in gathered.nodes if each.facts is not None}
    results += _apart(nodes, need)
    if _share_a_network(nodes):
        need = replace(need, is_apart=False)
    for answer in gathered.nodes:
        if answer.facts is None:
            silent.add(answer.name)
            results.append(_silent(answer))
        else:
            results += _one(answer, answer.facts, need, note=note, is_quick=gathered.is_quick)
    results += [*check_rdma_alike(nodes, need), *check_alike(nodes, need)]
    results += check_software_alike(nodes, need)
    results += [*check_torch_alike(gathered.nodes), *check_devices(gathered.nodes, need)]
    if gathered.sweep is not None:
        results += check_sweep(gathered.sweep, need)
    results = [_without_blame(each, silent) for each in results]
    return Preflight(
        nodes=tuple(answer.name for answer in gathered.nodes),
        results=tuple(_allow(each, allowed) for each in results),
        allowed=tuple(allowed),
        rates=node_rates(gathered.nodes),
        hashes={node: {**facts.code, **facts.data} for node, facts in nodes.items()},
    )


def check_names() -> tuple[str, ...]:
    """Every check that `--allow` can name, in the order they are shown."""
    return _NAMES


_NAMES = (
    *("answers", "shared-memory", "open-files", "locked-memory", "processes", "stack"),
    *("host-memory", "host-ecc", "cpus", "clock", "accelerators", "driver", "accelerator-memory"),
    *("accelerator-ecc", "accelerator-clocks", "fabric", "kernel-log", "pcie", "links"),
    *("acs", "iommu"),
    *("numa", "versions", "nccl", "torch", "checkpoint-folder", "checkpoint-room", "shared-folder"),
    *(
        "checkpoint-ephemeral",
        "folder",
        "caches",
        "data",
        "data-check",
        "interface",
        "environment",
        "ports",
        "own-name",
        "names",
    ),
    *(
        "reach",
        "rdma",
        "rdma-rate",
        "gpu-direct",
        "rdma-alike",
        "mtu",
        "packages",
        "code",
        "settings",
    ),
    *("machines", "matmul", "all-reduce"),
)


def _one(
    answer: NodeAnswer, facts: NodeFacts, need: Need, *, note: str | None, is_quick: bool
) -> list[Result]:
    node = answer.name
    took = f"{facts.host}, {facts.system} {facts.kernel}, looked at in {facts.seconds:.1f} s"
    results = [
        passed("answers", node, took),
        *check_host(answer, facts, need),
        *check_interfaces_named(node, facts, need),
        *check_environment(node, facts, need),
        *check_storage(node, facts, need, note=note),
        *check_data(node, facts, need),
        *check_network(answer, facts, need),
    ]
    if is_quick:
        results += check_gpus_at_once(node, facts, need)
    else:
        results += [
            *check_accelerators(node, facts, need),
            *check_versions(node, facts, need),
            *check_torch_build(node, facts, need),
            *check_torch(answer, need),
            *check_rdma(node, facts, need),
        ]
    order = {name: number for number, name in enumerate(_NAMES)}
    return sorted(results, key=lambda each: order.get(each.name, len(order)))


def _silent(answer: NodeAnswer) -> Result:
    fix = f"ssh -o BatchMode=yes {answer.name} true, or srun --nodelist={answer.name} hostname"
    said = answer.why_not or "it did not answer"
    return failed("answers", answer.name, said, id="node-unreachable", fix=fix)


def _apart(nodes: Mapping[str, NodeFacts], need: Need) -> Iterator[Result]:
    """Two names of one machine would share its accelerators and its memory."""
    if not need.is_apart:
        return
    first: dict[str, str] = {}
    for node, facts in nodes.items():
        key = f"{facts.boot_id} {facts.host}"
        if facts.boot_id and key in first:
            said = f"it is the same machine as {first[key]}: {facts.host}"
            if need.accelerator == "cpu":  # cores are shared, as of nodes that are simulated
                yield passed("machines", node, said)
                continue
            fix = "name every machine once"
            yield failed("machines", node, said, id="too-few-accelerators", fix=fix)
        else:
            first[key] = node
            yield passed("machines", node, f"{facts.host}")


def _share_a_network(nodes: Mapping[str, NodeFacts]) -> bool:
    """Whether all nodes are one machine with one set of addresses: its loopback leads to each."""
    stacks = {(each.boot_id, each.host, each.interfaces) for each in nodes.values()}
    return len(nodes) > 1 and len(stacks) == 1 and all(each.boot_id for each in nodes.values())


def _without_blame(result: Result, silent: set[str]) -> Result:
    """A node that cannot reach one that is down is not itself at fault."""
    if result.status is Status.FAIL and result.unreached and silent.issuperset(result.unreached):
        return replace(result, status=Status.WARNING)
    return result


def _allow(result: Result, allowed: Sequence[str]) -> Result:
    if result.status is Status.FAIL and (result.name in allowed or result.id in allowed):
        evidence = f"{result.evidence} (a fail, allowed by --allow)"
        return replace(result, status=Status.WARNING, evidence=evidence)
    return result
