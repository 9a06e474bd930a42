"""A plan as JSON and back, equal to what it was."""

import msgspec

from paceline.plan.decision import Plan


def plan_to_json(plan: Plan) -> bytes:
    """The plan as indented JSON: the fields of its dataclasses, and `limit_bytes`, which a rank may
    use. `cluster.usable_bytes` is what was free before the plan's head room. Without `search_s`, a
    measured time, one job gives one text and one hash."""
    fields = {**msgspec.to_builtins(plan), "limit_bytes": plan.limit_bytes}
    del fields["search_s"]
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


def plan_from_json(text: bytes) -> Plan:
    """The plan that `plan_to_json` wrote.

    Raises:
        msgspec.ValidationError: It is not the JSON of a plan.
    """
    return msgspec.json.decode(text, type=Plan)
