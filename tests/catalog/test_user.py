"""A catalog file of the reader's own: what it changes, and what is wrong with it."""

import tomllib
from pathlib import Path

import pytest

from paceline.catalog import Catalog, find_accelerator, find_prices, load_catalog
from paceline.catalog._rows import make_row
from paceline.catalog.efficiencies import load_efficiencies, with_measured
from paceline.catalog.load import load_accelerators
from paceline.catalog.price import PRICE_COLUMNS
from paceline.catalog.user import CATALOG_FILE, catalog_example, find_catalog_file, merge_catalog
from paceline.control.environment import Setting
from paceline.errors import JobError, Problem
from paceline.estimate.cost import Keeping, run_costs

FILE = Path("my.toml")


def merge(text: str) -> Catalog:
    return merge_catalog(tomllib.loads(text), FILE)


def problems(text: str) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        merge(text)
    return list(caught.value.problems)


def test_the_example_that_is_written_loads():
    catalog = merge(catalog_example())
    assert catalog.accelerators["H100-SXM-96"].memory_bytes == 96 * 2**30
    assert catalog.accelerators["H100-SXM"].network_node_bytes_per_s == 200e9
    assert "campus-fibre" in catalog.links


def test_one_number_of_a_known_accelerator_changes_and_the_rest_stays():
    catalog = merge('[accelerators.H100-SXM]\nnum_per_node = 4\nsource = "our racks"\n')
    ours, shipped = catalog.accelerators["H100-SXM"], load_accelerators()["H100-SXM"]
    assert ours.num_per_node == 4
    assert ours.peak_flops_per_s == shipped.peak_flops_per_s
    assert ours.sources["my.toml"] == "num_per_node"
    assert "our racks" in ours.source
    assert shipped.num_per_node == 8


def test_an_alias_changes_what_it_stands_for():
    assert (
        merge("[accelerators.h100]\nnum_per_node = 4\n").accelerators["H100-SXM"].num_per_node == 4
    )


def test_a_new_accelerator_may_be_like_another_and_leaves_its_spellings_to_it():
    catalog = merge('[accelerators.H100-X]\nlike = "h100"\nmemory_bytes = "96 GiB"\n')
    assert catalog.accelerators["H100-X"].memory_bytes == 96 * 2**30
    assert catalog.accelerators["H100-X"].smi_names == ()
    assert find_accelerator("h100", where="", catalog=catalog).name == "H100-SXM"


def test_a_new_accelerator_may_be_like_one_of_the_same_file():
    text = '[accelerators.A]\nlike = "L4"\nnum_per_node = 2\n[accelerators.B]\nlike = "A"\n'
    assert merge(text).accelerators["B"].num_per_node == 2


def test_an_accelerator_like_another_reaches_what_its_family_reaches():
    text = '[accelerators.A]\nlike = "A100-80"\n[accelerators.B]\nlike = "A"\n'
    rows = merge(text + "[efficiencies.A]\nstep_s = 0.5\n").efficiencies
    assert rows == {"A": {"family": "A100", "step_s": 0.5}, "B": {"family": "A100"}}
    shipped = load_efficiencies()
    ours = with_measured(shipped, rows, accelerator="B")
    assert ours.matmul_of("B", "bf16") == shipped.matmul_of("A100-80", "bf16")
    assert not ours.has_hopper_kernels("B")
    assert ours.of_accelerator(ours.sustained, "B") == shipped.sustained["A100"]


def test_a_price_replaces_those_of_the_same_provider_and_accelerator():
    text = (
        '[[prices]]\nprovider = "aws"\naccelerator = "h100"\nper_hour_usd = 3\nas_of = 2026-09-01\n'
    )
    rows = find_prices("H100-SXM", prices=merge(text).prices)
    assert [row.per_hour_usd for row in rows if row.provider == "aws"] == [3.0]
    assert any(row.provider == "azure" for row in rows)


def test_s0_14_a_price_without_the_machines_name_is_called_by_what_is_in_it():
    text = (
        '[[prices]]\nprovider = "us"\naccelerator = "H100-SXM"\nnum_accelerators = 8\n'
        "per_hour_usd = 16\nas_of = 2026-09-01\n"
    )
    rows = find_prices("H100-SXM", prices=merge(text).prices)
    assert [row.instance for row in rows if row.provider == "us"] == ["8x H100-SXM"]


def test_efficiencies_are_kept_under_the_catalogs_name():
    catalog = merge("[efficiencies.h100.matmul.bf16]\nshare = 0.7\n")
    assert catalog.efficiencies == {"H100-SXM": {"matmul": {"bf16": {"share": 0.7}}}}


def test_efficiencies_of_a_cpu_may_be_above_its_estimated_peak():
    text = "[efficiencies.cpu]\nmemory_share = 1.4\nmatmul.fp32.share = 1.1\n"
    assert merge(text).efficiencies["cpu"]["memory_share"] == 1.4


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        ("[efficiencies.cpu]\nmemory_shar = 1\n", "T015", "did you mean `memory_share`?"),
        ("[efficiencies.cpu.matmul.bf16]\nshares = 1\n", "T015", "did you mean `share`?"),
        ("[efficiencies.cpu.matmul.bf15]\nshare = 1\n", "T015", "did you mean `bf16`?"),
        ("[efficiencies.cpu.matmul.fp16]\nshare = 1\n", "T015", "write matmul.bf16"),
        ("[efficiencies.cpu]\nmatmul = 0.7\n", "T015", "write a table: share = ..."),
        ("[efficiencies.cpu]\nsustained = -1\n", "T015", "write a number above 0"),
        ("[efficiencies.cpu]\nsustained = 0\n", "T015", "write a number above 0"),
        ("[efficiencies.cpu]\nflash2 = 0\n", "T015", "write a number above 0"),
        ("[efficiencies.cpu]\nmatmul.bf16.share = nan\n", "T015", "write a number above 0"),
        ("[efficiencies.cpu]\nstep_s = inf\n", "T015", "write a number that is not negative"),
        ("[efficiencies.H101]\nsustained = 1\n", "T001", "did you mean `H100-SXM`"),
    ],
)
def test_a_mistake_in_efficiencies_says_what_mends_it(text: str, code: str, fix: str):
    (problem,) = problems(text)
    assert problem.code == code
    assert problem.fix.startswith(fix)


def test_a_misspelt_key_names_the_nearest():
    (problem,) = problems('[accelerators.H100-SXM]\nmemory_byte = "80 GiB"\n')
    assert problem.code == "T011"
    assert problem.where == "accelerators.H100-SXM in my.toml"
    assert problem.fix == "did you mean `memory_bytes`?"


def test_a_misspelt_table_names_the_nearest():
    (problem,) = problems("[accelerator.H100-SXM]\nnum_per_node = 4\n")
    assert problem.fix == "did you mean `accelerators`?"


def test_a_new_row_that_is_not_whole_names_every_key_it_lacks():
    found = problems("[links.fast]\nbytes_per_s = 1e9\n")
    assert {problem.code for problem in found} == {"T012"}
    assert "`links.fast` has no `latency_s`" in [problem.what for problem in found]


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("num_per_node = 0", "write a whole number above 0"),
        ("memory_bytes_per_s = -1", "write a number above 0"),
        ('memory_bytes = "80 bananas"', "has no unit of bytes; write it like 80 GiB or 512MB"),
        ("backend = 'mpi'", "write one of nccl"),
        ("peak_bf16_flops_per_s = inf", "write a number above 0"),
        ("memory_bytes_per_s = nan", "write a number above 0"),
        ('memory_bytes = "0 GiB"', "write a whole number above 0"),
        ('network_node_bytes_per_s = "0Gb/s"', "write a number above 0"),
    ],
)
def test_a_value_of_the_wrong_kind_says_what_to_write(line: str, fix: str):
    (problem,) = problems(f"[accelerators.H100-SXM]\n{line}\n")
    assert problem.code == "T013"
    assert fix in problem.fix


def test_sources_that_are_no_table_are_refused():
    assert problems("[accelerators.L4]\nsources = 3\n")[0].code == "T013"


def test_a_cpu_has_no_memory_of_its_own_and_another_like_it_must():
    changed = merge('[accelerators.cpu]\nmemory_bytes_per_s = "10GB/s"\n')
    assert changed.accelerators["cpu"].memory_bytes_per_s == 10e9
    (problem,) = problems('[accelerators.other]\nlike = "cpu"\n')
    assert problem.what == "`accelerators.other` has no `memory_bytes`"


def test_every_mistake_is_shown_at_once():
    assert len(problems("[accelerators.L4]\nfoo = 1\nnum_per_node = 0\n[linkss.x]\ny = 1\n")) == 3


def test_like_and_links_that_are_not_there_name_the_nearest():
    assert "`H100-SXM`" in problems('[accelerators.X]\nlike = "H1000-SXM"\n')[0].fix
    (problem,) = problems('[accelerators.L4]\nnetwork = "infiniband-nrd"\n')
    assert (problem.code, problem.where) == ("T004", "accelerators.L4.network in my.toml")
    assert "infiniband-ndr" in problem.fix


@pytest.mark.parametrize("text", ["accelerators = 3", "[accelerators]\nL4 = 3", "prices = 3"])
def test_a_table_that_is_none_is_refused(text: str):
    assert problems(text)[0].code == "T013"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        *((f"per_hour_usd = {text}", "a number above 0") for text in ("nan", "inf", "-1", "0")),
        *((f"spot_per_hour_usd = {text}", "a number above 0") for text in ("nan", "-inf", "0.0")),
        ("num_accelerators = -8", "a whole number above 0"),
        ('as_of = "yesterday"', "a day, such as 2026-09-01"),
        (
            "as_of = 2999-01-01",
            "the day of the price list, which has come: this machine has",
        ),
        (
            'as_of = "by 2999-01-01"',
            "the day of the price list, which has come: this machine has",
        ),
    ],
)
def test_a_number_that_is_no_price_is_refused(line: str, fix: str):
    key = line.partition(" ")[0]
    row = {"provider": '"x"', "accelerator": '"L4"', "per_hour_usd": "1", "as_of": "2026-09-01"}
    row[key] = line.partition(" = ")[2]
    lines = "\n".join(f"{name} = {value}" for name, value in row.items())
    (problem,) = problems(f"[[prices]]\n{lines}\n")
    assert (problem.code, problem.where) == ("T013", f"prices 1.{key} in my.toml")
    assert problem.fix.startswith(f"write {fix}")


MINE = """
[[prices]]
provider = "Mine"
accelerator = "L4"
per_hour_usd = 1
as_of = 2026-09-01
"""


def test_s0_14_storage_and_traffic_have_prices_of_one_s_own_that_come_before_the_shipped_ones():
    own = """
    [providers.mine]
    storage = {usd_per_gb_month = 0.01, as_of = 2026-09-01, source = "our contract"}
    egress = {steps = [[10, 0.0], [0, 0.02]], as_of = 2026-09-01}
    [providers.aws]
    storage = {usd_per_gb_month = 0, as_of = 2026-09-01}
    """
    prices = merge(MINE + own).prices
    (mine,) = [price for price in prices if price.provider == "Mine"]
    aws = next(price for price in find_prices("L4", prices=prices) if price.provider == "aws")
    assert mine.rents.storage.source == "our contract"
    assert mine.rents.egress.source == "my.toml"
    month_s, keeping = 365 * 24 / 12 * 3600, Keeping(stored_bytes=1e12, sent_bytes=1e12)
    costs = run_costs(num_accelerators=1, train_s=month_s, prices=[mine, aws], keeping=keeping)
    terms = {cost.provider: cost.terms for cost in costs}
    assert terms["Mine"]["storage"] == pytest.approx(1000 * 0.01)
    assert terms["Mine"]["egress"] == pytest.approx(990 * 0.02)
    assert terms["aws"]["storage"] == 0
    assert terms["aws"]["egress"] == pytest.approx(900 * 0.09), (
        "what the file leaves out is shipped"
    )


@pytest.mark.parametrize(
    ("line", "code", "place"),
    [
        *(
            (f"storage = {{usd_per_gb_month = {text}, as_of = 2026-09-01}}", "T013", "storage.usd_")
            for text in ("nan", "inf", "-1", '"dear"', "true")
        ),
        ("storage = {usd_per_gb_month = 1, as_of = 2999-01-01}", "T013", "storage.as_of"),
        ("storage = {usd_per_gb_month = 1}", "T012", "storage"),
        ("storage = {usd_per_gb_month = 1, as_of = 2026-09-01, region = 'x'}", "T011", "storage"),
        ("storage = 3", "T013", "storage"),
        ("disk = {usd_per_gb_month = 1, as_of = 2026-09-01}", "T011", ""),
        *(
            (f"egress = {{steps = {text}, as_of = 2026-09-01}}", "T013", "egress.steps")
            for text in (
                "[]",
                "[[10, 0.1]]",  # what is sent beyond has no price
                "[[0, 0.1], [10, 0.2]]",
                "[[20, 0.1], [10, 0.2], [0, 0.3]]",
                "[[10, nan], [0, 0.3]]",
                "[[10, -0.1], [0, 0.3]]",
                "[[inf, 0.1], [0, 0.3]]",
                "[10, 0.1]",
                "0.1",
            )
        ),
    ],
)
def test_s0_14_a_price_of_storage_or_traffic_that_is_none_is_refused(line, code, place):
    (problem,) = problems(f"{MINE}[providers.mine]\n{line}\n")
    assert problem.code == code
    assert problem.where.startswith(f"providers.mine{'.' if place else ''}{place}")


def test_storage_of_a_provider_whose_machines_have_no_price_is_refused_with_the_nearest():
    (problem,) = problems(MINE + "[providers.mien]\n")
    assert (problem.what, problem.fix) == (
        "no machine of `mien` has a price",
        "did you mean `Mine`?",
    )
    (other,) = problems("[providers.qqqq]\n")
    assert other.fix == 'add one: [[prices]] with provider = "qqqq"'


def test_a_price_of_an_unknown_accelerator_is_refused():
    text = (
        '[[prices]]\nprovider = "x"\naccelerator = "H1000"\nper_hour_usd = 1\nas_of = 2026-09-01\n'
    )
    assert problems(text)[0].code == "T001"


@pytest.mark.parametrize("content", [b"a = [", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, content: bytes | None):
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError, match="T010"):
        load_catalog(path)


def test_the_file_of_a_job_is_the_named_one_or_the_one_beside_it(tmp_path: Path):
    assert find_catalog_file(tmp_path, None) is None
    (tmp_path / CATALOG_FILE).write_text("")
    assert find_catalog_file(tmp_path, None) == tmp_path / CATALOG_FILE
    assert find_catalog_file(tmp_path, "other.toml") == tmp_path / "other.toml"


def test_a_table_of_prices_replaces_the_shipped_ones(tmp_path):
    (tmp_path / "prices.csv").write_text(
        ",".join(PRICE_COLUMNS)
        + "\nus,rack,H100,H100-SXM,8,80,192,2048,16.0,,2026-11-01,invoice,\n"
    )
    path = tmp_path / CATALOG_FILE
    path.write_text('prices_file = "prices.csv"\n')
    (tmp_path / "other.toml").write_text('prices_file = "wrong.csv"\n')
    (tmp_path / "wrong.csv").write_text(
        (tmp_path / "prices.csv").read_text().replace("16.0", "nan")
    )
    with pytest.raises(
        JobError, match=r"`per_hour_usd` is 'nan'\n  where: line 2.per_hour_usd in wr"
    ):
        load_catalog(tmp_path / "other.toml")
    (price,) = load_catalog(path).prices
    assert (price.provider, price.per_hour_usd, price.host_memory_bytes) == ("us", 16.0, 2**41)


def test_a_table_of_prices_that_cannot_be_read_is_named():
    (problem,) = problems('prices_file = "nowhere.csv"\n')
    assert problem.code == "T013"
    assert "nowhere.csv" in problem.what


def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path):
    path = tmp_path / "my.toml"
    path.write_text(
        """\
[accelerators.H100-SXM]
num_per_node = 4
"memory_bytes" = "lots"

[efficiencies."H100-SXM".matmul.bf16]
share = 0
[[prices]]
provider = "us"
accelerator = "H100-SXM"
per_hour_usd = -1
as_of = "2026-09-01"
"""
    )
    with pytest.raises(JobError) as caught:
        load_catalog(path)
    assert {each.where for each in caught.value.problems} == {
        "accelerators.H100-SXM.memory_bytes in my.toml line 3",
        "efficiencies.H100-SXM.matmul.bf16.share in my.toml line 6",
        "prices 1.per_hour_usd in my.toml line 10",
    }


def test_a_shipped_row_with_an_unknown_key_does_not_load():
    row = {"value": "1", "otherwise": "x", "is_neded": True}
    with pytest.raises(ValueError, match="`is_neded` is no key of NCCL_NVLS_ENABLE"):
        make_row(Setting, row, where="NCCL_NVLS_ENABLE", file="recovery_variables.toml")
