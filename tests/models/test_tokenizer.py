"""Tokenizers and chat templates, against the libraries that define them."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from longctx.models import ByteTokenizer, StreamDecoder, Tokenizer, load_tokenizer
from longctx.models.builtin import TINY

TEXT = "A long document goes in, and a model answers a question about it. Zürich, 東京 and 🦙🦙 too. " * 3
LLAMA3_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' }}
    {{- message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""
# What transformers adds to plain jinja2: its own tojson, loop controls, generation blocks, trimming.
EXTRAS_TEMPLATE = """{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == "stop" %}{% break %}{% endif %}
    {% if message.role == "assistant" %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {% else %}
{{ message | tojson }} {{ message | tojson(indent=2) }}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
{% endfor %}
{{ ns.count }}{{ strftime_now("%Y") }}{% if tools is none %} no tools{% endif %}{{ unk_token }}.
"""
MESSAGES = [
    {"role": "system", "content": " You are <brief> & 'kind'. "},
    {"role": "user", "content": "東京?"},
    {"role": "assistant", "content": "  Yes."},
    {"role": "stop", "content": ""},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level() -> tokenizers.Tokenizer:
    """As Llama 3's: byte-level BPE that begins with <s>."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<|eot|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: spaces are part of words, the first is stripped, unknown characters are bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocab |= {"▁": 259, "▁it": 260, "a": 261, "i": 262, "t": 263}
    merges = [("i", "t"), ("▁", "it")]
    vocab["it"] = 264
    model = tokenizers.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write(directory: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    contents = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(contents))
    return directory


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    kinds: dict[str, Tokenizer] = {"bytes": ByteTokenizer()}
    for name, build in {"byte_level": byte_level, "byte_fallback": byte_fallback}.items():
        kinds[name] = load_tokenizer(write(tmp_path_factory.mktemp(name), build()))
    return kinds


KINDS = ["bytes", "byte_level", "byte_fallback"]


# Encoding and decoding


def test_agrees_with_transformers(tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == 320
    assert ours.bos_id == theirs.bos_token_id == 0
    assert ours.eos_ids == (theirs.eos_token_id,) == (1,)
    for special in [True, False]:
        ids = ours.encode(TEXT, add_special_tokens=special)
        assert ids == theirs.encode(TEXT, add_special_tokens=special)
        assert (ids[0] == 0) == special
        assert ours.decode(ids) == TEXT == theirs.decode(ids, skip_special_tokens=True)


def test_training_leftovers_do_not_cut_or_pad(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=1000)
    assert load_tokenizer(write(tmp_path, tokenizer)).decode(load_tokenizer(tmp_path).encode(TEXT)) == TEXT


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == [256, *text.encode()]
    assert tokenizer.decode([*tokenizer.encode(text), 257]) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from("ait éß東🦙\n"), max_size=30))
def test_streaming_text_never_shows_half_a_character(loaded: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(id) for id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, decoder.finish()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "byte_level"])
@given(ids=st.lists(st.integers(0, 257), max_size=30))
@example(ids=[0xFF, 0xF0, 0x9F, 0x98, 0x80])
@example(ids=[0x80] * 10)
def test_streaming_any_tokens_gives_the_whole_text(loaded: dict[str, Tokenizer], kind: str, ids: Sequence[int]) -> None:
    decoder = StreamDecoder(loaded[kind])
    pieces = [decoder.push(id) for id in ids]
    assert "".join([*pieces, decoder.finish()]) == loaded[kind].decode(ids)


def test_streaming_emits_at_once_and_decodes_little() -> None:
    class Counting(ByteTokenizer):
        def decode(self, ids: Iterable[int]) -> str:
            ids = list(ids)
            assert len(ids) <= 8
            return super().decode(ids)

    decoder = StreamDecoder(Counting())
    assert [decoder.push(byte) for byte in "aé!".encode()] == ["a", "", "é", "!"]
    assert "".join(decoder.push(byte) for byte in TEXT.encode() * 10) == TEXT * 10


# What ends a generation


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, (1,)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": [1, 2]}, {}, (1, 2)),
        ({"temperature": 0.6}, {}, (1,)),
        (None, {"eos_token": {"content": "<|eot|>", "lstrip": False}}, (2,)),
        (None, {"eos_token": None}, ()),
    ],
)
def test_eos_ids(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write(tmp_path, byte_level(), **config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_tokenizer(tmp_path).eos_ids == expected


def test_eos_ids_are_limited_in_number(tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1] * 1001}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must have at most 1000 .*, got 1001"):
        load_tokenizer(tmp_path)


# Chat templates


def in_config(directory: Path, template: str) -> None:
    write(directory, byte_level(), chat_template=template, unk_token="<unk>")


def by_name(directory: Path, template: str) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": template}]
    write(directory, byte_level(), chat_template=named, unk_token="<unk>")


def in_file(directory: Path, template: str) -> None:
    write(directory, byte_level(), unk_token="<unk>")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


@pytest.mark.parametrize("put", [in_config, by_name, in_file])
@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, EXTRAS_TEMPLATE])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_render_as_in_transformers(
    tmp_path: Path, put: Callable[[Path, str], None], template: str, add_generation_prompt: bool
) -> None:
    put(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ours = load_tokenizer(tmp_path).apply_chat_template(MESSAGES, add_generation_prompt)
    assert ours == theirs
    assert "東京" in ours


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot render"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].nothing.at.all }}", "no attribute 'nothing'"),
    ],
)
def test_templates_that_refuse_or_are_unsafe(tmp_path: Path, template: str, message: str) -> None:
    in_config(tmp_path, template)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("kind", KINDS)
def test_no_template(loaded: dict[str, Tokenizer], kind: str) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        loaded[kind].apply_chat_template(MESSAGES)


# Directories


def test_the_byte_tokenizer_is_asked_for_by_class(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "longctx.ByteTokenizer"}')
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)


@pytest.fixture(scope="module")
def builtin() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY)


@given(st.one_of(st.text(), st.lists(st.sampled_from(["<bos>", "<eos>", "é", " ", "🦙", "\x00", "'s"])).map("".join)))
@example("<bos>Q: <eos>\r\n  ")
def test_transformers_reads_the_built_in_tokenizer(builtin: Any, text: str) -> None:
    ours = load_tokenizer(TINY)
    assert isinstance(ours, ByteTokenizer)
    for special in (True, False):
        ids = builtin.encode(text, add_special_tokens=special)
        assert ids == ours.encode(text, add_special_tokens=special)
        assert builtin.decode([*ids, 257], skip_special_tokens=True) == text


@given(st.lists(st.integers(0, 257)))
def test_transformers_decodes_as_the_built_in_tokenizer(builtin: Any, ids: list[int]) -> None:
    assert builtin.decode(ids, skip_special_tokens=True) == load_tokenizer(TINY).decode(ids)


def test_the_built_in_tokenizer_says_what_it_is(builtin: Any) -> None:
    ours = ByteTokenizer()
    assert (len(builtin), builtin.bos_token_id, (builtin.eos_token_id,)) == (ours.vocab_size, ours.bos_id, ours.eos_ids)
    assert {"bos_token": builtin.bos_token, "eos_token": builtin.eos_token} == ours.special_tokens


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
