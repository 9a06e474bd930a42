"""Whether a job resumes from a checkpoint, as plain text."""

from paceline.check.resume import Verdict


def resume_lines(verdict: Verdict) -> list[str]:
    """Whether a job resumes from a checkpoint, and what to run before."""
    words = {
        "compatible": "compatible: the job resumes from it as it is",
        "convertible": "convertible: the job resumes from it after the commands below",
        "not": "incompatible: the job cannot resume from it",
    }
    facts = {
        "checkpoint": verdict.checkpoint,
        "written by": verdict.wrote,
        "read by": verdict.wants,
        "resumes": verdict.keeps,
    }
    lines = [words[verdict.fit]]
    lines += [f"  {name:<11} {value}" for name, value in facts.items() if value]
    lines += [
        f"  {'why' if number == 0 else '':<11} {each}" for number, each in enumerate(verdict.why)
    ]
    lines += [
        f"  {'run' if number == 0 else '':<11} {each}"
        for number, each in enumerate(verdict.commands)
    ]
    return lines
