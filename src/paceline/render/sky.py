"""SkyPilot: one task that starts torchrun on every node of a cluster it rents where it is cheapest.

The files are torchrun's, and what rents, stops and recovers around them.
"""

from dataclasses import replace
from typing import Any

from paceline.catalog import Price, find_prices
from paceline.errors import JobError, Problem
from paceline.job import Job
from paceline.plan import Plan
from paceline.render import cloud, torchrun
from paceline.render.carried import OF_DDP
from paceline.render.cloud import GUARD, Limits, limits_of
from paceline.render.device import accelerator_refusals
from paceline.render.engine import Files, Gap
from paceline.render.example import example
from paceline.render.shell import quote, script
from paceline.render.text import header, to_yaml

CLOUDS = (
    *("aws", "azure", "gcp", "oci", "lambda", "runpod", "nebius", "vast", "cudo", "fluidstack"),
    *("paperspace", "do", "hyperbolic"),
)
"""Those of SkyPilot 0.14 (`sky.skylet.constants.ALL_CLOUDS`) whose prices the catalog has."""

_RESTARTS = 3

CARRIES = OF_DDP | {"cloud", "recovery.max_restarts", "recovery.shrink"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`task.yaml`, `submit.sh`, torchrun's files, the guard, and what is said of secrets."""
    return {
        "task.yaml": _task(plan, job),
        "submit.sh": _submit(plan, job),
        "launch.sh": torchrun.launch_script(plan, job),
        **cloud.secret_files(job),
        **example(plan, job, "train_torchrun.py", "lm.py", GUARD),
    }


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """torchrun's, files of this machine, and checkpoints without a bucket; a TPU is refused."""
    why = "task.yaml sets up PyTorch for CUDA, ROCm and CPUs, and names no TPU slice and runtime"
    no_tpu = accelerator_refusals(plan, uses=("nccl", "gloo"), why=why)
    return [*no_tpu, *torchrun.gaps(plan, job), *cloud.data_gap(job), *cloud.storage_gap(job)]


def offers_of(plan: Plan, job: Job) -> tuple[list[Price], Limits]:
    """The machines that may be taken, the cheapest first, and limits that hold at the dearest.

    Raises:
        JobError: `H040`, no cloud has them, or `plan.provider` has not, or not such a region;
            `H041`, too dear; `H044`, a budget without a price.
    """
    wanted = job.spec.plan
    clouds: tuple[str, ...] = CLOUDS if wanted.provider is None else (wanted.provider.lower(),)
    clouds = _with_region(job, clouds)
    limits = limits_of(plan, job, clouds)
    rows = [row for row in cloud.offers(plan, clouds) if cloud.hourly(row, spot=wanted.spot)]
    if not rows:
        raise JobError(_nobody_has(plan, job))
    budget, nodes = wanted.budget, plan.cluster.num_nodes
    if budget is not None and limits.expected is not None:
        hours = limits.expected.hours
        rows = [
            row for row in rows if cloud.hourly(row, spot=wanted.spot) * nodes * hours <= budget
        ]
    dearest = max(cloud.hourly(row, spot=wanted.spot) for row in rows) * nodes
    longest_s = limits.max_run_s
    if budget is not None:
        longest_s = min(longest_s, budget / dearest * 3600)
    return rows, replace(limits, per_hour_usd=dearest, max_run_s=longest_s)


def _with_region(job: Job, clouds: tuple[str, ...]) -> tuple[str, ...]:
    """Those that spell their regions as the job's is. A cloud that the job names itself may also be
    one whose spelling is not known here."""
    region, provider = job.spec.cloud.region, job.spec.plan.provider
    if region is None:
        return clouds
    sure = provider is None
    found = tuple(
        name
        for name in clouds
        if (has := cloud.has_region(name, region)) or (has is None and not sure)
    )
    if found:
        return found
    raise JobError.of(
        code="H040",
        what=f"{provider or 'no cloud that is known here'} "
        f"{'spells no region' if provider else 'spells a region'} {region}",
        where=job.where("cloud.region"),
        fix="set cloud.region to one of its own, or leave it out"
        if provider
        else "name the cloud as well: plan.provider",
    )


def resources(plan: Plan, job: Job, rows: list[Price], limits: Limits) -> dict[str, Any]:
    """What each node is. Where the plan names no provider, every cloud that has the accelerator may
    be taken; each calls it by the name of its own price list."""
    cluster, wanted = plan.cluster, job.spec.plan
    names = {row.provider: row.spelled for row in rows}
    region = job.spec.cloud.region
    places = [
        {
            "infra": name if region is None else f"{name}/{region}",
            "accelerators": f"{spelled}:{cluster.ranks_per_node}",
        }
        for name, spelled in names.items()
    ]
    found: dict[str, Any] = {"any_of": places} if len(places) > 1 else dict(places[0])
    found["use_spot"] = wanted.spot
    if not wanted.spot:  # a managed job ends its machines itself
        minutes = max(1, round(limits.idle_s / 60))
        found["autostop"] = {"idle_minutes": minutes, "down": True}
    if wanted.budget is not None and limits.per_hour_usd is not None:
        # Of one node, as SkyPilot counts it; beyond it the run would leave the budget.
        found["max_hourly_cost"] = round(limits.per_hour_usd / cluster.num_nodes, 2)
    if wanted.spot:
        found["job_recovery"] = {
            "strategy": "EAGER_NEXT_REGION",
            "max_restarts_on_errors": _RESTARTS,
        }
    if job.spec.cloud.image is not None:
        found["image_id"] = f"docker:{job.spec.cloud.image}"
    return found


def _nobody_has(plan: Plan, job: Job) -> Problem:
    cluster, provider = plan.cluster, job.spec.plan.provider
    wanted = f"{cluster.ranks_per_node} x {cluster.accelerator}"
    elsewhere = sorted({row.provider for row in cloud.offers(plan, CLOUDS)})
    counts = {row.num_accelerators for row in find_prices(cluster.accelerator)}
    if elsewhere:
        fix = f"set plan.provider to one of {', '.join(elsewhere)}, or leave it out"
    elif counts:
        fix = f"set cluster.per_node to one of {', '.join(map(str, sorted(counts)))}"
    else:
        fix = "name an accelerator with a price: `paceline catalog prices`"
    who = provider if provider is not None else "no cloud of SkyPilot whose prices are known here"
    return Problem(
        code="H040",
        what=f"{who} {'has no' if provider else 'has'} machine with {wanted}",
        where=job.where("plan.provider" if provider else "cluster.accelerator"),
        fix=fix,
    )


def _task(plan: Plan, job: Job) -> str:
    asked = job.spec.cloud
    rows, limits = offers_of(plan, job)
    task: dict[str, Any] = {
        "name": _name(job),
        "num_nodes": plan.cluster.num_nodes,
        "workdir": ".",
        "resources": resources(plan, job, rows, limits),
    }
    if asked.secrets:
        # No values: `submit.sh` hands them over from its environment.
        task["secrets"] = dict.fromkeys(asked.secrets)
    if asked.storage is not None:
        bucket, _, prefix = asked.storage.partition("://")[2].partition("/")
        task["file_mounts"] = {
            "/bucket": {
                "source": f"{asked.storage.partition('://')[0]}://{bucket}",
                "mode": "MOUNT_CACHED",
            }
        }
        kept = "/".join(("/bucket", *filter(None, (prefix, job.spec.name)), "checkpoints"))
    task["setup"] = "\n".join(["set -e", *(asked.setup or ["pip install torch transformers"]), ""])
    run = ["set -euo pipefail"]
    if asked.storage is not None:
        run += [f"mkdir -p {quote(kept)}", f"ln -sfn {quote(kept)} checkpoints"]
    if plan.cluster.num_nodes > 1:
        run += [
            'HEAD_ADDRESS="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"',
            'export HEAD_ADDRESS RUN_ID="$SKYPILOT_TASK_ID"',
        ]
    spent = None if asked.storage is None else "checkpoints/spent-seconds"
    run += [limits.guarded("bash", "launch.sh", spent=spent), ""]
    task["run"] = "\n".join(run)
    return to_yaml(header(plan, job, *limits.lines), task)


def _submit(plan: Plan, job: Job) -> str:
    secrets = job.spec.cloud.secrets
    spot = job.spec.plan.spot
    start = "sky jobs launch" if spot else f'sky launch -c "${{CLUSTER:-{_name(job)}}}"'
    given = "".join(f" --secret {name}" for name in secrets)
    return script(
        header(plan, job, "Rents what task.yaml says and starts the run on it."),
        'cd "$(dirname "$0")"',
        *cloud.need_lines(*secrets),
        f'exec {start}{given} "$@" task.yaml',
    )


def _name(job: Job) -> str:
    """As SkyPilot takes it: lower case, and no dots."""
    return job.spec.name.lower().replace("_", "-").replace(".", "-").strip("-")
