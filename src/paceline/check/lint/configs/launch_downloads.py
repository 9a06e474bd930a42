"""What every process of a launch line fetches or compiles for itself: the hub, and caches."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch
from paceline.check.lint.configs.launch_meeting import is_many
from paceline.check.lint.configs.say import INFO, WARNING, found
from paceline.check.lint.configs.scene import Scene, started
from paceline.check.lint.words import words_of

SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cephfs", "ceph", "efs", "weka", "fsx", "vast"}


_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def check_cache(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """Compilers of several nodes that write into one home."""
    nodes = is_many(launch, scene) or (scene.nodes or 0)
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


_LOCAL = words_of("launch", "local_folders")


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


def check_hub(launch: Launch, scene: Scene) -> Iterator[Finding]:
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
            INFO,
            launch.path,
            word.line,
            f"{ranks} ranks ask the hub for {word.text} at once",
            fix="download it once to a shared folder, and export HF_HUB_OFFLINE=1",
        )
        return
