"""Slices of cards (MIG), against NVIDIA's own tables."""

import pytest

from paceline.catalog import find_accelerator, find_prices, load_accelerators, load_catalog
from paceline.catalog.efficiencies import load_efficiencies
from paceline.catalog.mig import num_slices, slice_of
from paceline.errors import JobError


@pytest.mark.parametrize(
    ("card", "counts"),
    [
        ("A100-40", {"1g.5gb": 7, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1}),
        ("H100-SXM", {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "7g.80gb": 1}),
        ("H200", {"1g.18gb": 7, "1g.35gb": 4, "2g.35gb": 3, "3g.71gb": 2, "4g.71gb": 1}),
        ("GB300", {"1g.35gb": 7, "1g.70gb": 4, "2g.70gb": 3, "3g.139gb": 2, "4g.139gb": 1}),
        ("A30", {"1g.6gb": 4, "2g.12gb": 2, "4g.24gb": 1}),
        ("RTX-PRO-6000-Server", {"1g.24gb": 4, "2g.48gb": 2, "4g.96gb": 1}),
    ],
)
def test_a_card_holds_as_many_slices_as_the_mig_user_guide_says(card, counts):
    known = load_accelerators()[card]
    assert {each: num_slices(known, each) for each in counts} == counts


def test_every_profile_of_the_catalog_is_a_slice_below_its_card():
    for card in load_accelerators().values():
        for profile in card.mig_profiles:
            part = slice_of(card, profile)
            assert part is not None
            assert num_slices(card, profile) * part.memory_bytes <= card.memory_bytes
            assert 0 < part.peak_flops_per_s["bf16"] <= card.peak_flops_per_s["bf16"]


def test_a_slice_that_a_card_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(JobError, match=r"no slice \(MIG\) `1g\.5gb`(.|\n)*1g\.10gb \(7 of it\)"):
        find_accelerator("H100-SXM 1g.5gb", where="here")
    with pytest.raises(JobError, match=r"L4 has no slice(.|\n)*name the whole card"):
        find_accelerator("L4 1g.6gb", where="here")


def test_a_slice_is_never_priced_as_a_whole_card(tmp_path):
    known = find_accelerator("h100 MIG 1g.10gb+me", where="here")
    assert known.name == "H100-SXM 1g.10gb"
    assert find_prices(known.name) == ()
    own = tmp_path / "paceline-catalog.toml"
    own.write_text(
        """
[[prices]]
provider = "campus"
accelerator = "H100 1g.10gb"
per_hour_usd = 0.4
as_of = 2026-09-01
"""
    )
    (price,) = find_prices(known.name, prices=load_catalog(own).prices)
    assert price.per_accelerator_hour_usd == 0.4


def test_a_slice_runs_its_card_s_kernels():
    shipped = load_efficiencies()
    assert shipped.family_of("H100-SXM 1g.10gb") == shipped.family_of("H100-SXM")
    assert shipped.has_hopper_kernels("H100-SXM 1g.10gb")


def test_profiles_of_ones_own_are_read_as_nvidia_smi_names_them(tmp_path):
    own = tmp_path / "paceline-catalog.toml"
    own.write_text('[accelerators.L40]\nmig_profiles = ["half"]\n')
    with pytest.raises(JobError, match=r"T013(.|\n)*profiles as nvidia-smi names them"):
        load_catalog(own)


def test_the_rates_of_a_slice_have_its_share_as_their_source_and_not_the_cards_data_sheet():
    part = find_accelerator("H100-SXM 1g.10gb", where="here")
    for group in ("peak", "memory"):
        assert part.sources[group].startswith("estimated: 1/7 of H100-SXM's multiprocessors and")
    assert part.sources["network"] == load_accelerators()["H100-SXM"].sources["network"]
