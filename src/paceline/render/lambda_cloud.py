"""Lambda: one instance, started through its API, which terminates itself at the end.

An instance of Lambda is billed until it is terminated, also when it is shut down: so the key goes
to it over ssh, into the memory of one process, and that process terminates it whatever happens.
"""

from collections.abc import Iterator

from paceline.errors import JobError
from paceline.job import Job
from paceline.plan import Plan
from paceline.render import cloud, torchrun
from paceline.render.carried import OF_DDP
from paceline.render.cloud import GUARD, limits_of
from paceline.render.engine import Files, Gap
from paceline.render.example import example
from paceline.render.shell import script
from paceline.render.text import header, to_json

CARRIES = OF_DDP | {"cloud", "recovery.max_restarts", "recovery.shrink"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`instance.json`, what starts it, torchrun's files, the guard, and what is said of secrets."""
    limits = limits_of(plan, job, ("lambda",))
    secrets = job.spec.cloud.secrets
    return {
        "instance.json": to_json(_instance(plan, job)),
        "submit.sh": script(
            header(plan, job, *limits.lines),
            'cd "$(dirname "$0")"',
            *cloud.need_lines("LAMBDA_API_KEY", "LAMBDA_SSH_KEY_NAME", *secrets),
            'exec python3 lambda_submit.py "$@"',
        ),
        "start.sh": script(
            header(plan, job, "What the instance runs; lambda_submit.py ends the instance after."),
            'cd "$(dirname "$0")"',
            *job.spec.cloud.setup,
            limits.guarded("bash", "launch.sh"),
        ),
        "launch.sh": torchrun.launch_script(plan, job),
        **cloud.secret_files(job, "LAMBDA_API_KEY", "LAMBDA_SSH_KEY_NAME"),
        **example(plan, job, "train_torchrun.py", "lm.py", GUARD, "lambda_submit.py"),
    }


def gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    """torchrun's, several nodes, spot, containers and buckets."""
    asked = job.spec.cloud
    yield from torchrun.gaps(plan, job)
    yield from cloud.data_gap(job)
    yield from cloud.region_gap(job, "lambda", "Lambda")
    yield from cloud.one_machine(plan, "lambda")
    if job.spec.plan.spot:
        yield Gap(
            what="spot machines",
            where="plan.spot",
            why="Lambda has none",
            nearest="an instance on demand, at its price",
            fix="plan.spot: false",
        )
    if asked.image is not None:
        yield Gap(
            what=f"the image {asked.image}",
            where="cloud.image",
            why="an instance is a machine with Lambda Stack, not a container",
            nearest="Lambda Stack's Python and PyTorch; `cloud.setup` installs the rest",
        )
    if asked.storage is not None:
        yield Gap(
            what=f"checkpoints in {asked.storage}",
            where="cloud.storage",
            why="an instance mounts no bucket",
            nearest="they are on the instance and are fetched before it ends",
        )


def instance_type(plan: Plan, job: Job) -> str:
    """Lambda's name of the machine, from its price list.

    Raises:
        JobError: `H040`, it has none.
    """
    rows = cloud.offers(plan, ("lambda",))
    if rows:
        return rows[0].instance
    cluster = plan.cluster
    raise JobError.of(
        code="H040",
        what=f"Lambda has no machine with {cluster.ranks_per_node} x {cluster.accelerator} "
        "that is known here",
        where=job.where("cluster.accelerator"),
        fix="see `paceline catalog prices` for what it has, or render for sky",
    )


def _instance(plan: Plan, job: Job) -> dict[str, object]:
    """The body of `instance-operations/launch`, but the name of the ssh key."""
    return {
        "region_name": job.spec.cloud.region,
        "instance_type_name": instance_type(plan, job),
        "name": job.spec.name,
        "secrets": list(job.spec.cloud.secrets),
    }
