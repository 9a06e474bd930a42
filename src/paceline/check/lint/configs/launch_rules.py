"""What a launch line does wrong: alone, with its neighbours in the file, and with its job."""

import re
from collections.abc import Iterator, Sequence

from paceline.check.finding import Finding
from paceline.check.lint.configs.bf16 import bf16_finding
from paceline.check.lint.configs.launch_downloads import check_cache, check_hub
from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.launch_meeting import (
    check_meeting,
    check_nodes,
    check_number_of_node,
)
from paceline.check.lint.configs.megatron_arguments import check_megatron
from paceline.check.lint.configs.old_launcher import check_old_launcher
from paceline.check.lint.configs.say import ERROR, INFO, WARNING, found
from paceline.check.lint.configs.scene import Scene, started
from paceline.check.lint.configs.shell import Word
from paceline.check.lint.configs.variables import LOOPBACK
from paceline.check.lint.gpus import lacks_bf16

TRAINS = re.compile(
    r"(?i)(train|finetune|fine_tune|pretrain|sft|dpo|grpo|ddp|fsdp|run_clm|run_mlm)"
)
"""Names of scripts that train, where a plain `python` starts them."""


def check_launch(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Everything that one launch line shows by itself and with what is known of its job."""
    if launch.program in {"torchrun", "accelerate", "deepspeed", "horovod"}:
        yield from check_meeting(launch, scene)
        yield from check_nodes(launch, scene)
        yield from _check_devices(launch, scene)
        yield from _check_terminal(launch)
        yield from _check_elastic(launch, scene)
        yield from check_old_launcher(launch)
    yield from check_number_of_node(launch)
    yield from _check_precision(launch, scene)
    yield from check_cache(launch, scene)
    yield from check_hub(launch, scene)
    yield from _check_workers(launch, scene)
    yield from _check_plain_python(launch, scene)
    yield from _check_container(launch)
    yield from _check_mlx(launch, scene)
    yield from _check_horovod(launch)
    yield from check_megatron(launch, scene)


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
        yield found(
            "invalid-device-ordinal",
            ERROR,
            launch.path,
            word.line,
            f"{per_node} processes on each node, and {whose} has {devices} GPUs",
            fix=f"start {devices} on each node"
            + (
                f": --num_processes {devices * scene.nodes}"
                if launch.program == "accelerate" and scene.nodes
                else ""
            ),
        )


def _uses_gpus(launch: Launch) -> bool:
    return not ({"cpu", "use_cpu"} & set(launch.options)) and not any(
        word.text in {"--cpu", "--use_cpu", "--device=cpu", "--no_cuda"} for word in launch.words
    )


def _check_terminal(launch: Launch) -> Iterator[Finding]:
    """A launcher that ends with the terminal in spite of nohup."""
    if "nohup" in launch.wrappers and launch.program in {"torchrun", "accelerate", "deepspeed"}:
        if {"setsid", "docker"} & set(launch.wrappers):
            return
        yield found(
            "sighup-terminal-closed",
            WARNING,
            launch.path,
            launch.line,
            f"{launch.program} takes SIGHUP up again after nohup: closing the terminal ends it",
            fix="start it in tmux, by `setsid`, by `systemd-run --user`, or as a batch job",
        )


def _check_elastic(launch: Launch, scene: Scene) -> Iterator[Finding]:
    word = launch.option("nnodes")
    if word is None or not re.fullmatch(r"\d+:\d+", word.text) or scene.ends_by_itself:
        return
    lower, upper = word.text.split(":")
    if lower != upper:
        yield found(
            "elastic-no-restart-on-node-loss",
            INFO,
            launch.path,
            word.line,
            f"with --nnodes={word.text} a node that dies without a word is waited for without end",
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
    fp16 = launch.argument("fp16")
    model = launch.argument("model_name_or_path", "model", "model_name", "base_model", "model_id")
    if (
        fp16 is not None
        and fp16.text.lower() not in no
        and model is not None
        and _BF16_TRAINED.search(model.text)
        and not lacks_bf16(gpu)
    ):
        yield found(
            "fp16-loss-scale-collapse",
            WARNING if gpu is not None else INFO,
            launch.path,
            fp16.line,
            f"{model.text} was trained in bf16: its activations overflow fp16",
            fix="--bf16" + (f": {gpu} has it" if gpu is not None else " from Ampere on"),
        )
    if (
        bf16 is not None
        and fp16 is not None
        and bf16.text.lower() not in no
        and fp16.text.lower() not in no
    ):
        yield found(
            "ds-fp16-bf16-both",
            ERROR,
            launch.path,
            max(bf16.line, fp16.line),
            "--fp16 and --bf16 are both given",
            fix="keep one: bf16 from Ampere on",
        )


_BF16_TRAINED = re.compile(
    r"(?i)(llama|mistral|mixtral|qwen|gemma|t5|deepseek|phi-?[34]|olmo|falcon)"
)
"""Families whose published weights were trained in bf16 (their model cards)."""


def _check_workers(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """DataLoader workers against the cores a process has."""
    word = launch.argument(
        "num_workers", "dataloader_num_workers", "workers", "n_workers", "num_data_workers"
    )
    number = whole(word.text) if word is not None else None
    cores = scene.cpus_per_task
    if word is None or not number or cores is None:
        return
    per_task = 1
    if launch.program in {"torchrun", "accelerate", "deepspeed"}:
        per_task = started(launch, scene).per_node or 1
    if number * per_task > cores and "cpus-per-task" in scene.sbatch:
        many = f" x {per_task} ranks" if per_task > 1 else ""
        yield found(
            "dataloader-starved",
            WARNING,
            launch.path,
            word.line,
            f"{number} workers{many} share {cores} cores (--cpus-per-task={cores})",
            fix=f"ask for {(number + 1) * per_task} cores, or start "
            f"{max(cores // per_task - 1, 0)} workers",
        )


def _check_plain_python(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """A script for many ranks, started as one process."""
    if launch.program != "python" or launch.target is None or scene.scheduler == "ray":
        return
    if {"srun", "mpirun", "mpiexec", "jsrun"} & set(launch.wrappers):
        return
    if "WORLD_SIZE" in launch.environment and "RANK" in launch.environment:
        return
    visible = launch.variable("CUDA_VISIBLE_DEVICES") or ""
    seen = len(visible.split(",")) if re.fullmatch(r"\d+(,\d+)+", visible.strip()) else None
    gpus = seen or scene.gpus_per_node
    if gpus is None or gpus < 2:
        return
    word = launch.argument(
        "deepspeed",
        "fsdp",
        "ddp",
        "distributed",
        "local_rank",
        "ddp_find_unused_parameters",
        "deepspeed_config",
        "multi_gpu",
    )
    if word is not None:
        yield found(
            "launcher-plain-python",
            ERROR,
            launch.path,
            launch.line,
            f"{launch.target.text} is started once, and {gpus} GPUs are there for it",
            fix=f"torchrun --standalone --nproc-per-node={gpus} {launch.target.text} ...",
        )
    elif TRAINS.search(launch.target.text):
        yield found(
            "launcher-plain-python",
            INFO,
            launch.path,
            launch.line,
            f"one process of {launch.target.text} sees {gpus} GPUs: a program for many ranks "
            "needs a launcher",
        )


def _check_container(launch: Launch) -> Iterator[Finding]:
    """`docker run` around a launch."""
    for name in ("docker", "podman"):
        words = launch.wrappers.get(name)
        if words is not None:
            yield from check_docker(launch.path, launch.line, words, trains=True)


FEW_FILES = 1024
"""Open files that most systems give a process unless it asks for more: loaders pass a file for each
tensor, and each connection is one."""


def few_files(path: str, line: int, said: str, fix: str) -> Finding:
    return found(
        "too-many-open-files",
        WARNING,
        path,
        line,
        f"each process may have {said} open files: loaders with workers, and a job of many ranks, "
        "need more",
        fix=fix,
    )


def check_docker(path: str, line: int, words: Sequence[Word], *, trains: bool) -> Iterator[Finding]:
    """The options of `docker run` for a container that trains on GPUs."""
    text = " ".join(word.text for word in words)
    if not re.search(r"(^|\s)(run|create)\s", text + " "):
        return
    gpus = re.search(r"--gpus[ =]\S+|--runtime[ =]nvidia|nvidia\.com/gpu", text)
    size = re.search(r"--shm-size[ =](\d+(?:\.\d+)?)\s*([kKmMgG]?)", text)
    if gpus and trains and not re.search(r"--ipc[ =]\"?host|/dev/shm", text):
        scale = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
        given = float(size[1]) * scale[size[2].lower()] if size else 64 * 2**20
        if given < 2**30:
            place = next((word.line for word in words if "--shm-size" in word.text), line)
            said = f"{size[1]}{size[2]}" if size else "64 MB, Docker's default,"
            yield found(
                "shm-too-small",
                ERROR,
                path,
                place,
                f"the container has {said} of shared memory for NCCL and DataLoader workers",
                fix="--shm-size=16g, or --ipc=host",
            )
    for word in words:
        files = re.search(r"nofile=(\d+)", word.text)
        if gpus and files and int(files[1]) <= FEW_FILES:
            yield few_files(path, word.line, files[1], "--ulimit nofile=65536")
    rdma = next(
        (word for word in words if re.search(r"/dev/infiniband|rdma_cm|uverbs", word.text)), None
    )
    if rdma is not None and not re.search(r"memlock[ =]-1|memlock=-1|IPC_LOCK|--privileged", text):
        yield found(
            "memlock-limit",
            INFO,
            path,
            rdma.line,
            "RDMA registers memory, and the container may lock a few MB only",
            fix="--ulimit memlock=-1, and --cap-add=IPC_LOCK",
        )


def _check_mlx(launch: Launch, scene: Scene) -> Iterator[Finding]:
    if launch.program != "mlx":
        return
    hosts = launch.option("hosts")
    if hosts is not None:
        names = [name.strip() for name in hosts.text.split(",") if name.strip()]
        repeated = {name for name in names if names.count(name) > 1}
        local = [name for name in names if LOOPBACK.match(name)]
        if len(names) > 1 and (local or repeated):
            what = (
                f"{local[0]} is only reached from itself"
                if local
                else f"{sorted(repeated)[0]} is named twice"
            )
            if not (local and len(set(names)) == 1):
                yield found(
                    "mlx-ring-connect",
                    ERROR,
                    launch.path,
                    hosts.line,
                    f"--hosts: {what}",
                    fix="name every machine once, by an address that the others reach",
                )
    backend = launch.option("backend")
    if backend is not None and backend.text == "jaccl":
        yield found(
            "mlx-jaccl-peer-loss",
            INFO,
            launch.path,
            backend.line,
            "with jaccl a machine that is lost is waited for without a word and without end",
        )


def _check_horovod(launch: Launch) -> Iterator[Finding]:
    if launch.program != "horovod":
        return
    hosts, count = launch.option("H", "hosts"), launch.number("np", "num_proc", "n")
    if hosts is None or count is None:
        return
    slots = [whole(part.rpartition(":")[2]) for part in hosts.text.split(",") if ":" in part]
    known = [slot for slot in slots if slot is not None]
    if known and len(known) == len(hosts.text.split(",")) and sum(known) < count:
        yield found(
            "invalid-device-ordinal",
            ERROR,
            launch.path,
            hosts.line,
            f"-np {count}, and the hosts have {sum(known)} slots",
            fix=f"-np {sum(known)}, or more slots",
        )
