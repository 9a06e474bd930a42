"""How MLX starts a plan's ranks: its backend, and the words of `mlx.launch`."""

from paceline.plan.decision import Plan
from paceline.plan.operate import uses_rdma

THUNDERBOLT_PORTS = {"M3-Ultra": 6, "M4-Max": 4}
"""Of Thunderbolt 5 on a Mac Studio, which is the most that such a chip comes with (a MacBook Pro
has 3). Source: apple.com, technical specifications of Mac Studio (2025)."""

HOSTFILE = "hosts.json"


def is_mlx(plan: Plan) -> bool:
    """Whether the target is Macs."""
    return plan.cluster.backend == "mlx"


def mlx_backend(plan: Plan) -> str:
    """`jaccl` where the link has RDMA and every Mac a port for every other one, `jaccl-ring` where
    the ports are too few for that, and `ring` over TCP."""
    if not uses_rdma(plan):
        return "ring"
    ports = THUNDERBOLT_PORTS.get(plan.cluster.accelerator, 3)
    return "jaccl" if plan.cluster.num_nodes - 1 <= ports else "jaccl-ring"


def mlx_launch(plan: Plan) -> list[str]:
    """`mlx.launch` with flags that it has (0.32). What it runs comes after `--`: without that it
    executes the named file itself."""
    if plan.cluster.is_local or plan.cluster.num_nodes == 1:
        where = ["--hosts", "127.0.0.1", "-n", str(plan.cluster.num_ranks)]
    else:
        where = ["--hostfile", HOSTFILE]
    return ["mlx.launch", *where, "--backend", mlx_backend(plan), "--"]
