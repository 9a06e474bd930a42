"""What `system_profiler -json` says: the chip, its memory, and the Thunderbolt ports."""

import json
import re
from dataclasses import dataclass
from typing import Any

from paceline.units import parse_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ThunderboltPort:
    """One receptacle."""

    number: str
    bytes_per_s: float | None
    """Negotiated rate in one direction, or what an idle port can do at most."""

    is_connected: bool
    peer: str | None
    """The Mac at the other end; None for a drive, a display or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mac:
    """An Apple-silicon machine."""

    chip: str
    model: str | None
    memory_bytes: int | None
    ports: tuple[ThunderboltPort, ...]


def read_system_profiler(text: str) -> Mac | None:
    """The Mac in `system_profiler SPHardwareDataType SPThunderboltDataType -json`; None if none."""
    try:
        return _mac(json.loads(text))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None  # not what it prints; there is no other sign of that


def _mac(data: Any) -> Mac:
    hardware = data["SPHardwareDataType"][0]
    memory = re.fullmatch(r"(\d+) GB", str(hardware.get("physical_memory", "")))
    return Mac(
        chip=str(hardware["chip_type"]),
        model=hardware.get("machine_model"),
        memory_bytes=int(memory[1]) * 2**30 if memory else None,  # it means GiB
        ports=tuple(
            _port(bus, key, bus[key])
            for bus in data.get("SPThunderboltDataType", ())
            for key in sorted(bus)
            if re.fullmatch(r"receptacle_\d+_tag", key)
        ),
    )


def _port(bus: Any, key: str, port: Any) -> ThunderboltPort:
    speed = re.search(r"(\d+) Gb/s", str(port.get("current_speed_key", "")))
    macs = [
        item["_name"]
        for item in bus.get("_items", ())
        if item.get("vendor_name_key") == "Apple Inc." and "domain_uuid_key" in item
    ]
    return ThunderboltPort(
        number=str(port.get("receptacle_id_key", key.split("_")[1])),
        bytes_per_s=parse_bytes_per_s(f"{speed[1]}Gb/s") if speed else None,
        is_connected=port.get("receptacle_status_key") == "receptacle_connected",
        peer=macs[0] if macs else None,
    )
