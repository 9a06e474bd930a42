"""A plan as JSON and back, equal to what it was."""

import msgspec

from paceline.plan.decision import Plan


def plan_to_json(plan: Plan) -> bytes:
    """The plan as indented JSON, with the fields of its dataclasses."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"


def plan_from_json(text: bytes) -> Plan:
    """The plan that `plan_to_json` wrote.

    Raises:
        msgspec.ValidationError: It is not the JSON of a plan.
    """
    return msgspec.json.decode(text, type=Plan)
