"""What a launch line does wrong: alone, with its neighbours in the file, and with its job."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch, shown, whole
from paceline.check.lint.configs.megatron_arguments import check_megatron
from paceline.check.lint.configs.say import ERROR, INFO, WARNING, found
from paceline.check.lint.configs.scene import Scene, started
from paceline.check.lint.configs.shell import ESCAPED, Word
from paceline.check.lint.configs.variables import FIRST_NODE, LOOPBACK, check_port, wrong_host

TRAINS = re.compile(
    r"(?i)(train|finetune|fine_tune|pretrain|sft|dpo|grpo|ddp|fsdp|run_clm|run_mlm)"
)
"""Names of scripts that train, where a plain `python` starts them."""


def check_launch(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Everything that one launch line shows by itself and with what is known of its job."""
    if launch.program in {"torchrun", "accelerate", "deepspeed", "horovod"}:
        yield from _check_meeting(launch, scene)
        yield from _check_nodes(launch, scene)
        yield from _check_devices(launch, scene)
        yield from _check_terminal(launch)
        yield from _check_elastic(launch, scene)
    yield from _check_number_of_node(launch)
    yield from _check_precision(launch, scene)
    yield from _check_cache(launch, scene)
    yield from _check_hub(launch, scene)
    yield from _check_workers(launch, scene)
    yield from _check_plain_python(launch, scene)
    yield from _check_container(launch)
    yield from _check_mlx(launch, scene)
    yield from _check_horovod(launch)
    yield from check_megatron(launch, scene)


def check_neighbours(
    launches: Sequence[Launch], waits: Sequence[int], text: str
) -> Iterator[Finding]:
    """Two launches of one script that run at the same time and want the same port.

    Args:
        launches: In the order of the script.
        waits: Lines on which the script waits for what it started before.
        text: Of the script: a port that it counts up is another at each launch.
    """
    running: dict[str, Launch] = {}
    for launch in launches:
        running = {
            port: one
            for port, one in running.items()
            if not any(one.line < line <= launch.line for line in waits)
        }
        if launch.program not in {"torchrun", "accelerate", "deepspeed"}:
            continue
        port, word = port_of(launch)
        if port is None:
            continue
        if word is not None and _counts(word.source, text):
            continue
        if launch.background and launch.loop and port.isdigit() and not is_elsewhere(launch):
            yield found(
                "port-in-use",
                ERROR,
                launch.path,
                word.line if word else launch.line,
                f"every turn of `{launch.loop[:60]}` starts another launch on port {port}",
                fix="give each its own port: --master-port $((29500 + i)), or --standalone",
            )
        elif port in running and not is_elsewhere(launch):
            first = running[port]
            yield found(
                "port-in-use",
                ERROR,
                launch.path,
                word.line if word else launch.line,
                f"port {port} is taken by the launch of line {first.line}, which is still running",
                fix="give each its own port, or --standalone, which takes a free one",
                evidence=[(launch.path, first.line, _typed(first))],
            )
        if launch.background:
            running[port] = launch


def _counts(word: str, text: str) -> bool:
    """Whether a word has a variable that the script counts: `port=$((port + 1))`, `((port++))`."""
    return any(
        re.search(rf"\b{name}=\$\(\(|\(\(\s*{name}\s*(\+\+|\+=)|\blet\s+\W?{name}\W", text)
        for name in re.findall(r"\$\{?(\w+)", word)
    )


def is_elsewhere(launch: Launch) -> bool:
    return bool({"ssh", "pdsh", "srun", "docker", "podman"} & set(launch.wrappers))


def _typed(launch: Launch) -> str:
    return " ".join(shown(word.text) for word in launch.words)[:120]


def port_of(launch: Launch) -> tuple[str | None, Word | None]:
    """The port the launch listens on, and its word; None where it takes a free one."""
    if "standalone" in launch.options:
        return None, None
    endpoint = launch.option("rdzv_endpoint")
    if endpoint is not None:
        _, sign, port = endpoint.text.rpartition(":")
        return (port if sign and port != "0" else None if sign else "29400"), endpoint
    word = launch.option("master_port", "main_process_port")
    if word is not None:
        return (None if word.text == "0" else word.text), word
    if launch.program == "accelerate" and "config_file" in launch.options:
        return None, None
    said = launch.variable("MASTER_PORT") if launch.program != "torchrun" else None
    return said or "29500", None


def _is_many(launch: Launch, scene: Scene) -> int | None:
    """Nodes of the launch when they are surely more than one."""
    nodes = started(launch, scene).nodes
    text = launch.options["nnodes"].text if "nnodes" in launch.options else ""
    upper = re.fullmatch(r"\d+:(\d+)", text)
    if upper is not None:
        nodes = int(upper[1]) if scene.nodes is None else scene.nodes
    return nodes if nodes is not None and nodes > 1 else None


def _check_meeting(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Where the nodes are told to meet, and under which name."""
    nodes = _is_many(launch, scene)
    address = launch.option("rdzv_endpoint", "master_addr", "main_process_ip")
    if address is not None:
        is_endpoint = "rdzv_endpoint" in launch.options
        host = address.text.rpartition(":")[0] or address.text if is_endpoint else address.text
        if not is_endpoint and address.text.startswith("["):
            yield found(
                "ipv6-bracket-master-addr",
                ERROR,
                launch.path,
                address.line,
                f"{address.text}: brackets are not part of an address",
                fix=f"write {address.text.strip('[]')}",
            )
        if nodes and (wrong := wrong_host(host)) is not None and "SLURM_" in address.source:
            yield found(
                wrong[0],
                ERROR,
                launch.path,
                address.line,
                f"{shown(address.text)}: {wrong[1]}",
                fix=FIRST_NODE,
            )
        if nodes and LOOPBACK.match(host):
            yield found(
                "rendezvous-c10d-timeout",
                ERROR,
                launch.path,
                address.line,
                f"{host} is another machine on each of {nodes} nodes: none finds the others",
                fix="give an address of the first node that all others reach",
            )
        if (
            nodes
            and re.search(r"\$\(hostname|`hostname|\$\{?HOSTNAME", host)
            and (launch.on_node or ESCAPED in host)
        ):
            yield found(
                "rendezvous-c10d-timeout",
                ERROR,
                launch.path,
                address.line,
                f"{shown(host)} is evaluated on every node: each waits at its own address",
                fix='take the first of `scontrol show hostnames "$SLURM_JOB_NODELIST"` above srun',
            )
    for name in ("master_port", "main_process_port"):
        word = launch.option(name)
        port = whole(word.text) if word is not None else None
        if word is not None and port is not None:
            yield from check_port(launch.path, word.line, "the port", port)
    yield from _check_rendezvous_name(launch, scene, nodes)


def _check_rendezvous_name(launch: Launch, scene: Scene, nodes: int | None) -> Iterator[Finding]:
    name = launch.option("rdzv_id")
    if name is None:
        return
    differs = re.search(
        r"\$\{?RANDOM|\$\(hostname|`hostname|\$\{?HOSTNAME|\$\(date|\$\(uuidgen|\$\$", name.text
    )
    everywhere = (
        launch.on_node
        or ESCAPED in name.text
        or (
            "srun" not in launch.wrappers
            and scene.scheduler != "slurm"
            and "ssh" not in launch.wrappers
        )
    )
    if differs and nodes and everywhere:
        yield found(
            "rendezvous-timeout-few-nodes",
            ERROR,
            launch.path,
            name.line,
            f"--rdzv-id {shown(name.text)} is another name on each of {nodes} nodes: "
            "they never meet",
            fix="give all nodes one name: $SLURM_JOB_ID, or a fixed one for each run",
        )
    backend = launch.option("rdzv_backend")
    restarts = launch.number("max_restarts")
    if (
        backend is not None
        and backend.text.startswith("etcd")
        and "$" not in name.text
        and restarts != 0
        and "max_restarts" in launch.options
    ):
        yield found(
            "rendezvous-closed",
            WARNING,
            launch.path,
            name.line,
            f"--rdzv-id {name.text} is the same in every attempt, and {backend.text} remembers "
            "that it was closed",
            fix="put the attempt into the name: $SLURM_JOB_ID-$SLURM_RESTART_COUNT",
        )


def _check_nodes(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """The launcher's count of nodes against the job's, and how its ranks are told apart."""
    word = launch.option("nnodes", "num_machines", "num_nodes")
    nodes = started(launch, scene).nodes
    given = scene.nodes
    if word is not None and nodes is not None and given is not None and nodes != given:
        is_part = "srun" in launch.wrappers and launch.wrapper("srun", "nodes", "N") is not None
        if not is_part and scene.scheduler is not None:
            yield found(
                "rendezvous-timeout-few-nodes",
                ERROR,
                launch.path,
                word.line,
                f"{nodes} nodes are waited for, and the job has {given}",
                fix=f"say {given}"
                + (", or take it from $SLURM_NNODES" if scene.scheduler == "slurm" else ""),
            )
    told = {"PET_NNODES", "TORCHELASTIC_MIN_NODES"} & set(launch.environment)
    if (
        launch.program == "torchrun"
        and word is None
        and scene.scheduler == "slurm"
        and scene.nodes is not None
        and scene.nodes > 1
        and "srun" in launch.wrappers
        and not told
        and launch.wrapper("srun", "nodes", "N") is None
    ):
        yield found(
            "slurm-world-size-copies",
            WARNING,
            launch.path,
            launch.line,
            f"without --nnodes each of {scene.nodes} nodes trains by itself",
            fix=f"--nnodes={scene.nodes} with --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT",
        )
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
        yield found(
            "rendezvous-c10d-timeout",
            ERROR,
            launch.path,
            word.line,
            f"--nnodes={text} is a range, and the static rendezvous waits for all {match[2]}",
            fix="add --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT",
        )


_NUMBER = re.compile(rf"(?<!{ESCAPED})\$\{{?SLURM_(PROCID|NODEID|LOCALID)\b")


def _check_number_of_node(launch: Launch) -> Iterator[Finding]:
    """`--machine_rank $SLURM_PROCID`, which the batch shell has made 0 before srun starts."""
    if "srun" not in launch.wrappers or launch.on_node:
        return
    for before, word in pairwise(launch.words):
        names = f"{before.text} {word.text}".lower()
        if _NUMBER.search(word.text) and not word.single and "rank" in names:
            yield found(
                "accelerate-machine-rank-expanded",
                ERROR,
                launch.path,
                _line_of(launch, before, word),
                f"{shown(word.text)} is 0 for every node: the batch shell expands it before srun",
                fix="srun bash -c '... $SLURM_NODEID ...' in single quotes, or "
                "--rdzv_backend c10d, which needs no number",
            )
            return


def _line_of(launch: Launch, before: Word, word: Word) -> int:
    """The line of an option that a variable may hold, which is expanded elsewhere."""
    option = before.text if before.text.startswith("-") else word.text.split("=")[0]
    for each in launch.environment.values():
        at = each.value.find(option)
        if at >= 0 and each.line <= word.line and _NUMBER.search(each.value):
            return each.line + each.value[:at].count("\n")
    return word.line


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


_OLD = re.compile(r"(?i)\b([VP]100|P40|P4|K80|T4|GTX|TITAN|RTX[ -]?20\d\d|RTX ?[68]000)\b")
"""Before Ampere (compute capability below 8.0), which has bf16 in hardware first."""


def lacks_bf16(gpu: str | None) -> bool:
    """Whether this accelerator, as its owner writes it, surely has no bf16."""
    return gpu is not None and _OLD.search(gpu.replace("_", " ").replace("-", " ")) is not None


def bf16_finding(path: str, line: int, said: str, gpu: str) -> Finding:
    """bf16 asked for on a GPU before Ampere."""
    return found(
        "bf16-unsupported-gpu",
        ERROR,
        path,
        line,
        f"{said} asks for bf16, which {gpu} has not",
        fix="fp16 with loss scaling, or a GPU from Ampere on",
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

SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cephfs", "ceph", "efs", "weka", "fsx", "vast"}
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def _check_cache(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Compilers of several nodes that write into one home."""
    nodes = _is_many(launch, scene) or (scene.nodes or 0)
    if nodes < 2 or (scene.context.home_fs or "").lower() not in SHARED:
        return
    if any(name in launch.environment for name in _CACHES) or launch.variable("XDG_CACHE_HOME"):
        return
    compiles = launch.program == "deepspeed" or any(
        re.match(
            r"-*(torch_?compile|compile|use_compile|deepspeed|flash|triton|liger)",
            word.text.replace("-", "_").lstrip("_"),
        )
        for word in launch.arguments
    )
    yield found(
        "nfs-jit-cache-race",
        WARNING if compiles else INFO,
        launch.path,
        launch.line,
        f"{nodes} nodes compile into one cache in the home folder, which is on "
        f"{scene.context.home_fs}",
        fix="export TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and TORCH_EXTENSIONS_DIR to a "
        "folder in /tmp with the job's id",
    )


_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_LOCAL = {
    "data",
    "datasets",
    "dataset",
    "checkpoints",
    "checkpoint",
    "ckpt",
    "ckpts",
    "models",
    "model",
    "weights",
    "output",
    "outputs",
    "out",
    "runs",
    "configs",
    "config",
    "conf",
    "local",
    "cache",
    "mnt",
    "tmp",
    "scratch",
    "home",
    "workspace",
    "exp",
    "experiments",
    "logs",
    "scripts",
    "src",
    "recipes",
    "examples",
}
_MODEL_OR_DATA = (
    "dataset",
    "dataset_name",
    "dataset_path",
    "dataset_id",
    "model",
    "model_name",
    "model_name_or_path",
    "model_id",
    "base_model",
    "pretrained",
    "pretrained_model_name_or_path",
    "tokenizer",
    "tokenizer_name",
    "tokenizer_name_or_path",
    "hf_dataset",
    "train_dataset",
)


def _check_hub(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Every rank of a large job downloads from the hub at once."""
    if any(
        name in launch.environment
        for name in (
            "HF_HUB_OFFLINE",
            "HF_DATASETS_OFFLINE",
            "TRANSFORMERS_OFFLINE",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HF_ENDPOINT",
        )
    ):
        return
    how = started(launch, scene)
    ranks = how.world or scene.context.num_processes
    if ranks is None and (nodes := how.nodes or scene.nodes) and scene.gpus_per_node:
        ranks = nodes * scene.gpus_per_node
    if ranks is None or ranks <= 8:
        return
    for name in _MODEL_OR_DATA:
        word = launch.argument(name)
        if word is None or not _HUB.fullmatch(word.text):
            continue
        owner, _, rest = word.text.partition("/")
        if owner.lower() in _LOCAL or re.search(r"\.(py|json|jsonl|ya?ml|txt|pt|bin|csv)$", rest):
            continue
        yield found(
            "hub-rate-limit",
            WARNING,
            launch.path,
            word.line,
            f"{ranks} ranks ask the hub for {word.text} at once",
            fix="download it once to a shared folder, and export HF_HUB_OFFLINE=1",
        )
        return


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
    rdma = next(
        (word for word in words if re.search(r"/dev/infiniband|rdma_cm|uverbs", word.text)), None
    )
    if rdma is not None and not re.search(r"memlock[ =]-1|memlock=-1|IPC_LOCK|--privileged", text):
        yield found(
            "memlock-limit",
            WARNING,
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
