"""Phase 13: what is typed to start it."""

from typing import Any

from paceline.contracts.operate import health_checks, launch_command
from paceline.contracts.phases.case import Case
from paceline.render.environment import (
    PORT,
    environment,
    export_lines,
    meeting_lines,
)
from paceline.render.mlx import runs_mlx

_SLURM = "paceline render job.yaml --for slurm --out launch"
"""Writes the files that are submitted."""

_RANK_VARIABLES = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR"

_BESIDE_THE_LAUNCH = (
    "#!/usr/bin/env bash",
    "set -uo pipefail",
    'cd "$(dirname "$0")" || exit 2',
)


def plan_launch(case: Case) -> dict[str, Any]:
    """Scripts that start, check and debug the run on the plan's nodes."""
    plan = case.plan
    cluster = plan.cluster
    several = cluster.num_nodes > 1
    hosts = list(case.job.spec.ssh.hosts[: cluster.num_nodes])
    return {
        "launchScript": launch_script(case),
        "environmentConfig": {each.name: each.value for each in environment(plan)},
        "method": "paceline run on this machine"
        if cluster.is_local
        else "mlx.launch from one machine"
        if runs_mlx(plan)
        else f"torchrun on each of {cluster.num_nodes} nodes",
        "nodeSetup": [
            f"the same code and packages on all {cluster.num_nodes} nodes, at the same path",
            "the folder `runs` on storage that every node sees",
        ]
        if several
        else ["nothing: one node"],
        "jobSpecification": {"scheduler": "slurm", "command": _SLURM} if several else {},
        "hostfile": hosts,
        "network": {
            "masterAddress": "127.0.0.1"
            if not several
            else hosts[0].rpartition("@")[2]
            if hosts
            else "$HEAD_ADDRESS",
            "port": PORT,
            "interface": "the default route's; set NCCL_SOCKET_IFNAME only where that is wrong",
        },
        "validationScript": validation_script(case),
        "debuggingScript": debugging_script(case),
        "instructions": _instructions(case),
    }


def launch_script(case: Case) -> str:
    """A bash script that starts the plan's ranks; on several nodes it is run on each."""
    plan, cluster = case.plan, case.plan.cluster
    lines = [
        "#!/usr/bin/env bash",
        f"# {plan.layout_name} on {cluster.name}",
        (
            f"# {plan.layout.micro_batch} a micro-batch x {plan.layout.accumulation} accumulated x "
            f"{plan.layout.data} data ranks = {plan.layout.global_batch} samples a step"
        ),
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        *export_lines(plan),
    ]
    if cluster.is_local:
        return "\n".join([*lines, 'exec paceline run job.yaml "$@"', ""])
    lines.append(': "${TRAIN_SCRIPT:=train.py}"  # your script; the layout is in job.yaml')
    if not runs_mlx(plan):
        lines += meeting_lines(plan)
    elif cluster.num_nodes > 1:
        lines.append('test -s hosts.json || { echo "hosts.json is missing" >&2; exit 2; }')
    command = launch_command(plan).replace("train.py", '"$TRAIN_SCRIPT" "$@"')
    return "\n".join([*lines, f"exec {command}", ""])


def validation_script(case: Case) -> str:
    """A bash script that runs the health checks of one node and says which failed."""
    lines = [
        _BESIDE_THE_LAUNCH[0],
        "# shellcheck disable=SC2016  # a check's own shell expands it",
        *_BESIDE_THE_LAUNCH[1:],
        "failed=0",
        "check() {  # name, what is expected, command, fix",
        '  local got least; got="$(bash -c "$3" | sed "s/^ *//; s/ *$//")"',
        '  case "$2" in',
        '    "at least "*)',
        '      least="${2#at least }"',
        '      [[ "$got" =~ ^[0-9]+$ ]] && (( 10#$got >= least )) && return ;;',
        '    *) [[ "$got" == "$2" ]] && return ;;',
        "  esac",
        '  echo "FAIL $1: expected $2, got: $got; fix: $4" >&2; failed=1',
        "}",
    ]
    lines += [
        " ".join(["check", *map(_quoted, (one.name, one.expect, one.command, one.fix))])
        for one in health_checks(case.plan)
        if one.when == "before the start"
    ]
    return "\n".join([*lines, 'exit "$failed"', ""])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def debugging_script(case: Case) -> str:
    """A bash script that starts the ranks with what shows a fault, and ends as they end."""
    lines = [*_BESIDE_THE_LAUNCH]
    if case.plan.cluster.backend == "nccl":
        # DETAIL undoes the recovery of `paceline run` (control/environment.py).
        level = "INFO" if case.plan.engine == "paceline" else "DETAIL"
        lines += [
            f"export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG={level} TORCH_CPP_LOG_LEVEL=INFO",
            "nvidia-smi topo -m",
        ]
    lines += [
        f'for name in {_RANK_VARIABLES}; do echo "$name=${{!name:-not set}}"; done',
        'bash launch-script.sh "$@" 2>&1 | tee debug.log; status=$?',
    ]
    if case.plan.cluster.backend == "nccl":
        lines.append("grep -o 'Using network [A-Za-z]*' debug.log | sort | uniq -c")
    return "\n".join([*lines, 'exit "$status"', ""])


def _instructions(case: Case) -> list[str]:
    plan, cluster = case.plan, case.plan.cluster
    if cluster.is_local:
        return ["bash launch-script.sh"]
    if runs_mlx(plan):
        return ["write hosts.json on one Mac", "TRAIN_SCRIPT=train.py bash launch-script.sh"]
    if cluster.num_nodes == 1:
        return ["bash launch-script.sh on the node"]
    return [
        "bash validate.sh on every node; none may print FAIL",
        (
            "HEAD_ADDRESS=<first node> RUN_ID=<name> bash launch-script.sh on every node, within "
            "ten minutes of each other"
        ),
        f"or on Slurm: `{_SLURM}`, and submit what it writes once",
    ]
