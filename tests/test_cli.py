"""The commands `longctx generate` and `longctx demo`: their output and their errors."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from longctx.cli import main
from longctx.models import Llama, LlamaConfig, passkey, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over a vocabulary of a few words."""
    directory = tmp_path_factory.mktemp("model")
    words = ["<unk>", "the", "a", "cat", "dog", "sat", "ran", "on", "mat", "rug", "far"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    model = Llama(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=24,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            max_positions=64,
        )
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), model.abstract_params())
    save_checkpoint(directory, model, params)
    return directory


def test_generate_continues_a_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the cat sat on the mat")
    arguments = ["generate", "--model", str(checkpoint), "--prompt-file", str(prompt), "--chunk-size", "4"]
    arguments += ["--max-tokens", "5"]

    def text(*more: str) -> str:
        assert main([*arguments, *more]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    assert main(arguments) == 0
    printed = capsys.readouterr()
    greedy = printed.out.removesuffix("\n")
    assert len(greedy.split()) == 5, "standard output is the text alone"
    for figure in ("compiled in", "prompt   6 tokens", "memory", "TTFT", "prefill", "decode"):
        assert figure in printed.err
    assert "kernels  xla on cpu: mosaic_gpu needs an NVIDIA GPU of the Hopper generation" in printed.err
    assert "6/6" not in printed.err, "a progress bar is no use off a terminal"
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == printed._replace(err="")

    sampled = [text("--temperature", "2", "--seed", seed) for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]
    words = greedy.split()
    stop = next(i for i in range(1, 5) if words[i] not in words[:i])
    assert text("--stop", "far away", "--stop", words[stop]).split() == words[:stop]
    assert text("--temperature", "2", "--top-k", "1") == text("--temperature", "2", "--min-p", "1") == greedy


def test_generate_prints_several_completions(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "the dog", "--temperature", "2", "--n", "2"]
    assert main([*arguments, "--max-tokens", "7", "--chunk-size", "2"]) == 0
    first, second = capsys.readouterr().out.split("\n--- 2\n")
    assert len(first.split()) == len(second.split()) == 7
    assert first != second


def test_demo_finds_its_pass_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """It answers questions about a note while it prefills the document."""
    assert main(["demo", "--tokens", "2048", "--questions", "4", "--chunk-size", "8"]) == 0
    out = capsys.readouterr().out
    assert "hides 4 pass keys" in out
    assert "right    8 of 8" in out
    rows = [line for line in out.splitlines() if "What is" in line]
    assert "  note " in rows[0]
    assert int(rows[0].split("%")[0].split()[-1]) < 100
    cached = [row.split()[-1] for row in rows if "  document  " in row]
    assert sorted(cached) == ["0", "2,048", "2,048", "2,048"]


def test_demo_prints_the_expected_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make = passkey.make_document

    def lie(*arguments: int) -> passkey.Document:
        document = make(*arguments)
        return dataclasses.replace(document, facts=dict.fromkeys(document.facts, "00000"))

    monkeypatch.setattr(passkey, "make_document", lie)
    assert main(["demo", "--tokens", "300", "--questions", "1", "--chunk-size", "8"]) == 1
    out = capsys.readouterr().out
    assert "wrong: it is 00000" in out
    assert "right    0 of 5" in out


def test_demo_answers_about_a_given_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "story.txt"
    document.write_text("The miller crossed the bridge. The pass key of lemon is 48213. The old road was quiet.")
    question = "What is the pass key of lemon?"
    assert main(["demo", "--document", str(document), "--question", question, "--chunk-size", "8"]) == 0
    out = capsys.readouterr().out
    assert f"{question}  48213" in out
    assert "right" not in out
