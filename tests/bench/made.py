"""Made facts of a bench, for the tests that judge and show them."""

from collections.abc import Mapping
from dataclasses import replace

from paceline.job import parse_job
from paceline.parallel.layout import Layout
from paceline.plan import Plan, plan_job
from paceline.record.bench import PHASES, Communication, Measured, RankTimes

JOB = """
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {corpus: python-stdlib, seq_len: 64}
cluster: {accelerator: cpu, per_node: 1}
train: {global_batch: 8, steps: 10, precision: fp32}
"""


def plan_of(tmp_path, num_ranks: int, *, cores: float = 8.0, **fields) -> Plan:
    """A plan of the small job, moved to a machine with so many cores for each rank."""
    ranks = f"cluster.per_node={num_ranks}"
    plan = plan_job(parse_job(JOB, source="job.yaml", folder=tmp_path, overrides=[ranks]))
    cluster = replace(plan.cluster, cores_per_rank=cores)
    layout = Layout(
        **{
            "data": num_ranks,
            "sharding": "none",
            "micro_batch": 1,
            "accumulation": max(1, 8 // num_ranks),
            **fields,
        }
    )
    return replace(plan, cluster=cluster, layout=layout, rejected=())


def measured(
    plan: Plan,
    step_s: float,
    *,
    shares: Mapping[str, float] | None = None,
    exposed: float | None = 0.0,
    peak_bytes: int = 1000,
    steps: tuple[float, ...] | None = None,
) -> Measured:
    """Every rank saw the same; `shares` of a step by phase, forward and backward the rest."""
    given = dict(shares or {})
    rest = 1 - sum(given.values())
    given = {"forward": rest / 3, "backward": rest * 2 / 3, **given}
    flight = None
    if exposed is not None:
        flight = Communication(
            in_flight_s=1.5 * 1.1 * exposed * step_s,
            exposed_s=exposed * 1.1 * step_s,
            vote_s=0.0,
            num_collectives=3,
            step_s=1.1 * step_s,
        )
    times = steps or (step_s,) * 6
    ranks = tuple(
        RankTimes(
            rank=rank,
            step_s=times,
            phases={p: (given.get(p, 0.0) * step_s,) * len(times) for p in PHASES},
            communication=flight,
            peak_bytes=peak_bytes,
        )
        for rank in range(plan.layout.num_ranks)
    )
    return Measured(plan=plan, tokens_per_sample=64, notes=(), ranks=ranks)
