"""What the clouds share: names of accelerators, the limits of time and money, and secrets by name.

Each file that rents something says what the run is expected to cost, from which day the price is,
and has a limit that ends it. Secrets come from the environment of whoever submits; files have their
names alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.catalog import Price, find_prices, load_providers, offers_of_nodes
from paceline.catalog.price import price_day
from paceline.errors import JobError
from paceline.estimate.cost import RunCost, cannot_run
from paceline.job import Job
from paceline.plan import Plan
from paceline.plan.outlook import needs_of, outlook
from paceline.render.engine import Gap
from paceline.render.example import folder_gaps
from paceline.render.shell import command
from paceline.render.text import commented
from paceline.units import format_seconds, significant

GUARD = "cloud_guard.py"
PACKAGES = ("torch>=2.11,<2.14", "transformers>=5,<6")
"""What the example program was run with; images of PyTorch may have an older one."""

_COMPASS = "(north|south|east|west|central|northeast|northwest|southeast|southwest)"
_REGIONS = {
    "aws": rf"(us|eu|ap|ca|sa|me|af|il|mx|cn)(-gov)?-{_COMPASS}-\d",
    "azure": r"[a-z]{6,}\d?",
    "do": r"[a-z]{3}\d",
    "gcp": rf"(us|europe|asia|australia|northamerica|southamerica|me|africa)-{_COMPASS}\d+",
    "lambda": rf"(us|europe|asia|australia|me)-({_COMPASS}|midwest)-\d",
    "nebius": rf"(eu|us|me|uk)-{_COMPASS}\d",
    "oci": rf"(us|eu|uk|ap|ca|sa|me|af|il|mx)-(?!{_COMPASS}-)[a-z]+-\d",
    "runpod": r"[A-Z]{2,3}(-[A-Z]{2,3}-\d)?",
}
"""Provider -> the form of its regions' names; the price list has none. `--for sky` leaves out the
clouds whose form a region has not. The tests hold it against names of SkyPilot's catalogs v8: all
of aws, lambda and nebius, two of oci. azure, do, gcp and runpod were written from memory: no list
was at hand. Whether a region is there is the provider's to say."""

_BLIND = "PyTorch sees no GPU: its CUDA may need a newer driver. Set cloud.image"

_UNKNOWN_RUN_S = 24 * 3600.0
"""Where the time of the run is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a rented machine stops."""

    max_run_s: float
    idle_s: float
    expected: RunCost | None
    """What the run costs at this provider; None without a price or a time."""

    per_hour_usd: float | None
    """Price of all machines for an hour."""

    budget_usd: float | None

    @property
    def lines(self) -> list[str]:
        """For the comment at the head of a file."""
        idle = format_seconds(self.idle_s)
        ends = f"Ends after {format_seconds(self.max_run_s)} at the latest, or {idle} of idleness."
        if self.per_hour_usd is None:
            return ["What it costs is not known: no price of this accelerator here.", ends]
        most = self.per_hour_usd * self.max_run_s / 3600
        at_most = f"{ends} That is ${most:,.2f} at the most, at ${self.per_hour_usd:,.2f} an hour."
        if self.expected is None:
            return ["What it costs is not known: nor is its time.", at_most]
        cost = self.expected
        money = (
            f"Expected: ${cost.usd:,.2f} in {significant(cost.hours)} h, {cost.num_instances} x "
            f"{cost.instance} {cost.way} (price of {price_day(cost.as_of)}; {cost.source})."
        )
        return [money, at_most]

    def words(self, *command: str, spent: str | None = None) -> list[str]:
        """The command under `cloud_guard.py`.

        Args:
            command: What trains.
            spent: File on storage that outlives the machine, so that earlier starts count.
        """
        limits = ["--max-run-s", f"{self.max_run_s:.0f}", "--idle-s", f"{self.idle_s:.0f}"]
        if self.per_hour_usd is not None:
            limits += ["--per-hour-usd", f"{self.per_hour_usd:.4f}"]
        if self.budget_usd is not None:
            limits += ["--budget-usd", f"{self.budget_usd:g}"]
        if spent is not None:
            limits += ["--spent-file", spent]
        return ["python3", GUARD, *limits, "--", *command]

    def guarded(self, *words: str, spent: str | None = None) -> str:
        """The guarded command as a line of a shell."""
        return command(*self.words(*words, spent=spent))


def limits_of(plan: Plan, job: Job, providers: Sequence[str]) -> Limits:
    """The limits of a run at one of the providers, at the cheapest price of the plan's.

    Raises:
        JobError: `H041`, the run is expected to cost more than `plan.budget` there; `H044`, there
            is a budget and no price.
    """
    asked = job.spec.cloud
    way = "spot" if job.spec.plan.spot else "on demand"
    cost = _cost_at(plan, job, providers, way)
    rate = None
    if cost is not None:
        rate = cost.per_instance_hour_usd * cost.num_instances
    else:
        rates = [hourly(row, spot=job.spec.plan.spot) for row in offers(plan, providers)]
        if any(rates):  # a price, though the time of the run is not known
            rate = min(filter(None, rates)) * plan.cluster.num_nodes
    budget = job.spec.plan.budget
    if budget is not None and rate is None:
        raise JobError.of(
            code="H044",
            what=f"plan.budget of ${budget:,.2f} cannot be kept: no price of "
            f"{plan.cluster.ranks_per_node} x {plan.cluster.accelerator}, {way}, at "
            f"{' or '.join(providers)} is known here",
            where=job.where("plan.budget"),
            fix="leave plan.budget out and set cloud.max_run, or choose a machine with a price "
            "(`paceline catalog prices`)",
        )
    if budget is not None and cost is not None and cost.usd > budget:
        raise JobError.of(
            code="H041",
            what=f"the run is expected to cost ${cost.usd:,.2f} at {cost.provider}, {way}, and "
            f"plan.budget is ${budget:,.2f}",
            where=job.where("plan.budget"),
            fix="raise plan.budget, set plan.objective to cost, or see `paceline plan` for "
            "cheaper providers",
        )
    expected_s = plan.wall_s if cost is None else cost.hours * 3600
    if asked.max_run != "auto":
        max_run_s = asked.max_run
    else:
        max_run_s = _UNKNOWN_RUN_S if expected_s is None else 1.5 * expected_s + 1800
    if budget is not None and rate is not None:
        max_run_s = min(max_run_s, budget / rate * 3600)
    return Limits(
        max_run_s=max_run_s,
        idle_s=asked.idle_stop,
        expected=cost,
        per_hour_usd=rate,
        budget_usd=budget,
    )


def hourly(row: Price, *, spot: bool) -> float:
    """0 is: not to be had so."""
    return (row.spot_per_hour_usd or 0.0) if spot else row.per_hour_usd


def _cost_at(plan: Plan, job: Job, providers: Sequence[str], way: str) -> RunCost | None:
    """The plan's own where it has one there: it may come from a price list of the person's."""
    known = [plan.cost, *plan.costs] if plan.cost is not None else [*plan.costs]
    for costs in (known, outlook(plan, job, prices=offers(plan, providers)).costs):
        rented = [each for each in costs if each.way == way and not each.is_by_hand]
        here = [each for each in rented if each.provider in providers]
        if here:
            return min(here, key=lambda each: each.usd)
    return None


def offers(plan: Plan, providers: Sequence[str]) -> list[Price]:
    """Price rows of instances with a node's accelerators at the providers that can run the plan,
    the cheapest first. Where the network of all of them is slower than the plan counts on, they
    still have a price an hour, which limits hold; the run's time is then not known."""
    count, needs = plan.cluster.ranks_per_node, needs_of(plan, plan.state)
    alone = replace(needs, num_nodes=1, network_bytes_per_s=None, is_rdma=False)
    rows = offers_of_nodes(
        [row for row in find_prices(plan.cluster.accelerator) if row.provider in providers], count
    )
    rows = tuple(row for row in rows if row.num_accelerators == count)
    fitting = [row for row in rows if cannot_run(row, needs) is None] or [
        row for row in rows if cannot_run(row, alone) is None
    ]
    return sorted(fitting, key=lambda row: row.per_hour_usd)


def named(
    plan: Plan, job: Job, names: Mapping[str, str], *, provider: str, counts: Sequence[int] = ()
) -> str:
    """The provider's name of the plan's accelerator.

    Raises:
        JobError: `H040`, it has none, or not so many in one machine; naming what it has.
    """
    cluster = plan.cluster
    if cluster.accelerator not in names:
        raise JobError.of(
            code="H040",
            what=f"{provider} has no {cluster.accelerator} that is known here",
            where=job.where("cluster.accelerator"),
            fix=f"one of {', '.join(names)}",
        )
    if counts and cluster.ranks_per_node not in counts:
        raise JobError.of(
            code="H040",
            what=f"{provider} rents no machine with {cluster.ranks_per_node} {cluster.accelerator}",
            where=job.where("cluster.per_node"),
            fix=f"set cluster.per_node to {' or '.join(map(str, counts))}",
        )
    return names[cluster.accelerator]


def has_region(provider: str, region: str) -> bool | None:
    """Whether a provider spells its regions so; None where its spelling is not known here.

    >>> has_region("gcp", "us-east-1"), has_region("aws", "us-east-1"), has_region("vast", "x")
    (False, True, None)
    """
    form = _REGIONS.get(provider)
    return None if form is None else re.fullmatch(form, region) is not None


def region_gap(job: Job, provider: str, title: str) -> list[Gap]:
    """A region that is not spelled as the provider's are."""
    region = job.spec.cloud.region
    if region is None or has_region(provider, region):
        return []
    return [
        Gap(
            what=f"the region {region}",
            why=f"{title} spells its regions another way",
            nearest=f"handed on as it is: {title} refuses the run where it has no such region",
            fix="cloud.region: one of its own, or none",
            where="cloud.region",
        )
    ]


def torch_lines(job: Job, image: str) -> list[str]:
    """Lines of a shell that bring PyTorch as new as the program needs into an image of ours, and
    end where it does not see the GPUs; none where the job names its own image."""
    if job.spec.cloud.image is not None:
        return []
    see = f"import sys,torch; torch.cuda.is_available() or sys.exit({_BLIND!r})"
    return [
        f"# {image} has an older PyTorch.",
        command("python3", "-m", "pip", "install", "--quiet", *PACKAGES),
        command("python3", "-c", see),
    ]


def secret_files(job: Job, *keys: str) -> dict[str, str]:
    """`.env.example`: the variables that whoever submits has set, without values; and `.gitignore`,
    so that a copy of it with values is not kept by mistake."""
    names = [*keys, *job.spec.cloud.secrets]
    about = commented(["Set these where you submit. Never write a value into a file of the job."])
    return {
        ".env.example": about + "".join(f"{name}=\n" for name in names),
        ".gitignore": ".env\n.env.*\n!.env.example\ncheckpoints/\n",
    }


def need_lines(*names: str) -> list[str]:
    """Lines of a shell that end a script where a variable is not set, without showing any."""
    return [f': "${{{name}:?set it in your environment}}"' for name in names]


def one_machine(plan: Plan, provider: str) -> list[Gap]:
    """A refusal of several nodes, where the catalog says that a provider has none."""
    why = load_providers()[provider].one_machine
    if plan.cluster.num_nodes == 1 or why is None:
        return []
    what, where = f"{plan.cluster.num_nodes} nodes", "cluster.nodes"
    fix = "set cluster.nodes to 1, or render for sky"
    return [Gap(what=what, why=why, nearest=None, fix=fix, where=where)]


def data_gap(job: Job) -> list[Gap]:
    """A rented machine has none of the files of this one."""
    found = list(folder_gaps(job))
    if job.spec.data.path is None:
        return found
    return [
        *found,
        Gap(
            what=f"the files of data.path, {job.spec.data.path}",
            where="data.path",
            why="they are on this machine, and only the folder of these files is copied",
            nearest="copy them into the folder, at the same relative place, before submitting",
        ),
    ]


def storage_gap(job: Job) -> list[Gap]:
    """Machines that are given back take local checkpoints with them."""
    if job.spec.cloud.storage is not None:
        return []
    soon = f"{format_seconds(job.spec.cloud.idle_stop)} after the end they go with the machines"
    lost = "and spot machines that are taken away start the run from its beginning"
    return [
        Gap(
            what="checkpoints that outlive the machines",
            where="cloud.storage",
            why="cloud.storage names no bucket",
            nearest=f"{soon}: fetch them before" + (f"; {lost}" if job.spec.plan.spot else ""),
            fix="cloud.storage: s3://bucket/prefix",
        )
    ]
