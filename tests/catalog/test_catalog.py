"""The catalog: every number there, and names that are not."""

import pytest
import torch
from click.testing import CliRunner

from paceline.catalog import (
    PRECISIONS,
    Link,
    accelerator_spellings,
    find_accelerator,
    find_link,
    load,
    load_accelerators,
    load_links,
)
from paceline.catalog._rows import keys_of, with_likes
from paceline.catalog.configs import find_published, load_published_configs
from paceline.catalog.engines import load_engines
from paceline.cli import cli
from paceline.errors import JobError
from paceline.profile.ways import Ways
from paceline.render.engine import Engine


def test_every_entry_names_its_source():
    entries = (*load_accelerators().values(), *load_links().values())
    for entry in (*entries, *load_published_configs().values()):
        assert entry.source


def test_every_group_of_an_accelerators_numbers_names_its_source():
    for name, accelerator in load_accelerators().items():
        if name != "cpu":
            groups = {"peak", "memory", "link", "network", "overhead"}
            assert groups <= set(accelerator.sources), name


def test_a_row_that_is_like_another_has_its_own_names_and_sources():
    base = {"x": 1, "y": 2, "aliases": ["b"], "sources": {"x": "sheet", "y": "sheet"}}
    rows = with_likes({"a": base, "c": {"like": "a", "y": 3, "sources": {"y": "guess"}}})
    assert rows["c"] == {"x": 1, "y": 3, "sources": {"x": "sheet", "y": "guess"}}


def test_a_rows_keys_are_the_fields_of_its_dataclass():
    keys = keys_of(Link, without=("name",))
    assert keys["bytes_per_s"].read("400Gb/s") == 50e9
    assert keys["is_rdma"].required
    assert not keys["collective_share"].required
    with pytest.raises(ValueError, match="one of accelerator, port"):
        keys["per"].read("node")
    with pytest.raises(ValueError, match="from 0 to 1"):
        keys["collective_share"].read(1.5)


def test_every_engine_names_a_source_of_its_own():
    sources = [engine.source for engine in load_engines().values()]
    assert len(set(sources)) == len(sources)


def test_the_accelerators_that_people_have_are_there():
    names = set(load_accelerators())
    assert {"A100-40", "A100-80", "H100-SXM", "H200", "B200", "V100-32"} <= names
    assert {"L4", "L40S", "RTX-4090", "MI300X", "cpu"} <= names
    assert {"GB200", "GB300", "B300", "H20", "H800", "A800", "H100-PCIe", "H100-NVL"} <= names
    assert {"TPU-v4", "TPU-v5e", "TPU-v5p", "TPU-v6e", "Trainium2", "Gaudi2", "Gaudi3"} <= names
    assert {"M1-Max", "M2-Ultra", "M3-Ultra", "M4-Max", "MI250X", "MI325X", "MI355X"} <= names


def test_apple_makes_no_m4_ultra():
    assert "M4-Ultra" not in load_accelerators()


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("V100-32", {"bf16", "tf32", "fp8", "fp4"}),
        ("T4", {"bf16", "tf32", "fp8", "fp4"}),
        ("A100-80", {"fp8", "fp4"}),
        ("H100-SXM", {"fp4"}),
        ("MI355X", {"tf32"}),
        ("M4-Max", {"fp8", "fp4"}),
    ],
)
def test_a_precision_that_an_accelerator_lacks_is_not_there(name: str, lacks: set[str]):
    assert set(PRECISIONS) - set(load_accelerators()[name].peak_flops_per_s) >= lacks


def test_peaks_are_dense_so_each_halving_of_the_width_at_most_doubles_the_rate():
    for name, accelerator in load_accelerators().items():
        peaks = accelerator.peak_flops_per_s
        for wide, narrow in (("tf32", "bf16"), ("bf16", "fp8")):
            if wide in peaks and narrow in peaks:
                most = 3.76 if (name, narrow) == ("Trainium3", "fp8") else 2.05  # its MXFP8 alone
                assert peaks[narrow] <= most * peaks[wide], (name, wide, narrow)
        if "fp4" in peaks:  # 3 on Blackwell Ultra, whose fp4 alone was widened
            assert peaks["fp4"] <= (3.01 if name in ("B300", "GB300") else 4.05) * peaks["fp8"]


def test_rates_that_were_read_in_the_planners_table_are_those_of_the_table():
    rows = load_accelerators()
    assert rows["A100-80"].peak_flops_per_s["bf16"] == 312e12
    assert rows["H100-SXM"].peak_flops_per_s["fp8"] == pytest.approx(1979e12, rel=1e-3)
    assert rows["B200"].peak_flops_per_s["fp4"] == 9000e12
    assert rows["GB200"].peak_flops_per_s["bf16"] == 2500e12
    assert rows["TPU-v6e"].peak_flops_per_s["bf16"] == 918e12


def test_the_rate_inside_a_node_is_stated_once_by_its_links():
    links = load_links()
    for name, accelerator in load_accelerators().items():
        assert accelerator.link in links, name
        assert accelerator.link_bytes_per_s is None, name
        if accelerator.scale_up_size < accelerator.num_per_node and accelerator.name != "cpu":
            assert accelerator.host_link in links, name


def test_links_without_a_switch_add_up_to_their_rate():
    for name, link in load_links().items():
        assert (link.shape == "switch") == (link.num_links == 1), name
        if link.shape == "torus":
            assert link.num_links % 2 == 0, name
    assert load_links()["infinity-fabric-mi300x"].num_links == 7


def test_the_network_of_a_node_is_a_whole_number_of_its_ports():
    links = load_links()
    for name, accelerator in load_accelerators().items():
        assert accelerator.network is not None, name
        ports = accelerator.network_node_bytes_per_s / links[accelerator.network].bytes_per_s
        assert ports == pytest.approx(round(ports)), name
        assert ports >= 1, name


def test_a_pcie_card_has_no_nvlink_and_its_own_peak():
    rows = load_accelerators()
    for name, sxm in (
        ("V100-16-PCIe", "V100-16"),
        ("V100-32-PCIe", "V100-32"),
        ("A100-40-PCIe", "A100-40"),
        ("A100-80-PCIe", "A100-80"),
        ("H100-PCIe", "H100-SXM"),
    ):
        assert rows[name].scale_up_size == 1
        assert (rows[name].link or "").startswith("pcie")
        assert rows[name].memory_bytes == pytest.approx(rows[sxm].memory_bytes, rel=0.01)
        assert not set(rows[name].smi_names) & set(rows[sxm].smi_names)
    assert rows["V100-16-PCIe"].peak_flops_per_s["fp16"] == 112e12


def test_every_card_of_cuda_has_its_compute_capability_and_multiprocessors():
    for name, accelerator in load_accelerators().items():
        if accelerator.vendor == "NVIDIA":
            assert accelerator.compute_capability, name
            assert accelerator.num_multiprocessors, name


def test_gb200_shares_its_fast_link_in_a_rack_and_h100_in_a_node():
    rows = load_accelerators()
    assert (rows["GB200"].scale_up_size, rows["GB200"].num_per_node) == (72, 4)
    assert (rows["H100-SXM"].scale_up_size, rows["H100-SXM"].num_per_node) == (8, 8)
    assert rows["L40S"].scale_up_size == 1


def test_links_are_one_direction():
    links = load_links()
    assert links["nvlink-4"].bytes_per_s == 450e9
    assert links["infiniband-ndr"].bytes_per_s == 50e9
    assert links["pcie-5-x16"].bytes_per_s == pytest.approx(63e9, rel=0.01)


def test_a_measured_share_of_a_link_names_who_measured_it():
    for link in load_links().values():
        assert (link.collective_share is None) == (link.collective_source is None)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("h100", "H100-SXM"),
        ("H100 80GB", "H100-SXM"),
        ("H100-SXM5-80GB", "H100-SXM"),
        ("A100-SXM4-80GB", "A100-80"),
        ("A100-80GB", "A100-80"),
        ("B200-SXM-180GB", "B200"),
        ("mi300x", "MI300X"),
        ("Apple M3 Ultra", "M3-Ultra"),
    ],
)
def test_published_spellings_are_accepted_in_any_case(spelled: str, name: str):
    assert find_accelerator(spelled, where="here").name == name


def test_no_spelling_stands_for_two_accelerators():
    seen: dict[str, str] = {}
    for name, accelerator in load_accelerators().items():
        for spelling in {name, *accelerator.aliases}:
            assert seen.setdefault(spelling.lower(), name) == name, spelling
    assert len(accelerator_spellings(load_accelerators())) >= len(load_accelerators())


def test_an_unknown_accelerator_names_the_nearest():
    with pytest.raises(JobError) as caught:
        find_accelerator("h1000-sxm", where="here")
    (problem,) = caught.value.problems
    assert problem.code == "T001"
    assert "`H100-SXM`" in problem.fix
    written = problem.fix.rpartition("catalog file: ")[2].strip("`")
    assert CliRunner().invoke(cli, [*written.split()[1:], "--help"]).exit_code == 0
    assert written.startswith("paceline catalog --write ")


def test_an_unknown_link_names_the_nearest():
    with pytest.raises(JobError, match="T004: the catalog has no link `nvlink-44`"):
        find_link("nvlink-44", where="here")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(JobError, match="did you mean `llama-3-8b`"):
        find_published("llama3-8b", where="here")


def test_a_published_config_without_a_query_rank_has_whole_queries_when_it_is_built():
    """DeepSeek-V2-Lite had rank 0: empty matrices, queries of zeros, and a proof that failed."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(
        **{**find_published("deepseek-v2-lite", where="").config, **sizes}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert all(parameter.numel() for parameter in model.parameters())


def test_a_second_name_is_given_only_where_it_is_nearly_as_near():
    with pytest.raises(JobError, match="did you mean `H100-SXM`\\?"):
        find_accelerator("H1000", where="here")


def test_a_name_that_others_begin_with_names_those():
    with pytest.raises(JobError, match="did you mean `A100-40` or `A100-80`"):
        find_accelerator("A100", where="here")


def test_a_name_like_none_lists_all():
    with pytest.raises(JobError, match="choose one of tiny, llama-2-7b"):
        find_published("zzzzzz", where="here")


def test_a_published_model_without_a_window_has_none_rather_than_a_window_of_no_tokens():
    configs = load_published_configs()
    assert configs["mistral-7b"].config["sliding_window"] is None
    assert configs["mistral-7b-v0.1"].config["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA GH200 480GB", "GH200"),
        ("nvidia a100-sxm4-80gb", "A100-80"),
        ("Aqua Vanjaram [Instinct MI300X]", "MI300X"),
    ],
)
def test_an_accelerator_is_found_by_what_its_own_tool_prints(reported, name):
    assert find_accelerator(reported, where="cluster.accelerator").name == name


@pytest.mark.parametrize(
    ("read", "table"),
    [
        (
            lambda: load.read_key("families.toml", "split", Ways, dict),
            {"llama": {"split": {"blocks": "b", "first": [], "last": [], "fist": ["x"]}}},
        ),
        (
            lambda: load.read_rows("renderers.toml", Engine, key="module"),
            {"slurm": {"title": "Slurm", "validated": "shellcheck", "fist": "x"}},
        ),
    ],
    ids=["ways", "renderers"],
)
def test_a_key_that_no_row_has_is_refused_in_the_tables_of_ways_and_of_renderers(
    read, table, monkeypatch
):
    """A way's was passed over."""
    monkeypatch.setattr(load, "read_shipped", lambda file: table)
    with pytest.raises(ValueError, match="fist"):
        read()
