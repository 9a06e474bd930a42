"""Objects of Kubernetes held against their CustomResourceDefinitions, as the API server would, and
stricter: a key that the schema does not know fails, where the server drops it in silence.

The definitions are read where they are (`../shared/data/crds` beside the repository, or in
PACELINE_CRDS); they are too large to copy. Rules in CEL are not evaluated. As a program, in a
Python that has jsonschema: `python crds.py FOLDER` reads a list of objects and prints, as JSON,
what is wrong with them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent


def problems(python: Path, *objects: dict[str, Any]) -> list[str]:
    """What the definitions of the objects' kinds say against them.

    Args:
        python: One that has jsonschema and PyYAML.
        objects: Of kinds that are defined there; another one is a problem.
    """
    named = os.environ.get("PACELINE_CRDS")
    folders = [Path(named)] if named else []
    folders.append(ROOT.parent / "shared/data/crds")
    folder = next((each for each in folders if each.is_dir()), None)
    if folder is None:
        import pytest

        pytest.skip("no CustomResourceDefinitions here: set PACELINE_CRDS to their folder")
    done = subprocess.run(
        [python, __file__, str(folder)],
        input=json.dumps(objects),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def close(schema: Any) -> Any:
    """An openAPI schema as a JSON Schema that takes no key it does not name.

    `metadata` of the object itself is the API server's and stays open.
    """
    if isinstance(schema, list):
        return [close(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: close(each) for name, each in value.items()}
        elif not key.startswith("x-"):
            found[key] = close(value)
    keeps = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and "additionalProperties" not in schema and not keeps:
        found["additionalProperties"] = False
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        found["type"] = [schema["type"], "null"]
    return found


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML file."""
    return [each for each in yaml.safe_load_all(text) if each]


def _said(objects: list[dict[str, Any]], folder: Path) -> Iterator[str]:
    from jsonschema import Draft202012Validator

    schemas = dict(_schemas(folder, {each["kind"] for each in objects}))
    for each in objects:
        schema = schemas.get((each["apiVersion"], each["kind"]))
        if schema is None:
            yield f"there is no definition of {each['apiVersion']} {each['kind']}"
            continue
        for error in Draft202012Validator(schema).iter_errors(each):
            yield f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"


def _schemas(folder: Path, kinds: set[str]) -> Iterator[tuple[tuple[str, str], Any]]:
    """(apiVersion, kind) -> closed schema."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted(folder.glob("*.yaml")):
        text = path.read_text()
        if not any(f"kind: {kind}\n" in text for kind in kinds):
            continue
        spec = yaml.load(text, loader)["spec"]
        for version in spec["versions"]:
            key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            yield key, close(version["schema"]["openAPIV3Schema"])


if __name__ == "__main__":
    print(json.dumps(list(_said(json.load(sys.stdin), Path(sys.argv[1])))))
