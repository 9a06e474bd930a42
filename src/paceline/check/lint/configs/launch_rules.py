"""What a launch line does wrong: alone, with its neighbours in the file, and with its job."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.degrees import check_megatron
from paceline.check.lint.configs.launch_line import Launch
from paceline.check.lint.configs.launch_meeting import check_meeting, check_nodes
from paceline.check.lint.configs.say import bf16_finding, found
from paceline.check.lint.configs.scene import Scene, started
from paceline.check.lint.gpus import lacks_bf16


def check_launch(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Everything that one launch line shows by itself and with what is known of its job."""
    if launch.program in {"torchrun", "accelerate", "deepspeed", "horovod"}:
        yield from check_meeting(launch, scene)
        yield from check_nodes(launch, scene)
        yield from _check_devices(launch, scene)
        yield from _check_old_launcher(launch)
    yield from _check_precision(launch, scene)
    yield from check_megatron(launch, scene)


_OLD = "torch.distributed.launch"


def _check_old_launcher(launch: Launch) -> Iterator[Finding]:
    """The launcher that torchrun has replaced."""
    word = next((one for one in launch.words if one.text == _OLD), None)
    if word is not None:
        what = f"{_OLD} is deprecated: torchrun has taken its place"
        fix = "torchrun with the same options, and int(os.environ['LOCAL_RANK']) in the script"
        yield found("old-launcher", launch.path, word.line, what, fix)


def _check_devices(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """More processes on a node than it has devices for them."""
    word = launch.option("nproc_per_node", "num_gpus", "num_processes")
    per_node = started(launch, scene).per_node
    if word is None or per_node is None:
        return
    visible = launch.variable("CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"\d+(,\d+)*,?", visible.strip()):
        devices, whose = len(visible.strip(",").split(",")), f"CUDA_VISIBLE_DEVICES={visible}"
    elif scene.gpus_per_node is not None and _uses_gpus(launch):
        devices, whose = scene.gpus_per_node, "a node"
    else:
        return
    if per_node > devices:
        what = f"{per_node} processes on each node, and {whose} has {devices} GPUs"
        fix = f"start {devices} on each node" + (
            f": --num_processes {devices * scene.nodes}"
            if launch.program == "accelerate" and scene.nodes
            else ""
        )
        yield found("invalid-device-ordinal", launch.path, word.line, what, fix)


def _uses_gpus(launch: Launch) -> bool:
    return not ({"cpu", "use_cpu"} & set(launch.options)) and not any(
        word.text in {"--cpu", "--use_cpu", "--device=cpu", "--no_cuda"} for word in launch.words
    )


def _check_precision(launch: Launch, scene: Scene) -> Iterator[Finding]:
    gpu = scene.context.gpu
    precision = launch.option("mixed_precision")
    bf16 = launch.argument("bf16", "bf16_full_eval")
    said = launch.argument("mixed_precision", "precision", "dtype", "torch_dtype")
    no = {"false", "no", "0"}
    if gpu is not None and lacks_bf16(gpu):
        for word in (precision, said):
            if word is not None and word.text.lower() in {"bf16", "bfloat16", "bf16-mixed"}:
                yield bf16_finding(launch.path, word.line, word.text, gpu)
                return
        if bf16 is not None and bf16.text.lower() not in no:
            yield bf16_finding(launch.path, bf16.line, "--bf16", gpu)
