"""What several configurations say together: each contradiction is told, wherever it stands."""

from paceline.check.finding import Severity
from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint

ACCELERATE = b"""distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_config_file: ds.json}
num_processes: 8
"""
DEEPSPEED = b"""{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8,
"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}""".replace(b"\n", b" ")
SCRIPT = b"import accelerate\nmine = accelerate.Accelerator(gradient_accumulation_steps=2)\n"


def test_the_worst_that_is_said_of_a_line_is_told():
    line = b"python -m torch.distributed.launch --nproc_per_node=8 t.py\n"
    script = b"import argparse\nargs = argparse.ArgumentParser().parse_args()\n"
    alone, together = (
        [one.severity for one in lint(files, Context()) if one.id == "old-launcher"]
        for files in ({"run.sh": line}, {"run.sh": line, "t.py": script})
    )
    assert (alone, together) == ([Severity.INFO], [Severity.WARNING])


def test_two_contradictions_in_the_one_line_of_a_json_are_both_told():
    found = lint({"a.yaml": ACCELERATE, "ds.json": DEEPSPEED, "t.py": SCRIPT}, Context())
    told = [one.what for one in found if one.id == "ds-batch-size-mismatch"]
    assert sorted(each.split(" ")[0] for each in told) == [
        "gradient_accumulation_steps",
        "train_batch_size",
    ]
