"""The process that writes checkpoints starts once a rank, so it imports little."""

import subprocess
import sys

IMPORTS = """
import sys
import paceline.runtime.checkpoint.writer
print(sorted({"torch", "numpy", "pydantic", "paceline.job"} & set(sys.modules)))
"""


def test_a_writer_does_without_torch_numpy_and_the_job_files_models():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
