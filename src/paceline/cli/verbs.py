"""The verbs of the command line by what a person wants to do, and the words that people try first.

The module of a verb is `paceline.cli.VERB`; nothing here imports one.
"""

from collections.abc import Mapping

from paceline.errors import nearest

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Plan": {
        "init": "Write a job file for what is in this folder.",
        "plan": "Choose a fast, simple layout that fits, and explain why.",
        "cost": "Compare what a run costs at every provider.",
        "prove": "Check memory and communication of a layout on fake ranks.",
        "simulate": "Estimate how much of a month failures cost on N nodes.",
        "advise": "Suggest batch size, learning rate, buckets, checkpoints.",
        "catalog": "Show accelerators, links, prices and models.",
        "calibrate": "Measure this machine's speed, for better estimates.",
    },
    "Train": {
        "run": "Train a job or start your own script; recover from failures.",
        "status": "Show a run's step, place, queue and cost.",
        "logs": "Print the logs of a run, wherever it runs.",
        "stop": "Save a checkpoint of a run and stop it.",
        "runs": "List and compare runs; send their metrics to W&B or MLflow.",
        "watch": "Show runs on a live page.",
        "report": "Write a run's report: one HTML page with plots.",
        "alerts": "Test alert rules on a recorded run.",
        "render": "Write the plan as files for the engine you use.",
        "adapt": "Rewrite a script for one device to run on many.",
    },
    "Before a run": {
        "doctor": "Check that this machine is ready to train.",
        "detect": "Show what this machine has: accelerators, links, network.",
        "lint": "Find faults in training programs and configurations.",
        "scan": "Show how programs train, and what `adapt` would do.",
        "preflight": "Check every node before the job starts.",
        "sync": "Copy a job's code to all of its hosts, and compare it.",
        "smoke": "Try each step of a training pipeline in under a minute.",
        "verify": "Compare a layout's numbers with those of one device.",
        "bench": "Measure how a job scales over ranks.",
        "drill": "Break a run on purpose, and prove that it recovers.",
        "selftest": "Test this machine's GPUs, and recovery from a killed rank.",
    },
    "After a failure": {
        "diagnose": "Find the root cause of a failure in logs.",
        "explain": "Explain a code: why it happens, how it shows, the fix.",
    },
    "Data and checkpoints": {
        "data": "Check data, tokenize it before a run, and show samples.",
        "checkpoint": "List, inspect, verify and convert checkpoints.",
        "export": "Export a run's model, files to serve it, or runs as SQL.",
    },
    "Other": {
        "schema": "Print the JSON Schema of the job file.",
        "mcp": "Serve these commands to an AI assistant over MCP.",
        "contract": "Answer a JSON request of another program.",
    },
}
"""What one wants to do -> verb -> its line in `paceline --help`."""

COMMANDS: Mapping[str, str] = {
    name: line for verbs in GROUPS.values() for name, line in verbs.items()
}

_TRIED: Mapping[str, str] = {
    **dict.fromkeys(("train", "start", "launch", "exec", "fit", "finetune"), "run JOB"),
    **dict.fromkeys(("resume", "continue", "restart"), "run --resume RUN"),
    **dict.fromkeys(("ls", "list", "ps", "jobs"), "runs"),
    **dict.fromkeys(("kill", "cancel", "abort"), "stop RUN"),
    **dict.fromkeys(("show", "info", "describe"), "status RUN"),
    **dict.fromkeys(("log", "tail"), "logs RUN"),
    **dict.fromkeys(("ui", "dashboard", "top", "monitor"), "watch"),
    **dict.fromkeys(("new", "create", "template"), "init"),
    **dict.fromkeys(("estimate", "memory", "validate"), "plan JOB"),
    **dict.fromkeys(("price", "prices", "gpus", "models"), "catalog"),
    **dict.fromkeys(("compare", "diff"), "runs compare RUN RUN"),
    **dict.fromkeys(("benchmark", "scale"), "bench JOB"),
    **dict.fromkeys(("debug", "why", "analyze", "analyse"), "diagnose LOG"),
    **dict.fromkeys(("tokenize", "prepare"), "data prepare JOB"),
    **dict.fromkeys(("convert", "merge"), "checkpoint convert"),
    "profile": "run --script SCRIPT --profile",
    "check": "doctor",
    "version": "--version",
    "completion": "--help",
}
"""What people type who know other tools (torchrun, accelerate, ray, docker, kubectl) -> ours."""

START = """\
Paceline plans distributed training, checks that it fits, and runs it.

  plan a training job    paceline init job.yaml, then paceline plan job.yaml
  run your own script    paceline run --script train.py
  train or fine-tune     paceline run job.yaml
  find why a run failed  paceline diagnose train.log
  choose what to rent    paceline cost job.yaml

paceline --help: all commands"""
"""What `paceline` alone prints."""


def meant(name: str) -> str:
    """A question with the command that a word which is no verb may stand for, or nothing.

    >>> meant("trian"), meant("pln"), meant("xyzzy")
    ('did you mean `paceline run JOB`?', 'did you mean `paceline plan`?', '')
    """
    near = nearest(name.lower(), (*COMMANDS, *_TRIED))
    return f"did you mean `paceline {_TRIED.get(near[0], near[0])}`?" if near else ""
