"""What a model costs: parameters, FLOPs and saved activations, whatever the layout."""

from paceline.profile.decoder import profile_decoder
from paceline.profile.model import ActivationBytes, ComputeMode, ModelProfile
from paceline.profile.module import ModuleFacts, profile_module
from paceline.profile.resolve import resolve_decoder
from paceline.profile.shape import DecoderShape

__all__ = [
    "ActivationBytes",
    "ComputeMode",
    "DecoderShape",
    "ModelProfile",
    "ModuleFacts",
    "profile_decoder",
    "profile_module",
    "resolve_decoder",
]
