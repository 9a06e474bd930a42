"""Fixes that need no judgement, as changed texts: one small edit for each finding it knows.

A fix that does not apply exactly is left out: the finding then stays for the reader. A changed
Python file that no longer parses is left as it was.
"""

import ast
import difflib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.check.finding import Finding
from paceline.check.lint.configs.known_variables import RENAMED
from paceline.check.lint.epoch_fix import set_epoch_call


@dataclass(frozen=True, slots=True)
class Edit:
    """Text between two offsets, replaced. Equal offsets insert."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A file as it would be."""

    path: str
    before: str
    after: str
    findings: tuple[Finding, ...]
    """Those that the change mends."""

    @property
    def diff(self) -> str:
        """Unified, as `patch -p1` and `git apply` take it."""
        lines = difflib.unified_diff(
            re.findall(r"[^\n]*\n|[^\n]+", self.before),
            re.findall(r"[^\n]*\n|[^\n]+", self.after),
            f"a/{self.path}",
            f"b/{self.path}",
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )


def fix_files(findings: Sequence[Finding], texts: Mapping[str, str]) -> list[Fixed]:
    """Every file that changes."""
    fixed = []
    for path, whole in texts.items():
        text = whole.replace("\r\n", "\n")
        ends = "\r\n" if text != whole else "\n"
        if text.replace("\n", ends) != whole or "\r" in text:
            continue  # lines that end in several ways: numbers of lines would not be sure
        edits: list[tuple[Finding, list[Edit]]] = []
        for finding in findings:
            if finding.where.path == path and finding.id in _FIXES and finding.where.line:
                changes = _FIXES[finding.id](text, finding.where.line, finding)
                if changes and not _overlaps(changes, [e for _, each in edits for e in each]):
                    edits.append((finding, changes))
        if not edits:
            continue
        after = _applied(text, [edit for _, each in edits for edit in each])
        if after != text and (not path.endswith(".py") or _tree(after) is not None):
            fixed.append(
                Fixed(
                    path=path,
                    before=whole,
                    after=after.replace("\n", ends),
                    findings=tuple(f for f, _ in edits),
                )
            )
    return fixed


def _overlaps(changes: Sequence[Edit], others: Sequence[Edit]) -> bool:
    return any(
        (one.start < other.end and other.start < one.end) or one == other
        for one in changes
        for other in others
    )


def _applied(text: str, edits: Sequence[Edit]) -> str:
    for edit in sorted(edits, key=lambda one: (one.start, one.end), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _line_span(text: str, line: int) -> tuple[int, int]:
    """Offsets of a line's first letter and of its end, the line break left out."""
    lines = text.split("\n")
    start = sum(len(each) + 1 for each in lines[: line - 1])
    return start, start + len(lines[line - 1]) if line <= len(lines) else start


def _replace_in_line(text: str, line: int, pattern: str, new: str) -> list[Edit]:
    """The one match of a pattern in a line, replaced; nothing when there are none or several."""
    start, end = _line_span(text, line)
    matches = list(re.finditer(pattern, text[start:end]))
    if len(matches) != 1:
        return []
    match = matches[0]
    return [Edit(start + match.start(), start + match.end(), match.expand(new))]


def _replacing(pattern: str, new: str) -> "_Fix":
    return lambda text, line, _: _replace_in_line(text, line, pattern, new)


_Fix = Callable[[str, int, Finding], list[Edit]]


def _offset(text: str, line: int, column_bytes: int) -> int:
    """Offset of a node's place, which `ast` counts in bytes of UTF-8."""
    start, end = _line_span(text, line)
    return start + len(text[start:end].encode()[:column_bytes].decode(errors="ignore"))


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own escapes and literals
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _fix_set_epoch(text: str, line: int, _: Finding) -> list[Edit]:
    """`sampler.set_epoch(epoch)` as the loop's first line, where both names can be seen there."""
    tree = _tree(text)
    call = set_epoch_call(tree, line) if tree is not None else None
    loop = (
        next(
            (one for one in ast.walk(tree) if isinstance(one, ast.For) and one.lineno == line), None
        )
        if tree is not None
        else None
    )
    if call is None or loop is None:
        return []
    decorators = getattr(loop.body[0], "decorator_list", [])
    first = min([loop.body[0].lineno, *(one.lineno for one in decorators)])
    start, _end = _line_span(text, first)
    indent = re.match(r"[ \t]*", text[start:])
    if first == loop.lineno or indent is None:
        return []
    return [Edit(start, start, f"{indent[0]}{call}\n")]


def _fix_keyword(name: str, value: bool) -> _Fix:
    """Takes a keyword argument with this value out of a call that starts or stands on the line."""

    def fix(text: str, line: int, _: Finding) -> list[Edit]:
        tree = _tree(text)
        for call in ast.walk(tree) if tree is not None else ():
            if not isinstance(call, ast.Call) or not (
                call.lineno <= line <= (call.end_lineno or line)
            ):
                continue
            for keyword in call.keywords:
                if (
                    keyword.arg != name
                    or not isinstance(keyword.value, ast.Constant)
                    or (keyword.value.value is not value)
                ):
                    continue
                return [_without(text, call, keyword)]
        return []

    return fix


def _without(text: str, call: ast.Call, keyword: ast.keyword) -> Edit:
    """Takes an argument out with its comma, and with its line and comment where it has its own."""
    start = _offset(text, keyword.lineno, keyword.col_offset)
    end = _offset(text, keyword.end_lineno or keyword.lineno, keyword.end_col_offset or 0)
    first = _line_span(text, keyword.lineno)[0]
    last = _line_span(text, keyword.end_lineno or keyword.lineno)[1]
    alone = not text[first:start].strip() and re.fullmatch(r"\s*,?\s*(#.*)?", text[end:last])
    if alone and last < len(text):
        return Edit(first, last + 1, "")
    others: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    places = [
        (
            _offset(text, one.lineno, one.col_offset),
            _offset(text, one.end_lineno or one.lineno, one.end_col_offset or 0),
        )
        for one in others
    ]
    following = [one for one, _ in places if one >= end]
    preceding = [one for _, one in places if one <= start]
    if following:
        comma = re.match(r"\s*,[ \t]*", text[end:])
        between = text[end : min(following)]
        whole = "#" not in between and "*" not in between
        end = min(following) if whole else end + (comma.end() if comma is not None else 0)
    elif preceding and "#" not in text[max(preceding) : start]:
        start = max(preceding)
    return Edit(start, end, "")


def _fix_variable(text: str, line: int, finding: Finding) -> list[Edit]:
    """The name that is read instead, where the values mean the same."""
    other_values = {
        "NCCL_TREE_THRESHOLD",
        "NCCL_LL_THRESHOLD",
        "NCCL_RINGS",
        "NCCL_IB_CUDA_SUPPORT",
    }
    new = re.fullmatch(r"(?:write|set) ([A-Z0-9_]+)(?: instead)?", finding.fix)
    start, end = _line_span(text, line)
    for old in re.findall(r"[A-Z][A-Z0-9_]{3,}", text[start:end]):
        if old in finding.what.split() or f"{old}:" in finding.what.split():
            if old in other_values or new is None or old == new[1]:
                return []
            if old in RENAMED and RENAMED[old][0] != new[1]:
                return []
            return _replace_in_line(text, line, rf"\b{old}\b", new[1])
    return []


def _fix_tasks(text: str, line: int, finding: Finding) -> list[Edit]:
    """The number of tasks, and the cores of one so that a node has as many as before."""
    number = re.search(r"--ntasks-per-node=(\d+)", finding.fix)
    start, end = _line_span(text, line)
    before = re.search(r"--ntasks-per-node[= ](\d+)", text[start:end])
    if number is None or before is None:
        return []
    edits = _replace_in_line(text, line, r"(--ntasks-per-node[= ])\d+", rf"\g<1>{number[1]}")
    options = re.findall(r"(?m)^[ \t]*#SBATCH\b[^\n]*", text)
    if re.search(
        r"\s(--ntasks[= ]|-n[= \d]|--\w+-per-task\b(?<!cpus-per-task))", "\n".join(options)
    ):
        return []  # they count the tasks as well
    if re.search(
        r"\bntasks|SLURM_N(TASKS|PROCS)|cpus[-_]per|CPUS_PER_TASK|\bsrun .* -c", _rest(text)
    ):
        return []  # what the script reckons from them would change, too
    cores = list(re.finditer(_CORES, text))
    if not cores or not edits:
        return edits
    total = int(before[1]) * int(cores[0][1])
    if len(cores) > 1 or total % int(number[1]):
        return []
    new = str(total // int(number[1]))
    return [*edits, Edit(cores[0].start(1), cores[0].end(1), new)]


_CORES = r"(?m)^[ \t]*#SBATCH\b[^\n]*?\s(?:--cpus-per-task[= ]|-c[= ]?)(\d+)\b"


def _rest(text: str) -> str:
    """A batch script without its `#SBATCH` lines and comments."""
    return "\n".join(one for one in text.split("\n") if not one.lstrip().startswith("#"))


def _fix_dns(text: str, line: int, _: Finding) -> list[Edit]:
    start, end = _line_span(text, line)
    match = re.fullmatch(r"([ ]*)hostNetwork:[ ]*true[ ]*(#.*)?", text[start:end])
    if match is None or f"\n{match[1]}dnsPolicy:" in text:
        return []
    return [Edit(end, end, f"\n{match[1]}dnsPolicy: ClusterFirstWithHostNet")]


def _fix_restart(text: str, line: int, _: Finding) -> list[Edit]:
    """OnFailure for every kind of pod of the document, of which the finding names the first."""
    start, end = _line_span(text, line)
    if not re.search(_NEVER, text[start:end]):
        return []
    first = text.rfind("\n---", 0, start) + 1
    last = text.find("\n---", end)
    document = text[first : last if last >= 0 else len(text)]
    return [
        Edit(first + match.start(1), first + match.end(1), "OnFailure")
        for match in re.finditer(_NEVER, document)
    ]


_NEVER = r"(?m)^[^#\n]*?\brestartPolicy[\"']?: *[\"']?(Never)\b"


def _fix_shared_memory(text: str, line: int, _: Finding) -> list[Edit]:
    """--shm-size for `docker run`; a memory volume at /dev/shm for pods written block by block."""
    start, end = _line_span(text, line)
    if re.search(r"\b(docker|podman)\s+run\b", text[start:end]):
        if "--shm-size" in text[start:end]:
            return _replace_in_line(text, line, r"--shm-size[= ]\S+", "--shm-size=16g")
        return _replace_in_line(text, line, r"\b(docker|podman)\s+run\b", r"\g<0> --shm-size=16g")
    if "sizeLimit" in text[start:end]:
        return _replace_in_line(text, line, r"sizeLimit:\s*\"?[\w.]+\"?", "sizeLimit: 16Gi")
    if not text[start:end].startswith("kind:"):
        return []
    return _mount(text, line)


def _mount(text: str, line: int) -> list[Edit]:
    """The volume and its mount, in every pod of the document that starts around this line."""
    lines = text.split("\n")
    first = max((n for n in range(line - 1) if lines[n].startswith("---")), default=-1) + 1
    last = next((n for n in range(line, len(lines)) if lines[n].startswith("---")), len(lines))
    edits: list[Edit] = []
    for number in range(first, last):
        block = re.fullmatch(r"( *)containers:[ ]*(#.*)?", lines[number])
        if block is None:
            continue
        indent = block[1]
        inside = number + 1
        while inside < last and (
            not lines[inside].strip() or lines[inside].startswith((f"{indent} ", f"{indent}-"))
        ):
            inside += 1
        body = lines[number + 1 : inside]
        pod = _pod(lines, number, last, indent)
        if any(re.match(rf"{indent}volumes:", one) for one in pod) or "/dev/shm" in "\n".join(body):
            return []
        images = [n for n, one in enumerate(body) if re.match(r" *(- )?image: ", one)]
        if len(images) != 1 or any("volumeMounts" in one for one in body):
            return []
        at = re.match(r" *(?:- )?", body[images[0]])
        column = " " * len(at[0]) if at is not None else indent
        _, end = _line_span(text, number + 2 + images[0])
        edits.append(
            Edit(
                end,
                end,
                f"\n{column}volumeMounts:\n{column}  - name: dshm\n{column}    mountPath: /dev/shm",
            )
        )
        start, _ = _line_span(text, number + 1)
        edits.append(
            Edit(
                start,
                start,
                f"{indent}volumes:\n{indent}  - name: dshm\n{indent}    emptyDir:\n"
                f"{indent}      medium: Memory\n{indent}      sizeLimit: 16Gi\n",
            )
        )
    return edits


def _pod(lines: Sequence[str], number: int, last: int, indent: str) -> list[str]:
    """The lines of the pod's spec around its containers."""
    first = number
    while first > 0 and lines[first - 1].startswith(indent) and lines[first - 1].strip():
        first -= 1
    end = number
    while end < last and (lines[end].startswith(indent) or not lines[end].strip()):
        end += 1
    return list(lines[first:end])


_FIXES: Mapping[str, _Fix] = {
    "set-epoch-missing": _fix_set_epoch,
    "sampler-and-shuffle": _fix_keyword("shuffle", True),
    "ddp-find-unused-overhead": _fix_keyword("find_unused_parameters", True),
    "mlx-silent-singleton": _replacing(r"distributed\.init\(\)", "distributed.init(strict=True)"),
    "eval-duplicates": _replacing(r"\.gather\(", ".gather_for_metrics("),
    "nccl-env-deprecated": _fix_variable,
    "tokenizers-fork": _replacing(
        r"(TOKENIZERS_PARALLELISM\W{1,4}(?:value: )?)(true|True|1)\b", r"\g<1>false"
    ),
    "slurm-ntasks-mismatch": _fix_tasks,
    "k8s-init-container-stuck": _fix_dns,
    "k8s-master-dns-not-ready": _fix_restart,
    "shm-too-small": _fix_shared_memory,
    "fsdp-ram-efficient-needs-sync": _replacing(r"(fsdp_sync_module_states: )false", r"\g<1>true"),
    "ipv6-bracket-master-addr": _replacing(r"\[([0-9a-fA-F:]+)\]", r"\g<1>"),
    "cuda-oom-fragmentation": _replacing(r"expandable_segment:", "expandable_segments:"),
}
"""Failure -> its edit."""
