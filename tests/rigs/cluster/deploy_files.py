"""The manifests below ``deploy``, and where their objects are in the API."""

import pathlib
from collections.abc import Mapping
from typing import Any

import yaml

from tests.rigs.api_objects import Object

ROOT = pathlib.Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def manifest_objects(file: str, kind: str = "") -> list[Object]:
    """Return the objects of a manifest below ``deploy``, or those of one kind."""
    documents = yaml.safe_load_all((DEPLOY / file).read_text(encoding="utf-8"))
    return [each for each in documents if kind in ("", each["kind"])]


def collection(obj: Mapping[str, Any]) -> str:
    """Return the path to create an object at."""
    version, namespace = str(obj["apiVersion"]), obj["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    kind = str(obj["kind"]).lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"
