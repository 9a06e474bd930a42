import pytest

from paceline.check.lint.context import Context, launch_in_text
from paceline.check.lint.stated import context_from_facts, context_from_launch


@pytest.mark.parametrize(
    ("line", "processes"),
    [
        ("torchrun --nnodes=2 --nproc-per-node=8 train.py", 16),
        ("torchrun --nproc_per_node 4 train.py --nodes x", 4),
        ("python -m torch.distributed.run --nproc_per_node=2 t.py", 2),
        ("srun torchrun --nnodes $N --nproc-per-node 8 t.py", None),
        ("accelerate launch --num_processes 8 t.py", 8),
        ("deepspeed --num_gpus=8 t.py", 8),
        ("mpirun -np 4 python t.py", 4),
        ("python train.py", None),
    ],
)
def test_a_launch_line_says_how_many_processes_run(line, processes):
    assert context_from_launch(line).num_processes == processes


def test_facts_of_other_tools_are_read_and_strange_ones_passed_over():
    context = context_from_facts({"devices": 8, "num_nodes": "2", "mood": "good"})
    assert (context.nodes, context.devices, context.num_processes) == (2, 8, 16)


def test_what_is_given_wins_over_the_launch_line():
    context = context_from_facts({"nodes": 4, "launch": "torchrun --nnodes=2 --nproc-per-node=8"})
    assert (context.nodes, context.devices) == (4, 8)


def test_nothing_is_known_at_first():
    assert Context().num_processes is None
    assert Context(versions={"torch": "2.13.0+cpu"}).version("torch") == (2, 13, 0)
    assert Context().version("torch") is None


def test_a_comment_gives_the_launch_line():
    text = "import torch\n# launched with: torchrun --nnodes=2 --nproc-per-node=8 x.py\n"
    assert launch_in_text(text) == "torchrun --nnodes=2 --nproc-per-node=8 x.py"
    assert launch_in_text("# uses torchrun to start\n") is None
