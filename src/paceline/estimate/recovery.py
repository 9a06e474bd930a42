"""Where a lost rank's state can come from in a layout, what each place costs, and which is best.

Three tiers, as `recovery.state` names them: live `replica`, snapshots in host `memory`, and the
`checkpoint`, which is always written besides. A tier is worth its share of the
useful time: what it slows the steps down, against what a failure costs with it.

Leaves out: pieces of different size (experts beside dense layers, uneven stages), traffic that
shares a link with the step's own, and failures of many nodes together, beyond one share for all.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from paceline.estimate.engine_memory import HOST_MEMORY_BYTES_PER_S
from paceline.estimate.goodput import Copies, best_interval_s, goodput_with, job_mtbf_s
from paceline.parallel import Layout
from paceline.units import bytes_apart, format_bytes

Tier = Literal["replica", "memory", "checkpoint"]

_SIMPLEST: tuple[Tier, ...] = ("replica", "checkpoint", "memory")
"""What costs nothing first: it is taken where another gains less than `LEAST_GAIN`."""

LEAST_GAIN = 0.001
"""Least gain, as a share of the time. A guess: below it, it is the assumptions that decide."""

_FLOAT32_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What fails, how often, and how long it takes to go on."""

    rank_mtbf_s: float
    """Mean seconds between failures of one rank with its share of host and network."""

    restart_s: float
    """From a failure to the first step when everybody starts again, reading the checkpoint
    included."""

    in_place_s: float = 21.0
    """From a failure to the first step when survivors stay and only the lost ranks are replaced,
    without the state's copy. TrainMover: 19.6 to 21.1 s at 32 to 1,024 GPUs (arXiv:2412.12636).
    Ours on one machine is below a second, which does not predict thousands of ranks."""

    process_share: float = 54 / 419
    """Share of all failures that leave the node and its memory as they are: Llama 3's software
    bugs, 54 of 419 (arXiv:2407.21783, table 5)."""

    together_share: float = 0.01
    """Share of all failures that take a node and the one that holds its copy. A guess."""

    everything_share: float = 0.001
    """Share of all failures that take every copy: power, an operator, a bug. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates that keeping state costs, of one rank; None is unknown."""

    num_domains: int
    """Parts that fail apart: nodes."""

    ranks_per_node: int
    network_bytes_per_s: float | None
    """Network rate of one node, each direction."""

    copy_bytes_per_s: float = 10e9
    """From the accelerator to its host, as copies reach it (`Cluster.copy_bytes_per_s`)."""

    host_bytes_per_s: float = HOST_MEMORY_BYTES_PER_S
    """Bandwidth of one node's memory, read and written by an optimizer on its cores."""

    shares_cores: bool = False
    """Whether the steps run on the same cores (a CPU), so that nothing is hidden behind them."""

    sends_copies: bool = True
    """Whether each snapshot is also sent to another node's memory."""

    free_host_bytes: float = inf
    """Bytes of one node's memory beyond what training keeps there."""

    engine: str | None = None
    """Whose processes train, where they are not Paceline's own: only its checkpoints are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained."""

    num_parameters: int
    """That are trained, of the whole model."""

    num_routed: int = 0
    """Trained parameters in routed experts, a part of `num_parameters`."""

    moment_bytes: float
    """Bytes of the optimizer's moments, for each parameter."""

    step_s: float
    """Without any tier's own cost."""

    save_s: float
    """Training stands still for one checkpoint."""

    write_s: float = 0.0
    """A checkpoint is written on in the background."""

    checkpoint_interval_s: float | None = None
    """Between two checkpoints; None is Daly's, for the failures that need one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTier:
    """One way to keep state, with what it costs and what a failure costs with it."""

    name: Tier
    why_not: str | None
    """Why this layout cannot have it; None when it can."""

    covered: float
    """Share of the failures after which the state is there; the rest go to the checkpoint."""

    outlives_node: bool | None = None
    """Whether those are failures of whole nodes too, and not only of processes whose node stays;
    None in plans of earlier versions."""

    host_bytes: int
    """Bytes of one node's memory, beyond what training needs."""

    network_bytes_per_step: float
    """Sent by each rank, beyond what training needs."""

    step_s: float
    """What each step takes longer, waiting included."""

    interval_s: float | None
    """Seconds of training between two copies; None where there is one of every step."""

    lost_s: float
    """Repeated work after a covered failure, on the mean."""

    fetch_s: float
    """To copy one rank's piece of it from another node."""

    recover_s: float
    """From a covered failure to the first step after it, detection included."""

    useful: float | None
    """Share of the time that is expected to be useful; None where the tier is impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """The tiers of a layout and the one that was chosen."""

    chosen: Tier
    is_asked: bool
    """Whether the job names it."""

    copies: int
    """Ranks that hold the same parameters and optimizer state, as `copies_of` counts them."""

    tiers: tuple[StateTier, ...]
    mtbf_s: float
    """Mean seconds between failures of the whole job, assumed."""

    reason: str
    known: Literal["estimated"] = "estimated"

    def tier(self, name: Tier) -> StateTier:
        """The one of this name."""
        return next(each for each in self.tiers if each.name == name)


def copies_of(layout: Layout) -> int:
    """Ranks with identical parameters and optimizer state, counting the rank itself: the size of
    the groups of `parallel.replicas_of`, without listing them.

    ZeRO-1 keeps whole parameters everywhere but only one copy of each part of the optimizer, so it
    has one.

    >>> copies_of(Layout(data=8, sharding="hybrid", shard=2, micro_batch=1, accumulation=1))
    4
    >>> copies_of(Layout(data=8, sharding="zero1", micro_batch=1, accumulation=1))
    1
    """
    dp_cp = layout.data * layout.context
    if layout.sharding == "hybrid" and layout.expert > layout.shard_degree:
        return 1  # the experts are shared across the copies, and no two ranks hold the same
    return max(1, dp_cp // max(layout.shard_degree, layout.expert))


def copies_elsewhere(layout: Layout, ranks_per_domain: int) -> int:
    """Copies of a rank's parameters and optimizer state that are on other nodes (or other parts
    that fail apart) than the rank's own.

    Copies of a shard are `shard_degree x tensor` ranks apart (`parallel/rank_map.py`).

    >>> layout = Layout(data=8, sharding="hybrid", shard=4, micro_batch=1, accumulation=1)
    >>> copies_elsewhere(layout, 4), copies_elsewhere(layout, 8)
    (1, 0)
    """
    copies = copies_of(layout)
    apart = layout.data * layout.context * layout.tensor // copies
    return copies - min(copies, max(1, ranks_per_domain // apart))


def state_plan(
    layout: Layout,
    training: Training,
    machine: Machine,
    failures: Reliability,
    *,
    asked: Tier | None = None,
) -> StatePlan:
    """The tiers that a layout has, and the one that leaves the most useful time.

    Args:
        layout: How the work is split.
        training: What is trained.
        machine: On what.
        failures: Their rate and their price.
        asked: What the job wants; left out, the best is chosen.

    >>> layout = Layout(data=64, sharding="full", micro_batch=1, accumulation=1)
    >>> training = Training(num_parameters=8_000_000_000, moment_bytes=8,
    ...     step_s=10, save_s=0.15, write_s=6)
    >>> machine = Machine(num_domains=8, ranks_per_node=8, network_bytes_per_s=50e9)
    >>> failures = Reliability(rank_mtbf_s=1_000 * 3600, restart_s=300)
    >>> found = state_plan(layout, training, machine, failures)
    >>> found.chosen, [each.name for each in found.tiers if each.why_not is None]
    ('memory', ['memory', 'checkpoint'])
    """
    mtbf_s = job_mtbf_s(layout.num_ranks, failures.rank_mtbf_s)
    case = _Case(layout, training, machine, failures, mtbf_s)
    tiers = (_replica(case), _memory(case), _checkpoint(case))
    most = max(each.useful or 0.0 for each in tiers)
    good = [each for each in tiers if (each.useful or 0.0) >= most - LEAST_GAIN]
    best = min(good, key=lambda each: _SIMPLEST.index(each.name))
    return StatePlan(
        chosen=best.name if asked is None else asked,
        is_asked=asked is not None,
        copies=copies_of(layout),
        tiers=tiers,
        mtbf_s=mtbf_s,
        reason=_reason(tiers, best, asked),
    )


def _reason(tiers: tuple[StateTier, ...], best: StateTier, asked: Tier | None) -> str:
    others = [
        f"{each.name} {each.useful:.2%}"
        for each in tiers
        if each.useful is not None and each.name != best.name
    ]
    against = f"; {', '.join(others)}" if others else ""
    expected = f"{best.name} gives a goodput of {best.useful:.2%}{against}"
    if asked is None or asked == best.name:
        return expected
    return f"asked for {asked}; {expected}"


@dataclass(frozen=True, slots=True)
class _Case:
    layout: Layout
    training: Training
    machine: Machine
    failures: Reliability
    mtbf_s: float

    @property
    def piece(self) -> float:
        """Parameters of one rank's piece of the optimizer state."""
        layout, training = self.layout, self.training
        routed = training.num_routed / max(layout.shard_degree, layout.expert)
        others = (training.num_parameters - training.num_routed) / layout.shard_degree
        return (others + routed) / (layout.tensor * layout.pipeline)

    @property
    def without_agents(self) -> str | None:
        """Why nothing but checkpoints is there, with an engine of others."""
        engine = self.machine.engine
        return f"{engine} saves only checkpoints" if engine is not None else None

    @property
    def piece_bytes(self) -> float:
        """Float32 parameters and moments of that piece."""
        return self.piece * (_FLOAT32_BYTES + self.training.moment_bytes)

    @property
    def link_bytes_per_s(self) -> float:
        """Network rate of each rank when all of a node send; inf where it is unknown."""
        rate = self.machine.network_bytes_per_s
        return inf if rate is None else rate / self.machine.ranks_per_node

    @property
    def fetch_s(self) -> float:
        """To copy a piece from another node."""
        return self.piece_bytes / self.link_bytes_per_s


def _replica(case: _Case) -> StateTier:
    copies = copies_of(case.layout)
    elsewhere = copies_elsewhere(
        case.layout, max(1, case.layout.num_ranks // case.machine.num_domains)
    )
    why_not = case.without_agents
    if why_not is None and copies < 2:
        why_not = "no other rank holds the same state"
    takes_all = case.failures.together_share if elsewhere == 1 else case.failures.everything_share
    return _priced(case, "replica", why_not=why_not, takes_all=takes_all if elsewhere else None)


_CONTENTION = 0.1
"""Share of the seconds that extra traffic takes by which the step's own traffic is later, though
both are hidden. A guess."""


def _memory(case: _Case) -> StateTier:
    training, machine = case.training, case.machine
    copy_s = case.piece_bytes / machine.copy_bytes_per_s
    if machine.shares_cores:
        copy_s = case.piece_bytes * 2 * machine.ranks_per_node / machine.host_bytes_per_s
    sends, is_alone = machine.sends_copies, machine.num_domains < 2
    why_not = case.without_agents
    if why_not is None and sends and is_alone:
        why_not = "a copy in host memory needs a second node"
    # The own piece and the peer's, and a second of each while it is being replaced.
    copies, held = 4 if sends else 2, case.piece_bytes * machine.ranks_per_node
    needed = copies * held
    if why_not is None and needed > machine.free_host_bytes:
        needs, has = bytes_apart(needed, machine.free_host_bytes)
        why_not = (
            f"{copies} copies of the {format_bytes(held)} of a node's ranks take {needs} of host "
            f"memory, which has {has} for them"
        )
    send_s = case.fetch_s if sends else 0.0
    interval_s = best_interval_s(copy_s, case.mtbf_s, background_s=send_s, step_s=training.step_s)
    steps = max(1.0, interval_s / training.step_s)
    return _priced(
        case,
        "memory",
        why_not=why_not,
        takes_all=case.failures.together_share if sends else None,
        host_bytes=round(needed),
        network_bytes=case.piece_bytes / steps if sends else 0.0,
        fetch_s=send_s,
        step_s=(copy_s + _CONTENTION * send_s) / steps,
        interval_s=interval_s,
        # A failure goes back to the last snapshot that has arrived.
        lost_s=interval_s / 2 + send_s,
    )


def _checkpoint(case: _Case) -> StateTier:
    return _priced(case, "checkpoint", why_not=None, takes_all=1.0)


def _priced(
    case: _Case,
    name: Tier,
    *,
    why_not: str | None,
    takes_all: float | None,
    host_bytes: int = 0,
    network_bytes: float = 0.0,
    step_s: float = 0.0,
    interval_s: float | None = None,
    lost_s: float | None = None,
    fetch_s: float | None = None,
) -> StateTier:
    """A tier with its useful time: that of the checkpoints which it leaves necessary, less what its
    own failures and its own work take. `takes_all` is the share of all failures that take every
    copy; None where a failure of the node takes them."""
    training, failures = case.training, case.failures
    covered = failures.process_share if takes_all is None else 1 - takes_all
    # A failure comes anywhere in a step, which is repeated.
    lost_s = training.step_s / 2 if lost_s is None else lost_s
    fetch_s = case.fetch_s if fetch_s is None else fetch_s
    recover_s = failures.in_place_s + fetch_s
    if training.checkpoint_interval_s is not None:
        saves_every_s = training.checkpoint_interval_s
    else:
        saves_every_s = best_interval_s(
            training.save_s,
            case.mtbf_s / (1 - covered),
            background_s=training.write_s,
            step_s=training.step_s,
        )
    good = goodput_with(
        Copies(
            covered=covered, recover_s=recover_s, lost_s=lost_s, slower=step_s / training.step_s
        ),
        mtbf_s=case.mtbf_s,
        interval_s=saves_every_s,
        save_s=training.save_s,
        restart_s=failures.restart_s,
        background_s=min(training.write_s, saves_every_s),
    )
    return StateTier(
        name=name,
        why_not=why_not,
        covered=covered,
        outlives_node=takes_all is not None,
        host_bytes=host_bytes,
        network_bytes_per_step=network_bytes,
        step_s=step_s,
        interval_s=saves_every_s if name == "checkpoint" else interval_s,
        fetch_s=fetch_s,
        lost_s=good.lost_s_per_failure if name == "checkpoint" else lost_s,
        recover_s=failures.restart_s if name == "checkpoint" else recover_s,
        useful=None if why_not is not None else good.useful,
    )
