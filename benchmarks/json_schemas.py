"""Grammars of JSON schemas, against suites that others wrote: `python -m benchmarks.json_schemas FOLDER`.

FOLDER is a checkout of JSON-Schema-Test-Suite (json-schema-org) or of JSONSchemaBench (guidance-ai), or a folder of
either. Each schema goes the way of a request's `response_format`. For each that compiles:

- instances of the suite are fed as tokens: as the suite writes them, in compact JSON, and where that is refused with
  the keys in any order and whole numbers without a fraction. Columns give them of valid and of invalid instances; an
  invalid one counts as accepted if any of these texts is.
- texts are drawn uniformly from the tokens that masks allow, with the built-in model's vocabulary of bytes. After
  `--free` tokens those that close something come first. Finished texts are checked by the package `jsonschema`, formats
  included, by the schema's draft.

`--by file` groups by the file (a keyword), `draft` by the suite's draft or the collection. `--show` prints what failed.
"""

import argparse
import collections
import dataclasses
import decimal
import functools
import importlib.metadata
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import regex
from jsonschema.validators import validator_for

from longctx.models import load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import SamplingParams
from longctx.serving.request.grammar import Grammars
from longctx.serving.request.token_mask import TokenMask, mask_words
from longctx.serving.server.structured import GrammarFields

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
TOKENIZER = load_tokenizer(TINY)
STOPS = TOKENIZER.eos_ids
CLOSING = [*STOPS, *b'}]",']
_COLLECTION = re.compile(r"---.*|_\d+$")
_STEPS = 20_000  # of a search for the text of an instance


@dataclasses.dataclass
class Case:
    """A schema with instances.

    Attributes:
      draft: or the collection that it is of.
      file: its name, of a keyword in JSON-Schema-Test-Suite.
      instances: each with whether it is valid.
    """

    draft: str
    file: str
    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


@dataclasses.dataclass
class Row:
    """Counts of a group of schemas."""

    schemas: int = 0
    compiled: int = 0
    valid: int = 0
    as_written: int = 0
    reordered: int = 0
    invalid: int = 0
    refused: int = 0
    drawn: int = 0
    finished: int = 0
    good: int = 0

    def cells(self) -> list[str]:
        """Cells of a table, as the header of `main` names them."""
        return [
            f"{self.schemas:,}",
            _share(self.compiled, self.schemas),
            f"{self.valid:,}",
            _share(self.as_written, self.valid),
            _share(self.as_written + self.reordered, self.valid),
            f"{self.invalid:,}",
            _share(self.refused, self.invalid),
            f"{self.drawn:,}",
            f"{self.finished:,}",
            _share(self.good, self.finished),
        ]


def _share(part: int, whole: int) -> str:
    if not whole:
        return "-"
    return "100 %" if part == whole else f"{min(100 * part / whole, 99.99):.4g} % (-{whole - part:,})"


def read_cases(folder: Path) -> Iterator[Case]:
    """Read the schemas of a suite."""
    for path in sorted(folder.rglob("*.json")):
        parts = path.parts
        draft = next((part for part in parts if part in DRAFTS), None)
        if "remotes" in parts or (draft is None and "maskbench" not in parts):
            continue
        with path.open(encoding="utf-8") as file:
            groups = json.load(file)
        name = path.stem if "optional" not in parts else f"optional/{'format/' * ('format' in parts)}{path.stem}"
        for group in groups if isinstance(groups, list) else [groups]:
            schema = group["schema"]
            if draft is not None and isinstance(schema, dict) and path.stem != "no-schema":
                schema = {"$schema": DRAFTS[draft]} | schema
            instances = [(test["data"], test["valid"]) for test in group.get("tests", ())]
            collection = draft or _COLLECTION.sub("", path.stem)
            yield Case(collection, name if draft else collection, group.get("description", name), schema, instances)


def grammar_of(schema: Any) -> str:
    """Return the grammar of a schema, as a server makes it of a request's body."""
    form = {"type": "json_schema", "json_schema": {"name": "case", "schema": schema}}
    named = GrammarFields.model_validate({"response_format": form}).named_grammar()
    assert named is not None
    return named.grammar


class Follower:
    """A matcher that is asked whether it takes an instance."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher.deep_copy()

    def takes(self, instance: Any) -> bool:
        """Return whether it takes an instance as it is, in compact JSON."""
        text = json.dumps(instance, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        count = self._matcher.try_consume_tokens(list(text))
        accepts = count == len(text) and self._matcher.is_accepting()
        self._matcher.rollback(count)
        return accepts

    def takes_any_order(self, instance: Any) -> bool:
        """Return whether it takes one of the texts of an instance: a search in depth, of `_STEPS` steps at most."""
        at, found, steps = 0, False, 0
        waiting: list[tuple[int, _Rest]] = [(0, (instance, None))]
        while waiting and not found and steps < _STEPS:
            steps += 1
            count, rest = waiting.pop()
            self._matcher.rollback(at - count)
            at = count
            if rest is None:
                found = self._matcher.is_accepting()
            elif isinstance(rest[0], bytes):
                count = self._matcher.try_consume_tokens(list(rest[0]))
                if count == len(rest[0]):
                    at += count
                    waiting.append((at, rest[1]))
                else:
                    self._matcher.rollback(count)
            else:
                waiting += [(at, way) for way in reversed(list(_ways(*rest)))]
        self._matcher.rollback(at)
        return found


_Rest = tuple[Any, Any] | None
"""What is left of a text: its next part, a value or bytes, and the rest."""


@dataclasses.dataclass
class _Members:
    """The members of an object that are left."""

    value: dict[str, Any]
    keys: list[str]


def _ways(value: Any, rest: _Rest) -> Iterator[_Rest]:
    """List the ways to go on with a value."""
    if isinstance(value, _Members):
        comma = b"," * (len(value.keys) < len(value.value))
        for number, key in enumerate(value.keys):
            left = _Members(value.value, [*value.keys[:number], *value.keys[number + 1 :]])
            yield comma + _text(key) + b":", (value.value[key], (left, rest))
        if not value.keys:
            yield b"}", rest
    elif isinstance(value, dict):
        yield b"{", (_Members(value, list(value)), rest)
    elif isinstance(value, list):
        rest = (b"]", rest)
        for number, each in reversed(list(enumerate(value))):
            rest = (each, rest) if not number else (b",", (each, rest))
        yield b"[", rest
    else:
        yield _text(value), rest
        if isinstance(value, float) and math.isfinite(value):
            yield f"{value:f}".encode(), rest
            if value.is_integer():
                yield str(int(value)).encode(), rest


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def draw(matcher: Any, seed: int, free: int, limit: int) -> str | None:
    """Draw a text uniformly from the tokens that a grammar allows; None: it has not ended by `limit` tokens.

    After `free` tokens those that close something come first.

    Raises:
      ValueError: the grammar has exceeded a limit.
    """
    rng, size = random.Random(seed), TOKENIZER.vocab_size
    mask = TokenMask(SamplingParams(max_tokens=limit), size, STOPS, matcher.deep_copy())
    tokens, row = list[int](), np.zeros(mask_words(size), np.int32)
    while not mask.is_complete and len(tokens) < limit:
        mask.fill(row, len(tokens))
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if mask.problem is not None or not allowed:
            raise ValueError(f"no token can follow: {mask.problem}")
        order = () if len(tokens) < free else b'"' if ord("q") in allowed else CLOSING  # only strings have a "q"
        token = next((token for token in order if token in allowed), None) or rng.choice(allowed)
        mask.push(token)
        if token in STOPS:
            return TOKENIZER.decode(tokens)
        tokens.append(token)
    return TOKENIZER.decode(tokens) if mask.is_complete else None


class _Written(float):
    """A number that remembers how it was written."""

    text: str

    def __new__(cls, text: str) -> "_Written":
        made = super().__new__(cls, text)
        made.text = text
        return made


def problem_of(text: str, schema: Any) -> str | None:
    """Return why a text isn't valid by a schema; None: it is.

    `jsonschema` reads patterns as Python's and divides binary floats. Here patterns are ECMA's, as JSON Schema says,
    and numbers decimal.
    """
    try:
        value = json.loads(text, parse_float=_Written)
    except ValueError as error:
        return f"no JSON: {error}"
    plain = validator_for(schema, default=jsonschema.Draft202012Validator)
    kind = jsonschema.validators.extend(plain, _KEYWORDS)
    try:
        kind(schema, format_checker=plain.FORMAT_CHECKER).validate(value)
    except jsonschema.ValidationError as error:
        return f"{error.validator}: {error.message[:200]}"
    return None


_Errors = Iterator[jsonschema.ValidationError]


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> _Errors:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, value: Any, instance: Any, __: Any) -> _Errors:
    for pattern, schema in value.items() if isinstance(instance, dict) else ():
        for key in instance:
            if _matches(pattern, key):
                yield from validator.descend(instance[key], schema, path=key)


def _additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    patterns = schema.get("patternProperties", {})
    for key in instance if isinstance(instance, dict) else ():
        if key not in schema.get("properties", {}) and not any(_matches(pattern, key) for pattern in patterns):
            yield from validator.descend(instance[key], value, path=key)


def _multiple_of(_: Any, divisor: float, instance: Any, __: Any) -> _Errors:
    if isinstance(instance, int | float) and not isinstance(instance, bool):
        with decimal.localcontext(prec=5000):
            number = decimal.Decimal(instance.text if isinstance(instance, _Written) else instance)
            if number % decimal.Decimal(repr(divisor)):
                yield jsonschema.ValidationError(f"{number} is not a multiple of {divisor!r}")


_KEYWORDS = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
}


def _matches(pattern: str, text: str) -> bool:
    return regex.search(_ecma(pattern), text) is not None


@functools.lru_cache(1024)
def _ecma(pattern: str) -> str:
    """Return a pattern whose digits and words are ASCII's, as ECMA's are, in a syntax of Python's `regex`."""
    made, in_class = "", False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        in_class = part == "[" or (in_class and part != "]")
        names = {r"\d": "0-9", r"\w": "A-Za-z0-9_"} | ({} if in_class else {r"\D": "^0-9", r"\W": "^A-Za-z0-9_"})
        made += part if part not in names else names[part] if in_class else f"[{names[part]}]"
    return made


def measure(case: Case, options: argparse.Namespace, grammars: Grammars, seed: int) -> tuple[Row, list[str]]:
    """Return the counts of one schema, and what failed."""
    row, failed = Row(schemas=1), list[str]()
    try:
        matcher = grammars.matcher(grammar_of(case.schema))
    except ValueError as error:
        return row, [f"refused: {error}"]
    row.compiled = 1
    follower = Follower(matcher)
    for instance, is_valid in case.instances:
        is_taken = follower.takes(instance)
        is_reordered = not is_taken and follower.takes_any_order(instance)
        if is_valid:
            row.valid += 1
            row.as_written += is_taken
            row.reordered += is_reordered
            if not (is_taken or is_reordered):
                failed.append(f"valid, not taken: {json.dumps(instance)[:200]}")
        else:
            row.invalid += 1
            row.refused += not (is_taken or is_reordered)
            if is_taken or is_reordered:
                failed.append(f"invalid, taken: {json.dumps(instance)[:200]}")
    for number in range(options.draws):
        row.drawn += 1
        try:
            text = draw(matcher, seed + number, options.free, options.limit)
        except ValueError as error:  # the request would fail with this message
            failed.append(f"drawing failed: {error}")
            continue
        if text is None:
            continue
        row.finished += 1
        try:
            problem = problem_of(text, case.schema)
        except Exception as error:  # `jsonschema` and `regex` can't read the schema
            problem = f"{type(error).__name__}: {error}"
        row.good += problem is None
        if problem is not None:
            failed.append(f"drawn, wrong: {problem}: {text[:300]}")
    return row, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--by", choices=("draft", "file", "both"), default="both")
    parser.add_argument("--draws", type=int, default=8, help="texts that are drawn of a schema")
    parser.add_argument("--free", type=int, default=100, help="tokens before those that close come first")
    parser.add_argument("--limit", type=int, default=2000, help="tokens of a text at most")
    parser.add_argument("--sample", type=int, default=0, help="schemas of each group at most; 0: all")
    parser.add_argument("--only", default="", help="part of the name of a file or a draft")
    parser.add_argument("--show", action="store_true", help="print what failed")
    options = parser.parse_args()
    grammars = Grammars(TOKENIZER, TOKENIZER.vocab_size, STOPS)
    rows: dict[str, dict[str, Row]] = {"draft": {}, "file": {}}
    reasons = collections.Counter[str]()
    cases = [case for case in read_cases(options.folder) if options.only in f"{case.draft}/{case.file}"]
    random.Random(0).shuffle(cases)
    taken = collections.Counter[str]()
    for number, case in enumerate(cases):
        taken[case.draft] += 1
        if options.sample and taken[case.draft] > options.sample:
            continue
        found, failed = measure(case, options, grammars, number * options.draws)
        for kind, name in (("draft", case.draft), ("file", case.file)):
            total = rows[kind].setdefault(name, Row())
            for field in dataclasses.fields(Row):
                setattr(total, field.name, getattr(total, field.name) + getattr(found, field.name))
        reasons.update(_reason(each) for each in failed if each.startswith("refused: "))
        if options.show:
            for each in failed:
                print(f"{case.draft}/{case.file}: {case.name}: {each}", file=sys.stderr)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("llguidance", "jsonschema"))
    print(f"{versions}; {options.draws} texts of each schema\n")
    for kind in ("draft", "file") if options.by == "both" else (options.by,):
        print(f"| {kind} | schemas | compile | valid | taken as written | in any order | invalid | refused |", end="")
        print(" drawn | finished | valid by jsonschema |\n" + "|---" * 11 + "|")
        for name in sorted(rows[kind]):
            print(f"| {name} | " + " | ".join(rows[kind][name].cells()) + " |")
        print()
    print("| refused for | schemas |\n|---|---|")
    for reason, count in reasons.most_common(40):
        print(f"| {reason} | {count} |")
    return 0


def _reason(text: str) -> str:
    """Return the reason of a refusal without what differs between schemas."""
    text = text.removeprefix("refused: ").removeprefix("grammar is wrong or too complex: ")
    return re.sub(r"'[^']*#[^']*'", "'#'", text)[:100].replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
