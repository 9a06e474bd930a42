"""Names of the nodes, for engines whose files list them."""

from paceline.errors import JobError
from paceline.job import Job
from paceline.job.hosts import repeated_hosts
from paceline.plan import Plan


def host_names(plan: Plan, job: Job) -> list[str]:
    """`ssh.hosts`, one for each node of the plan.

    Raises:
        JobError: `H021`, one is there twice, or they are too few.
    """
    hosts = list(job.spec.ssh.hosts[: plan.cluster.num_nodes])
    twice = repeated_hosts(hosts)
    if twice or len(hosts) < plan.cluster.num_nodes:
        what = (
            f"{', '.join(twice)} is there twice"
            if twice
            else f"hosts are {len(hosts)}, nodes {plan.cluster.num_nodes}"
        )
        raise JobError.of(
            code="H021",
            what=f"the hostfile cannot be written: {what}",
            where=job.where("ssh.hosts"),
            fix="name every node once",
        )
    return hosts
