"""Reading a configuration: files to a merged tree, the tree to typed models; errors name key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from ddtree_bench.config.models import Config


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` holds one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("the configuration cannot be used:\n" + "\n".join(f"  - {p}" for p in self.problems))


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `overlay` laid over it as Snakemake does: mappings are merged, all else is replaced."""
    merged = dict(base)
    for key, value in overlay.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_files(paths: Sequence[Path]) -> dict[str, Any]:
    """Read YAML files and lay each over those before it.

    Raises ConfigError for a file that is missing, is no YAML or holds no mapping.
    """
    tree: dict[str, Any] = {}
    for path in paths:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError([f"{path}: cannot be read ({error.strerror}); give the path of a YAML file"]) from error
        except yaml.YAMLError as error:
            raise ConfigError([f"{path}: is not valid YAML: {error}"]) from error
        if not isinstance(loaded, dict):
            raise ConfigError([f"{path}: holds {type(loaded).__name__}, not a mapping of configuration keys"])
        tree = merge(tree, loaded)
    return tree


def parse(tree: Mapping[str, Any]) -> Config:
    """Turn a merged tree into typed models.

    Raises ConfigError that names every unknown key (with the nearest known one) and every value of a wrong type.
    """
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError(list(_sentences(error.errors(include_url=False)))) from error


def dotted(location: Sequence[str | int]) -> str:
    """Write a location as users write it: `sweep[0].budget[2]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _sentences(errors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one sentence a location; a type with alternatives gives an error for each of them."""
    grouped: dict[tuple[str | int, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        location = tuple(part for part in error["loc"] if not _is_union_tag(part))
        grouped.setdefault(location, []).append(error)
    for location, alternatives in grouped.items():
        yield _sentence(location, alternatives)


def _sentence(location: Sequence[str | int], errors: Sequence[Mapping[str, Any]]) -> str:
    where, error = dotted(location), errors[0]
    if error["type"] == "extra_forbidden":
        return _unknown_key(location)
    if error["type"] == "missing":
        return f"{where}: is missing; add this key"
    if error["type"] == "string_pattern_mismatch":
        return f"{where}: {error['input']!r} is not a name; use letters, digits and underscores, a letter first"
    remedy = " or ".join(item["msg"][:1].lower() + item["msg"][1:] for item in errors)
    # What stands there may be the key itself.
    shown = "what it holds" if location[-1] == "api_key_env" else repr(error["input"])
    return f"{where}: {shown} is not allowed; {remedy}"


def _is_union_tag(part: str | int) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("int", "str", "constrained-int", "[key]"))


def _unknown_key(location: Sequence[str | int]) -> str:
    known = sorted(_fields_at(location[:-1]))
    nearest = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    remedy = f"did you mean {nearest[0]!r}?" if nearest else f"known keys here: {', '.join(known)}"
    return f"{dotted(location)}: unknown key; {remedy}"


def _fields_at(location: Sequence[str | int]) -> list[str]:
    """Return the keys that the models know at a location."""
    kind: type[BaseModel] | None = Config
    named = False
    for part in location:
        if kind is None:
            return []
        if named or isinstance(part, int):
            named = False
            continue
        annotation = kind.model_fields[part].annotation
        kind, named = section_type(annotation), _is_mapping(annotation)
    return list(kind.model_fields) if kind is not None else []


def _is_mapping(annotation: Any) -> bool:
    """Whether a field holds sections by names of the user's choice."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_origin(annotation) is dict


def section_type(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field's type holds (itself, in a list, or by name), or None."""
    while get_origin(annotation) is not None:
        inner = [part for part in get_args(annotation) if part is not type(None)]
        annotation = inner[0] if get_origin(annotation) is Annotated else inner[-1]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
