"""Keys that Arrow filled with None: which to drop, and which nulls mean something."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from datasets import Features, List, Value

# JSON-schema keywords whose value may be null in its own right.
NULLABLE_KEYWORDS = ("default", "const")


def drop_filled_nulls(value: Any, feature: Any = None) -> Any:
    """Copy a nested value without the keys that are None, keeping the nulls that mean something.

    An Arrow table gives every struct of a column the same keys and fills the absent ones with None;
    chat templates then print ``null`` for parameters that a tool never had. Kept are: None inside a
    list (an enum may hold null) and ``default`` / ``const`` of a JSON schema, unless the column's
    type (``feature``) shows that other rows hold real values there and this schema does not admit
    null: then it is filling.

    Args:
        value: any nesting of dicts, lists and scalars.
        feature: the ``datasets`` feature of the value, if it came from a table.

    Example:
        >>> drop_filled_nulls({"x": {"type": "string", "default": None}, "y": None})
        {'x': {'type': 'string', 'default': None}}
    """
    if _is_json(feature):
        return value
    if isinstance(value, Mapping):
        kept = {}
        for key, item in value.items():
            sub = feature.get(key) if isinstance(feature, (dict, Features)) else None
            if item is not None:
                kept[key] = drop_filled_nulls(item, sub)
            elif _means_null(key, value, sub):
                kept[key] = None
        return kept
    if isinstance(value, (list, tuple)):
        sub = feature.feature if isinstance(feature, List) else None
        return [drop_filled_nulls(item, sub) for item in value]
    return value


def _is_json(feature: Any) -> bool:
    # A column of this type keeps each value as it was written; older versions of datasets have no
    # such type.
    return type(feature).__name__ == "Json"


def _means_null(key: str, schema: Mapping[str, Any], feature: Any) -> bool:
    if key not in NULLABLE_KEYWORDS or not _is_schema(schema):
        return False
    only_nulls_in_column = isinstance(feature, Value) and feature.dtype == "null"
    return feature is None or only_nulls_in_column or _admits_null(schema)


def _is_schema(value: Mapping[str, Any]) -> bool:
    # A schema names a type by a word, a list of words or a combination; a mapping of property names
    # does not.
    kind = value.get("type")
    return (
        isinstance(kind, str)
        or (isinstance(kind, list) and all(isinstance(k, str) for k in kind))
        or any(isinstance(value.get(k), list) for k in ("anyOf", "oneOf", "enum"))
    )


def _admits_null(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    branches = [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]
    return (
        kind == "null"
        or (isinstance(kind, list) and "null" in kind)
        or schema.get("nullable") is True
        or any(isinstance(b, Mapping) and b.get("type") == "null" for b in branches)
    )


def clean_tools(tools: Any, feature: Any = None) -> list[Any] | None:
    """Tools as a template wants them: JSON text is parsed as it stands, filled nulls are dropped.

    Raises:
        ValueError: text that is no JSON, or a value that is no list of tools.
    """
    if tools is None:
        return None
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            parsed = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"column 'tools' holds text that is no JSON: {error}") from None
        return clean_parsed_tools(parsed)
    if not isinstance(tools, (list, tuple)):
        raise ValueError(
            f"column 'tools' is {type(tools).__name__}, want a list of tools or its JSON text"
        )
    sub = feature.feature if isinstance(feature, List) else None
    cleaned = []
    for tool in tools:
        if isinstance(tool, str):
            cleaned.append(json.loads(tool))
        elif isinstance(tool, Mapping):
            cleaned.append(drop_filled_nulls(tool, sub))
        else:
            cleaned.append(tool)
    return cleaned or None


def clean_parsed_tools(parsed: Any) -> list[Any] | None:
    """Check that JSON text was a list of tools (one tool alone is taken as a list of one)."""
    if isinstance(parsed, dict):
        return [parsed]
    if isinstance(parsed, list):
        return parsed or None
    raise ValueError(
        f"column 'tools' holds JSON of type {type(parsed).__name__}, want a list of tools"
    )


def count_filled_nulls(value: Any, feature: Any = None) -> int:
    """How many keys `drop_filled_nulls` would drop.

    Example:
        >>> count_filled_nulls({"role": "user", "tool_calls": None})
        1
    """
    if _is_json(feature):
        return 0
    if isinstance(value, Mapping):
        count = 0
        for key, item in value.items():
            sub = feature.get(key) if isinstance(feature, (dict, Features)) else None
            if item is not None:
                count += count_filled_nulls(item, sub) if not isinstance(item, str) else 0
            elif not _means_null(key, value, sub):
                count += 1
        return count
    if isinstance(value, (list, tuple)):
        sub = feature.feature if isinstance(feature, List) else None
        return sum(count_filled_nulls(item, sub) for item in value)
    return 0
