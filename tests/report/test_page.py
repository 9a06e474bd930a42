"""The page of a run: whole, self-contained, and there for any record."""

import base64
import hashlib
import html.parser
import json
import math
import re
from dataclasses import replace

import msgspec
import pytest

pytest.importorskip("jinja2", reason="the page needs the report extra")

from tests.report import made

from paceline.cli.report import write_report
from paceline.record import events as log
from paceline.record.outputs import Generation, Outputs, Score
from paceline.record.run import RunFolder
from paceline.report.page import SCRIPTS, asset, render_page, without_nulls


class Tags(html.parser.HTMLParser):
    """Every tag with its attributes, and the text; remembers what was left open. Of scripts only
    the data are text."""

    def __init__(self, text):
        super().__init__()
        self.seen, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        is_data = self.seen and self.seen[-1] == ("script", DATA)
        if self.open[-1:] != ["script"] or is_data:
            self.text += data


DATA = {"type": "application/json", "id": "data"}


def picture(page):
    """What the page's script draws from."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found[1])


@pytest.fixture(scope="module")
def page():
    return render_page(made.killed_and_finished())


def test_page_refers_to_nothing_outside_itself(page):
    tags = Tags(page)
    assert tags.open == []
    assert not {"link", "img", "iframe"} & {tag for tag, _ in tags.seen}
    for _, attributes in tags.seen:
        for name in ("src", "href", "xlink:href", "style", "onload", "onclick", "onerror"):
            assert name not in attributes or attributes[name].startswith("#")
    assert "@import" not in page
    assert not re.findall(r"url\(", page)


def test_policy_of_the_page_lets_only_its_own_scripts_run_and_nothing_be_loaded(page):
    (policy,) = (
        a["content"]
        for tag, a in Tags(page).seen
        if tag == "meta" and "content" in a and a.get("http-equiv") == "Content-Security-Policy"
    )
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert scripts == [asset(name) for name in SCRIPTS]
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    assert policy == f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'"


def test_drawing_library_is_the_one_whose_hash_is_known():
    """`dist/uPlot.iife.min.js` and `dist/uPlot.min.css` of the npm package uplot 1.6.32."""
    assert hashlib.sha256(asset("uplot.js").encode()).hexdigest() == (
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    )
    assert hashlib.sha256(asset("uplot.css").encode()).hexdigest() == (
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"
    )


LIVE_IDS = {
    *("find", "runs", "rank", "follow", "find-log", "log", "logs", "comparing", "differ", "same"),
}
"""Elements that only the live page has."""


def test_page_gives_every_id_once_and_has_all_that_its_script_asks_for(page):
    ids = re.findall(r' id="([^"]+)"', page)
    ours = asset("curves.js") + asset("page.js")
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"[$]\('([\w-]+)'\)", ours)) - set(ids) == LIVE_IDS


def test_page_of_the_same_record_is_the_same_to_the_byte(page):
    assert render_page(made.killed_and_finished()) == page


def test_page_says_how_the_run_went(page):
    text = " ".join(Tags(page).text.split())
    assert "Finished all 200 steps on 2 ranks" in text
    assert "recovered by itself once" in text
    assert "0.69 below a bigram model (2.380)" in text
    assert "ab" * 32 in text
    assert "killed by SIGKILL (the job's drill)" in text
    assert "14 steps repeated" in text
    assert "402 MiB" in text
    assert "410 MiB estimated" in text


def test_page_shows_what_a_step_waits_for_its_data_where_that_was_measured():
    record = made.killed_and_finished()
    assert "waiting for data" not in render_page(record)
    lines = [replace(line, data_s=0.002) for line in record.metrics]
    opened = [replace(lines[0], data_s=lines[0].step_s), *lines[1:]]  # read from disk, once
    said = "2.0 % of the time after the first step waiting for data"
    assert said in render_page(replace(record, metrics=opened))


def test_s0_26_the_first_step_after_a_resume_opens_the_data_again_and_does_not_count():
    record = made.killed_and_finished()
    lines = [replace(line, data_s=0.002) for line in record.metrics]
    starts = [each.at for each in record.events if isinstance(each, log.TrainingStarted)]
    firsts = [next(n for n, line in enumerate(lines) if line.at >= at) for at in starts]
    assert firsts[-1] > 0
    opened = [
        replace(line, data_s=line.step_s) if n in {0, *firsts} else line
        for n, line in enumerate(lines)
    ]
    said = "2.0 % of the time after the first step waiting for data"
    assert said in render_page(replace(record, metrics=opened))


def test_page_tells_kept_checkpoints_from_pruned_ones(page):
    rows = re.findall(r"step-(\d{8})</td>.*?<td>(kept|pruned)</td>", page)
    assert [int(step) for step, state in rows if state == "kept"] == [160, 180, 200]
    assert len(rows) == 10


def test_page_shows_why_each_layout_lost_and_unknown_numbers_as_unknown(page):
    row = re.search(r"<tr><td>FSDP2 over 2 ranks.*?</tr>", page)
    assert row is not None
    assert row[0].count("unknown") == 3
    assert "communicates 1.5x as much" in row[0]


def test_page_escapes_what_a_record_says():
    evil = "<script>alert(1)</script>"
    whole = made.killed_and_finished()
    baseline = log.BaselineEvaluated(at=made.T0, generation=1, name=f"{evil} $x^{{", loss=2.0)
    lost = msgspec.structs.replace(made.lost(9, 30, generation=5), how=f"{evil} $\\frac")
    page = render_page(
        replace(whole, name=evil, job_text=evil, events=(*whole.events, baseline, lost))
    )
    assert evil not in page
    assert "&lt;script&gt;" in page
    assert picture(page)["head"]["name"] == evil
    assert Tags(page).open == []


PARTIAL = {
    "nothing at all": made.record(with_plan=False),
    "a plan only": made.record(),
    "the first event": made.record([made.started()], is_running=True),
    "no step yet": made.record([made.started(), made.training(3, 1)], is_running=True),
    "a failure before the first step": made.record(
        [made.started(), made.lost(2, 0), made.finished(3, outcome="failed", step=0)]
    ),
    "one step": made.record([made.started(), made.training(1, 1)], [made.line(1, 1.2)]),
    "no evaluation": made.record(
        [made.started(), made.training(1, 1)], [made.line(s, 1 + s / 9) for s in range(1, 60)]
    ),
    "an evaluation only": made.record([made.started(), made.evaluated(2, 0, 5.6)]),
    "losses that are not finite": made.record(
        [
            made.started(),
            made.evaluated(2, 0, math.nan),
            log.StepRefused(at=made.T0 + 3, generation=1, step=2, reason="the loss is not finite"),
        ],
        [made.line(s, s, loss=[4.0, math.nan, math.inf, 3.0][s % 4]) for s in range(1, 50)],
    ),
    "only losses that are not finite": made.record(
        [made.started()], [made.line(s, s, loss=math.nan) for s in range(1, 50)]
    ),
    "metrics without events": made.record([], [made.line(s, s) for s in range(1, 5)]),
    "a resumed run": made.record(
        [made.started(0), made.finished(9, outcome="interrupted"), made.started(50, resumed=True)],
        [made.line(1, 5), made.line(2, 8), made.line(3, 55)],
    ),
    "a save that failed and one refused": made.record(
        [
            made.started(),
            log.CheckpointFailed(at=made.T0 + 1, generation=1, step=5, reason="no space left"),
            log.CheckpointRefused(
                at=made.T0 + 2, generation=1, checkpoint="step-00000005", reason="a flipped bit"
            ),
        ]
    ),
}


@pytest.mark.parametrize("what", PARTIAL)
def test_page_is_whole_when_the_record_has(what):
    tags = Tags(render_page(PARTIAL[what]))
    assert tags.open == []
    assert " nan" not in tags.text.lower()
    assert "None" not in tags.text.replace("None was written", "")


def test_page_says_what_was_refused_and_why():
    text = Tags(render_page(PARTIAL["losses that are not finite"])).text
    assert "Steps refused by all ranks" in text
    text = Tags(render_page(PARTIAL["a save that failed and one refused"])).text
    assert "not written: no space left" in text
    assert "a flipped bit" in text


def test_page_of_a_failed_run_gives_the_reason_and_the_command_to_go_on():
    text = Tags(render_page(PARTIAL["a failure before the first step"])).text
    assert "rank 1: killed by SIGKILL" in text
    assert "paceline run --resume /runs/tiny-lm" in text


def test_page_says_when_the_limit_is_near_where_it_is():
    whole = made.killed_and_finished()
    cluster = replace(whole.plan.cluster, usable_bytes=500 * made.MIB)
    page = render_page(replace(whole, plan=replace(whole.plan, cluster=cluster)))
    assert 'class="limit"' in page
    assert "Limit of one rank: 500 MiB (measured)." in page


def test_page_compares_only_what_tensors_take_on_an_accelerator():
    whole = made.killed_and_finished()
    cluster = replace(whole.plan.cluster, backend="nccl", accelerator="H100-SXM")
    page = render_page(replace(whole, plan=replace(whole.plan, cluster=cluster)))
    assert "Taken by tensors, 130 MiB estimated" in page
    assert "measured on the fullest rank: the estimate is" in page


def test_page_draws_the_fullest_and_the_least_full_of_many_ranks():
    whole = made.killed_and_finished()
    peaks = [(300 + rank) * made.MIB for rank in range(64)]
    end = msgspec.structs.replace(
        whole.events[-1], peak_bytes=peaks, baseline_bytes=[200 * made.MIB] * 64
    )
    page = render_page(replace(whole, events=(*whole.events[:-1], end)))
    assert "measured, rank 63, fullest of 64" in page
    assert "measured, rank 0, least full" in page
    assert "measured, rank 7" not in page


def test_memory_that_was_not_measured_is_left_out_and_is_not_0_bytes():
    whole = made.killed_and_finished()
    end = msgspec.structs.replace(
        whole.events[-1], peak_bytes=[None, None], baseline_bytes=[None, None]
    )
    lines = tuple(replace(line, memory_bytes=None) for line in whole.metrics)
    text = Tags(render_page(replace(whole, events=(*whole.events[:-1], end), metrics=lines))).text
    assert "measured, rank" not in text
    assert "at the fullest rank" not in text
    assert "None" not in text


def test_page_says_what_the_allocator_reserved_and_what_the_driver_reported():
    whole = made.killed_and_finished()
    lines = tuple(replace(line, reserved_bytes=700 * made.MIB) for line in whole.metrics)
    xid = log.GpuHealth(at=made.T0 + 3, node=1, gpu="GPU-6a", what="xid", value=79, is_fatal=True)
    text = Tags(render_page(replace(whole, events=(*whole.events, xid), metrics=lines))).text
    assert "700 MiB reserved by rank 0's allocator" in text
    assert "What the driver reported of GPUs" in text
    assert "GPU-6a" in text
    assert "against its node" in text


def test_page_draws_the_first_names_that_the_program_logged():
    lines = [
        replace(made.line(step, step / 10), logged={f"score_{i}": 0.5 for i in range(30)})
        for step in (1, 2, 3)
    ]
    lines[1] = replace(lines[1], logged={"score_0": None})
    page = render_page(made.record([made.started(), made.training(0.1, 1)], lines))
    assert Tags(page).open == []
    names = [chart["name"] for chart in picture(page)["head"]["charts"]]
    assert [name for name in names if name.startswith("score")] == [f"score_{i}" for i in range(24)]
    assert picture(page)["tables"][0]["curves"]["score_0"]["mean"] == [0.5, None, 0.5]


def test_100k_steps_stay_a_small_page():
    lines = [made.line(step, 1 + step * 0.11) for step in range(1, 100_001)]
    saves = [made.saved(1 + step * 0.11, step) for step in range(100, 100_001, 100)]
    record = made.record([made.started(), made.training(1, 1), *saves], lines)
    page = render_page(record)
    assert len(page) < 1_000_000
    assert "The last 200 of 1000." in page


def test_report_leaves_no_half_page_when_the_disk_refuses(tmp_path, monkeypatch):
    folder = tmp_path / "away"
    monkeypatch.setattr("paceline.record.gather.gather", lambda run: made.record())
    with pytest.raises(FileNotFoundError):
        write_report(RunFolder(tmp_path), folder / "page.html")
    made_at = write_report(RunFolder(tmp_path))
    assert made_at == tmp_path / "report.html"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_layouts_have_a_memory_bar_and_the_front_is_plotted():
    page = render_page(made.record())
    assert 'class="sized" data-style="--part:100.0%"' in page
    assert "Time against memory" in page
    assert page.count("a step, 4") + page.count("a step, 3") >= 2


def test_page_says_that_a_run_stopped_early_and_what_was_best():
    record = made.killed_and_finished()
    *events, end = record.events
    early = log.StoppedEarly(at=end.at, step=120, waited=3, best_step=90, best_loss=1.25)
    page = render_page(replace(record, events=(*events, early, end)))
    text = " ".join(Tags(page).text.split())
    assert "Stopped early after step 120 of 200 on 2 ranks" in text
    assert "no improvement in 3 evaluations, lowest evaluation loss 1.250 after step 90" in text


def test_page_shows_what_the_model_made_of_prompts_as_text():
    made_of = Generation(prompt="<b>Once", text="upon\na time", is_cut=True)
    record = replace(made.killed_and_finished(), outputs=Outputs(step=90, generations=(made_of,)))
    page = render_page(record)
    assert "&lt;b&gt;Once" in page
    assert "upon\na time" in page
    assert "continued by the checkpoint of step 90" in " ".join(Tags(page).text.split())
    failed = replace(record, outputs=Outputs(step=90, problem="no room"))
    assert "Something is missing of the checkpoint of step 90: no room" in render_page(failed)


def test_page_shows_how_the_model_did_at_tasks_beside_what_is_missing():
    good = Score(task="facts<b>", metric="acc", value=0.4375, error=0.0625, num_samples=96)
    bad = Score(task="facts<b>", metric="perplexity", value=None, error=None, num_samples=96)
    outputs = Outputs(step=90, scores=(good, bad), problem="no prompts")
    page = render_page(replace(made.killed_and_finished(), outputs=outputs))
    text = " ".join(Tags(page).text.split())
    name = "<tr><td>facts&lt;b&gt;</td><td>"
    assert f"{name}acc</td><td>90</td><td>0.4375</td><td>0.062</td><td>96</td></tr>" in page
    assert f"{name}perplexity</td><td>90</td><td>no value</td><td></td><td>96</td></tr>" in page
    assert "with the checkpoint of step 90" in text
    assert "Something is missing of the checkpoint of step 90: no prompts" in text
    assert "Prompts of" not in text


def test_page_of_a_script_of_your_own_is_the_same_page():
    record = replace(made.killed_and_finished(), job=None, plan=None)
    page = render_page(record)
    assert Tags(page).open == []
    assert picture(page)["head"]["sentence"].startswith("Finished on 2 ranks")
    assert ["Program", "DDP over 2 ranks"] in picture(page)["head"]["facts"]


def test_job_is_shown_without_the_fields_that_say_nothing():
    text = "name: x\nmodel:\n  path: null\n  inner:\n    a: null\nlist:\n- 1\nlast: {}\n"
    assert without_nulls(text) == "name: x\nlist:\n- 1\n"
    assert without_nulls("a:\n  b: null\n  c: 1\n") == "a:\n  c: 1\n"


def test_page_shows_scores_and_texts_of_chosen_steps_one_under_the_other():
    def made_of(step, acc, text, **more):
        score = Score(task="facts", metric="acc", value=acc, error=None, num_samples=8)
        other = Score(task="more", metric="acc", value=acc / 2, error=None, num_samples=8)
        said = tuple(Generation(prompt=p, text=p + text, is_cut=False) for p in ("Once", "Then"))
        return Outputs(step=step, scores=(score, other), generations=said, **more)

    missing = Outputs(step=60, problem="no checkpoint")
    outputs = made_of(90, 0.75, " end", chosen=(made_of(30, 0.25, " start"), missing))
    page = render_page(replace(made.killed_and_finished(), outputs=outputs))
    text = " ".join(Tags(page).text.split())
    rows = re.findall(r"<td>(facts|more)</td><td>acc</td><td>(\d+)</td><td>([\d.]+)<", page)
    assert rows == [
        ("facts", "30", "0.25"),
        ("facts", "90", "0.75"),
        ("more", "30", "0.125"),
        ("more", "90", "0.375"),
    ]
    assert re.findall(r">(Once|Then)</td><td>(\d+)</td>.*?>(.*?)</td>", page) == [
        ("Once", "30", "Once start"),
        ("Once", "90", "Once end"),
        ("Then", "30", "Then start"),
        ("Then", "90", "Then end"),
    ]
    assert "with the checkpoints of steps 30, 60, 90" in text
    assert "Something is missing of the checkpoint of step 60: no checkpoint" in text
