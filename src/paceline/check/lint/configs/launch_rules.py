"""What a launch line does wrong: alone, with its neighbours in the file, and with its job."""

import re
from collections.abc import Iterator
from dataclasses import replace

from paceline.check.lint.configs.degrees import check_megatron
from paceline.check.lint.configs.launch_line import Launch, launches_in, whole
from paceline.check.lint.configs.say import Fault
from paceline.check.lint.configs.scene import Scene, scene_of, started
from paceline.check.lint.configs.shell import Script
from paceline.check.lint.configs.variables import LOOPBACK, check_port, check_variables
from paceline.check.lint.context import Context


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


def check_launch(launch: Launch, scene: Scene) -> Iterator[Fault]:
    """Everything that one launch line shows by itself and with what is known of its job."""
    if launch.program in {"torchrun", "accelerate", "deepspeed", "horovod"}:
        yield from _check_meeting(launch, scene)
        yield from _check_nodes(launch, scene)
        old = next((one for one in launch.words if one.text == _OLD), None)
        if old is not None:
            what = f"{_OLD} is deprecated: torchrun has taken its place"
            fix = "torchrun with the same options, and int(os.environ['LOCAL_RANK']) in the script"
            yield Fault("old-launcher", old, what, fix)
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
        if LOOPBACK.match(host):
            what = (
                f"{host} names a different machine on each of {nodes} nodes: none finds the others"
            )
            fix = "give an address of the first node that all others reach"
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
