"""Which moves go to this rank's device, and which are listed because only a guess is possible."""

import re
from contextlib import nullcontext

import pytest
from tests.adapt.test_adapt import PLAIN, changed, lefts

from paceline.adapt import Target, adapt
from paceline.adapt.scan import scan_files, scanned_data


def moved(setting: str, place: str) -> str:
    """The small script with lines of its own at its top, its model and batches moved to a place."""
    return changed(
        ("torch.manual_seed(0)", f"{setting}\ntorch.manual_seed(0)"),
        ("nn.Linear(4, 2)", f"nn.Linear(4, 2).to({place})"),
        ("model(x)", f"model(x.to({place}))"),
    )


NUMBERS = [
    ("device = 0", "device"),
    ("", "0"),
    ("", "device=0"),
    ("class Config:\n    gpu = 1", "Config.gpu"),
    ('cfg = {"device": 0}', 'cfg["device"]'),
    ('rank = 0 if torch.cuda.is_available() else "cpu"', "rank"),
    ('if torch.cuda.is_available():\n    dev = 0\nelse:\n    dev = "cpu"', "dev"),
    ('dev = "cpu"\nif torch.cuda.is_available():\n    dev = 0', "dev"),
    ("gpu = 0\ndevice = torch.device(gpu)", "device"),
    ("device = torch.device(0)", "device"),
]


@pytest.mark.parametrize("target", PLAIN, ids=str)
@pytest.mark.parametrize(("setting", "place"), NUMBERS)
def test_s0_8_a_move_to_the_index_of_a_gpu_goes_to_this_ranks_device(setting, place, target):
    adapted = adapt(moved(setting, place), target)
    ours = "accelerator.device" if target is Target.ACCELERATE else "THIS_DEVICE"
    made_once = f"device = {ours}" in adapted.text and place == "device"
    places = re.findall(r"(?:Linear\(4, 2\)|x)\.to\((?:device=)?([^()]*)\)", adapted.text)
    assert places == ["device" if made_once else ours] * 2
    assert "torch.device(0)" not in adapted.text
    assert "torch.device(gpu)" not in adapted.text
    assert not [each for each in adapted.left if "device" in each.why], lefts(adapted)


PASSED_ON = {
    "def put(value, gpu_id): return value.to(gpu_id)": "put(x, 0)",
    "def put(value, gpu_id=0): return value.to(gpu_id)": "put(x)",
    "def put(value, *, gpu_id=0): return value.to(gpu_id)": "put(x)",
    "class Put:\n"
    "    def __init__(self, gpu_id): self.gpu_id = gpu_id\n"
    "    def put(self, value): return value.to(self.gpu_id)\n"
    "mover = Put(0)": "mover.put(x)",
}


@pytest.mark.parametrize(("helper", "use"), PASSED_ON.items())
def test_s0_8_an_index_is_followed_through_calls_defaults_and_attributes(helper, use):
    source = changed(
        ("torch.manual_seed(0)", f"{helper}\ntorch.manual_seed(0)"), ("model(x)", f"model({use})")
    )
    adapted = adapt(source, Target.DDP)
    assert "return value.to(THIS_DEVICE)" in adapted.text
    assert adapted.left == ()


@pytest.mark.parametrize(
    ("setting", "place", "why"),
    [
        ("from settings import DEVICE", "DEVICE", "set outside this file"),
        ("import mine", "mine.gpu", "set outside this file"),
        ("gpu = int(parser.parse_args().gpu)", "gpu", "an option chooses"),
        ('gpu = 0\nname = "cuda:" + str(gpu)', "name", "an option chooses"),
        ('dev = "cpu"\nif gpus_wanted():\n    dev = 0', "dev", "may be the index of a GPU"),
        (
            'dev = "cpu"\nif wanted():\n    if torch.cuda.is_available():\n        dev = 0',
            "dev",
            "may be the index of a GPU",
        ),
        ("import sys\nwhere = 0\nwhere = pick(sys.argv)", "where", "may be the index of a GPU"),
        ("gpu = 0 if len(names) else 'cpu'", "gpu", "an option chooses"),
    ],
)
def test_s0_8_a_move_whose_device_could_only_be_guessed_is_listed(setting, place, why):
    source = moved(setting, place)
    adapted = adapt(source, Target.DDP)
    lines = [n for n, line in enumerate(source.split("\n"), 1) if f".to({place})" in line]
    assert [each.line for each in adapted.left if why in each.why] == lines, lefts(adapted)
    assert f"x.to({place})" in adapted.text


def test_s0_8_a_helper_that_also_moves_to_the_cpu_is_listed_and_stays():
    helper = "def put(value, where='cpu'): return value.to(where)"
    source = changed(
        ("torch.manual_seed(0)", f"{helper}\ntorch.manual_seed(0)"),
        ("model(x)", "model(put(x, 0))"),
        ("optimizer.step()", "optimizer.step()\n        put(x).numpy()"),
    )
    adapted = adapt(source, Target.DDP)
    assert helper in adapted.text
    assert [(each.line, "index of a GPU" in each.why) for each in adapted.left] == [(5, True)]


@pytest.mark.parametrize(
    "place", ["torch.float16", "next(model.parameters()).device", "y.device", "y", "y.dtype"]
)
def test_a_dtype_and_another_tensors_device_stay(place):
    adapted = adapt(changed(("model(x)", f"model(x.to({place}))")), Target.DDP)
    assert f"x.to({place})" in adapted.text
    assert not [each for each in adapted.left if "device" in each.why], lefts(adapted)


def test_the_default_device_given_by_its_index_is_this_ranks():
    adapted = adapt(changed(("torch.man", "torch.set_default_device(0)\ntorch.man")), Target.DDP)
    assert "torch.set_default_device(THIS_DEVICE)" in adapted.text


def test_s0_1_scan_reports_what_adapt_does_with_an_index_and_with_an_unknown_device():
    known, unknown = moved("gpu = 0", "gpu"), moved("from settings import gpu", "gpu")
    files = {"known.py": known.encode(), "unknown.py": unknown.encode()}
    first, second = scanned_data(scan_files(files, nullcontext), [])["files"]
    assert first["adapt"]["ddp"]["outcome"] == "adapted"
    assert "GPU index gpu -> THIS_DEVICE" in [x["what"] for x in first["adapt"]["ddp"]["done"]]
    assert second["adapt"]["ddp"]["outcome"] == "left"
    assert [x["line"] for x in second["adapt"]["ddp"]["left"]] == [7, 13]
