"""Words that must not come back: docs, help, messages and names say the field's term."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAY = {
    r"done again": "repeated",
    r"held-out loss": "evaluation loss, eval loss",
    r"mend(s|ed|ing)?": "fix, repair",
    r"foreign programs?": "your own script",
    r"goes on from": "resumes from",
    r"its own (word|affair)": "is not checked; what is meant",
    r"sharers": "dp_cp, data-parallel ranks",
    r"idle share": "pipeline bubble",
    r"(copy_in|sum_out|scatter_out)": "copy_to, reduce_from, scatter_to",
    r"(take_facts|unseat|Dealer)": "load_state_dict, release, save plan",
    r"files cannot say": "files cannot express",
    r"of the time (is )?useful": "goodput",
    r"lost state": "recovery from ...",
    r"fullest instant": "peak",
    r"(is|are|comes?|every) on the mean": "on average",
    r"kind to them": "favours them",
    r"as what they were": "recognised as the fault that was injected",
    r"mind the disk": "watch the disk space",
    r"float64 truth": "float64",
    r"lets you in without a question": "ssh logs in without a prompt",
    r"(is|are|all is) said,": "printed, listed",
    r"programs that are not ours": "your own script",
}
"""Pattern -> what is said instead."""

READ = ("README.md", "CONTRIBUTING.md", "docs", "src", "examples", "scripts")
NOT_OURS = {"src/paceline/catalog/failures"}
"""Folders with what others wrote: titles of threads, lines of logs."""


def test_the_words_that_were_replaced_do_not_come_back():
    listed = subprocess.run(
        ["git", "ls-files", *READ], cwd=ROOT, capture_output=True, text=True, check=True
    )
    texts = [ROOT / name for name in listed.stdout.split() if not name.startswith(tuple(NOT_OURS))]
    pattern = re.compile(rf"\b({'|'.join(SAY)})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        if path.suffix in {".md", ".py", ".toml", ".yaml", ".sh", ".html"}
        for match in pattern.finditer(" ".join(path.read_text().split()))
    ]
    assert found == []
