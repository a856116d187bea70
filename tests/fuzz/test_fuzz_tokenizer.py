"""Random damage to tokenizers and chat templates: nothing but ValueError and FileNotFoundError leaves them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fuzz.mutate import NUM_INPUTS, mutate_bytes, mutate_json

from longctx.models import chat_template, load_tokenizer
from longctx.models.chat_template import ChatTemplate

TEMPLATE = """{%- macro show(x, depth=0) -%}{{ '  ' * depth ~ x | tojson(indent=2) }}{%- endmacro -%}
{%- set ns = namespace(count=0) -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}{{ show(message, 1) }}{%- set ns.count = ns.count + 1 -%}
{%- else -%}{{ '<|' + message.role + '|>' + message['content'] | trim }}{%- endif -%}
{%- endfor -%}
{{ '%5d' % ns.count }}{{ range(9) | join(',') }}{{ 'x'.center(9) }}{{ bos_token if add_generation_prompt }}"""
MESSAGES = [{"role": "user", "content": " Zürich?"}, {"role": "tool", "content": {"x": [1, 2.5]}}]


def byte_level() -> dict[str, Any]:
    """A tokenizer of bytes with one merge, as Llama 3's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "it"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("i", "t")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(100)
    tokenizer.enable_padding()
    return json.loads(tokenizer.to_str())


@NUM_INPUTS
def test_damaged_tokenizers(num_inputs: int, memory_path: Path) -> None:
    contents: dict[str, dict[str, Any]] = {
        "tokenizer.json": byte_level(),
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "chat_template": [{"name": "default", "template": "x"}, {"name": "rag", "template": "y"}],
        },
        "generation_config.json": {"eos_token_id": [1, 2]},
    }
    for name, content in contents.items():
        (memory_path / name).write_text(json.dumps(content))
    loaded, refusals = 0, list[str]()
    for seed in range(num_inputs):
        rng = random.Random(seed)
        name = rng.choice([*contents, "tokenizer.json", "tokenizer.json"])
        if rng.random() < 0.7:
            damaged = mutate_json(rng, contents[name])
            if isinstance(damaged, dict) and isinstance(damaged.get("model"), dict):
                # A prefix that cuts a character in two makes version 0.23 abort the process, which nothing can catch.
                damaged["model"].pop("continuing_subword_prefix", None)
            data = json.dumps(damaged).encode()
        else:
            data = mutate_bytes(rng, json.dumps(contents[name]).encode())
        (memory_path / name).write_bytes(data)
        try:
            tokenizer = load_tokenizer(memory_path)
            tokenizer.decode(tokenizer.encode("Is it Zürich?"))
            loaded += 1
        except (FileNotFoundError, ValueError) as error:
            refusals.append(str(error))
        (memory_path / name).write_text(json.dumps(contents[name]))
    assert all(str(memory_path) in refusal for refusal in refusals)
    assert num_inputs / 20 < loaded < num_inputs * 0.8


@NUM_INPUTS
def test_damaged_templates_and_messages(num_inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "MAX_MEMORY", 128 * 2**20)
    rendered, refusals = 0, list[str]()
    for seed in range(num_inputs):
        rng = random.Random(seed)
        text, messages = TEMPLATE, MESSAGES
        if seed % 4:
            messages = mutate_json(rng, [*MESSAGES, *MESSAGES])
        else:
            text = mutate_bytes(rng, TEMPLATE.encode()).decode(errors="replace")
        try:
            result = ChatTemplate(Path("some/template"), text).render(messages, True, {"bos_token": "<s>"})
            assert isinstance(result, str)
            rendered += 1
        except ValueError as error:
            refusals.append(str(error))
    assert all("some/template: the chat template cannot" in refusal or "JSON" in refusal for refusal in refusals)
    assert num_inputs / 20 < rendered < num_inputs
