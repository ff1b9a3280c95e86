"""The files that are made from code: schema, default configuration, and the reference pages of docs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from pydantic import BaseModel

from ddtree_bench import columns
from ddtree_bench.config import models
from ddtree_bench.config.demo import DEMO
from ddtree_bench.config.load import section_type
from ddtree_bench.config.training import Training
from ddtree_bench.metrics import document_keys
from ddtree_bench.servers import releases_page

SCHEMA_FILE = "config/schemas/config.schema.json"
DEFAULT_FILE = "config/config.yaml"
REFERENCE_FILE = "docs/configuration.md"
TABLES_FILE = "docs/tables.md"
METRICS_FILE = "docs/metrics-json.md"
SERVER_VALUES_FILE = "docs/server-values.md"
WIDTH = 116

DEFAULT_HEAD = """\
# yaml-language-server: $schema=schemas/config.schema.json
# What is measured. Lay another file over this one with: snakemake --configfile FILE
# (mappings are merged, lists are replaced). Every key there is: docs/configuration.md
"""

REFERENCE_HEAD = """\
# Configuration reference

Every key of the configuration, from the models in `scripts/ddtree_bench/config/models.py`
(`python -m ddtree_bench generate` writes this page, `config/schemas/config.schema.json` and `config/config.yaml`).
A key without a default must be given. Unknown keys are errors.
"""

SECTIONS: dict[str, type[BaseModel]] = {
    "Top level": models.Config,
    "targets.<name>": models.Target,
    "models.<name>": models.Model,
    "models.<name>.drafter": models.Drafter,
    "workloads.<name>": models.Workload,
    "warmup": models.WarmUp,
    "training": Training,
    "sweep[]": models.SweepBlock,
    "sweep[].include[], sweep[].exclude[]": models.Point,
    "comparisons[]": models.Comparison,
}


def generated_files(root: Path) -> dict[Path, str]:
    """Return the path and the text of every generated file of the repository `root`."""
    return {
        root / SCHEMA_FILE: schema_json(),
        root / DEFAULT_FILE: default_yaml(),
        root / REFERENCE_FILE: reference_page(),
        root / TABLES_FILE: columns.document(),
        root / METRICS_FILE: document_keys.page(),
        root / SERVER_VALUES_FILE: releases_page.page(),
    }


def write_generated(root: Path) -> list[Path]:
    """Write every generated file and return the paths."""
    files = generated_files(root)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def schema_json() -> str:
    """Return the JSON schema of the configuration, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **models.Config.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def default_yaml() -> str:
    """Return the default configuration with each key's description as a comment the first time it occurs."""
    return DEFAULT_HEAD + "\n" + "\n".join(_commented(DEMO, models.Config, "", set())) + "\n"


def _commented(
    values: Mapping[str, Any], kind: type[BaseModel], indent: str, told: set[tuple[str, str]]
) -> Iterator[str]:
    for key, value in values.items():
        field = kind.model_fields[key]
        if (kind.__name__, key) not in told:
            told.add((kind.__name__, key))
            yield from (f"{indent}# {line}" for line in wrap(field.description or "", WIDTH - len(indent)))
        section = section_type(field.annotation)
        if section is not None and isinstance(value, list):
            yield f"{indent}{key}:"
            for item in value:
                first, *rest = _commented(item, section, f"{indent}    ", told)
                yield f"{indent}  -"
                yield from (first, *rest)
        elif section is not None and key in ("targets", "models", "workloads"):
            yield f"{indent}{key}:"
            for name, item in value.items():
                yield f"{indent}  {name}:"
                yield from _commented(item, section, f"{indent}    ", told)
        elif section is not None:
            yield f"{indent}{key}:"
            yield from _commented(value, section, f"{indent}  ", told)
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def reference_page() -> str:
    """Return the reference table of every key as Markdown."""
    parts = [REFERENCE_HEAD]
    for title, kind in SECTIONS.items():
        parts.append(f"\n## `{title}`\n" if title != "Top level" else f"\n## {title}\n")
        parts.append(f"{(kind.__doc__ or '').strip()}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts += [_row(kind, key) for key in kind.model_fields]
    return "\n".join(parts) + "\n"


def _row(kind: type[BaseModel], key: str) -> str:
    field = kind.model_fields[key]
    default = "" if field.is_required() else f"`{_scalar(_plain(field.default))}`"
    type_text = _type_text(kind.model_json_schema()["properties"][key])
    return f"| `{key}` | {type_text} | {default} | {(field.description or '').replace(chr(10), ' ')} |"


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


def _type_text(schema: Mapping[str, Any]) -> str:
    """Write a JSON schema's type in a word or two."""
    if "$ref" in schema:
        return "section"
    if "anyOf" in schema:
        return " or ".join(_type_text(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " / ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type_text(schema['items'])}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
        return f"name: {_type_text(values)}"
    return str(schema.get("type", "any"))
