"""A plan in sixteen phases with gates between them, each phase a JSON file of a known form."""

from paceline.plan.phases.case import Gate, Goals, Phase
from paceline.plan.phases.gates import exit_code, format_gates
from paceline.plan.phases.make import PHASES, PhasePlan, make_phases

__all__ = [
    "PHASES",
    "Gate",
    "Goals",
    "Phase",
    "PhasePlan",
    "exit_code",
    "format_gates",
    "make_phases",
]
