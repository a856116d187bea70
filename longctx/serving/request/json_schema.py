"""JSON schemas before grammars are made of them: what a grammar would pass over is refused, and formats are narrowed.

llguidance refuses keywords of the schema's draft that it can't enforce. It passes over those of other drafts, as JSON
Schema says, and three things of its grammars allow too much.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
_SINCE = {
    **dict.fromkeys(("contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
    **dict.fromkeys(("divisibleBy", "disallow", "extends"), 9999),  # of draft 3 alone
}
"""Keywords and the first draft that has them; `$schema` says which draft it is, by default the newest."""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""Keywords that may be written `2.0`, which llguidance does not take; nor does it take `"uniqueItems": false`."""

_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")

# The grammar has 29 February in each year, seconds of 60 at any minute, which most parsers refuse at all, and names of
# hosts of any length, with labels such as `xn--a`, few of which are the Punycode of something.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"(?:[0-9]{{4}}-(?:(?:0[13-9]|1[0-2])-[0-3][0-9]|02-(?:[01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_CHAR = "[a-zA-Z0-9-]"
_LABEL = f"(?:{_CHAR}{{1,3}}|{_CHAR}{{2}}-?[a-zA-Z0-9]{_CHAR}*)"
_NARROWER: Mapping[str, Mapping[str, Any]] = {
    "date": {"pattern": f"^{_DAY}$"},
    "date-time": {"pattern": f"^{_DAY}[Tt][0-9]{{2}}:[0-9]{{2}}:[0-5]"},
    "time": {"pattern": "^[0-9]{2}:[0-9]{2}:[0-5]"},
    "hostname": {"pattern": f"^{_LABEL}(?:\\.{_LABEL})*$", "maxLength": 253},
}


def enforceable(schema: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """Return a schema whose grammar allows only what is valid.

    Args:
      schema: as Python's objects.
      strict: refuse what the grammar would pass over.

    Raises:
      ValueError: it has such a keyword, which the message names with its place.
      RecursionError: it is too deep.
    """
    made: dict[str, Any] = json.loads(json.dumps(schema))  # which is changed below
    for place, node, draft in list(_nodes(made)):
        node |= {name: int(node[name]) for name in _COUNTS if _is_whole(node.get(name))}
        if strict:
            _check(place, node, draft)
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        narrower = _NARROWER.get(node["format"]) if isinstance(node.get("format"), str) else None
        if narrower is not None and isinstance(node.get("allOf", []), list):
            node["allOf"] = [*node.get("allOf", []), dict(narrower)]
    return made


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _check(place: str, node: Mapping[str, Any], draft: int) -> None:
    if "/draft-03/" in str(node.get("$schema")):
        raise ValueError(f"$schema at {place} is of draft 3, whose keywords are not enforced")
    for name in node:
        if _SINCE.get(name, 0) > draft:
            raise ValueError(f"{name} at {place} is no keyword of the draft in $schema, so it would be passed over")
    least, required = node.get("minProperties"), node.get("required")
    count = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > count + 1 and node.get("type", "object") in ("object", ["object"]):
        message = "can't be enforced beyond one more than are required, as other keys may be written twice"
        raise ValueError(f"minProperties {least} at {place} {message}")


def _nodes(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], int]]:
    """List the objects of a schema that are schemas themselves, with their places and drafts."""
    waiting, seen = [("#", root, 2020)], set[int]()
    while waiting:
        place, node, draft = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        draft = next((number for name, number in _DRAFTS.items() if name in str(node.get("$schema"))), draft)
        yield place, node, draft
        for name in _ONE:
            waiting.append((f"{place}/{name}", node.get(name), draft))  # type: ignore[arg-type]
        for name in _LISTS:
            if isinstance(node.get(name), list):
                waiting += [(f"{place}/{name}/{number}", each, draft) for number, each in enumerate(node[name])]
        for name in _MAPS:
            if isinstance(node.get(name), dict):
                waiting += [(f"{place}/{name}/{key}", each, draft) for key, each in node[name].items()]
        if isinstance(node.get("$ref"), str) and node["$ref"].startswith("#/"):
            waiting.append((node["$ref"], _target(root, node["$ref"]), draft))


def _target(root: Any, reference: str) -> Any:
    """Return what a reference within the document leads to; None: nothing."""
    found = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found
