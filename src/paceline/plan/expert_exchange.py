"""What a job may ask of the exchange of tokens with routed experts, and what that leaves of the
layouts.

Sources: Megatron-LM core_v0.16.1, core/transformer/transformer_config.py (assertions beside
`overlap_moe_expert_parallel_comm`); deepseek-ai/DeepEP, csrc/kernels/launch.cuh (SWITCH_RANKS,
SWITCH_RDMA_RANKS) and configs.cuh (NUM_MAX_NVL_PEERS); its legacy page's requirements, and setup.py
(be8053d: DISABLE_SM90_FEATURES leaves out the kernels between nodes).
"""

from collections.abc import Iterator

from paceline.catalog import accelerator_named, load_accelerators
from paceline.choices.pipeline_schedules import PLAIN
from paceline.errors import Problem
from paceline.job import Job
from paceline.parallel.abilities import Abilities, Excluded, abilities_of
from paceline.profile import ModelProfile
from paceline.topology import Cluster

_PEERS = 8
"""Ranks of a node that DeepEP's kernels between nodes take."""

_DEEPEP_NODES = 16

_DEEPEP_INSIDE, _DEEPEP_BETWEEN = 8.0, 9.0
"""Compute capabilities from which on DeepEP has kernels inside a node, and between nodes."""

_HIDDEN = "train.async_expert hides nothing there (Megatron Core: overlap_moe_expert_parallel_comm)"

_ASYNC = (
    Excluded(when={"recompute": ("full",)}, why=_HIDDEN),
    Excluded(when={"pipeline": "several", "schedule": (PLAIN,)}, why=_HIDDEN),
)


def asked_of(train: object) -> dict[str, str | bool]:
    """What a job asks of the exchange: field -> what it is where nothing is asked."""
    unasked: dict[str, str | bool] = {"token_dispatcher": "auto", "async_expert": False}
    return {name: each for name, each in unasked.items() if getattr(train, name) != each}


def excluded_by_exchange(job: Job, cluster: Cluster, able: Abilities) -> tuple[Excluded, ...]:
    """Layouts that do not go together with how tokens reach their experts, where an engine can be
    asked for that."""
    train = job.spec.train
    found = _ASYNC if train.async_expert and able.async_expert else ()
    is_named = train.token_dispatcher in able.token_dispatchers
    if job.spec.layout.expert != 1 and (found or is_named):
        found = (*found, Excluded(when={"expert": (1,)}, why="no tokens cross to experts there"))
    if not is_named or train.token_dispatcher != "deepep":
        return found
    is_full = cluster.ranks_per_node == _PEERS and cluster.uses_rdma
    is_full = is_full and (_capability(cluster) or _DEEPEP_BETWEEN) >= _DEEPEP_BETWEEN
    most = _PEERS * _DEEPEP_NODES if is_full else min(cluster.ranks_per_node, _PEERS)
    allowed = {1 << power for power in range(most.bit_length())}
    others = tuple(n for n in range(2, cluster.num_ranks + 1) if n not in allowed)
    why = (
        "DeepEP takes 2, 4 or 8 expert ranks of one node, or 16, 32, 64 or 128 on nodes of 8 GPUs "
        f"with RDMA and compute capability {_DEEPEP_BETWEEN}; at most {most} here"
    )
    return (*found, Excluded(when={"expert": others}, why=why))


def check_exchange(job: Job, cluster: Cluster, profile: ModelProfile) -> Iterator[Problem]:
    """`L012`: an exchange is asked for that the job has not, or that it cannot do."""
    train = job.spec.train
    experts = any(block.experts for block in profile.blocks)
    for name in asked_of(train):
        value = str(getattr(train, name)).lower()
        if not experts or job.spec.layout.expert == 1:
            why = "layout.expert is 1" if experts else f"{profile.name} has no routed experts"
            yield Problem(
                code="L012",
                what=f"train.{name} is {value}, and {why}: no tokens cross to experts",
                where=job.where(f"train.{name}"),
                fix=f"leave train.{name} out",
            )
    has, takes = _capability(cluster), abilities_of(job.spec.engine).deepep_on
    is_deepep, why = train.token_dispatcher == "deepep", ""
    if is_deepep and has is not None and has < _DEEPEP_INSIDE:
        why = f"whose kernels are CUDA's for compute capability {_DEEPEP_INSIDE} and up, and "
        why += f"{cluster.accelerator} " + (f"has {has}" if has else "is not NVIDIA's")
    elif is_deepep and takes and not {cluster.accelerator, str(int(has or 8))} & {*takes}:
        named = (f"compute capability {each}.x" if each.isdigit() else each for each in takes)
        why = f"which {job.spec.engine} takes on {', '.join(named)} alone, and the cluster has "
        why += cluster.accelerator
    if why:
        yield Problem(
            code="L012",
            what=f"train.token_dispatcher is deepep, {why}",
            where=job.where("train.token_dispatcher"),
            fix="leave train.token_dispatcher out",
        )
    if train.async_expert and train.precision == "fp32":
        yield Problem(
            code="L012",
            what="train.async_expert is true, which takes bf16, fp16 or fp8, and train.precision "
            "is fp32",
            where=job.where("train.precision"),
            fix="set train.precision to bf16, or leave train.async_expert out",
        )


def _capability(cluster: Cluster) -> float | None:
    """Compute capability of the accelerators: 0 where they are not NVIDIA's, None where it is not
    known."""
    chip = accelerator_named(cluster.accelerator, load_accelerators())
    if chip is None or chip.vendor != "NVIDIA":
        return None if chip is None else 0.0
    return None if chip.compute_capability is None else float(chip.compute_capability)
