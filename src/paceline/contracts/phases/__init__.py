"""A plan in sixteen phases with gates between them, each phase a JSON file of a known form."""

from paceline.contracts.phases.case import Gate, Goals, Phase
from paceline.contracts.phases.gates import exit_code, format_gates, gate_rows
from paceline.contracts.phases.make import PHASES, PhasePlan, make_phases

__all__ = [
    "PHASES",
    "Gate",
    "Goals",
    "Phase",
    "PhasePlan",
    "exit_code",
    "format_gates",
    "gate_rows",
    "make_phases",
]
