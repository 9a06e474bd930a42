"""Generations of accelerators by the names that people write."""

import pytest

from paceline.catalog import load_accelerators
from paceline.catalog.generation import generation_of, gpu_in

FROM_AMPERE_ON = 8.0


def test_every_card_of_cuda_in_the_catalog_is_of_a_generation_that_agrees_on_bf16():
    cards = [card for card in load_accelerators().values() if card.backend == "nccl"]
    of_cuda = [card for card in cards if (card.compute_capability or "gfx")[0].isdigit()]
    assert len(of_cuda) > 20
    for card in of_cuda:
        for name in (card.name, *card.aliases, *card.smi_names):
            generation = generation_of(name)
            assert generation is not None, name
            has_bf16 = float(card.compute_capability or 0) >= FROM_AMPERE_ON
            assert generation.has_bf16 is has_bf16, (name, generation.name)
            assert has_bf16 is ("bf16" in card.peak_flops_per_s), name


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("RTX 6000 Ada", "Ada"),
        ("RTX_5000_ada", "Ada"),
        ("Quadro RTX 6000", "Turing"),
        ("RTX 8000", "Turing"),
        ("GTX 1660", "Turing"),
        ("TITAN RTX", "Turing"),
        ("TITAN V", "Volta"),
        ("NVIDIA GeForce GTX 1080 Ti", "Pascal"),
        ("2080ti", "Turing"),
        ("RTX A6000", "Ampere-GA10x"),
        ("A2", "Ampere-GA10x"),
        ("MI300X", "Instinct"),
        ("v5e", "TPU"),
        ("RTX 6000", None),  # of Turing or of Ada
        ("p4d.24xlarge", None),
        ("nonsense", None),
    ],
)
def test_a_name_is_of_one_generation(name: str, generation: str | None):
    found = generation_of(name)
    assert (found.name if found else None) == generation


def test_a_card_is_found_in_an_option_and_a_machine_is_none():
    assert gpu_in("gpu:a100_80g:4") == "A100"
    assert gpu_in("NVIDIA-RTX-A6000") == "RTX A6000"
    assert gpu_in("a2-highgpu-8g") is None
