"""What a model costs: parameters, FLOPs and saved activations, whatever the layout."""

from paceline.profile.block import (
    Block,
    Matrix,
    MeasuredCosts,
    Split,
    attention_flops,
    block_flops,
    block_parameters,
    dense_parameters,
    expert_parameters,
    matrices,
)
from paceline.profile.decoder import profile_decoder
from paceline.profile.from_config import FAMILIES, profile_config
from paceline.profile.kernels import ComputeMode, runtime_kernels
from paceline.profile.model import Adapter, ModelProfile
from paceline.profile.module import BlockFacts, ModuleFacts, profile_module
from paceline.profile.resolve import (
    AskedConfig,
    check_asked,
    check_model,
    check_positions,
    check_runnable,
    left_out_of,
    needs_transformers,
    resolve_config,
    resolve_decoder,
    resolve_profile,
)
from paceline.profile.runnable import Splits, splits_of
from paceline.profile.saved import Kernels, OutsideBytes, SavedBytes, outside_bytes, saved_bytes
from paceline.profile.shape import DecoderShape

__all__ = [
    "FAMILIES",
    "Adapter",
    "AskedConfig",
    "Block",
    "BlockFacts",
    "ComputeMode",
    "DecoderShape",
    "Kernels",
    "Matrix",
    "MeasuredCosts",
    "ModelProfile",
    "ModuleFacts",
    "OutsideBytes",
    "SavedBytes",
    "Split",
    "Splits",
    "attention_flops",
    "block_flops",
    "block_parameters",
    "check_asked",
    "check_model",
    "check_positions",
    "check_runnable",
    "dense_parameters",
    "expert_parameters",
    "left_out_of",
    "matrices",
    "needs_transformers",
    "outside_bytes",
    "profile_config",
    "profile_decoder",
    "profile_module",
    "resolve_config",
    "resolve_decoder",
    "resolve_profile",
    "runtime_kernels",
    "saved_bytes",
    "splits_of",
]
