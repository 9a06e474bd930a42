# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 8 ranks on 1 node x 8 H100-SXM.
# micro-batch 8 x 1 accumulation step x 8 data ranks = 64 samples a step.
# Expected: $0.03 in 0.000972 h, 1 x 8x H100 on demand (price of 2026-05-07; https://techbytes.app/posts/serverless-gpu-pricing-matrix-modal-replicate-lambda-2026/ (third-party copy of the vendor list)).
# Ends after 30m 05s at the latest, or 10m 00s of idleness. That is $15.84 at the most, at $31.59 an hour.
# Modal itself ends it after 30m 05s.
"""Trains on Modal: `bash submit.sh`."""

import pathlib
import shutil
import subprocess
import threading

import modal

HERE = pathlib.Path(__file__).parent
WORDS = ['python3', 'cloud_guard.py', '--max-run-s', '1805', '--idle-s', '600', '--per-hour-usd', '31.5936', '--budget-usd', '100', '--spent-file', '/checkpoints/spent-seconds', '--', 'bash', 'launch.sh']
app = modal.App('tiny')
image = modal.Image.debian_slim(python_version="3.12").pip_install("torch", "transformers").add_local_dir(HERE, "/job", copy=False)
checkpoints = modal.Volume.from_name('tiny-checkpoints', create_if_missing=True)
secrets = [modal.Secret.from_local_environ(['HF_TOKEN'])] if modal.is_local() else []  # values come from your environment


def unpack(job: pathlib.Path, work: pathlib.Path, kept: pathlib.Path) -> None:
    """A fresh copy of the files; a retry may come into the container of the attempt before it."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(job, work, ignore=shutil.ignore_patterns("checkpoints"))
    (work / "checkpoints").symlink_to(kept)


@app.function(
    image=image,
    gpu="H100!:8",
    timeout=1805,
    retries=3,
    max_containers=1,
    volumes={"/checkpoints": checkpoints},
    secrets=secrets,
)
def train() -> None:
    """torchrun on all GPUs of the container; checkpoints are kept as they are written."""
    unpack(pathlib.Path("/job"), pathlib.Path("/work"), pathlib.Path("/checkpoints"))
    done = threading.Event()

    def keep() -> None:
        while not done.wait(60):
            checkpoints.commit()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        code = subprocess.run(WORDS, cwd="/work", check=False).returncode
        if code in (124, 125):  # the guard ended it: a retry would spend more
            print("ended by the guard, see above")
        elif code:
            raise SystemExit(code)
    finally:
        done.set()
        keeper.join()
        checkpoints.commit()


@app.local_entrypoint()
def main() -> None:
    """Waits for the end."""
    train.remote()
