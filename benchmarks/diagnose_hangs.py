"""Whether `paceline diagnose` names the guilty rank and line of hangs that are made on purpose.

    python benchmarks/diagnose_hangs.py [--record tests/check/hangs]
    python benchmarks/diagnose_hangs.py --logs

Three real ranks over gloo, for each way to hang one small program. After some seconds each rank
writes its stacks (faulthandler) and its flight recorder, and is ended. Both are then diagnosed, by
themselves and together. --record keeps them: the tests read what real ranks wrote.

--logs: no stacks and no dumps. The others wait until gloo's time-out ends them, and what all ranks
printed is diagnosed: the guilty rank is one that reports nothing.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.check.diagnose.diagnose import diagnose
from paceline.record.log_files import Log

RANKS = 3
GUILTY = "# guilty"
"""Marks the line in which the guilty rank stands, or which it called before it went its own way."""

PRELUDE = """\
import datetime, faulthandler, os, sys, threading, time
import torch
import torch.distributed as dist

folder = sys.argv[1]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[3])))


def write_down():
    time.sleep(float(sys.argv[2]))
    with open(f"{folder}/rank-{rank}.pickle", "wb") as file:
        file.write(torch._C._distributed_c10d._dump_fr_trace())
    with open(f"{folder}/rank-{rank}.stacks.txt", "w") as file:
        faulthandler.dump_traceback(file)
    for _ in range(300):  # a rank that ends first would be the others' error
        if all(os.path.exists(f"{folder}/rank-{each}.stacks.txt") for each in range(3)):
            break
        time.sleep(0.1)
    time.sleep(0.5)
    os._exit(0)


threading.Thread(target=write_down, daemon=True).start()


def backward(size=8):
    dist.all_reduce(torch.ones(size))


def save_checkpoint():
    dist.barrier()


def load_batch(step):
    return torch.ones(4)


def evaluate():
    time.sleep(600)


"""

PROGRAMS = {
    "skipped-collective": """\
def train():
    for step in range(20):
        if rank == 2 and step == 7:
            log_images()
        backward()


def log_images():
    time.sleep(600)  # guilty


train()
""",
    "stuck-in-data": """\
def load_batch(step):
    if rank == 1 and step == 5:
        open(f"{folder}/pipe").read()  # guilty
    return torch.ones(4)


def train():
    os.path.exists(f"{folder}/pipe") or rank == 1 and os.mkfifo(f"{folder}/pipe")
    for step in range(20):
        load_batch(step)
        backward()


train()
""",
    "save-on-one-rank": """\
def train():
    for step in range(20):
        backward()
        if step == 6 and rank == 0:
            save_checkpoint()  # guilty


train()
""",
    "evaluation-on-one-rank": """\
def evaluate():
    time.sleep(600)  # guilty


def train():
    for step in range(20):
        backward()
        if step == 6 and rank == 0:
            evaluate()


train()
""",
    "uneven-batches": """\
def train():
    batches = 9 if rank == 1 else 8
    for step in range(batches):
        backward()  # guilty
    time.sleep(600)


train()
""",
    "other-shape": """\
def train():
    for step in range(20):
        backward(16 if rank == 1 and step == 4 else 8)  # guilty


train()
""",
    "other-collective": """\
def train():
    for step in range(20):
        if rank == 2 and step == 5:
            dist.broadcast(torch.ones(8), 0)  # guilty
        else:
            backward()


train()
""",
}
EXPECTED: dict[str, int | None] = {
    "skipped-collective": 2,
    "stuck-in-data": 1,
    "save-on-one-rank": 0,
    "evaluation-on-one-rank": 0,
    "uneven-batches": 1,
    "other-shape": None,
    "other-collective": 2,
}
"""Program -> the rank that does what the others do not. None where gloo ends the processes and no
message says which brought the other size."""


def main() -> None:
    """Make each hang, diagnose what its ranks wrote, and print who is blamed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--logs", action="store_true")
    arguments = parser.parse_args()
    named = 0
    programs = {
        n: body for n, body in PROGRAMS.items() if not arguments.logs or EXPECTED[n] is not None
    }
    for name, body in programs.items():
        with tempfile.TemporaryDirectory() as folder:
            if arguments.logs:
                make_hang(name, body, Path(folder), 2.5 * arguments.seconds, arguments.seconds)
            else:
                make_hang(name, body, Path(folder), arguments.seconds)
            if arguments.record is not None:
                _keep(Path(folder), arguments.record / name)
            kinds = ("log",) if arguments.logs else ("stacks.txt", "pickle", "")
            told = {kind: blame(Path(folder), kind) for kind in kinds}
        right = [kind or "all" for kind, (_, rank, _) in told.items() if rank == EXPECTED[name]]
        if EXPECTED[name] is None:
            right = ["the log"] if told[""][0] == "gloo-size-mismatch" else []
        named += bool(right)
        print(f"{name:<24} rank {EXPECTED[name]} is named by: {', '.join(right) or 'nothing'}")
        for kind, (cause, _, what) in told.items():
            print(f"    {kind or 'all':<12} {cause}: {what}")
    print(f"named {named} of {len(programs)}")


def make_hang(name: str, body: str, folder: Path, seconds: float, timeout_s: float = 120.0) -> None:
    """Run the program on three ranks until they have written down where they stand.

    Args:
        timeout_s: After which a collective that waits raises; beyond `seconds`, none does.
    """
    program = folder / "train.py"
    program.write_text(PRELUDE + body)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    shared |= {"TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(RANKS):
        with (folder / f"rank-{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(program), str(folder), str(seconds), str(timeout_s)],
                    env=os.environ | shared | {"RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    for each in ranks:
        try:
            each.wait(timeout=60 + seconds)
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()


def blame(folder: Path, kind: str) -> tuple[str, int | None, str]:
    """The cause, the rank, and what is said of it, from all ranks' files of one kind."""
    names = sorted(folder.glob(f"rank-*{kind}"))
    logs = [
        Log(name=path.name, rank=int(path.name[5]), blocks=[path.read_bytes()]) for path in names
    ]
    diagnosis = diagnose(logs)
    if not diagnosis.causes:
        return "no cause", None, ""
    cause = diagnosis.causes[0]
    return cause.id, cause.rank, cause.what


def _keep(folder: Path, to: Path) -> None:
    """Keep what the ranks wrote, with the program, without the folder's own name."""
    to.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in {".txt", ".log", ".py"}:
            text = path.read_text(encoding="utf-8", errors="replace")
            name = path.name.replace("train.py", "train.txt")  # no program of ours, for linters
            (to / name).write_text(text.replace(str(folder), "/home/u"), encoding="utf-8")
        elif path.suffix == ".pickle":
            shutil.copy(path, to / path.name)


if __name__ == "__main__":
    main()
