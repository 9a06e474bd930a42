"""What the folder of a new run has in it."""

from pathlib import Path

from paceline.job.load import make_script
from paceline.record.run import create_engine_run


def test_a_run_of_an_engine_has_its_files_where_its_program_looks_for_them(tmp_path):
    made_for: list[Path] = []

    def make(folder: Path):
        made_for.append(folder)
        return make_script({"name": "x", "command": ["sh", "engine/launch.sh"]}, tmp_path)

    files = {"engine/launch.sh": "exec true\n", "engine/conf/a.json": "{}", "note": "ä"}
    script, run = create_engine_run(make, files, name="x", folder=tmp_path / "run", runs=tmp_path)
    assert made_for == [run.path]
    assert {name: (run.path / name).read_text("utf-8") for name in files} == files
    assert run.script().spec == script.spec
