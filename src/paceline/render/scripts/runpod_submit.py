"""Starts the pod of `pod.json` with the files of this folder in it.

    RUNPOD_API_KEY=... python3 runpod_submit.py [--dry-run]

Needs `pip install runpod`. Secrets are read from the environment and go to RunPod alone.
"""

import base64
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
_MOST_BYTES = 100_000
"""Most bytes of the files together, packed: what an environment variable may hold (Linux: 128
KiB)."""

_UNPACK = "mkdir -p /workspace/job && cd /workspace/job && echo $JOB_FILES | base64 -d | tar xz"


def packed_files(folder: Path) -> str:
    """All files of the folder as a tar.gz in base64; no secret is in them."""
    kept = io.BytesIO()
    with tarfile.open(fileobj=kept, mode="w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith(".env"):
                archive.add(path, arcname=str(path.relative_to(folder)))
    text = base64.b64encode(kept.getvalue()).decode()
    if len(text) > _MOST_BYTES:
        raise SystemExit(f"the files are {len(text)} bytes packed; a pod takes {_MOST_BYTES}")
    return text


def pod_arguments(folder: Path) -> dict[str, Any]:
    """The arguments of `runpod.create_pod`."""
    asked: dict[str, Any] = json.loads((folder / "pod.json").read_text())
    names = asked.pop("secrets")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise SystemExit(f"{', '.join(missing)} is not set in your environment")
    env = {name: os.environ[name] for name in names} | {"JOB_FILES": packed_files(folder)}
    start = f"bash -c '{_UNPACK} && exec bash start.sh'"
    return {name: value for name, value in asked.items() if value is not None} | {
        "env": env,
        "docker_args": start,
    }


def main() -> None:
    """Create the pod, or with --dry-run say what would be asked for, without any secret."""
    arguments = pod_arguments(FOLDER)
    if "--dry-run" in sys.argv[1:]:
        shown = arguments | {"env": sorted(arguments["env"])}
        print(json.dumps(shown, indent=2))
        return
    import runpod

    runpod.api_key = os.environ["RUNPOD_API_KEY"]
    pod = runpod.create_pod(**arguments)
    print(json.dumps({"id": pod["id"], "machine": pod.get("machineId")}))


if __name__ == "__main__":
    main()
