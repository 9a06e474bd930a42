"""What is rewritten, what is listed, and what is refused; read from the text, without torch."""

import ast
import shlex
import time
from pathlib import Path

import pytest
from tests.command import run_command

from paceline.adapt import Adapted, Target, adapt
from paceline.job import load_script

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
PLAIN = tuple(Target)

SMALL = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Linear(4, 2)
data = [(torch.randn(4), 1) for _ in range(64)]
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def changed(*pairs: tuple[str, str]) -> str:
    text = SMALL
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def lefts(adapted: Adapted) -> str:
    return "\n".join(f"{each.line}: {each.what}: {each.why}" for each in adapted.left)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("target", PLAIN, ids=str)
def test_s0_8_adapting_what_was_adapted_changes_nothing_and_says_so(path, target):
    once = adapt(path.read_text(), target)
    again = adapt(once.text, target)
    assert once.text != path.read_text()
    assert again.already
    assert again.text == once.text
    assert (again.done, again.left) == ((), ())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("target", PLAIN, ids=str)
def test_every_comment_stays_and_the_result_is_python(path, target):
    text = adapt(path.read_text(), target).text
    ast.parse(text)
    for line in path.read_text().split("\n"):
        before, mark, comment = line.partition("#")
        if mark and '"' not in before:
            assert mark + comment in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("target", PLAIN, ids=str)
def test_no_collective_stands_in_a_branch_of_one_rank(path, target):
    """Helpers aside: they are written by hand, and `save_once` waits outside of its branch."""
    tree = ast.parse(adapt(path.read_text(), target).text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "RANK == 0",
            "accelerator.is_main_process",
        ):
            inside = "\n".join(ast.unparse(each) for each in node.body)
            for word in ("_over_ranks(", "full_state(", "save_once(", "barrier(", "agreed("):
                assert word not in inside


@pytest.mark.parametrize("target", list(Target), ids=str)
def test_s0_8_an_import_that_nothing_uses_is_no_reason_to_refuse(target):
    unused = (
        "import torch.distributed as dist\nimport deepspeed\nfrom accelerate import Accelerator\n"
        "from transformers import Trainer\n"
    )
    adapted, plain = adapt(unused + SMALL, target), adapt(SMALL, target)
    assert not adapted.refused
    assert [each.what for each in adapted.done] == [each.what for each in plain.done]
    compile(adapted.text, "train.py", "exec")
    assert adapt(adapted.text, target).already


@pytest.mark.parametrize(
    ("source", "line", "word"),
    [
        ("", 1, "empty"),
        ("\n\n", 1, "empty"),
        ("import torch\nfor x in\n", 2, "no valid Python"),
        ('{"cells": [], "nbformat": 4}', 1, "notebook"),
        ("import torch\nprint(torch.ones(2))\n", 1, "no training loop"),
        ("import tensorflow as tf\nprint(tf)\n", 1, "tensorflow"),
        ("import torch.distributed as d\nd.get_rank()\n" + SMALL, 2, "torch.distributed already"),
        ("from accelerate import Accelerator as A\nA()\n" + SMALL, 2, "Accelerate already"),
        ("import lightning as L\nL.Trainer()\n", 2, "Lightning owns the loop"),
        ("import pytorch_lightning as L\nclass M(L.LightningModule): ...\n", 2, "Lightning owns"),
        ("from lightning.fabric import Fabric\nf = Fabric()\n" + SMALL, 2, "Fabric distributes"),
        ("from transformers import Trainer\nclass T(Trainer): ...\n", 2, "Hugging Face Trainer"),
        ("import deepspeed\ndeepspeed.initialize()\n" + SMALL, 2, "DeepSpeed already"),
        ("from trl import *\n" + SMALL, 1, "TRL trainer"),
        ("from paceline.runtime import Session\nSession()\n", 2, "Paceline"),
        (
            "from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(0)\n" + SMALL,
            2,
            "DistributedDataParallel already",
        ),
        (changed(("DataLoader(data, batch_size=8, shuffle=True)", "data")), 11, "DataLoader"),
        (
            changed(("model = nn", "other = nn.Linear(1, 1)\nmodel = nn"),
                    ("optimizer = ", "second = torch.optim.SGD(other.parameters())\noptimizer = ")),
            10,
            "one of 2 models",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", list(Target), ids=str)
def test_what_cannot_be_adapted_is_refused_with_its_line(source, line, word, target):
    adapted = adapt(source, target)
    assert adapted.refused
    assert adapted.text == source
    assert any(each.line == line and word in each.what for each in adapted.left), adapted.left
    assert all(each.why for each in adapted.left)


@pytest.mark.parametrize(
    "unused",
    [
        "from lightning.fabric.utilities.seed import seed_everything\n",
        "import pytorch_lightning\n",
        "from pytorch_lightning import seed_everything\nseed_everything(1)\n",
    ],
)
def test_s0_1_a_utility_of_a_library_that_could_own_the_loop_owns_none(unused):
    adapted = adapt(unused + SMALL, Target.DDP)
    assert not adapted.refused, adapted.left
    assert "DistributedDataParallel" in adapted.text


def below(old: str, *lines: str) -> str:
    """The small script with lines above the first one that begins with `old`, indented as it is."""
    found = next(line for line in SMALL.split("\n") if line.lstrip().startswith(old))
    indent = found[: len(found) - len(found.lstrip())]
    return changed((found, "\n".join([*(indent + line for line in lines), found])))


@pytest.mark.parametrize(
    ("source", "line", "word"),
    [
        (changed(("shuffle=True", "sampler=mine")), 8, "sampler of your own"),
        (
            below("loss.backward", "if torch.isnan(loss):", "    continue"),
            14,
            "decides this by its own samples",
        ),
        (below("loss.backward", "loss.backward(retain_graph=True)"), 15, "second backward"),
        (
            below("for epoch", "import copy", "ema = copy.deepcopy(model)"),
            11,
            "a copy of the model",
        ),
        (
            below("torch.man", "import sys", "d = torch.device(sys.argv[1])"),
            6,
            "comes from outside",
        ),
        (
            below("optimizer.z", "best = max(0, loss.item() * 2 ** y)", "print(best)"),
            14,
            "rank 0's share",
        ),
        (
            below("optimizer.z", "loss = loss + model(x).square().sum()"),
            15,
            "part of the loss is a mean",
        ),
    ],
)
def test_what_could_only_be_guessed_is_listed_with_its_line(source, line, word):
    adapted = adapt(source, Target.DDP)
    assert not adapted.refused
    assert any(each.line == line and word in each.why for each in adapted.left), lefts(adapted)


def test_a_decision_by_the_loss_is_taken_by_the_mean_of_all_ranks():
    source = below("loss.backward", "if loss.item() > 9:", "    print(loss.item())")
    adapted = adapt(source, Target.DDP)
    assert "if mean_over_ranks(loss.item()) > 9:" in adapted.text
    assert adapted.left == ()


def test_nothing_is_left_of_a_plain_script():
    for target in (Target.DDP, Target.FSDP2, Target.ACCELERATE):
        assert adapt(SMALL, target).left == ()


def test_the_batch_is_shared_and_the_learning_rate_stays():
    adapted = adapt(SMALL, Target.DDP)
    assert "batch_size=per_rank(8)" in adapted.text
    assert "lr=0.1" in adapted.text
    assert any("shared by the ranks" in each.what and each.line == 8 for each in adapted.done)


def test_a_script_adapted_to_another_form_is_sent_back_to_its_origin():
    adapted = adapt(adapt(SMALL, Target.DDP).text, Target.FSDP2)
    assert adapted.refused
    assert "was adapted to ddp" in adapted.left[0].what


def test_a_name_that_the_helpers_need_is_refused_with_its_line():
    adapted = adapt(SMALL + "RANK = 3\n", Target.DDP)
    assert adapted.refused
    assert adapted.left[0].line == 16


def test_a_loss_that_is_a_sum_is_scaled_because_ranks_average():
    source = changed(("(model(x), y)", '(model(x), y, reduction="sum")'))
    assert "(loss * WORLD_SIZE).backward()" in adapt(source, Target.DDP).text


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("(loss / 4).backward()", "accelerator.backward(loss / 4)"),
        ("(loss / 4).backward(retain_graph=True)", "((loss / 4), retain_graph=True)"),
        ("(loss.mean()).backward()", "accelerator.backward(loss.mean())"),
    ],
)
def test_a_backward_pass_of_an_expression_is_accelerates(written, wanted):
    source = changed(("loss.backward()", written))
    assert wanted in adapt(source, Target.ACCELERATE).text


def test_shards_are_made_before_any_list_of_parameters():
    source = below("optimizer = ", "groups = [p for p in model.parameters()]", "print(len(groups))")
    source = source.replace("SGD(model.parameters()", "SGD(groups")
    lines = adapt(source, Target.FSDP2).text.split("\n")
    assert lines.index("shard(model)") < lines.index("groups = [p for p in model.parameters()]")


def test_s0_8_the_command_shows_a_diff_and_writes_only_when_asked(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SMALL)
    shown = run_command("adapt", "train.py", "--to", "ddp", folder=tmp_path)
    assert (shown.returncode, script.read_text()) == (0, SMALL)
    assert "+loader.sampler.set_epoch" in shown.stdout.replace("    ", "")
    written = run_command("adapt", "train.py", "--to", "ddp", "--write", folder=tmp_path)
    assert written.returncode == 0, written.stderr
    assert (tmp_path / "train.py.orig").read_text() == SMALL
    assert "join_ranks()" in script.read_text()
    again = run_command("adapt", "train.py", "--to", "ddp", "--write", folder=tmp_path)
    assert (again.returncode, "nothing to change" in again.stderr) == (0, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "train.py.orig"]


@pytest.mark.parametrize("target", ["ddp", "fsdp2"])
def test_s0_8_what_the_helpers_need_is_imported_above_them_wherever_the_script_does(target):
    late = changed(
        ("torch.manual_seed(0)", "x = 1\n\ndef f():\n    import gc, logging\n\nimport os")
    )
    body = ast.parse(adapt(late, Target(target)).text).body
    bound = set()
    for stmt in body:
        if isinstance(stmt, ast.Import | ast.ImportFrom):
            bound |= {each.asname or each.name.partition(".")[0] for each in stmt.names}
        elif isinstance(stmt, ast.Assign):
            names = {each.id for each in ast.walk(stmt.value) if isinstance(each, ast.Name)}
            assert names & {"os", "gc", "logging", "random", "dist"} <= bound


def test_s0_8_a_file_with_the_name_of_a_package_that_it_imports_is_not_written(tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    options = ("--to", "accelerate", "--out", "accelerate.py")
    result = run_command("adapt", "train.py", *options, folder=tmp_path)
    assert result.returncode == 2
    assert "A003" in result.stderr
    assert "imports accelerate" in result.stderr
    assert not (tmp_path / "accelerate.py").exists()


def test_the_command_never_writes_over_another_file(tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    (tmp_path / "other.py").write_text("precious = 1\n")
    result = run_command("adapt", "train.py", "--to", "ddp", "--out", "other.py", folder=tmp_path)
    assert result.returncode == 2
    assert "A003" in result.stderr
    assert (tmp_path / "other.py").read_text() == "precious = 1\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe\x00\x01", "A001"),
        (b"print('\xe9')\n", "A001"),
        (b"x = 1\0\n", "A001"),
        (b"", "empty"),
        (b"def f(:\n", "no valid Python"),
        (b"((((" * 5000, "A002"),
        (b"# -*- coding: no-such -*-\n", "A001"),
    ],
)
def test_files_that_are_no_script_are_refused_without_a_traceback(data, said, tmp_path):
    (tmp_path / "train.py").write_bytes(data)
    result = run_command("adapt", "train.py", "--to", "ddp", folder=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_line_ends_and_encoding_stay(tmp_path):
    text = "# -*- coding: latin-1 -*-\n# caf\xe9\n" + SMALL
    (tmp_path / "train.py").write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    result = run_command("adapt", "train.py", "--to", "ddp", "--write", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    written = (tmp_path / "train.py").read_bytes()
    assert b"caf\xe9" in written
    assert written.count(b"\n") == written.count(b"\r\n")


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    for name in (".", "nothing.py"):
        result = run_command("adapt", name, "--to", "ddp", folder=tmp_path)
        assert (result.returncode, "A001" in result.stderr) == (2, True)
        assert "Traceback" not in result.stderr


def test_for_paceline_a_job_file_is_written_beside_the_script(tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    result = run_command(
        "adapt", "train.py", "--to", "paceline", "--out", "far.py", folder=tmp_path
    )
    assert result.returncode == 1, result.stderr
    assert "no checkpoint is ever loaded" in result.stderr
    job = (tmp_path / "far.yaml").read_text()
    assert "command: [python, far.py]" in job
    assert "paceline adapt: paceline" in (tmp_path / "far.py").read_text()
    again = run_command("adapt", "far.py", "--to", "paceline", folder=tmp_path)
    assert (again.returncode, "nothing to change" in again.stderr) == (0, True)


@pytest.mark.parametrize("name", ["my train.py", "_a,b#c.py", "train", "\N{SNOWMAN}.py"])
def test_a_job_file_is_right_whatever_the_script_is_called(tmp_path, name):
    (tmp_path / name).write_text(SMALL + 'print("SCRIPT.py")\n')
    result = run_command("adapt", name, "--to", "paceline", "--write", folder=tmp_path)
    assert result.returncode == 1, result.stderr
    (path,) = tmp_path.glob("*.yaml")
    program = load_script(path)
    assert program is not None
    assert list(program.spec.command) == ["python", name]
    assert result.stderr.endswith(f"start it: paceline run {shlex.quote(path.name)}\n")
    assert 'print_once("SCRIPT.py")' in (tmp_path / name).read_text()


GUARDED = """\
import sys
import time
import torch
from torch.utils.data import DataLoader

def main():
    model = torch.nn.Linear(4, 2)
    loader = DataLoader([(torch.randn(4), 1)] * 8, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return 0

if __name__ == "__main__":
    sys.exit(main())
"""


def test_ranks_meet_before_main_and_leave_before_the_program_ends():
    lines = [line.strip() for line in adapt(GUARDED, Target.DDP).text.split("\n")]
    guard = lines.index('if __name__ == "__main__":')
    assert lines[guard + 1 : guard + 6] == [
        "join_ranks()",
        "share_seed()",
        "exit_code = main()",
        "leave_ranks()",
        "sys.exit(exit_code)",
    ]


def test_a_model_made_above_the_guard_is_wrapped_after_the_ranks_met():
    source = SMALL.replace("for epoch", 'if __name__ == "__main__":\n  for epoch')
    lines = adapt(source, Target.DDP).text.split("\n")
    assert lines.index("join_ranks()") < lines.index("model = distribute(model)")


def test_a_script_that_knows_no_gpu_stays_on_the_cpu_and_says_so():
    adapted = adapt(SMALL, Target.DDP)
    assert 'THIS_DEVICE = torch.device("cpu")' in adapted.text
    assert any("on CPUs too" in each.what for each in adapted.done)
    moved = adapt(changed(("model(x)", 'model(x.to("cuda"))')), Target.DDP)
    assert 'THIS_DEVICE = torch.device("cuda", LOCAL_RANK) if' in moved.text


@pytest.mark.parametrize("target", PLAIN, ids=str)
def test_every_move_to_a_device_of_an_option_is_listed(target):
    source = changed(
        ("torch.manual_seed(0)", "args = parser.parse_args()\ntorch.manual_seed(0)"),
        ("nn.Linear(4, 2)", "nn.Linear(4, 2).to(args.device)"),
        ("model(x)", "model(x.to(args.device))"),
    )
    asked = [each for each in adapt(source, target).left if "an option chooses" in each.why]
    assert [each.line for each in asked] == [7, 13]
    chosen = source.replace("args.device", "device").replace(
        "args = parser.parse_args()",
        'device = torch.device("cuda" if parser.parse_args().gpu else "cpu")',
    )
    assert any("an option chooses" in each.why for each in adapt(chosen, target).left)


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ('cfg = {"device": "cpu"}', 'cfg["device"]'),
        ('device = "cpu"', "device"),
        ('class Config:\n    device = "cpu"', "Config.device"),
        ('device = torch.device("cpu")', "device"),
    ],
)
def test_a_script_that_names_the_cpu_alone_has_cpu_ranks(setting, place):
    source = changed(
        ("torch.manual_seed(0)", f"{setting}\ntorch.manual_seed(0)"),
        ("nn.Linear(4, 2)", f"nn.Linear(4, 2).to({place})"),
        ("model(x)", f"model(x.to({place}))"),
    )
    adapted = adapt(source, Target.DDP)
    assert 'THIS_DEVICE = torch.device("cpu")' in adapted.text
    assert not adapted.left
    gpu = adapt(source.replace('"cpu"', '"cuda"'), Target.DDP)
    assert 'THIS_DEVICE = torch.device("cuda", LOCAL_RANK) if' in gpu.text
    assert not gpu.left


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("cross_entropy(model(x), y)", "cross_entropy(model(x), y, ignore_index=0)", 12),
        ("nn.functional.cross_entropy(model(x), y)", "model(x).square()[y > 0].mean()", 12),
        (
            "nn.functional.cross_entropy(model(x), y)",
            "(model(x)[:, 0] * (y > 0)).sum() / (y > 0).sum()",
            12,
        ),
    ],
)
def test_a_mean_over_unmasked_targets_is_listed(old, new, line):
    (left,) = adapt(changed((old, new)), Target.DDP).left
    assert left.line == line
    assert "different numbers of them" in left.why
    if "cross_entropy(" in new:
        summed = adapt(changed((old, new[:-1] + ', reduction="sum")')), Target.DDP)
        assert "different numbers of them" not in lefts(summed)


def test_a_sampler_stands_beside_a_batch_size_that_comes_last():
    for options in ("batch_size=8", "8"):
        text = adapt(changed(("batch_size=8, shuffle=True", options)), Target.DDP).text
        assert "per_rank(8), sampler=DistributedSampler(data, shuffle=False))" in text


def test_loaders_in_a_dict_are_refused_where_they_are_made():
    source = changed(
        ("loader = DataLoader", 'loaders = {}\nloaders["train"] = DataLoader'),
        ("in loader", 'in loaders[("train" if epoch else "val")]'),
    )
    adapted = adapt(source, Target.DDP)
    assert adapted.refused
    assert (adapted.left[0].line, "cannot be followed" in adapted.left[0].what) == (9, True)


def test_a_list_of_two_thousand_lines_is_read_in_seconds():
    filler = "".join(
        f"\n\ndef metric_{n}(x, y):\n    a = x * {n}\n    b = y + a\n    return (a * b).sum()\n"
        for n in range(400)
    )
    start = time.process_time()
    assert not adapt(SMALL.replace("torch.manual", filler + "\n\ntorch.manual"), Target.DDP).refused
    assert time.process_time() - start < 30


def test_only_one_rank_pushes_and_metrics_have_a_file_for_each():
    head = "import evaluate\nfrom transformers import AutoModel\n"
    source = head + changed(("nn.Linear(4, 2)", 'AutoModel.from_pretrained("tiny")'))
    source += 'metric = evaluate.load("glue")\nmodel.push_to_hub("me/model")\n'
    text = adapt(source, Target.DDP).text
    assert 'evaluate.load("glue", experiment_id=str(RANK))' in text
    assert 'if RANK == 0:\n    unwrapped(model).push_to_hub("me/model")' in text
    sharded = adapt(source, Target.FSDP2)
    assert any("holds shards" in each.why for each in sharded.left)


def test_an_interrupt_is_no_place_to_save_together():
    body = SMALL.index("for epoch")
    loop = "".join(f"    {line}\n" for line in SMALL[body:].rstrip().split("\n"))
    source = SMALL[:body] + "try:\n" + loop
    source += 'except KeyboardInterrupt:\n    torch.save(model.state_dict(), "x.pt")\n'
    adapted = adapt(source, Target.DDP)
    assert any("would wait for ever" in each.why and each.line == 18 for each in adapted.left)
    assert "save_once(unwrapped" not in adapted.text
