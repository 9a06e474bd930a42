"""A pipeline of Kubeflow Pipelines v2: prepare, train, evaluate, export.

    python pipeline.py compile     writes pipeline.yaml, for the user interface or `kfp run create`
    python pipeline.py local       runs it here, every step a process, with this Python

The steps carry the program beside this file with them, so that their image needs PyTorch alone.
What `kfp.json` says: the image, and what the training step asks for.
"""

import json
import sys
from pathlib import Path

from kfp import compiler, dsl, local
from kfp.dsl import Dataset, Input, Metrics, Model, Output

HERE = Path(__file__).resolve().parent
OPTIONS = json.loads((HERE / "kfp.json").read_text())
PROGRAM = {name: (HERE / name).read_text() for name in OPTIONS["program"]}
IS_LOCAL = sys.argv[1:2] == ["local"]

step = dsl.component(
    base_image=OPTIONS["image"],
    # Here this Python has it; an image need not.
    install_kfp_package=not IS_LOCAL,
    packages_to_install=[],
)


@step
def prepare(program: dict, folder: Output[Dataset]):
    """The program in a folder, and proof that there is something to train on."""
    import json
    import sys
    from pathlib import Path

    place = Path(folder.path)
    place.mkdir(parents=True)
    for name, text in program.items():
        (place / name).write_text(text)
    settings = json.loads((place / "train.json").read_text())
    # The last step is saved, whatever the interval: the next steps read that checkpoint.
    most = min(settings["checkpoint_every"], settings["steps"])
    every = max(n for n in range(1, most + 1) if settings["steps"] % n == 0)
    (place / "train.json").write_text(json.dumps(settings | {"checkpoint_every": every}, indent=2))
    sys.path.insert(0, str(place))
    import lm

    samples = lm.Samples(lm.read_settings())
    folder.metadata["samples"] = samples.text.num
    print(f"{samples.text.num} samples")


@step
def train(folder: Input[Dataset], processes: int, checkpoint: Output[Model]):
    """torchrun on this pod's accelerators, or CPUs; the newest checkpoint is the result."""
    import shutil
    import subprocess
    import sys
    from pathlib import Path

    work = Path(checkpoint.path + "-work")
    shutil.copytree(folder.path, work, dirs_exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "train.py"]
    subprocess.run(command, cwd=work, check=True)
    newest = sorted((work / "checkpoints").glob("step-*"))[-1]
    shutil.copytree(newest, checkpoint.path)
    checkpoint.metadata["step"] = int(newest.name.removeprefix("step-"))
    checkpoint.metadata["processes"] = processes


@step
def evaluate(
    folder: Input[Dataset], checkpoint: Input[Model], batches: int, metrics: Output[Metrics]
) -> float:
    """Mean loss over samples that follow those that were trained on."""
    import sys

    sys.path.insert(0, folder.path)
    import lm
    import torch
    import torch.distributed.checkpoint as dcp

    settings = lm.read_settings()
    model = lm.LanguageModel(settings)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint.path, no_dist=True)
    model.load_state_dict(state["model"])
    samples, steps = lm.Samples(settings), range(settings["steps"], settings["steps"] + batches)
    with torch.no_grad():
        losses = [
            float(lm.loss_of(model(tokens[:, :-1]), tokens))
            for step in steps
            for tokens in samples.micro_batches(step, 0, 1)
        ]
    loss = sum(losses) / len(losses)
    metrics.log_metric("held_out_loss", loss)
    print(f"evaluation loss {loss:.4f} over {len(losses)} micro-batches")
    return loss


@step
def export(folder: Input[Dataset], checkpoint: Input[Model], loss: float, model: Output[Model]):
    """One file of whole weights, with their hash: `model.pt` beside `model.json`."""
    import json
    import sys
    from pathlib import Path

    sys.path.insert(0, folder.path)
    import lm
    import torch
    import torch.distributed.checkpoint as dcp

    settings = lm.read_settings()
    state = {"model": lm.LanguageModel(settings).state_dict()}
    dcp.load(state, checkpoint_id=checkpoint.path, no_dist=True)
    place = Path(model.path)
    place.mkdir(parents=True)
    torch.save(state["model"], place / "model.pt")
    said = {"sha256": lm.digest(state["model"]), "held_out_loss": loss, "settings": settings}
    (place / "model.json").write_text(json.dumps(said, indent=2))
    model.metadata["sha256"] = said["sha256"]


@dsl.pipeline(name=OPTIONS["name"], description=OPTIONS["description"])
def pipeline(processes: int = OPTIONS["processes"], batches: int = 4):
    """What runs after what. A step that has succeeded is not run again for the same input."""
    prepared = prepare(program=PROGRAM)
    trained = train(folder=prepared.outputs["folder"], processes=processes)
    if OPTIONS["accelerator"]:
        trained.set_accelerator_type(OPTIONS["accelerator"])
        trained.set_accelerator_limit(OPTIONS["processes"])
    trained.set_retry(num_retries=OPTIONS["retries"])
    evaluated = evaluate(
        folder=prepared.outputs["folder"],
        checkpoint=trained.outputs["checkpoint"],
        batches=batches,
    )
    export(
        folder=prepared.outputs["folder"],
        checkpoint=trained.outputs["checkpoint"],
        loss=evaluated.outputs["Output"],
    )


def main() -> None:
    """Compile, or run here."""
    if sys.argv[1:] == ["compile"]:
        compiler.Compiler().compile(pipeline, str(HERE / "pipeline.yaml"))
        print(HERE / "pipeline.yaml")
    elif IS_LOCAL:
        local.init(
            runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(HERE / "outputs")
        )
        pipeline()
    else:
        raise SystemExit("python pipeline.py compile | local")


if __name__ == "__main__":
    main()
