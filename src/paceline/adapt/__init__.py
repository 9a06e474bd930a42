"""Rewrite a single-device training script into its distributed form."""

from paceline.adapt.adapt import adapt, judge
from paceline.adapt.result import Adapted, Done, Left, Target

__all__ = ["Adapted", "Done", "Left", "Target", "adapt", "judge"]
