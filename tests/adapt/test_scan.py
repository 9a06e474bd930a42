"""`paceline scan`: what programs and notebooks have of a training, and what `adapt` would do."""

import json
import os
import time
from pathlib import Path

import pytest
from tests.command import run_command

from paceline.adapt import Target, adapt
from paceline.adapt.inventory import Inventory, inventory
from paceline.adapt.notebook import read_notebook
from paceline.check.lint.facts.program import read_program

PLAIN = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
held = DataLoader(data, batch_size=8)
model = torch.nn.Linear(4, 1).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in held:
            model(x.to(device).to(torch.float32))
    torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt"))
"""


def parts(source: str) -> Inventory:
    return inventory(read_program("train.py", source))


def lines(items) -> list[tuple[int, str]]:
    return [(each.line, each.what) for each in items]


def test_s0_1_an_optimizer_that_the_model_makes_is_found():
    made = "optimizer = model.configure_optimizers(0.1)"
    found = parts(PLAIN.replace("optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)", made))
    assert [each.line for each in found.optimizers] == [9]


def test_s0_1_a_plain_script_gives_each_part_with_its_line():
    found = parts(PLAIN)
    assert (found.framework, found.owner, found.trains) == ("pytorch", None, True)
    assert [(each.line, each.end_line, each.role, each.over) for each in found.loops] == [
        (10, 20, "outer", "range(3)"),
        (11, 16, "training", "loader"),
        (18, 19, "evaluation", "held"),
    ]
    assert lines(found.devices) == [
        *(
            (4, "torch.cuda.is_available"),
            (4, "torch.device"),
            (8, ".to"),
            (12, ".to"),
            (19, ".to"),
        ),
    ]
    name = "torch.utils.data.DataLoader"
    assert lines(found.loaders) == [(6, name), (7, name)]
    assert lines(found.optimizers) == [(9, "torch.optim.AdamW")]
    assert lines(found.saves) == [(20, "torch.save")]
    assert lines(found.loads) == [(21, ".load_state_dict"), (21, "torch.load")]
    assert (found.wrapping, found.launch) == ((), ())


PROGRAMS = {
    "ddp": (
        (
            '"""torchrun --nproc-per-node=8 train.py"""\n'
            "import torch, torch.distributed as dist\n"
            "from torch.nn.parallel import DistributedDataParallel as DDP\n"
            'dist.init_process_group("nccl")\n'
            "model = DDP(torch.nn.Linear(2, 2).cuda())\n"
            "for step in range(9):\n    model(x).sum().backward()\n"
        ),
        ("pytorch", None, ["init_process_group", "DistributedDataParallel"], [6]),
    ),
    "fsdp2": (
        (
            "import torch\nfrom torch.distributed.fsdp import fully_shard\n"
            "model = torch.nn.Linear(2, 2)\nfully_shard(model)\nmodel.parameters()\n"
        ),
        ("pytorch", None, ["fully_shard"], []),
    ),
    "accelerate": (
        (
            "from accelerate import Accelerator\naccelerator = Accelerator()\n"
            "model, loader = accelerator.prepare(model, loader)\n"
            "for batch in loader:\n    accelerator.backward(model(batch))\n"
            "accelerator.print('done')\n"
        ),
        ("pytorch", "accelerate", ["Accelerator", "prepare"], [4]),
    ),
    "deepspeed": (
        (
            "import deepspeed\nengine, _, loader, _ = deepspeed.initialize(model=model)\n"
            "for batch in loader:\n    engine.backward(engine(batch))\n    engine.step()\n"
        ),
        ("pytorch", "deepspeed", ["initialize"], [3]),
    ),
    "transformers": (
        (
            "from transformers import Trainer\n\nclass Mine(Trainer):\n    pass\n\n"
            "trainer = Mine(model=model)\ntrainer.train()\n"
        ),
        ("pytorch", "transformers", ["Trainer"], [7]),
    ),
    "lightning": (
        (
            "import lightning as L\n\nclass Net(L.LightningModule):\n"
            "    def training_step(self, batch, index):\n        return self(batch)\n\n"
            "L.Trainer(devices=2).fit(Net(), loader)\n"
        ),
        ("pytorch", "lightning", ["Trainer"], [4, 7]),
    ),
    "keras": (
        (
            "import tensorflow as tf\nwith tf.distribute.MirroredStrategy().scope():\n"
            "    model = tf.keras.Sequential([])\n    model.compile(tf.keras.optimizers.Adam())\n"
            "model.fit(tf.data.Dataset.from_tensors(1))\nmodel.save_weights('w')\n"
        ),
        ("tensorflow", "tensorflow", ["MirroredStrategy"], [5]),
    ),
    "jax": (
        (
            "import jax, optax\noptimizer = optax.adam(1e-3)\n\n"
            "def step(params, state, batch):\n    grads = jax.grad(loss)(params, batch)\n"
            "    updates, state = optimizer.update(grads, state)\n"
            "    return optax.apply_updates(params, updates), state\n\n"
            "step = jax.pmap(step)\nfor batch in batches:\n"
            "    params, state = step(params, state, batch)\n"
        ),
        ("jax", None, ["pmap"], [10]),
    ),
    "mlx": (
        (
            "import mlx.core as mx\nimport mlx.optimizers as optim\nimport mlx.nn as nn\n"
            "optimizer = optim.Adam(1e-3)\nworld = mx.distributed.init()\n"
            "for x in batches:\n    optimizer.update(model, nn.average_gradients(grads))\n"
        ),
        ("mlx", "mlx", ["init", "average_gradients"], [6]),
    ),
    "a closure": (
        (
            "import torch\noptimizer = torch.optim.LBFGS(model.parameters())\n"
            "for i in range(5):\n    def closure():\n        loss = f(model)\n"
            "        loss.backward()\n"
            "        return loss\n    optimizer.step(closure)\n"
        ),
        ("pytorch", None, [], [3]),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_s0_1_framework_wrapping_and_training_loop_are_found_for(name):
    source, expected = PROGRAMS[name]
    found = parts(source)
    wraps = [each.what.rpartition(".")[2] for each in found.wrapping]
    loops = [each.line for each in found.loops if each.role == "training"]
    assert (found.framework, found.owner, wraps, loops) == expected


def test_s0_1_code_under_a_condition_that_does_not_hold_here_counts_too():
    found = parts(
        "import torch\nresume = False\nmodel = torch.nn.Linear(2, 2)\n"
        "if resume:\n    state = torch.load('a.pt')\n    model.to(device).load_state_dict(state)\n"
        "if False:\n    torch.save(state, 'a.pt')\n"
    )
    assert lines(found.loads) == [(5, "torch.load"), (6, ".load_state_dict")]
    assert (lines(found.devices), lines(found.saves)) == ([(6, ".to")], [(8, "torch.save")])


def test_s0_1_a_method_of_a_chain_has_the_line_that_it_stands_on():
    found = parts(
        "import torch\nmodel = (\n    torch.nn.Linear(\n        2, 2\n    ).to('cuda')\n)\n"
    )
    assert lines(found.devices) == [(5, ".to")]


def test_s0_1_a_launch_line_in_a_docstring_counts():
    (launch,) = parts(PROGRAMS["ddp"][0]).launch
    assert (launch.line, launch.text) == (1, "torchrun --nproc-per-node=8 train.py")


def test_s0_1_a_loop_that_trains_in_another_file_is_an_outer_one(tmp_path):
    (tmp_path / "engine.py").write_text(
        "def epoch(model, loader):\n    for batch in loader:\n        model(batch).backward()\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\nfrom engine import epoch\n"
        "for number in range(3):\n    epoch(model, loader)\n"
    )
    files = scanned(tmp_path)["files"]
    assert {Path(each["path"]).name: [one["role"] for one in each["loops"]] for each in files} == {
        "engine.py": ["training"],
        "train.py": ["outer"],
    }


def scanned(*paths: Path, code: int = 0, words: tuple[str, ...] = ()) -> dict:
    done = run_command(
        "scan", *(str(path) for path in paths), "--json", *words, folder=paths[0].parent
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    return json.loads(done.stdout)


def test_s0_1_what_adapt_would_do_is_what_adapt_does(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "ddp.py").write_text(PROGRAMS["ddp"][0])
    files = {Path(each["path"]).name: each for each in scanned(tmp_path)["files"]}
    for to in Target:
        asked = files["train.py"]["adapt"][to]
        really = adapt(PLAIN, to, name="train.py")
        assert not really.refused
        assert [each["what"] for each in asked["done"]] == [each.what for each in really.done]
        assert [each["what"] for each in asked["left"]] == [each.what for each in really.left]
        assert asked["start"] == really.start
        refused = files["ddp.py"]["adapt"][to]
        assert refused["outcome"] == "refused"
        assert refused["left"][1]["what"] == "uses DistributedDataParallel already"


def notebook(*cells: str) -> str:
    made = [{"cell_type": "markdown", "source": ["# A title"]}]
    made += [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": made, "nbformat": 4})


def test_s0_1_a_notebook_is_read_with_its_cells_and_without_its_magics(tmp_path):
    head, loop = PLAIN.split("for epoch")
    (tmp_path / "train.ipynb").write_text(
        notebook(
            "%matplotlib inline\n!pip install torch \\\n    numpy\nfiles = !ls\n" + head,
            "%%bash\necho $HOME",
            f"for epoch{loop}",
            'print("%d"\n      % 3)  # right?',
        )
    )
    (file,) = scanned(tmp_path)["files"]
    assert (file["kind"], file["framework"]) == ("notebook", "pytorch")
    places = [(each["role"], each["cell"], each["cell_line"]) for each in file["loops"]]
    assert places == [("outer", 4, 1), ("training", 4, 2), ("evaluation", 4, 9)]
    assert file["adapt"]["ddp"]["left"][0]["what"] == "this is a notebook"
    shown = run_command("scan", "train.ipynb", folder=tmp_path).stdout
    assert "cell 4:2-7   training" in shown


def test_s0_1_a_line_of_a_notebook_keeps_its_place():
    text, places = read_notebook(notebook("import os\n%time run()", "a = 1\nos.path?"))
    assert text.split("\n") == ["import os", "pass", "a = 1", "pass", ""]
    assert places == ((2, 1), (2, 2), (3, 1), (3, 2))


def test_s0_1_a_notebook_in_another_language_is_named(tmp_path):
    made = json.loads(notebook("x <- 1"))
    made["metadata"] = {"kernelspec": {"language": "R"}}
    (tmp_path / "plot.ipynb").write_text(json.dumps(made))
    (unread,) = scanned(tmp_path, code=2)["unread"]
    assert unread["what"] == "a notebook in R, not in Python"


def test_s0_1_files_of_here_and_of_elsewhere_are_shown_together(tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(PLAIN)
    there = str(tmp_path / "there/train.py")
    done = run_command("scan", "train.py", there, folder=tmp_path / "here")
    names = [line.split()[0] for line in done.stdout.splitlines()[3:]]
    assert (done.returncode, sorted(names)) == (0, sorted(["train.py", there]))


def test_s0_1_what_starts_a_program_is_named_with_its_line(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "go.sh").write_text("#!/bin/bash\nset -e\ntorchrun --nproc-per-node 4 train.py\n")
    (file,) = scanned(tmp_path)["files"]
    (start,) = file["started_by"]
    assert Path(start["path"]).name == "go.sh"
    assert (start["line"], start["text"]) == (3, "torchrun --nproc-per-node 4 train.py")


def test_s0_1_broken_files_links_and_large_files_are_named_and_end_nothing(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "train.py").write_text(PLAIN)
    (tree / "broken.py").write_text("def f(:\n")
    (tree / "binary.py").write_bytes(b"\0\1\2")
    (tree / "latin.py").write_bytes("x = 'é'\n".encode("latin-1"))
    (tree / "broken.ipynb").write_text("{")
    (tree / "bad-cell.ipynb").write_text(notebook("x = 1", "y =\n"))
    (tree / "huge.py").write_text("x = 1\n" * 800_000)
    (tree / "deep.py").write_text(f"x = {'(' * 3000}1{')' * 3000}\n")
    (tree / "empty.py").write_text("")
    (tree / "again").symlink_to(tree)
    (tree / "itself.py").symlink_to(tree / "itself.py")
    os.mkfifo(tree / "pipe.py")
    found = scanned(tree, code=2)
    assert {Path(each["path"]).name for each in found["files"]} >= {"train.py", "empty.py"}
    unread = {Path(each["path"]).name: each["what"] for each in found["unread"]}
    assert set(unread) == {
        *("broken.py", "binary.py", "latin.py", "broken.ipynb", "bad-cell.ipynb"),
        *("huge.py", "deep.py", "itself.py"),
    }
    assert unread["bad-cell.ipynb"].startswith("cell 3, line 1: ")
    (train,) = [each for each in found["files"] if each["path"].endswith("/train.py")]
    assert train["trains"]


def test_s0_1_time_is_bounded_and_what_was_left_is_named(tmp_path):
    function = "def f{0}(x):\n" + "".join(f"    x = f{{0}}({n})(x, [{n}])\n" for n in range(400))
    for name in range(6):
        text = "\n".join(function.format(n) for n in range(40))
        (tmp_path / f"long{name}.py").write_text(text)
    began = time.monotonic()
    found = scanned(tmp_path, code=2, words=("--timeout", "0.5"))
    assert time.monotonic() - began < 120
    assert found["unread"]
    assert {each["what"] for each in found["unread"]} == {"the 0.5 s of --timeout are over"}
    assert len(found["unread"]) + len(found["files"]) == 6


def test_s0_1_a_tree_is_one_row_a_program_and_a_path_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "ddp.py").write_text(PROGRAMS["ddp"][0])
    (tmp_path / "utils.py").write_text("x = 1\n")
    done = run_command("scan", ".", folder=tmp_path)
    first, _, head, *rows = done.stdout.splitlines()
    assert first == "3 programs: 2 train, 1 of them can be adapted to many devices"
    assert head.split("  ")[0] == "file"
    assert rows[0].split()[:3] == ["ddp.py", "pytorch", "6"]
    assert rows[0].endswith("no: uses torch.distributed already  process group, DDP")
    assert rows[1].split()[:3] == ["train.py", "pytorch", "11"]
    assert rows[-1] == "and 1 program without any of these"
    gone = run_command("scan", "nowhere", "--json", folder=tmp_path)
    assert (gone.returncode, json.loads(gone.stdout)["problems"][0]["code"]) == (2, "V020")


def test_s0_1_a_file_that_is_no_program_is_not_passed_over(tmp_path: Path):
    path = tmp_path / "job.json"
    path.write_text("{}")
    (unread,) = scanned(path, code=2)["unread"]
    assert unread["what"] == "neither a program nor a notebook"


def test_s0_1_a_script_without_a_loop_that_imports_another_framework_says_both(tmp_path: Path):
    path = tmp_path / "convert.py"
    path.write_text("import torch\nimport mlx.core as mx\nprint(torch.ones(1), mx.ones(1))\n")
    (file,) = scanned(path)["files"]
    assert "no loop of plain PyTorch, and it imports mlx" in json.dumps(file["adapt"])


@pytest.mark.parametrize(
    ("body", "roles"),
    [
        ("X, Y = get_batch(split)\n            logits, loss = model(X, Y)", ["evaluation"]),
        ("x = get_batch(k)\n            x = x.to(device)\n            score(x)", ["evaluation"]),
        ("ids = context[-8:]\n            context = cat(context, model(ids))", []),
        ("state = model(x[k])\n            model(state)", ["evaluation"]),
        ("state = cell(x[k], state)\n            model(state)", []),
        ("model(fixed)", []),
    ],
    ids=["by hand", "in a function", "generation", "two models", "recurrence", "one input timed"],
)
def test_s0_1_a_loop_without_a_loader_evaluates_what_it_makes_anew(body, roles):
    source = f"""import torch
model = torch.nn.Linear(2, 2)
def score(x):
    return model(x)
@torch.no_grad()
def estimate_loss():
    for split in ["train", "val"]:
        for k in range(9):
            {body}
estimate_loss()
"""
    loops = parts(source).loops
    assert [each.role for each in loops] == roles
    assert all(each.over == "range(9)" for each in loops)
