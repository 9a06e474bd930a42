"""How the processes of a launch line find each other: ports, hosts, nodes and their numbers."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch, shown, whole
from paceline.check.lint.configs.say import ERROR, found
from paceline.check.lint.configs.scene import Scene, started
from paceline.check.lint.configs.shell import ESCAPED
from paceline.check.lint.configs.variables import FIRST_NODE, LOOPBACK, check_port, wrong_host


def is_many(launch: Launch, scene: Scene) -> int | None:
    """Nodes of the launch when they are surely more than one."""
    nodes = started(launch, scene).nodes
    text = launch.options["nnodes"].text if "nnodes" in launch.options else ""
    upper = re.fullmatch(r"\d+:(\d+)", text)
    if upper is not None:
        nodes = int(upper[1]) if scene.nodes is None else scene.nodes
    return nodes if nodes is not None and nodes > 1 else None


def check_meeting(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Where the nodes are told to meet, and under which name."""
    nodes = is_many(launch, scene)
    address = launch.option("rdzv_endpoint", "master_addr", "main_process_ip")
    if address is not None:
        is_endpoint = "rdzv_endpoint" in launch.options
        host = address.text.rpartition(":")[0] or address.text if is_endpoint else address.text
        if nodes and (wrong := wrong_host(host)) is not None and "SLURM_" in address.source:
            what = f"{shown(address.text)}: {wrong[1]}"
            yield found(wrong[0], launch.path, address.line, what, FIRST_NODE, level=ERROR)
        if nodes and LOOPBACK.match(host):
            what = (
                f"{host} names a different machine on each of {nodes} nodes: none finds the others"
            )
            fix = "give an address of the first node that all others reach"
            yield found("rendezvous-c10d-timeout", launch.path, address.line, what, fix)
        if (
            nodes
            and re.search(r"\$\(hostname|`hostname|\$\{?HOSTNAME", address.source)
            and ((launch.on_node and address.line >= launch.line) or ESCAPED in host)
        ):
            what = f"{shown(host)} is evaluated on every node: each waits at its own address"
            fix = 'take the first of `scontrol show hostnames "$SLURM_JOB_NODELIST"` above srun'
            yield found("rendezvous-c10d-timeout", launch.path, address.line, what, fix)
    for name in ("master_port", "main_process_port"):
        word = launch.option(name)
        port = whole(word.text) if word is not None else None
        if word is not None and port is not None:
            yield from check_port(launch.path, word.line, "the port", port)


def check_nodes(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """The launcher's count of nodes against the job's, and how its ranks are told apart."""
    word = launch.option("nnodes", "num_machines", "num_nodes")
    nodes = started(launch, scene).nodes
    given = scene.nodes
    if word is not None and nodes is not None and given is not None and nodes != given:
        is_part = "srun" in launch.wrappers and launch.wrapper("srun", "nodes", "N") is not None
        if not is_part and scene.scheduler is not None:
            what = f"the launcher waits for {nodes} nodes, and the job has {given}"
            fix = f"write {given}" + (
                ", or take it from $SLURM_NNODES" if scene.scheduler == "slurm" else ""
            )
            yield found("rendezvous-timeout-few-nodes", launch.path, word.line, what, fix)
    text = word.text if word is not None else ""
    backend = launch.option("rdzv_backend")
    if (
        launch.program == "torchrun"
        and (match := re.fullmatch(r"(\d+):(\d+)", text)) is not None
        and match[1] != match[2]
        and (backend is None or backend.text == "static")
        and "standalone" not in launch.options
        and word is not None
    ):
        what = f"--nnodes={text} is a range, and the static rendezvous waits for all {match[2]}"
        fix = "add --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
        yield found("rendezvous-c10d-timeout", launch.path, word.line, what, fix)
