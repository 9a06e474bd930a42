"""The ten ways to change Paceline that the architecture page lists: each is made in a copy of the
source, in the files that the page names, and then used.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
PAGE = Path(__file__).parent.parent.parent / "docs/concepts/architecture.md"

Edits = Mapping[str, tuple[tuple[str, str], ...] | str]
"""File -> what is replaced there by what, or a text that is added at its end."""

NADAM = """\
import torch


def make(groups, train):
    return torch.optim.NAdam(groups, lr=train.learning_rate)
"""

MADE: Mapping[str, Edits] = {
    "accelerator": {
        "catalog/accelerators.toml": """
[Z1]
like = "H100-SXM"
memory_bytes = 400_000_000_000
sources = { memory = "guess" }
""",
    },
    "optimizer": {
        "choices/optimizers.py": (
            ('"adafactor", "sgd"]', '"adafactor", "sgd", "nadam"]'),
            ('    "sgd": Opt', '    "nadam": OptimizerFacts(moment_bytes=8.0),\n    "sgd": Opt'),
        ),
        "runtime/optimizer/nadam.py": NADAM,
    },
    "pipeline schedule": {
        "choices/pipeline_schedules.py": (
            ('"dualpipe-v"]', '"dualpipe-v", "2f2b"]'),
            (
                '    "gpipe": Sched',
                (
                    '    "2f2b": ScheduleFacts(torch_class="ScheduleGPipe", chunks="one"),\n'
                    '    "gpipe": Sched'
                ),
            ),
        ),
    },
    "recompute policy": {
        "choices/recomputes.py": (
            ('"selective", "full"]', '"selective", "full", "most"]'),
            ('    "full": Rec', '    "most": RecomputeFacts(whole_blocks=True),\n    "full": Rec'),
        ),
        "estimate/recompute.py": (
            ('    "full": _keeps_input,', '    "full": _keeps_input,\n    "most": _keeps_input,'),
            ('    "full": _does_whole,', '    "full": _does_whole,\n    "most": _does_whole,'),
        ),
        "runtime/strategy/recompute.py": (('    "full": {},', '    "full": {},\n    "most": {},'),),
    },
    "fault": {
        "job/faults.toml": """
[kinds.leave]
does = "os._exit(78) in the worker"
verdict = "exited with 78"

[matrix.99]
title = "a worker leaves"
faults = ["leave rank=1 step=6"]
""",
        "runtime/faults.py": (
            (
                '    "segv": _segv,',
                '    "segv": _segv,\n    "leave": lambda fault, _: os._exit(78),',
            ),
        ),
    },
    "model family": {
        "catalog/families.toml": """
[newcomer]
form = "gated"
written = {ops = 41}
split = {like = "llama"}
""",
    },
    "metric sink": {
        "choices/sinks.py": (
            ('"prometheus", "otel"]', '"prometheus", "otel", "plainfile"]'),
            ('    "otel": Sink', '    "plainfile": SinkRow(title="A file"),\n    "otel": Sink'),
        ),
        "launch/sinks/plainfile.py": "def open_sink(told):\n    raise SystemExit(str(told))\n",
    },
    "price": {
        "catalog/prices.csv": "aws,z.large,H100,H100-SXM,8,80,192,2048,0.5,,2026-11-20,guess,\n",
    },
    "lint rule": {
        "check/lint/rules/passes.py": '''
def check_passes(program, context):
    """Every backward pass."""
    for call in program.backwards:
        yield program.finding("passes", call, what="it goes backward here", fix="see the rule")


RULES = (check_passes,)
''',
        "check/lint/rules/__init__.py": (
            ("    devices,\n    parallel", "    devices,\n    parallel,\n    passes"),
            ("    *parallel.RULES,", "    *parallel.RULES,\n    *passes.RULES,"),
        ),
        "check/lint/rules/passes.toml": """
[passes]
category = "performance"
title = "a program goes backward"
effect = "degraded"
lint = "warning"
frameworks = ["pytorch"]
why = "It goes backward."
fix = "See the rule."
sources = ["guess"]
""",
    },
    "job field": {
        "job/train.py": (
            (
                "    optimizer: Optimizer",
                '    nickname: str = ""\n    """A name."""\n\n    optimizer: Optimizer',
            ),
        ),
    },
}

JOB = """
name: seven
model: {decoder: {layers: 8, hidden: 1024, heads: 8, vocab: 32000}}
data: {seq_len: 1024}
cluster: {accelerator: H100-SXM, nodes: 2}
train: {global_batch: 64, steps: 100}
"""

TRAIN = """
import torch

model = torch.nn.Linear(2, 2)
model(torch.ones(2)).sum().backward()
"""


def table() -> dict[str, list[str]]:
    """Way -> files, from the page. A name with a capital word stands for one of one's own."""
    rows = re.findall(r"(?m)^\| ([^|`]+?) \| ((?:`[^|`]+`(?:, )?)+) \|", PAGE.read_text())
    return {way: re.findall(r"`([^`]+)`", files) for way, files in rows}


@pytest.fixture(scope="module")
def call(tmp_path_factory) -> Callable[..., str]:
    """Runs a command or a line of Python with all ten changes made."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(SOURCE, folder / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    for edits in MADE.values():
        for name, edit in edits.items():
            file = folder / "paceline" / name
            text = file.read_text() if file.exists() else ""
            if isinstance(edit, str):
                text += edit
            for old, new in edit if not isinstance(edit, str) else ():
                assert text.count(old) == 1, f"{name}: {old}"
                text = text.replace(old, new)
            file.write_text(text)
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").write_text(TRAIN)

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    return run


def planned(call: Callable[..., str], *changes: str) -> dict:
    sets = [word for change in changes for word in ("--set", change)]
    return json.loads(call("-m", "paceline", "plan", "job.yaml", "--json", *sets))


def test_the_page_lists_the_ten_ways_with_at_most_four_files_that_exist():
    ways = table()
    assert ways.keys() == MADE.keys()
    for way, files in ways.items():
        assert 1 <= len(files) <= 4, way
        for name in files:
            stem = Path(name).stem
            exists = (SOURCE / name).exists()
            assert exists or (stem.isupper() and (SOURCE / name).parent.is_dir()), name


@pytest.mark.parametrize("way", MADE)
def test_a_change_needs_no_file_that_the_page_does_not_name(way):
    named = table()[way]
    own = {str(Path(name).parent) for name in named if Path(name).stem.isupper()}
    left = {name for name in MADE[way] if name not in named and str(Path(name).parent) not in own}
    assert left == set()


def test_a_new_accelerator_is_planned_for(call):
    plan = planned(call, "cluster.accelerator=Z1")
    assert "Z1" in json.dumps(plan["cluster"])


def test_a_new_optimizer_is_planned_and_made(call):
    assert planned(call, "train.optimizer=nadam")["optimizer"] == "nadam"
    made = call(
        "-c",
        "from torch import nn\nfrom paceline.job import TrainSpec\n"
        "from paceline.runtime.optimizer import make_optimizer\n"
        "spec = TrainSpec(global_batch=8, steps=10, optimizer='nadam')\n"
        "print(type(make_optimizer(nn.Linear(2, 2), spec)).__name__)\n"
        "from paceline.runtime.faults import _ACTIONS\nprint('leave' in _ACTIONS)\n"
        "from paceline.runtime.strategy.recompute import _OPTIONS\nprint(_OPTIONS['most'])\n"
        "from paceline.parallel import Layout\n"
        "from paceline.parallel.stages import torch_class\n"
        "two = Layout(data=1, sharding='none', micro_batch=1, accumulation=2, pipeline=2,\n"
        "    schedule='2f2b')\nprint(torch_class(two))\n",
    )
    assert made.split() == ["NAdam", "True", "{}", "ScheduleGPipe"]


def test_a_new_schedule_is_planned(call):
    plan = planned(call, "layout.pipeline=2", "layout.schedule=2f2b", "engine=paceline")
    assert plan["layout"]["schedule"] == "2f2b"


def test_a_new_recompute_policy_is_planned_and_saves_memory(call):
    none, most = (
        planned(call, f"layout.recompute={word}", "engine=paceline", "layout.micro_batch=1")
        for word in ("none", "most")
    )

    def kept(plan: dict) -> float:
        return plan["estimate"]["memory"]["parts"]["activations"]

    assert most["layout"]["recompute"] == "most"
    assert kept(most) < kept(none)


def test_a_new_fault_is_parsed_and_in_the_matrix(call):
    found = call(
        "-c",
        "from paceline.job.fault_grammar import parse_fault\n"
        "from paceline.job.fault_grammar import rows_of\n"
        "print(parse_fault('leave rank=1 step=6').kind, *rows_of('leave'))\n",
    )
    assert found.split() == ["leave", "99"]


def test_a_new_family_is_counted_and_split(call):
    config = {"model_type": "newcomer", "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128}
    config |= {"architectures": ["NewcomerForCausalLM"], "max_position_embeddings": 1024}
    code = (
        "import json, sys, pathlib\n"
        f"pathlib.Path('newcomer').mkdir()\n"
        f"pathlib.Path('newcomer/config.json').write_text({json.dumps(json.dumps(config))})\n"
    )
    call("-c", code)
    plan = planned(call, "model={hf_config: newcomer}")
    assert plan["profile"]
    split = (
        "from paceline.profile.ways import HUGGING_FACE as known; print(known['newcomer'].blocks)"
    )
    assert call("-c", split).strip() == "model.layers"


def test_a_new_sink_is_one_of_the_job_and_of_runs_send(call):
    planned(call, "metrics.sinks=[plainfile]")
    assert "plainfile" in call("-m", "paceline", "runs", "send", "--help")
    opened = "from paceline.launch.sinks import opener; print(opener('plainfile').__name__)"
    assert call("-c", opened).strip() == "open_sink"


def test_a_new_price_is_the_cheapest(call):
    assert "z.large" in call("-m", "paceline", "catalog", "prices", "H100-SXM")


def test_a_new_lint_rule_finds_and_is_explained(call):
    assert "it goes backward here" in call("-m", "paceline", "lint", "train.py")
    assert "See the rule" in call("-m", "paceline", "explain", "passes")


def test_a_new_field_of_the_job_is_taken_and_in_the_schema(call):
    planned(call, "train.nickname=speedy")
    assert "nickname" in call("-m", "paceline", "schema")
