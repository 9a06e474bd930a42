"""MLX: Macs over Thunderbolt or Ethernet, or CPU ranks of this machine.

Its own launcher starts the ranks, and ends with 0 even when they die: `launch.sh` checks what it
does not. Leaves out: MLX on NVIDIA GPUs, which torchrun serves.
"""

from collections.abc import Iterator
from typing import Any

from paceline.job import Job
from paceline.parallel.abilities import ABILITIES
from paceline.plan import Plan
from paceline.render.carried import OF_EXAMPLE
from paceline.render.engine import Files, Gap
from paceline.render.environment import export_lines
from paceline.render.example import example, example_gaps
from paceline.render.hosts import host_names
from paceline.render.shared_gaps import offload_gaps, precision_gaps, split_gaps
from paceline.render.shell import command, script
from paceline.render.text import header, to_json
from paceline.units import counted, format_bytes

_EXAMPLE_NETWORK = "192.0.2"
"""Addresses of documentation, RFC 5737: `mlx_check.py` refuses them."""

_PORT = 32323
"""mlx.launch's own default."""

_NO_PRECISION = {
    "fp16": ("MLX (0.32) has no loss scaler", None),
    "fp8": ("MLX (0.32) trains in no 8-bit type", None),
    "tf32": ("TF32 is a format of NVIDIA's GPUs", "matrices are multiplied in float32"),
}
"""Precision -> why MLX does not train in it, and what comes nearest."""

THUNDERBOLT_PORTS = {"M3-Ultra": 6, "M4-Max": 4}
"""Thunderbolt 5 ports of a Mac Studio, which is the most that such a chip comes with (a MacBook Pro
has 3). Source: apple.com, technical specifications of Mac Studio (2025)."""

HOSTFILE = "hosts.json"

_START = (
    "# The highest tiers of throughput and latency (taskpolicy(8)): macOS keeps a process of lower",
    "# quality of service on the efficiency cores, and one slow rank holds up all.",
    "start() {",
    '  if [[ "$(uname)" == Darwin ]]; then exec taskpolicy -t 0 -l 0 "$@"; fi',
    '  exec "$@"',
    "}",
)
"""Starts a program on a Mac with the quality of service of one that a person waits for."""

_UNTRIED = ABILITIES["mlx"].untried

CARRIES = OF_EXAMPLE | {"ssh.hosts", "train.states"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`launch.sh` and what it starts and checks; for several Macs also `hosts.json`, to be filled
    in, and `hosts.sh`, which finds out what belongs there."""
    files = {
        "launch.sh": _launch(plan, job),
        **example(plan, job, "train_mlx.py", "mlx_check.py"),
    }
    if plan.cluster.num_ranks > 1:
        files["rank.sh"] = _rank(plan, job)
    if plan.cluster.num_nodes > 1 and not plan.cluster.is_local:
        files[HOSTFILE] = to_json(hostfile(plan, job))
        files["hosts.sh"] = _hosts(plan, job)
    return files


def is_mlx(plan: Plan) -> bool:
    """Whether the target is Macs."""
    return plan.cluster.backend == "mlx"


def runs_mlx(plan: Plan) -> bool:
    """Whether MLX trains the plan: on Macs, or where the job names it on CPU ranks."""
    return is_mlx(plan) or plan.engine == "mlx"


def mlx_backend(plan: Plan) -> str:
    """`jaccl` where the link has RDMA and every Mac a port for every other one, `jaccl-ring` where
    the ports are too few for that, and over TCP `ring`, or `mpi` where the job asks for it; on
    NVIDIA GPUs `nccl`."""
    if plan.cluster.backend == "nccl":
        return "nccl"
    if plan.mlx_backend != "auto":
        return plan.mlx_backend
    if not plan.cluster.uses_rdma:
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


def hostfile(plan: Plan, job: Job) -> dict[str, Any]:
    """The hostfile of `mlx.launch`: with `ssh.hosts`, or else with example names, and with example
    addresses where a host is a name.

    With JACCL, `rdma` says which device of a Mac leads to which other one; null is itself, and
    pairs that do not talk.
    """
    backend, count = mlx_backend(plan), plan.cluster.num_nodes
    names = [f"mac-{mac}" for mac in range(count)]
    if job.spec.ssh.hosts:
        names = host_names(plan, job)
    return {
        "backend": backend,
        "envs": [],
        "hosts": [
            {
                "ssh": names[mac],
                "ips": [_address(names[mac], mac)],
                "rdma": _devices(mac, count, backend) if backend.startswith("jaccl") else [],
            }
            for mac in range(count)
        ],
    }


def _address(host: str, mac: int) -> str:
    address = host.rpartition("@")[2]
    is_ip = address.count(".") == 3 and address.replace(".", "").isdecimal()
    return address if is_ip else f"{_EXAMPLE_NETWORK}.{mac + 1}"


def _devices(mac: int, count: int, backend: str) -> list[str | None]:
    peers = {(mac - 1) % count, (mac + 1) % count} if backend == "jaccl-ring" else set(range(count))
    cabled = [peer for peer in range(count) if peer in peers and peer != mac]
    # macOS counts Thunderbolt interfaces from en2 on.
    return [f"rdma_en{cabled.index(peer) + 2}" if peer in cabled else None for peer in range(count)]


def _launch(plan: Plan, job: Job) -> str:
    ranks = plan.cluster.num_ranks
    start = ['cd "$(dirname "$0")"', 'train="${TRAIN_SCRIPT:-train.py}"']
    if ranks == 1:
        lines = [
            'python="${PYTHON:-python3}"',
            *_mac_check(plan),
            *(_START if is_mlx(plan) else ()),
            f'{"start" if is_mlx(plan) else "exec"} "$python" "$train" "$@"',
        ]
        return script(_about(plan, job), *start, *lines)
    words = command(*mlx_launch(plan)[:-1]).replace(HOSTFILE, '"$hostfile"')
    lines = ['python="${PYTHON:-$(mlx.launch --print-python)}"']
    if mlx_backend(plan) == "mpi":
        lines.append("command -v mpirun >&2 || { echo 'Open MPI is not installed' >&2; exit 1; }")
    if HOSTFILE in mlx_launch(plan):
        checked = f"--ranks {ranks} --backend {mlx_backend(plan)}"
        lines += [
            'hostfile="${HOSTFILE:-' + HOSTFILE + '}"',
            f'"$python" mlx_check.py hosts "$hostfile" {checked} --reach "$python"',
        ]
    lines += [
        'kept="$(mktemp -d)"',
        "trap 'rm -rf \"$kept\"' EXIT",
        "# mlx.launch reads its input all the time, and spins where that has ended.",
        'mkfifo "$kept/input"',
        'exec 3<>"$kept/input"',
        f"{' '.join(filter(None, (words, _where(plan))))} -- \\",
        '  bash rank.sh "$python" "$train" "$@" <&3 | tee "$kept/output"',
        "# mlx.launch ends with 0 even when ranks die: what they said counts.",
        f'"$python" mlx_check.py run "$kept/output" --ranks {ranks}',
    ]
    return script(_about(plan, job), *start, *lines)


def _where(plan: Plan) -> str:
    """The ranks' port and folder. `mlx.launch` (0.32) gives mpirun its folder as `-cwd`, which Open
    MPI 5 no longer has: there ranks start in the launcher's folder without it."""
    if mlx_backend(plan) == "mpi":
        return ""
    return f'--starting-port "${{STARTING_PORT:-{_PORT}}}" --cwd "$PWD"'


def _rank(plan: Plan, job: Job) -> str:
    return script(
        header(plan, job, "One rank, started by mlx.launch on its Mac: says how it ended."),
        *(export_lines(plan) if is_mlx(plan) else []),
        *(['python="$1"', *_mac_check(plan)] if is_mlx(plan) else []),
        *(_START if is_mlx(plan) else ()),
        'start "$@" &' if is_mlx(plan) else '"$@" &',
        "program=$!",
        "trap 'kill \"$program\"' TERM INT HUP",
        "code=0",
        'wait "$program" || code=$?',
        "# mpirun numbers its ranks itself.",
        'rank="${MLX_RANK:-${OMPI_COMM_WORLD_RANK:-}}"',
        'printf \'\\nrank %s ended with %s\\n\' "$rank" "$code"',
        'exit "$code"',
    )


def _mac_check(plan: Plan) -> list[str]:
    if not is_mlx(plan):
        return []
    needed = ["--memory-bytes", str(plan.estimate.memory.known_bytes)]
    rdma = ["--rdma"] if plan.cluster.uses_rdma else []
    return ['"$python" ' + command("mlx_check.py", "mac", *needed, *rdma)]


def _hosts(plan: Plan, job: Job) -> str:
    link = plan.cluster.network_link or ""
    over = "thunderbolt" if link.startswith("thunderbolt") else "ethernet"
    # mlx.distributed_config (0.32) has no mpi: its ring has the addresses too.
    backend = "ring" if mlx_backend(plan) == "mpi" else mlx_backend(plan)
    words = ["--over", over, "--backend", backend, "--output-hostfile", HOSTFILE]
    return script(
        header(plan, job, "Writes hosts.json: asks every Mac for its cables and addresses."),
        'cd "$(dirname "$0")"',
        ': "${MACS:?set it to the names of the Macs for ssh, with commas, rank 0 first}"',
        f'exec mlx.distributed_config --hosts "$MACS" {command(*words)} "$@"',
    )


def _about(plan: Plan, job: Job) -> list[str]:
    """The header with what each Mac needs."""
    memory = plan.estimate.memory
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.parts.items() if size)
    of = f"of {format_bytes(plan.cluster.memory_bytes)}"
    about = [f"Memory of each rank (estimated): {format_bytes(memory.known_bytes)} {of}:"]
    about.append(f"  {parts}.")
    if is_mlx(plan) and plan.cluster.uses_rdma:
        macs, way = plan.cluster.num_nodes, mlx_backend(plan)
        cables = "a Thunderbolt 5 cable between every two" if way == "jaccl" else "a ring of cables"
        about.append(
            f"RDMA over Thunderbolt: macOS 26.2 or newer, {cables} of the {macs} Macs, and"
        )
        about.append("`rdma_ctl enable` once on each in macOS Recovery.")
    if plan.cluster.num_nodes > 1 and not plan.cluster.is_local:
        about.append("Run it on one machine that reaches every Mac by ssh. This folder is at the")
        about.append("same path on all of them.")
    return header(plan, job, *about)


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What MLX 0.32, its backends and the example program lack."""
    return [*_refusals(plan), *layout_gaps(plan), *example_gaps(plan, job, "own")]


def _refusals(plan: Plan) -> Iterator[Gap]:
    cluster = plan.cluster
    if not is_mlx(plan) and cluster.accelerator != "cpu":
        yield Gap(
            what=f"ranks on {cluster.accelerator}",
            where="cluster.accelerator",
            why="these files are for Macs and CPUs"
            + (f", {untried}" if (untried := _UNTRIED.get(cluster.backend)) else ""),
            nearest=None,
            fix="render for torchrun, or set cluster.accelerator to a Mac (`paceline catalog`); on "
            "Kubernetes, untried: kubernetes.runtime: mlx-distributed, render --for kubernetes",
        )
    if is_mlx(plan) and cluster.ranks_per_node > 1:
        yield Gap(
            what=f"{counted(cluster.ranks_per_node, 'rank')} on one Mac",
            where="cluster.per_node",
            why="a Mac has one GPU, which one rank uses whole",
            nearest=None,
            fix="set cluster.per_node to 1",
        )


def layout_gaps(plan: Plan) -> Iterator[Gap]:
    """What of the layout MLX or the example program lacks."""
    layout = plan.layout
    shares = "example program shares data and parameters only"
    none = dict.fromkeys(("pipeline", "context", "expert"), f"MLX has none, and the {shares}")
    why = {"tensor": f"MLX has shard_linear for it, and the {shares}", **none}
    yield from split_gaps(plan, why, "launch.sh starts your own TRAIN_SCRIPT on the same ranks")
    if layout.sharding in ("zero1", "zero2", "hybrid"):
        yield Gap(
            what=layout.name,
            where="layout.sharding",
            why="nn.fully_shard (0.32) shares parameters, gradients and optimizer state, over all "
            "ranks",
            nearest="fully sharded over all ranks, which holds less and gathers more",
            fix="layout.sharding: full, or none",
        )
    backend = mlx_backend(plan)
    if layout.sharding != "none" and layout.data > 1 and backend in ("ring", "mpi"):
        yield Gap(
            what="reduce-scatter of the gradients",
            where="layout.sharding",
            why=f"the {backend} backend (0.32) has no sum_scatter",
            nearest="gradients are all-reduced and cut: the same numbers and memory, twice the "
            "bytes on the wire",
            fix="Thunderbolt 5 with RDMA (JACCL), or layout.sharding: none where that fits",
        )
    if layout.recompute == "selective" or layout.recompute_every > 1:
        yield Gap(
            what=f"recompute {layout.recompute}, every {layout.recompute_every} blocks",
            where="layout.recompute",
            why="nn.utils.checkpoint recomputes whole modules, and the example program every block",
            nearest="full recompute of every block: less memory, more time",
            fix="layout.recompute: full, or none",
        )
    yield from offload_gaps(plan, "a Mac's memory is one: the GPU and the CPU share it")
    yield from precision_gaps(plan, _NO_PRECISION)
