"""What several configurations say together: each contradiction is told, wherever it stands."""

from paceline.check.finding import Severity
from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint


def test_the_worst_that_is_said_of_a_line_is_told():
    line = b"python -m torch.distributed.launch --nproc_per_node=8 t.py\n"
    script = b"import argparse\nargs = argparse.ArgumentParser().parse_args()\n"
    alone, together = (
        [one.severity for one in lint(files, Context()) if one.id == "old-launcher"]
        for files in ({"run.sh": line}, {"run.sh": line, "t.py": script})
    )
    assert (alone, together) == ([Severity.INFO], [Severity.WARNING])
