"""`paceline lint`: files and folders, broken input, output, suppression, fixes, exit codes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click import UsageError
from click.testing import CliRunner
from tests.plan.scene import JOB, plan_of

from paceline.check.lint.configs.shell import _parser
from paceline.check.lint.rules import RULES
from paceline.cli.lint import command
from paceline.job.packages import install_line
from paceline.plan import plan_to_json

BAD = """\
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def main(model, dataset, optimizer):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, shuffle=True)
    for epoch in range(3):
        for batch in loader:
            model(batch).backward()
            optimizer.step()
"""
WARNED = BAD.replace(", shuffle=True", "")
GOOD = "import torch\n\nprint(torch.ones(2))\n"


def lint(*arguments, expect=None):
    result = CliRunner().invoke(command, [str(one) for one in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    if expect is not None:
        assert result.return_value == expect, result.output
    return result


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def test_an_error_ends_with_1_and_shows_the_line_with_a_caret(folder):
    (folder / "train.py").write_text(BAD)
    text = lint("train.py", expect=1).stdout
    assert "train.py:7" in text
    assert "loader = DataLoader(dataset, sampler=sampler, shuffle=True)" in text
    assert any(line.rstrip().endswith("^") for line in text.splitlines())
    assert "fix:" in text


HF, SK, AWS = f"hf_{'a1' * 17}", f"sk-proj-{'b2' * 12}", f"AKIA{'C3' * 8}"
WANDB, PASSWORD = "0a1b2c3d4e" * 4, "h7Gk29fjQ1abX4mZ"
HOLDING = {
    "train.py": f'import os\n\nos.environ["WANDB_API_KEY"] = "{WANDB}"\n',
    "login.py": f'import wandb\nimport torch\nwandb.login(key="{WANDB}")\n',
    "broken.py": f'def (:\n\ntoken = "{HF}"\n',
    "launch.sh": f"#!/bin/bash\n\nexport HF_TOKEN={HF}\n",
    ".env": f"A=1\nB=2\nDB_PASSWORD={PASSWORD}\n",
    ".env.prod": f"A=1\nB=2\nOPENAI={SK}\n",
    "conf.yaml": f"a: 1\nb: 2\nurl: postgres://u:{PASSWORD}@db/x\n",
    "conf.json": f'{{"a": 1,\n\n"id": "{AWS}"}}',
    "conf.toml": f'a = 1\nb = 2\ntracking_password = "{PASSWORD}"\n',
    "id.conf": "\n\n-----BEGIN " + "PRIVATE KEY-----\n",
    "login.pem": "\n\n-----BEGIN " + "RSA PRIVATE KEY-----\n",
    "id_ed25519": "\n\n-----BEGIN " + "OPENSSH PRIVATE KEY-----\n",
    "a.ipynb": '{"cells": [{"source": [\n"a",\n"api_key = \\"' + PASSWORD + '\\"\\n"]}]}',
    "Dockerfile": f"FROM x\nRUN true\nENV HF_TOKEN={HF}\n",
    "pod.yaml": f"env:\n- name: DB_PASSWORD  # of the tracker\n  value: {PASSWORD}\n",
    "flow.yaml": f'a: 1\nenv:\n- {{name: DB_PASSWORD, value: "{PASSWORD}"}}\n',
    "sorted.yaml": f"a: 1\nenv:\n- value: {PASSWORD}\n  name: DB_PASSWORD\n",
    "pod.json": f'{{"env": [{{\n"name": "WANDB_API_KEY",\n"value": "{WANDB}"}}]}}',
    "pod.py": f'from k import EnvVar\n\nEnvVar(name="PGPASSWORD", value="{PASSWORD}")\n',
}


@pytest.mark.parametrize("name", HOLDING)
def test_s0_25_a_secret_is_found_in_any_file_on_its_line_and_is_never_shown(folder, name):
    (folder / name).write_text(HOLDING[name])
    result = lint(".", expect=2 if name == "broken.py" else 1)
    assert f"{name}:3: error: " in result.stdout
    assert "[secret-in-file]" in result.stdout
    for options in ((), ("--json",), ("--sarif",)):
        shown = lint(".", *options)
        for secret in (HF, SK, AWS, WANDB, PASSWORD):
            assert secret not in shown.stdout + shown.stderr


def test_s0_25_what_refers_to_a_secret_or_stands_for_one_is_none(folder):
    (folder / "train.py").write_text(
        'import os\n\ntoken = os.environ["HF_TOKEN"]\npad_token = "<pad>"\n'
        'url = f"postgres://{user}:{password}@host/db"\napi_key = key\n'
        'def load(token: str = "", api_key: str | None = None): ...\n'
    )
    (folder / "launch.sh").write_text("export HF_TOKEN=$(cat ~/.token)\nrun --token $HF_TOKEN\n")
    (folder / "run.sh").write_text("sky launch --secret HF_TOKEN\n")
    (folder / "conf.yaml").write_text("eos_token: </s>\napi_key: ${WANDB_API_KEY}\n")
    (folder / "pod.yaml").write_text(
        "env:\n- name: HF_TOKEN\n  valueFrom: {secretKeyRef: {name: hf, key: token}}\n"
        "- name: DB_PASSWORD\n  value: $(FROM_ELSEWHERE)\n- name: SIZE\n  value: abcd1234efgh\n"
        "- value: abcd1234efgh\n- name: API_KEY\n"
    )
    (folder / "job.yaml").write_text(
        "model: {decoder: {layers: 2, hidden: 64, heads: 2}}\ntrain: {global_batch: 8}\n"
        "kubernetes: {secrets: {HF_TOKEN: hf/token}}\n"
    )
    assert "secret-in-file" not in lint(".", "--json").stdout.replace('"files"', "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", 'API_KEY = "api-key"\n'),  # the name of a key
        ("run.sh", "gantry run --secret S2_API_KEY=team1_S2_API_KEY -- torchrun train.py\n"),
        ("eval.py", f'"""Use it so:\n\napi_key="{PASSWORD}"\n"""\n'),
        ("vm.json", '{"username": "me", "password": "password1234"}'),
        ("examples/env.yaml", f"api_key: {PASSWORD}\n"),
        ("tests/test_client.py", f'client = Client(api_key="{PASSWORD}")\n'),
        ("chats.jsonl", f'{{"text": "my password: {PASSWORD}"}}\n'),
        ("stack.yaml", "MasterPassword: !Ref Password1234\n"),
        ("build.yaml", "permissions: {id-token: write}\n"),
        ("dev.yaml", f"url: postgres://app:{PASSWORD}@localhost/db\n"),
        ("load.py", 'load_embedding("charturnerv2", token="charturnerv2")\n'),
        (".env", f"API_KEY_SHA256={WANDB}\nSECRET_ID={WANDB}\nAPI_TOKEN=fake-h7Gk29fjQ1ab\n"),
        ("Dockerfile", 'FROM x\nRUN echo "u ALL=(ALL) NOPASSWD:ALL8888" >> /etc/sudoers\n'),
    ],
)
def test_s0_25_a_value_that_is_only_named_like_a_secret_is_a_hint_at_most(folder, name, text):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / "beside.py").write_text("size = 1\n")
    levels = {one["severity"] for one in json.loads(lint(".", "--json").stdout)["findings"]}
    assert levels <= {"info"}


@pytest.mark.parametrize(
    "line",
    [
        "export AWS_SECRET_ACCESS_KEY=ErH2FGK2bPJSkZXr6dHflNRDpHBxzCwhErX7UuDT",
        f"export WANDB_API_KEY={WANDB}",
        "DB=postgres://bob:FbtgrhQGVYSLGV@host/db",
        "client_secret: arBzSkaO9DQSPXbRBxXi5YZ4nK4HQgPb",
        'password: "oXc7IVL0AfmU8o!x"',
    ],
)
def test_s0_25_a_value_that_is_named_like_a_secret_and_looks_made_fails_the_build(folder, line):
    (folder / "conf.env").write_text(f"{line}\n")
    assert "looks like a real one (not shown)" in lint(".", expect=1).stdout


@pytest.mark.parametrize("value", ["changeme", "${VAR}", "<token>", "example", "xxxxxxxx", "''"])
def test_s0_25_a_place_for_a_secret_is_silent(folder, value):
    (folder / "conf.env").write_text(
        f"AWS_SECRET_ACCESS_KEY={value}\npassword: {value}\nDB=postgres://bob:{value}@host/db\n"
    )
    assert "nothing found" in lint(".", "--severity", "info", expect=0).stdout


def test_s0_25_a_file_that_git_ignores_may_hold_secrets_and_a_tracked_one_may_not(folder):
    subprocess.run(["git", "init", "-q"], check=True)
    (folder / ".gitignore").write_text(".env\n")
    (folder / ".env").write_text(HOLDING[".env.prod"])
    lint(".", expect=0)
    subprocess.run(["git", "add", "-f", ".env"], check=True)
    lint(".", expect=1)


def test_in_tests_of_a_program_findings_are_hints(folder):
    (folder / "test_train.py").write_text(BAD)
    findings = json.loads(lint(".", "--json", "--severity", "info", expect=0).stdout)["findings"]
    assert {one["severity"] for one in findings} == {"info"}
    (folder / "train.py").write_text(BAD)
    lint(".", expect=1)


def test_a_file_without_findings_ends_with_0(folder):
    (folder / "train.py").write_text(GOOD)
    assert "1 file: nothing found" in lint("train.py", expect=0).stdout


def test_s3_12_warnings_end_with_1_only_when_strict(folder):
    (folder / "train.py").write_text(WARNED)
    lint("train.py", expect=0)
    lint("train.py", "--strict", expect=1)


def test_invalid_python_is_named_with_its_line_and_the_rest_is_linted(folder):
    (folder / "broken.py").write_text("import os\ndef f(:\n    pass\n")
    (folder / "train.py").write_text(BAD)
    result = lint(".", expect=2)
    assert "broken.py:2" in result.stderr
    assert "sampler-and-shuffle" in result.stdout


def test_binary_empty_and_other_encodings_are_said_and_not_raised(folder):
    (folder / "binary.py").write_bytes(b"\x00\x01\x02" * 100)
    (folder / "latin.py").write_bytes("# naïve\nname = 'é'\n".encode("latin-1"))
    (folder / "empty.py").write_text("")
    (folder / "list.json").write_text("[1, 2, 3]")
    (folder / "broken.yaml").write_text("distributed_type: [FSDP\nfsdp_config: {\n")
    result = lint(".", expect=2)
    assert "binary.py: a binary file" in result.stderr
    assert "broken.yaml:" in result.stderr
    assert "empty.py" not in result.stderr
    assert "empty" in lint("empty.py", expect=2).stderr


def test_an_empty_package_file_is_no_trouble_as_a_hook_names_it(folder):
    (folder / "__init__.py").write_text("")
    assert lint("__init__.py").stderr == ""


def test_a_path_that_is_not_there_is_refused(folder):
    with pytest.raises(Exception, match="there is no nowhere"):
        lint("nowhere")


def test_a_file_that_links_lead_to_is_read_once_and_by_its_own_name(folder):
    (folder / "z" / "deep").mkdir(parents=True)
    (folder / "z" / "deep" / "train.py").write_text(BAD)
    (folder / "a").symlink_to(folder / "z")
    (folder / "m").mkdir()
    (folder / "m" / "again").symlink_to(folder / "z" / "deep")
    (folder / "b.py").symlink_to(folder / "z" / "deep" / "train.py")
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "other.py").write_text(BAD)
    (folder / "c").symlink_to(outside)
    (folder / "d.py").symlink_to(outside / "other.py")
    assert set(json.loads(lint(".", "--json").stdout)["files"]) == {"z/deep/train.py", "c/other.py"}


def test_loops_of_links_end_and_folders_of_tools_are_passed_over(folder):
    (folder / "a").mkdir()
    (folder / "a" / "train.py").write_text(BAD)
    (folder / "a" / "loop").symlink_to(folder / "a")
    (folder / "self.py").symlink_to(folder / "self.py")
    for name in (".git", "build", "env"):
        (folder / name).mkdir()
        (folder / name / "x.py").write_text(BAD)
    (folder / "env" / "pyvenv.cfg").write_text("home = /usr\n")
    data = json.loads(lint("a", "build/..", "--json").stdout)
    assert [Path(name).name for name in data["files"]] == ["train.py"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_said(folder):
    (folder / "train.py").write_text(GOOD)
    (folder / "train.py").chmod(0)
    assert "permission denied" in lint("train.py", expect=2).stderr


def test_one_of_several_that_may_not_be_read_is_said_and_the_others_are_linted(folder, monkeypatch):
    (folder / "closed.py").write_text(GOOD)
    (folder / "train.py").write_text(BAD)
    read = Path.read_bytes

    def refused(path):
        if path.name == "closed.py":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path).name != "closed.py")
    data = json.loads(lint("closed.py", "train.py", "--json", expect=2).stdout)
    assert [(one["path"], one["what"]) for one in data["unread"]] == [
        ("closed.py", "permission denied")
    ]
    assert "sampler-and-shuffle" in {one["id"] for one in data["findings"]}


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe.py")
    assert "not a file" in lint("pipe.py", expect=2).stderr


def test_a_comment_with_a_reason_answers_a_finding(folder):
    line = "    loader = DataLoader(dataset, sampler=sampler, shuffle=True)"
    (folder / "train.py").write_text(
        BAD.replace(line, f"{line}  # paceline: ignore[sampler-and-shuffle] a test of the message")
    )
    data = json.loads(lint("train.py", "--json").stdout)
    assert "sampler-and-shuffle" not in {one["id"] for one in data["findings"]}
    assert [one["id"] for one in data["answered"]] == ["sampler-and-shuffle"]


def test_a_comment_by_a_published_name_on_the_line_above_counts(folder):
    (folder / "train.py").write_text(
        BAD.replace(
            "    for epoch",
            "    # paceline: ignore[missing-set-epoch] the sampler does not shuffle\n    for epoch",
        )
    )
    data = json.loads(lint("train.py", "--json").stdout)
    assert [one["id"] for one in data["answered"]] == ["set-epoch-missing"]


@pytest.mark.parametrize(
    ("comment", "says"),
    [
        ("# paceline: ignore[sampler-and-shuffle]", "no reason"),
        ("# paceline: ignore[no-such-thing] because", "no finding is called"),
        ("# paceline: ignore because", "names no finding"),
    ],
)
def test_a_comment_that_does_nothing_is_said(folder, comment, says):
    line = "    loader = DataLoader(dataset, sampler=sampler, shuffle=True)"
    (folder / "train.py").write_text(BAD.replace(line, f"{line}  {comment}"))
    data = json.loads(lint("train.py", "--json", expect=1).stdout)
    (said,) = [one for one in data["findings"] if one["id"] == "lint-suppression"]
    assert says in said["what"]
    assert said["severity"] == "warning"  # a hook shows warnings
    assert "sampler-and-shuffle" in {one["id"] for one in data["findings"]}


def test_a_comment_is_read_in_any_case_and_a_sentence_is_none(folder):
    line = "    loader = DataLoader(dataset, sampler=sampler, shuffle=True)"
    (folder / "train.py").write_text(
        BAD.replace(line, f"{line}  # Paceline: Ignore[Sampler-and-Shuffle] a test of the message")
        + "# paceline: ignored until it is ours\n"
    )
    data = json.loads(lint("train.py", "--json").stdout)
    assert [one["id"] for one in data["answered"]] == ["sampler-and-shuffle"]
    assert "lint-suppression" not in {one["id"] for one in data["findings"]}


def test_a_comment_that_answers_nothing_is_said(folder):
    (folder / "a.py").write_text(f"{GOOD}x = 1  # paceline: ignore[sampler-and-shuffle] once was\n")
    assert "nothing is found here" in lint("a.py", "--severity", "info", expect=0).stdout


LARGE = (
    "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n"
    "from transformers import AutoModelForCausalLM\n\ndist.init_process_group('nccl')\n"
    "model = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-2-13b-hf')\n"
    "model = DistributedDataParallel(model)\n"
)
"""A program whose model is larger than a V100, and not than the largest accelerator."""


def test_options_and_a_file_of_facts_are_the_context(folder):
    (folder / "large.py").write_text(LARGE)
    hints = ("large.py", "--severity", "info")
    assert "ddp-does-not-fit" not in lint(*hints).stdout
    assert "V100-32 has" in lint(*hints, "--gpu", "V100-32").stdout
    (folder / "facts.json").write_text('{"gpu": "V100-32"}')
    assert "V100-32 has" in lint(*hints, "--context", "facts.json").stdout
    (folder / "facts.json").write_text("[1")
    with pytest.raises(Exception, match="no JSON object"):
        lint("large.py", "--context", "facts.json")


def test_a_launch_line_gives_its_script_its_nodes(folder):
    (folder / "train.sh").write_text("#!/bin/sh\ntorchrun --nnodes=2 --nproc-per-node=8 train.py\n")
    (folder / "train.py").write_text(
        "import torch\nimport torch.distributed as dist\n\ndist.init_process_group('nccl')\n"
        "torch.cuda.set_device(dist.get_rank())\n"
    )
    alone, beside = lint("train.py"), lint(".", expect=1)
    assert "warning: this is the global rank" in alone.stdout
    assert "error: this is the global rank" in beside.stdout
    assert "the first of 2 nodes" in beside.stdout


def test_s3_12_sarif_has_every_rule_with_help_and_every_place(folder):
    (folder / "train file.py").write_text(BAD)
    (folder / "broken.py").write_text("def f(:\n")
    log = json.loads(lint(".", "--sarif").stdout)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["results"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"error", "warning", "note"}
        assert result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "train%20file.py"
        assert place["region"]["startLine"] >= 1
    for rule in rules:
        assert rule["help"]["text"]
        assert rule.get("helpUri", "https://").startswith("https://")
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["locations"][0]["physicalLocation"]["region"]["startLine"] == 1


def test_a_finding_shows_the_name_it_was_published_by(folder):
    (folder / "train.py").write_text(BAD)
    assert "[set-epoch-missing]" in lint("train.py").stdout
    rules = json.loads(lint("train.py", "--sarif").stdout)["runs"][0]["tool"]["driver"]["rules"]
    (rule,) = [one for one in rules if one["id"] == "set-epoch-missing"]
    assert "missing-set-epoch" in rule["properties"]["published"]


def test_changes_are_offered_only_where_there_are_some(folder):
    (folder / "train.py").write_text(BAD)
    assert "`--fix` shows 2 " in lint("train.py").stdout
    twice = BAD.replace("for epoch in range(3)", "for _ in (1, 2)")
    (folder / "train.py").write_text(twice.replace(", shuffle=True", ""))
    said = lint("train.py").stdout
    assert "set-epoch-missing" in said
    assert "--fix" not in said
    assert "nothing to write" in lint("train.py", "--fix", "--write").stderr


def test_fixes_are_a_diff_and_written_only_when_asked(folder):
    (folder / "train.py").write_text(BAD)
    diff = lint("train.py", "--fix").stdout
    assert "+        loader.sampler.set_epoch(epoch)\n" in diff
    assert "+    loader = DataLoader(dataset, sampler=sampler, shuffle=False)\n" in diff
    assert (folder / "train.py").read_text() == BAD
    subprocess.run(["git", "apply"], input=diff.encode(), check=True, cwd=folder)
    applied = (folder / "train.py").read_text()
    assert "set_epoch" in applied
    (folder / "train.py").write_text(BAD)
    lint("train.py", "--fix", "--write")
    assert (folder / "train.py").read_text() == applied
    left = json.loads(lint("train.py", "--json").stdout)["findings"]
    assert not {"set-epoch-missing", "sampler-and-shuffle"} & {one["id"] for one in left}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("NCCL_ASYNC_ERROR_HANDLING=1", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1"),
        ("NCCL_IB_DISBLE=1", "NCCL_IB_DISABLE=1"),
        ("NCCL_TREE_THRESHOLD=0", None),
    ],
)
def test_a_name_that_nothing_reads_becomes_the_one_that_is_read(folder, old, new):
    (folder / "a.sh").write_text(f"export {old}\n")
    assert "nccl-env-deprecated" in ids_in()
    lint("a.sh", "--fix", "--write")
    assert (folder / "a.sh").read_text() == f"export {new or old}\n"
    assert ("nccl-env-deprecated" in ids_in()) == (new is None)


def ids_in():
    data = json.loads(lint(".", "--json", "--severity", "info").stdout)
    return {one["id"] for one in data["findings"]}


HEAD = (
    "import torch.distributed as dist\n"
    "from torch.utils.data import DataLoader, DistributedSampler\n"
)
LOOP = "    for epoch in range(3):\n        for batch in loader:\n            print(batch)\n"
BUILD = (
    "def build(data):\n    sampler = DistributedSampler(data)\n"
    "    return DataLoader(data, sampler=sampler)\n"
)


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (f"{BUILD}def main(data):\n    loader = build(data)\n{LOOP}", "loader.sampler"),
        (
            f"{BUILD}def train(loader):\n{LOOP}def main(data):\n    train(build(data))\n",
            "loader.sampler",
        ),
        (
            f"{BUILD}def main(data):\n"
            + LOOP.replace("for batch", "loader = build(data)\n        for batch"),
            None,
        ),
        (
            "def main(data, many):\n    sampler = DistributedSampler(data) if many else None\n"
            "    loader = DataLoader(data, sampler=sampler)\n" + LOOP,
            None,
        ),
        (
            "def main(data):\n    sampler = DistributedSampler(data)\n"
            "    loader = DataLoader(data, sampler=sampler)\n    sampler = None\n" + LOOP,
            "loader.sampler",
        ),
        (
            "def main(data):\n    sampler = DistributedSampler(data)\n"
            "    loader = DataLoader(data, sampler=sampler)\n"
            + LOOP.replace("epoch in range(3)", "lr in [0.1, 0.2]"),
            None,
        ),
        (
            "class Run:\n  def __init__(self, data):\n    self.sampler = DistributedSampler(data)\n"
            "    self.loader = DataLoader(data, sampler=self.sampler)\n"
            "  def fit(self):\n" + LOOP.replace("loader", "self.loader"),
            "self.loader.sampler",
        ),
    ],
)
def test_set_epoch_is_written_only_where_its_names_are_seen(folder, program, wanted):
    (folder / "train.py").write_text(HEAD + program)
    assert "set-epoch-missing" in ids_in()
    after = lint("train.py", "--fix", "--write").stdout
    if wanted is None:
        assert "set_epoch" not in after
    else:
        assert f"+        {wanted}.set_epoch(epoch)\n" in after
        assert "set-epoch-missing" not in ids_in()


def test_a_fix_keeps_the_ends_of_lines_and_the_comments(folder):
    text = (
        HEAD + "def main(data):\n    loader = DataLoader(\n        data,  # the pages\n"
        "        sampler=DistributedSampler(data),\n        shuffle=True  # why\n    )\n"
    )
    (folder / "train.py").write_bytes(text.replace("\n", "\r\n").encode())
    diff = lint("train.py", "--fix").stdout_bytes
    lint("train.py", "--fix", "--write")
    wanted = text.replace("shuffle=True", "shuffle=False").replace("\n", "\r\n").encode()
    assert (folder / "train.py").read_bytes() == wanted
    (folder / "train.py").write_bytes(text.replace("\n", "\r\n").encode())
    subprocess.run(["git", "apply"], input=diff, check=True, cwd=folder)
    assert (folder / "train.py").read_bytes() == wanted


@pytest.mark.parametrize(
    ("name", "text", "id"),
    [
        ("ds.json", '{"zero_optimization": 3, "train_micro_batch_size_per_gpu": 1}', "silent-keys"),
        ("ds.json", '{"zero_optimization": {"stage": "three"}}', "ds-config-silent-keys"),
        ("ds.json", '{"train_micro_batch_size_per_gpu": 0, "steps_per_print": 1}', "silent-keys"),
        ("ds.json", '{"steps_per_print": 1, "bf16": true}', "ds-config-silent-keys"),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: lots\n", "config-unknown-key"),
    ],
)
def test_values_of_a_wrong_kind_are_found(folder, name, text, id):
    (folder / name).write_text(text)
    assert [one for one in ids_in() if one.endswith(id)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "ds.json",
            (
                '{"zero_optimization": {"stage": 2}, "train_batch_size": "auto", '
                '"train_micro_batch_size_per_gpu": "4", "gradient_accumulation_steps": "${ACC}", '
                '"bf16": {"enabled": "auto"}}'
            ),
        ),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: ${N}\nmachine_rank: 0\n"),
    ],
)
def test_numbers_that_are_filled_in_later_are_no_findings(folder, name, text):
    (folder / name).write_text(text)
    assert not {one for one in ids_in() if one.endswith(("silent-keys", "unknown-key"))}


def test_an_accelerator_and_facts_that_nobody_knows_are_said_and_passed_over(folder):
    (folder / "large.py").write_text(LARGE)
    odd = lint("large.py", "--gpu", "H1000")
    assert "no accelerator is called H1000 (H100" in odd.stderr
    (folder / "facts.json").write_text('{"node": 2, "gpus_per_node": "many", "gpu": "H100"}')
    said = lint("large.py", "--context", "facts.json").stderr
    assert "no fact is called node (" in said
    assert "gpus_per_node is many" in said
    assert lint("large.py", "--gpu", "A100-SXM4-80GB").stderr == ""


def test_a_named_file_of_no_known_kind_is_said(folder):
    (folder / "notes.md").write_text("words\n")
    assert (
        "notes.md: no kind of file that lint knows (searched for secrets only)"
        in lint("notes.md").stderr
    )
    assert lint(".").stderr == ""


def test_aliases_that_multiply_are_said_in_a_folder_too(folder):
    (folder / "bomb.yaml").write_text(
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n"
            for n in range(8)
        )
    )
    for name in ("bomb.yaml", "."):
        said = lint(name, expect=2).stderr
        assert "bomb.yaml:1: its aliases stand for more values than it has letters" in said


def test_a_folder_that_may_not_be_opened_is_said_and_the_rest_is_linted(folder, monkeypatch):
    (folder / "shut").mkdir()
    (folder / "train.py").write_text(BAD)
    real = os.scandir

    def scandir(path):
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied")
        return real(path)

    def stat(path, **options):
        if Path(path).parent.name == "shut":
            raise PermissionError(13, "Permission denied")
        return real_stat(path, **options)

    real_stat = Path.stat
    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "stat", stat)
    result = lint(".", expect=2)
    assert "shut: permission denied" in result.stderr
    assert "sampler-and-shuffle" in result.stdout


def test_columns_count_letters_and_a_file_unread_is_no_success(folder):
    (folder / "train.py").write_text(
        BAD.replace("    loader = DataLoader(", "    é = 'ääää'; loader = DataLoader(")
    )
    place = json.loads(lint("train.py", "--json").stdout)["findings"]
    found = next(one["where"] for one in place if one["id"] == "sampler-and-shuffle")
    line = (folder / "train.py").read_text().split("\n")[found["line"] - 1]
    assert line[found["column"] - 1 :].startswith(("shuffle=True", "True"))
    log = json.loads(lint("train.py", "--sarif").stdout)["runs"][0]
    assert log["invocations"][0]["executionSuccessful"] is True
    (folder / "broken.py").write_text("def f(:\n")
    log = json.loads(lint(".", "--sarif").stdout)["runs"][0]
    assert log["invocations"][0]["executionSuccessful"] is False


def test_a_comment_on_any_line_of_a_statement_answers(folder):
    long = (
        "    loader = DataLoader(  # {}\n        dataset,  # {}\n        sampler=sampler,\n"
        "        shuffle=True,  # {}\n    )  # {}"
    )
    line = "    loader = DataLoader(dataset, sampler=sampler, shuffle=True)"
    for place in range(4):
        comments = ["words"] * 4
        comments[place] = "paceline: ignore[sampler-and-shuffle] a test of the message"
        (folder / "train.py").write_text(BAD.replace(line, long.format(*comments)))
        data = json.loads(lint("train.py", "--json").stdout)
        assert [one["id"] for one in data["answered"]] == ["sampler-and-shuffle"], place


def test_a_reader_that_leaves_changes_no_exit_code(folder):
    (folder / "train.py").write_text(BAD)
    command = [sys.executable, "-m", "paceline", "lint", "train.py"]
    ended = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ended.stdout is not None
    ended.stdout.close()
    assert ended.wait() == 1
    assert b"Traceback" not in ended.stderr.read()
    ended.stderr.close()


@pytest.mark.parametrize(
    ("name", "text", "reported"),
    [
        ("deep.py", "x = " + "-" * 100_000 + "1\n", "nested too deeply"),
        ("accelerate.yaml", f"distributed_type: {'[' * 20_000}{']' * 20_000}", "nested too deeply"),
        (
            "ds_config.json",
            f'{{"zero_optimization": {"[" * 20_000}{"]" * 20_000}}}',
            "depth beyond",
        ),
    ],
)
def test_what_is_nested_too_deeply_to_read_is_said_in_words(folder, name, text, reported):
    (folder / name).write_text(text)
    assert reported in lint(name, expect=2).stderr


def test_a_level_hides_what_is_below_it_and_an_id_can_be_left_out(folder):
    (folder / "train.py").write_text(WARNED)
    assert "set-epoch-missing" in lint("train.py", "--severity", "warning", expect=0).stdout
    above = lint("train.py", "--severity", "error", expect=0).stdout
    assert "set-epoch-missing" not in above
    assert "1 warning hidden (shown with --severity info)" in above
    left = lint("train.py", "--ignore", "set-epoch-missing", expect=0).stdout
    assert "set-epoch-missing" not in left
    with pytest.raises(Exception, match="no finding is called"):
        lint("train.py", "--ignore", "nonsense")


def test_the_command_starts_without_torch_and_shows_no_traceback(folder):
    (folder / "train.py").write_text(BAD)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "paceline", "lint", "train.py", "missing"],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 2
    assert "V020" in done.stderr
    assert "Traceback" not in done.stderr
    assert " torch\n" not in done.stderr


def found_in(folder):
    data = json.loads(lint(".", "--json", "--severity", "info").stdout)
    return {(one["id"], one["where"]["path"], one["where"]["line"]) for one in data["findings"]}


def test_variables_that_a_program_sets_are_judged(folder):
    (folder / "train.py").write_text(
        'import os\n\nos.environ["NCCL_SOCKET_IFNAME"] = "docker0"\n'
        'os.environ.setdefault("NCCL_IB_DISBLE", "1")\n'
    )
    found = found_in(folder)
    assert ("nccl-wrong-interface", "train.py", 3) in found
    assert ("nccl-env-deprecated", "train.py", 4) in found


@pytest.fixture
def no_shell_parser(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the extra `lint` is not installed."""
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    _parser.cache_clear()
    yield
    _parser.cache_clear()


def test_without_the_shells_parser_the_rest_is_linted_with_one_note(tmp_path, no_shell_parser):
    for name in ("run.sh", "clean.sh"):
        (tmp_path / name).write_text("torchrun train.py\n")
    (tmp_path / "train.py").write_text("print()\n")
    done = lint(tmp_path, expect=0)
    assert done.output.count("2 files with shell commands not linted: ") == 1
    assert " ".join(done.output.split()).count(install_line("lint")) == 1
    (tmp_path / "train.py").write_text("import torch\nmodel = torch.nn.DataParallel(model)\n")
    assert "dataparallel-not-ddp" in lint(tmp_path, "--severity", "info").output


def test_a_shell_script_that_is_named_is_not_passed_over_in_silence(tmp_path, no_shell_parser):
    (tmp_path / "run.sh").write_text("torchrun train.py\n")
    done = lint(tmp_path / "run.sh", expect=2)
    assert install_line("lint") in " ".join(done.output.split())


def test_a_rule_that_fails_is_reported_and_the_others_answer(tmp_path, monkeypatch):
    def broken(*_: object) -> Iterator[None]:
        raise RecursionError("maximum recursion depth exceeded")
        yield

    monkeypatch.setattr("paceline.check.lint.lint.RULES", (broken, *RULES))
    (tmp_path / "train.py").write_text("import torch\nmodel = torch.nn.DataParallel(model)\n")
    done = lint(tmp_path, "--severity", "info", expect=2)
    assert "dataparallel-not-ddp" in done.output
    assert "the rule broken failed with RecursionError: maximum recursion" in done.output


def test_fix_write_keeps_a_copy_of_each_file_that_it_changes(tmp_path):
    script = tmp_path / "train.py"
    before = BAD
    script.write_text(before)
    script.chmod(0o755)
    for number in range(2):
        script.write_text(before)
        done = lint(script, "--fix", "--write")
        copy = tmp_path / ("train.py.orig.1" if number else "train.py.orig")
        assert f"changed; {copy.name} keeps what it was" in done.output
        assert copy.read_text() == before
        assert script.read_text() != before
        assert script.stat().st_mode & 0o777 == 0o755


JOB_70B = """\
model: {preset: llama-2-70b}
data: {seq_len: 4096}
cluster: {accelerator: A100-80, nodes: 1, per_node: 8}
train: {global_batch: 512, steps: 100}
layout:
  sharding: none
"""


def by_id(*args: str) -> dict[str, dict[str, Any]]:
    data = json.loads(CliRunner().invoke(command, [*args, "--json"]).stdout)
    return {one["id"]: one for one in data["findings"]}


def test_s3_2_a_job_that_the_planner_refuses_is_an_error_of_lint_too(folder):
    (folder / "job.yaml").write_text(JOB_70B)
    found = by_id("job.yaml")["job-file"]
    assert found["severity"] == "error"
    assert found["what"].startswith("P001: no layout fits on 1 node x 8 A100-80")
    assert found["where"]["line"] == 3
    # Of this machine's own accelerators nothing follows for another's.
    (folder / "job.yaml").write_text(JOB_70B.replace("accelerator: A100-80, nodes: 1, ", ""))
    assert by_id("job.yaml") == {}
    assert "job.yaml: not planned: cluster.accelerator auto" in lint("job.yaml").stderr


@pytest.mark.parametrize("accelerator", ["cpu", "H100-SXM"])
def test_s3_2_every_refusal_of_the_planner_is_an_error_also_of_a_job_for_cpus(folder, accelerator):
    (folder / "job.yaml").write_text(
        "model: {decoder: {layers: 2, hidden: 64, heads: 4}}\n"
        f"cluster: {{accelerator: {accelerator}, per_node: 2}}\n"
        "train: {global_batch: 7, steps: 10}\nlayout: {tensor: 3, pipeline: 5}\n"
    )
    shown = lint("job.yaml", expect=1).stdout
    assert [code for code in ("L004", "L005", "L006") if f"error: {code}" in shown] == [
        "L004",
        "L005",
        "L006",
    ]
    (folder / "job.yaml").write_text(JOB_70B.replace("A100-80, nodes: 1", "cpu"))
    assert by_id("job.yaml") == {}  # the memory of this machine says nothing of the next


def test_s3_2_the_job_of_a_program_that_is_only_started_is_read_too(folder):
    job = "command: [python, train.py]\nprocesses: 2\nrecovery: {max_restarts: 3}\n"
    (folder / "job.yaml").write_text(job)
    assert by_id("job.yaml") == {}
    assert "no kind of file" not in lint("job.yaml", expect=0).stderr
    (folder / "job.yaml").write_text(job.replace("max_restarts", "max_restart"))
    found = by_id("job.yaml")["job-file"]
    assert "did you mean" in found["what"] + found["fix"]
    assert found["where"]["line"] == 3
    # A command at the top of somebody else's file makes no job.
    (folder / "compose.yaml").write_text("command: [python, train.py]\nimage: a\n")
    assert by_id("compose.yaml") == {}


def test_s1_21_model_parallelism_bubbles_and_nodes_of_a_job_are_those_of_its_plan(folder):
    small = JOB_70B.replace("llama-2-70b", "tinyllama-1.1b").replace("nodes: 1", "nodes: 2")
    (folder / "tensor.yaml").write_text(small.replace("sharding: none", "tensor: 4"))
    found = by_id("tensor.yaml")["model-parallel-needless"]
    assert "layout.tensor 4 is fixed by the job" in found["what"]
    assert (found["severity"], found["where"]["line"]) == ("warning", 5)
    stages = "pipeline: 4\n  schedule: 1f1b\n  micro_batch: 1\n  data: 2\n  tensor: 2"
    (folder / "stages.yaml").write_text(
        small.replace("sharding: none", stages).replace("512", "16")
    )
    found = by_id("stages.yaml")["pipeline-bubble"]
    assert "4 pipeline stages with 8 micro-batches" in found["what"]
    assert found["where"]["line"] == 6
    wide = small.replace("tinyllama-1.1b", "llama-2-7b")
    (folder / "wide.yaml").write_text(wide.replace("sharding: none", "tensor: 16"))
    assert by_id("wide.yaml")["plan-caution"]["where"]["line"] == 6


def test_s1_21_ranks_that_mostly_wait_are_not_taken_for_twice_the_work(folder):
    slow = JOB_70B.replace("llama-2-70b", "tinyllama-1.1b").replace("nodes: 1", "nodes: 32")
    slow = slow.replace("per_node: 8", "per_node: 8, network: 100Gb/s")
    (folder / "job.yaml").write_text(slow)
    found = by_id("job.yaml")["scaling-not-linear"]
    assert re.search(
        r"ranks wait \d+% of a step .* data .* 256 of them do the work of", found["what"]
    )
    (folder / "job.yaml").write_text(slow.replace("512", "65536"))
    assert "scaling-not-linear" not in by_id("job.yaml")


def test_s3_2_a_plan_is_judged_by_what_it_warned_of_and_what_contradicts_in_it(folder):
    fixed = ("layout.sharding=full", "layout.tensor=1", "layout.pipeline=1")
    text = plan_to_json(plan_of(JOB, *fixed)).decode()
    (folder / "plan.json").write_text(text)
    found = by_id("plan.json")
    assert set(found) == {"plan-caution"}
    assert "one all-gather, of embedding" in found["plan-caution"]["what"]
    assert found["plan-caution"]["where"]["line"] > 1
    (folder / "plan.json").write_text(text.replace('"data": 8', '"data": 4', 1))
    found = by_id("plan.json")["plan-file"]
    assert found["severity"] == "error"
    assert "is 4 ranks, the cluster has 8" in found["what"]
    (folder / "plan.json").write_text(re.sub(r'("micro_batch": )\d+', r"\g<1>9", text, count=1))
    assert (
        "layout.micro_batch is 9, and the plan decided" in by_id("plan.json")["plan-file"]["what"]
    )
    (folder / "plan.json").write_text(re.sub(r'("usable_bytes": )\d+', r"\g<1>1000000000", text))
    assert "may be used of H100-SXM" in by_id("plan.json")["plan-file"]["what"]
    (folder / "plan.json").write_text(text.replace('"precision": "bf16"', '"precision": 16', 1))
    assert by_id("plan.json")["plan-file"]["severity"] == "warning"
    assert lint("plan.json", expect=0).stderr == ""


def test_a_folder_is_remembered_in_the_users_cache_and_not_where_that_cannot_be(folder):
    (folder / "train.py").write_text(BAD)
    first = lint(".", "--json")
    (kept,) = (folder.parent / "cache" / "paceline").glob("lint-*.json")
    data = kept.read_bytes()
    assert lint(".", "--json").stdout == first.stdout
    assert kept.read_bytes() == data
    kept.write_bytes(data.replace(b"DataLoader", b"DataLodger"))
    assert lint(".", "--json").stdout == first.stdout
    assert kept.read_bytes() == data
    kept.unlink()
    kept.mkdir()  # it can be neither read nor replaced
    assert lint(".", "--json").stdout == first.stdout
    assert sorted(kept.parent.iterdir()) == [kept]


def test_nothing_is_remembered_of_named_files_or_without_cache(folder):
    (folder / "train.py").write_text(BAD)
    lint("train.py")
    lint(".", "--no-cache")
    assert not list(folder.parent.glob("cache/paceline/lint-*"))


def test_a_secret_that_git_ignores_by_now_is_no_finding_though_the_file_is_remembered(folder):
    subprocess.run(["git", "init", "-q"], check=True, cwd=folder)
    (folder / "settings.json").write_text(f'{{"key": "{SK}"}}')
    assert "secret-in-file" in lint(".").stdout
    (folder / ".gitignore").write_text("settings.json\n")
    assert "secret-in-file" not in lint(".").stdout


def test_a_lone_surrogate_in_a_string_of_a_program_is_spelled_out(folder):
    (folder / "train.py").write_text('import os\n\nos.environ["NCCL_ALGO"] = "\\ud800ring"\n')
    for _ in range(2):  # the second time it is remembered
        (found,) = json.loads(lint(".", "--json").stdout)["findings"]
        assert "`\\ud800ring`" in found["what"]


def test_a_working_directory_that_is_gone_ends_no_linting(folder):
    (folder / "train.py").write_text(BAD)
    gone = folder.parent / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert "train.py:7" in lint(folder, expect=1).stdout


@pytest.mark.parametrize("two", [("--json", "--sarif"), ("--json", "--fix"), ("--sarif", "--fix")])
def test_two_forms_of_the_answer_are_refused(folder, two):
    (folder / "train.py").write_text("print(1)\n")
    with pytest.raises(UsageError, match="give one of --json, --sarif and --fix"):
        lint("train.py", *two)


def test_a_comment_that_a_string_shows_answers_nothing(folder):
    (folder / "help.py").write_text('HELP = """\n# paceline: ignore[no-such-thing] why\n"""\n')
    assert "no finding is called" not in lint("help.py").stdout
