"""How a plan's run is watched: checks before the start, and alarms while it runs.

Each is a rule a program can follow, not advice: a command with what it must print, or a metric of
`metrics.jsonl` with a threshold.
"""

from dataclasses import dataclass
from typing import Literal

from paceline.plan.decision import Plan

METRICS = (
    "step",
    "generation",
    "at",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "step_s",
    "data_s",
    "forward_s",
    "backward_s",
    "vote_s",
    "apply_s",
    "mfu",
    "memory_bytes",
    "reserved_bytes",
    "applied",
    "samples_digest",
    "accuracy",
    "state_digest",
    "logged",
)
"""Every field of a line of `metrics.jsonl` (docs/reference/metrics.md)."""

_LEAST_SILENCE_S = 60.0
_SILENT_STEPS = 10
_SLOW = 0.8
"""Below this share of the estimated rate somebody should look: the estimate's own error is 10 %."""

_FULL = 0.95
Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A command that must print something, on every node."""

    name: str
    command: str
    expect: str
    """What its output must be, or contain."""

    when: Literal["before the start", "every minute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A metric that must not pass a threshold."""

    metric: str
    """A field of `metrics.jsonl`; `age_s` is the seconds since its last line."""

    above: float | None = None
    below: float | None = None
    steps: int = 1
    """In a row for which it must be so."""

    severity: Severity = "warning"
    action: str = ""

    @property
    def condition(self) -> str:
        """The rule as one expression.

        >>> Alert(metric="tokens_per_s", below=100.0, steps=20).condition
        'tokens_per_s < 100 for 20 steps'
        """
        if self.above is None and self.below is None:
            rule = f"{self.metric} is null"
        elif self.above is not None:
            rule = f"{self.metric} > {_number(self.above)}"
        else:
            rule = f"{self.metric} < {_number(self.below or 0.0)}"
        return rule if self.steps == 1 else f"{rule} for {self.steps} steps"

    @property
    def threshold(self) -> str:
        """The number of the rule, as text."""
        value = self.above if self.above is not None else self.below
        return "null" if value is None else _number(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def health_checks(plan: Plan) -> tuple[HealthCheck, ...]:
    """What must hold on every node of the plan's cluster."""
    cluster = plan.cluster
    found: list[HealthCheck] = []
    if cluster.backend == "nccl":
        found += [
            HealthCheck(
                name="accelerators",
                command="nvidia-smi --query-gpu=index --format=csv,noheader | wc -l",
                expect=str(cluster.ranks_per_node),
                when="before the start",
            ),
            HealthCheck(
                name="memory errors",
                command="nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total "
                "--format=csv,noheader | sort -u",
                expect="0",
                when="every minute",
            ),
        ]
        if uses_rdma(plan):
            found.append(
                HealthCheck(
                    name="network ports",
                    command="cat /sys/class/infiniband/*/ports/*/state | sort -u",
                    expect="4: ACTIVE",
                    when="before the start",
                )
            )
    if cluster.backend == "mlx":
        found.append(
            HealthCheck(
                name="mlx",
                command='python3 -c "import mlx.core as mx; print(mx.metal.is_available())"',
                expect="True",
                when="before the start",
            )
        )
    found += [
        HealthCheck(
            name="shared memory",
            command="df --output=avail -B1 /dev/shm | tail -1",
            expect="at least 1073741824",
            when="before the start",
        ),
        HealthCheck(
            name="checkpoint storage",
            command="test -w runs && df --output=avail -B1 runs | tail -1",
            expect=f"at least {3 * plan.estimate.num_checkpoint_bytes}",
            when="before the start",
        ),
    ]
    return tuple(found)


def alerts(plan: Plan) -> tuple[Alert, ...]:
    """Thresholds from the plan's own estimate."""
    price = plan.estimate
    silence = _LEAST_SILENCE_S
    if price.step_s is not None:
        silence = max(silence, _SILENT_STEPS * price.step_s)
    found = [
        Alert(
            metric="age_s",
            above=silence,
            severity="critical",
            action="a rank hangs or died: `paceline runs` has the state, logs/ every rank's output",
        ),
        Alert(
            metric="loss",
            severity="critical",
            action="the step was refused by all ranks; look at grad_norm before it",
        ),
        Alert(
            metric="memory_bytes",
            above=_FULL * plan.cluster.memory_bytes,
            severity="warning",
            action="halve layout.micro_batch: accumulation doubles, the batch stays",
        ),
        Alert(
            metric="generation",
            above=1,
            severity="info",
            action="the run was restarted; events.jsonl has the cause",
        ),
    ]
    if price.tokens_per_s is not None:
        found.append(
            Alert(
                metric="tokens_per_s",
                below=_SLOW * price.tokens_per_s,
                steps=20,
                severity="warning",
                action="compare data_s, forward_s and vote_s with the first steps: a growing "
                "vote_s is one slow rank, a growing data_s is the data (forward_s where your "
                "program reads it)",
            )
        )
    return tuple(found)


def network_link(plan: Plan) -> str | None:
    """The catalog's name of the link between nodes; None on one node, or when it is unknown."""
    levels = getattr(plan.cluster, "levels", ())
    return levels[-1].link if levels and levels[-1].name == "network" else None


def uses_rdma(plan: Plan) -> bool:
    """Whether the nodes reach each other over a link with remote memory access."""
    link = network_link(plan) or ""
    return link.startswith(("infiniband", "roce", "efa", "slingshot", "omni-path")) or (
        link.endswith("jaccl")
    )
