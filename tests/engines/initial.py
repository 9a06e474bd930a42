"""The weights that `lm.py` draws, for the example programs of engines that are not PyTorch."""

import subprocess
import sys
from pathlib import Path

from paceline import render

_WRITE = """
import numpy
import lm
from paceline.profile.hf_names import from_hf_name
def ours(name):
    name = from_hf_name(name).replace("attention.output", "out")
    return name.replace("attention.", "").replace("ffn.", "")
weights = lm.build(lm.read_settings()).named_parameters()
numpy.savez("initial.npz", **{ours(name): each.detach().numpy() for name, each in weights})
"""


def write_initial(folder: Path) -> Path:
    """`initial.npz`, with which the program begins as PyTorch's does; its losses can then be
    compared with those of a single device."""
    scripts = Path(render.__file__).parent / "scripts"
    (folder / "lm.py").write_text((scripts / "lm.py").read_text())
    subprocess.run([sys.executable, "-c", _WRITE], cwd=folder, check=True, timeout=120)
    return folder
