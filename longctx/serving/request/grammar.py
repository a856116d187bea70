"""Grammars that a completion's text must follow, in the form of llguidance, which makes token masks of them.

A grammar is one string (`SamplingParams.grammar`), made by the functions of this module, or any that
`llguidance.LLMatcher` takes. `Grammars` compiles and keeps them for a tokenizer.
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from longctx import extras
from longctx.models.validation import shown
from longctx.serving.request.json_schema import enforceable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from longctx.models.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 2**20
"""Length of the longest grammar, in bytes of UTF-8."""

_KEPT = 64  # compiled grammars
WHITESPACE = (
    r"(?: |\n[ \t]{0,16})?"  # between the parts of a JSON text: without a bound a model may go on with it for ever
)


def from_json_schema(schema: Any, strict: bool = True) -> str:
    """Make the grammar of JSON texts that a schema allows.

    Args:
      schema: a JSON schema as Python's objects, or as a text of JSON.
      strict: refuse a schema that has what can't be enforced, here or where the grammar is compiled; else pass over it.

    Returns:
      The grammar.

    Raises:
      ValueError: it is no JSON schema, or one that has what can't be enforced; the message names the keyword.

    Examples:
      >>> from longctx.serving.request.grammar import from_json_schema
      >>> from longctx.serving import SamplingParams
      >>> grammar = from_json_schema({"type": "object", "required": ["age"]})
      >>> SamplingParams(max_tokens=64, grammar=grammar).level.name
      'MASKS'
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a JSON schema must be JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a JSON schema must be an object, true or false, got {shown(schema)}")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        overrides = {"whitespace_pattern": WHITESPACE} | ({} if strict else {"lenient": True})
        made = _llguidance().LLMatcher.grammar_from_json_schema(enforceable(schema, strict), overrides=overrides)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a JSON schema must be JSON: {error}") from None
    return str(made)


def json_object() -> str:
    """Return the grammar of all JSON objects."""
    return from_json_schema({"type": "object"})


def from_regex(pattern: str) -> str:
    """Make the grammar of the texts that a regular expression matches as a whole, in the syntax of Rust's `regex`."""
    return str(_llguidance().LLMatcher.grammar_from_regex(_text("a regular expression", pattern)))


def from_choices(texts: Sequence[str]) -> str:
    """Make the grammar of a few texts; ValueError: there are none, or one of them is empty."""
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"choices must be a list of texts, none of them empty, got {shown(texts)}")
    return from_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def from_lark(grammar: str) -> str:
    """Make a grammar of llguidance's variant of Lark's language."""
    return str(_llguidance().LLMatcher.grammar_from_lark(_text("a grammar", grammar)))


def from_gbnf(grammar: str) -> str:
    """Make a grammar of llama.cpp's language, GBNF, or of Lark's; ValueError: it is neither."""
    _llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return from_lark(any_to_lark(_text("a grammar", grammar)))
    except Exception as error:  # the converter raises plain ones, such as for a rule that is not there
        raise ValueError(f"a grammar must be GBNF or Lark: {error}") from None


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} must be a text that is not empty, got {shown(value)}")
    return value


@functools.cache
def _llguidance() -> Any:
    extras.check("serve", "a grammar")
    import llguidance

    return llguidance


class Grammars:
    """Compiled grammars of a tokenizer, of which the last used ones are kept. Any thread may call it.

    It travels to processes without what it has compiled.

    Args:
      tokenizer: None: there is none, and no grammar.
      vocab_size: of the model, which may have more tokens than the tokenizer.
      eos_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: "Tokenizer | None", vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer, self.vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(sorted(eos_ids))
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._own: LLTokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_kept", "_own")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __contains__(self, grammar: str) -> bool:
        """Whether a grammar is compiled."""
        return grammar in self._kept

    def matcher(self, grammar: str) -> "LLMatcher":
        """Return a matcher at the beginning of a text.

        Raises:
          ValueError: there is no tokenizer, or one without a token that ends a text; or the grammar is wrong, or too
            complex.
        """
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
                return found.deep_copy()
        if self._tokenizer is None or not self._eos_ids:
            raise ValueError("grammar needs a tokenizer that has a token for the end of a text")
        if len(grammar) > MAX_GRAMMAR_BYTES or len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"grammar must have at most {MAX_GRAMMAR_BYTES:,} bytes, got {len(grammar):,} characters")
        made = _llguidance().LLMatcher(self._for_tokenizer(), grammar, log_level=0)
        tried = made.deep_copy()
        if not made.is_error():  # some, such as those that only name themselves, fail at the first mask
            tried.compute_bitmask()
        if tried.is_error():
            raise ValueError(f"grammar is wrong or too complex: {_first_line(tried.get_error())}")
        with self._lock:
            self._kept[grammar] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made.deep_copy()

    def _for_tokenizer(self) -> "LLTokenizer":
        with self._lock:
            if self._own is None:
                assert self._tokenizer is not None
                library = _llguidance()
                vocabulary = library.TokenizerWrapper(_Vocabulary(self._tokenizer, self.vocab_size, self._eos_ids))
                self._own = library.LLTokenizer(vocabulary, n_vocab=self.vocab_size, eos_token=list(self._eos_ids))
            return self._own


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of all tokens, and which of them are special."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_ids: Sequence[int]) -> None:
        from longctx.models.tokenizer import HFTokenizer, TokenBytes

        self._tokenizer, names = tokenizer, TokenBytes(tokenizer)
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        self.tokens = [names.of(token) if token < tokenizer.vocab_size else b"" for token in range(vocab_size)]
        special = {*eos_ids, *(tokenizer.control_names if isinstance(tokenizer, HFTokenizer) else ())}
        for token in special:  # a text can't have them
            self.tokens[token] = self.tokens[token] or f"<|{token}|>".encode()
        self.special_token_ids = sorted(special)

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(plain, add_special_tokens=False)


def _first_line(text: str) -> str:
    return (text.strip() or "no reason given").splitlines()[0][:300]
