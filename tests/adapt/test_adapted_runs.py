"""Adapted scripts on two ranks print what the one-device script prints.

Everything runs in float64. Printed are four to six decimals, so the tolerance is one unit of the
last one: what the order of a few hundred additions changes is below 1e-12 of these numbers, but a
number that lies on a rounding boundary may be printed either way.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.adapt.running import Ran, run

from paceline.adapt import Target, adapt

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent / "scripts"
ISSUE = (
    "image_classifier",
    "language_model",
    "mixed_precision",
    "data_parallel",
    "resume",
    "hugging_face",
)
SHAPES = ("class_trainer", "meters", "steps", "stream", "next_batch", "sum_loss")
"""Written in other ways: a trainer class, meters, steps without epochs, a stream, `next`, a sum."""

FIRST_EPOCH = {"image_classifier": "1", "steps": "1"}
"""Scripts whose first epoch is 1: the sampler's order has this number as its seed."""

PLAIN = (Target.DDP, Target.FSDP2, Target.ACCELERATE)
ALWAYS = {
    *((name, Target.DDP) for name in ("image_classifier", "mixed_precision", "resume", "sum_loss")),
    ("language_model", Target.FSDP2),
    ("language_model", Target.ACCELERATE),
}
"""What `./test` runs."""

IN_CI = {
    *((name, Target.DDP) for name in (*ISSUE, "class_trainer", "next_batch", "sum_loss")),
    ("hugging_face", Target.FSDP2),
}
"""What `./test --ranks` runs too; the others are `slow`."""


def cases(names: tuple[str, ...]) -> list[object]:
    def marks(name: str, target: Target) -> list[pytest.MarkDecorator]:
        if (name, target) in ALWAYS:
            return []
        return [pytest.mark.repeat if (name, target) in IN_CI else pytest.mark.slow]

    return [
        pytest.param(name, target, id=f"{name}-{target}", marks=marks(name, target))
        for name in names
        for target in PLAIN
    ]  # fmt: skip


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """What the script prints on one device; run once for all targets."""
    kept: dict[str, Ran] = {}

    def of(name: str) -> Ran:
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            first = FIRST_EPOCH.get(name, "0")
            (kept[name],) = run(SCRIPTS / f"{name}.py", 0, folder, first_epoch=first)
        return kept[name]

    return of


def written(name: str, target: Target, folder: Path) -> Path:
    adapted = adapt((SCRIPTS / f"{name}.py").read_text(), target)
    assert not adapted.refused, adapted.left
    assert adapted.left == ()
    path = folder / f"{name}_{target}.py"
    path.write_text(adapted.text)
    return path


def assert_prints_the_same(one: Ran, ranks: list[Ran]) -> None:
    assert [rank.code for rank in ranks] == [0] * len(ranks), ranks[0].out + ranks[1].out
    assert one.code == 0, one.out
    assert one.lines, one.out
    assert ranks[1].lines == [], "only rank 0 prints"
    assert len(ranks[0].lines) == len(one.lines), ranks[0].out
    for mine, other in zip(ranks[0].lines, one.lines, strict=True):
        number = r"-?\d+\.\d+|\d+"
        assert re.sub(number, "#", mine) == re.sub(number, "#", other)
        for a, b in zip(re.findall(number, mine), re.findall(number, other), strict=True):
            decimals = len(a.partition(".")[2])
            assert float(a) == pytest.approx(float(b), abs=1.01 * 10**-decimals if decimals else 0)


@pytest.mark.parametrize(("name", "target"), cases(ISSUE + SHAPES))
def test_s0_8_two_ranks_print_the_losses_of_one_device(name, target, alone, tmp_path):
    script = written(name, target, tmp_path)
    first = FIRST_EPOCH.get(name, "0")
    assert_prints_the_same(alone(name), run(script, 2, tmp_path / "ranks", first_epoch=first))


@pytest.mark.parametrize(
    "target",
    [Target.DDP, Target.FSDP2, pytest.param(Target.ACCELERATE, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_run_resumed_from_its_checkpoint_goes_on_as_if_it_had_not_stopped(
    target, alone, tmp_path
):
    script = written("resume", target, tmp_path)
    run(script, 2, tmp_path / "ranks", args=["--epochs", "2"])
    ranks = run(script, 2, tmp_path / "ranks", args=["--resume"], first_epoch="2")
    one = alone("resume")
    assert "resumed at epoch 2" in ranks[0].out
    late = [line for line in one.lines if re.match(r"epoch [23] |best", line)]
    assert_prints_the_same(Ran(code=0, out="\n".join(late)), ranks)


def test_a_checkpoint_of_one_device_is_resumed_by_ranks_and_theirs_by_one_device(alone, tmp_path):
    script = written("resume", Target.FSDP2, tmp_path)
    run(SCRIPTS / "resume.py", 0, tmp_path / "run", args=["--epochs", "1"])
    run(script, 2, tmp_path / "run", args=["--resume", "--epochs", "3"], first_epoch="1")
    (one,) = run(SCRIPTS / "resume.py", 0, tmp_path / "run", args=["--resume"], first_epoch="3")
    assert one.code == 0, one.out
    assert one.lines == [x for x in alone("resume").lines if re.match("epoch 3 |best", x)]


@pytest.mark.repeat  # the losses of two ranks are above
@pytest.mark.parametrize(
    "name", ["language_model", pytest.param("class_trainer", marks=pytest.mark.slow)]
)
def test_torchrun_starts_it_and_every_rank_ends_cleanly(name, tmp_path):
    """Its own start and end, without our runner around it: model let go, group destroyed."""
    script = written(name, Target.DDP, tmp_path)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "terminate called" not in ended.stderr
    assert re.search(r"epoch 1", ended.stdout)


def test_without_torchrun_it_is_a_world_of_one(alone, tmp_path):
    script = written("language_model", Target.DDP, tmp_path)
    (one,) = run(script, 0, tmp_path / "one")
    assert one.code == 0, one.out
    assert one.lines == alone("language_model").lines


@pytest.mark.slow
def test_paceline_runs_it_and_starts_it_again_from_its_own_checkpoint(alone, tmp_path):
    adapted = adapt((SCRIPTS / "resume.py").read_text(), Target.PACELINE, name="resume.py")
    assert [each.what for each in adapted.left] == [
        'p.add_argument("--resume", action="store_true")'
    ]
    (tmp_path / "resume.py").write_text(DIES_ONCE + adapted.text)
    job = (adapted.job_file or "").replace("resume.py]", "resume.py, --resume]")
    (tmp_path / "resume.yaml").write_text(job)
    command = [sys.executable, "-m", "paceline", "run", "resume.yaml"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of the job's `python`
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = (
        ended.stdout
        + ended.stderr
        + "".join(path.read_text() for path in tmp_path.glob("runs/*/**/*.log"))
    )
    assert ended.returncode == 0, said
    assert "resumed at epoch" in said
    assert "best" in said


DIES_ONCE = """\
import os, pathlib, threading, time


def die_when_saved():
    while not pathlib.Path("out/last.pt").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), 9)


if os.environ.get("PACELINE_RESTART") == "0" and os.environ.get("RANK") == "1":
    threading.Thread(target=die_when_saved, daemon=True).start()
"""
"""Rank 1 of the first attempt kills itself once a checkpoint is there."""
