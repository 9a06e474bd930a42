"""What is known beforehand: accelerators and published models, each number with its source."""

from paceline.catalog.load import (
    Accelerator,
    ModelPreset,
    find_accelerator,
    find_model_preset,
    load_accelerators,
    load_model_presets,
)

__all__ = [
    "Accelerator",
    "ModelPreset",
    "find_accelerator",
    "find_model_preset",
    "load_accelerators",
    "load_model_presets",
]
