"""`python -m torch.distributed.launch`: what it gives the script that torchrun does not."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch
from paceline.check.lint.configs.say import INFO, WARNING, found

_OLD = "torch.distributed.launch"
_READS_IT = re.compile(r"local-rank|parse_known_args|\(\s*parser\b|HfArgumentParser")
"""The argument itself, others let through, or a parser that somebody else adds arguments to."""


def check_old_launcher(launch: Launch) -> Iterator[Finding]:
    """The launcher that torchrun has replaced."""
    word = next((one for one in launch.words if one.text == _OLD), None)
    if word is not None:
        yield found(
            "old-launcher",
            INFO,
            launch.path,
            word.line,
            f"{_OLD} is deprecated: torchrun has taken its place",
            fix="torchrun with the same options, and int(os.environ['LOCAL_RANK']) in the script",
        )


def check_local_rank_argument(launch: Launch, path: str, text: str) -> Iterator[Finding]:
    """A script whose own parser ends at the `--local-rank=N` that the old launcher adds.

    Source: `torch/distributed/launch.py` and `run.py` of torch 2.0 to 2.13: the argument is written
    with a dash since 2.0, and is left out with --use-env.
    """
    word = next((one for one in launch.words if one.text == _OLD), None)
    if word is None or "use_env" in launch.options or _READS_IT.search(text):
        return
    parser = re.search(r"\bArgumentParser\(", text)
    if parser is None or ".parse_args(" not in text:
        return
    line = text.count("\n", 0, parser.start()) + 1
    knows = (
        "knows --local_rank, its name before torch 2.0"
        if "--local_rank" in text
        else "does not know it"
    )
    yield found(
        "old-launcher",
        WARNING,
        launch.path,
        word.line,
        f"{_OLD} adds --local-rank=N to the arguments of {path}, whose parser {knows}: every "
        "process ends with `unrecognized arguments`",
        fix="torchrun, and int(os.environ['LOCAL_RANK']) in the script",
        evidence=[(path, line, text.splitlines()[line - 1].strip())],
    )
