"""What a launch line does wrong: alone, with its neighbours in the file, and with its job."""

import re
from collections.abc import Iterator
from dataclasses import replace

from paceline.check.lint.configs.degrees import check_megatron
from paceline.check.lint.configs.launch_line import Launch, launches_in, shown, whole
from paceline.check.lint.configs.say import Fault, no_bf16
from paceline.check.lint.configs.scene import Scene, scene_of, started
from paceline.check.lint.configs.shell import ESCAPED, Script
from paceline.check.lint.configs.variables import (
    FIRST_NODE,
    LOOPBACK,
    check_port,
    check_variables,
    wrong_host,
)
from paceline.check.lint.context import Context
from paceline.check.lint.gpus import lacks_bf16


def check_script(script: Script, context: Context) -> Iterator[Fault]:
    """Everything a shell script shows: its variables, its launches, and the two together."""
    launches, scene = launches_in(script), scene_of(script, context)
    said = {started(one, scene).nodes for one in launches if one.program != "python"}
    if scene.nodes is None and len(said) == 1 and not script.is_batch:
        scene = replace(scene, nodes=said.pop())
    inline = [each for command in script.commands for each in command.environment]
    yield from check_variables([*script.variables, *inline], scene.known)
    for launch in launches:
        yield from check_launch(launch, scene)
        if script.is_batch:
            yield from _check_tasks(script, launch, scene)


def _check_tasks(script: Script, launch: Launch, scene: Scene) -> Iterator[Fault]:
    """Several tasks on a node, each of which starts all of the node's ranks."""
    if "srun" not in launch.wrappers or launch.program not in {"torchrun", "accelerate"}:
        return
    tasks, each = scene.tasks_per_node, launch.wrapper("srun", "ntasks_per_node")
    own = each or launch.wrapper("srun", "ntasks", "n")
    asked = [script.sbatch[name] for name in ("ntasks-per-node", "ntasks") if name in script.sbatch]
    line = own.line if own is not None else asked[0].line if asked else launch.line
    if own is not None and tasks is not None:
        tasks = scene.number(own.text)
        if tasks is not None and each is None and scene.nodes:
            tasks //= scene.nodes
    ranks = launch.option("nproc_per_node", "num_processes")
    if tasks is not None and tasks > 1 and ranks is not None and whole(ranks.text) != 1:
        what = (
            f"{tasks} tasks a node each start {launch.program}, which starts all ranks of the "
            "node itself"
        )
        fix = "--ntasks-per-node=1: one launcher a node"
        yield Fault("slurm-ntasks-mismatch", line, what, fix)


def check_launch(launch: Launch, scene: Scene) -> Iterator[Fault]:
    """Everything that one launch line shows by itself and with what is known of its job."""
    if launch.program in {"torchrun", "accelerate", "deepspeed", "horovod"}:
        yield from _check_meeting(launch, scene)
        yield from _check_nodes(launch, scene)
        yield from _check_devices(launch, scene)
        old = next((one for one in launch.words if one.text == _OLD), None)
        if old is not None:
            what = f"{_OLD} is deprecated: torchrun has taken its place"
            fix = "torchrun with the same options, and int(os.environ['LOCAL_RANK']) in the script"
            yield Fault("old-launcher", old, what, fix)
    yield from _check_precision(launch, scene)
    yield from check_megatron(launch, scene)


_OLD = "torch.distributed.launch"


def _check_meeting(launch: Launch, scene: Scene) -> Iterator[Fault]:
    """Where the nodes are told to meet, and under which name."""
    nodes = started(launch, scene).nodes
    word = launch.option("nnodes")
    if word is not None and (upper := re.fullmatch(r"\d+:(\d+)", word.text)) is not None:
        nodes = scene.nodes if scene.nodes is not None else int(upper[1])
    address = launch.option("rdzv_endpoint", "master_addr", "main_process_ip")
    if address is not None and nodes is not None and nodes > 1:
        is_endpoint = "rdzv_endpoint" in launch.options
        host = address.text.rpartition(":")[0] or address.text if is_endpoint else address.text
        if (wrong := wrong_host(host)) is not None and "SLURM_" in address.source:
            yield Fault(wrong[0], address, f"{shown(address.text)}: {wrong[1]}", FIRST_NODE)
        if LOOPBACK.match(host):
            what = (
                f"{host} names a different machine on each of {nodes} nodes: none finds the others"
            )
            fix = "give an address of the first node that all others reach"
            yield Fault("rendezvous-c10d-timeout", address, what, fix)
        is_on_each = launch.on_node and address.line >= launch.line
        if re.search(r"\$\(hostname|`hostname|\$\{?HOSTNAME", address.source) and (
            is_on_each or ESCAPED in host
        ):
            what = f"{shown(host)} is evaluated on every node: each waits at its own address"
            fix = 'take the first of `scontrol show hostnames "$SLURM_JOB_NODELIST"` above srun'
            yield Fault("rendezvous-c10d-timeout", address, what, fix)
    port = launch.option("master_port", "main_process_port")
    if port is not None and (number := whole(port.text)) is not None:
        yield from check_port(port, "the port", number)


def _check_nodes(launch: Launch, scene: Scene) -> Iterator[Fault]:
    """The launcher's count of nodes against the job's, and how its ranks are told apart."""
    word = launch.option("nnodes", "num_machines", "num_nodes")
    if word is None:
        return
    nodes, given = started(launch, scene).nodes, scene.nodes
    is_part = launch.wrapper("srun", "nodes", "N") is not None
    if nodes is not None and given not in {None, nodes} and scene.scheduler and not is_part:
        what = f"the launcher waits for {nodes} nodes, and the job has {given}"
        also = ", or take it from $SLURM_NNODES" if scene.scheduler == "slurm" else ""
        yield Fault("rendezvous-timeout-few-nodes", word, what, f"write {given}{also}")
    ends, backend = re.fullmatch(r"(\d+):(\d+)", word.text), launch.option("rdzv_backend")
    meets = "standalone" in launch.options or (backend is not None and backend.text != "static")
    if launch.program == "torchrun" and ends is not None and ends[1] != ends[2] and not meets:
        what = f"--nnodes={ends[0]} is a range, and the static rendezvous waits for all {ends[2]}"
        fix = "add --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
        yield Fault("rendezvous-c10d-timeout", word, what, fix)


def _check_devices(launch: Launch, scene: Scene) -> Iterator[Fault]:
    """More processes on a node than it has devices for them."""
    word = launch.option("nproc_per_node", "num_gpus", "num_processes")
    per_node, devices, whose = started(launch, scene).per_node, scene.gpus_per_node, "a node"
    if word is None or per_node is None:
        return
    visible = launch.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"\d+(,\d+)*,?", visible.value.strip()):
        devices = len(visible.value.strip().strip(",").split(","))
        whose = f"CUDA_VISIBLE_DEVICES={visible.value}"
    elif {"cpu", "use_cpu"} & set(launch.options) or any(
        one.text in {"--cpu", "--use_cpu", "--device=cpu", "--no_cuda"} for one in launch.words
    ):
        return
    if devices is not None and per_node > devices:
        what = f"{per_node} processes on each node, and {whose} has {devices} GPUs"
        fix = f"start {devices} on each node"
        if launch.program == "accelerate" and scene.nodes:
            fix += f": --num_processes {devices * scene.nodes}"
        yield Fault("invalid-device-ordinal", word, what, fix)


def _check_precision(launch: Launch, scene: Scene) -> Iterator[Fault]:
    gpu = scene.context.gpu
    if gpu is None or not lacks_bf16(gpu):
        return
    said = launch.argument("mixed_precision", "precision", "dtype", "torch_dtype")
    flag = launch.argument("bf16", "bf16_full_eval")
    for word in (launch.option("mixed_precision"), said):
        if word is not None and word.text.lower() in {"bf16", "bfloat16", "bf16-mixed"}:
            yield no_bf16(word, word.text, gpu)
            return
    if flag is not None and flag.text.lower() not in {"false", "no", "0"}:
        yield no_bf16(flag, "--bf16", gpu)
