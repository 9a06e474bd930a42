"""bfloat16 on accelerators whose hardware has none."""

from paceline.check.finding import Finding
from paceline.check.lint.configs.say import found


def bf16_finding(path: str, line: int, said: str, gpu: str) -> Finding:
    """bf16 asked for on a GPU before Ampere."""
    what = f"{said} asks for bf16, which {gpu} does not have"
    fix = "fp16 with loss scaling, or an Ampere GPU or newer"
    return found("bf16-unsupported-gpu", path, line, what, fix)
