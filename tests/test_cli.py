"""The command line as a user meets it: what it prints, and what it says to bad input."""

from pathlib import Path

import jax
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from longctx.cli import main
from longctx.models import Llama, LlamaConfig, save_checkpoint


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
    save_checkpoint(directory, model, model.init(jax.random.key(0), initializer_range=0.5))
    return directory


def test_generate_continues_a_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the cat sat on the mat")
    arguments = ["generate", "--model", str(checkpoint), "--prompt-file", str(prompt), "--max-tokens", "5"]
    assert main(arguments) == 0
    greedy = capsys.readouterr().out
    assert len(greedy.splitlines()[0].split()) == 5
    assert "prompt   6 tokens" in greedy
    for figure in ("TTFT", "prefill", "decode"):
        assert figure in greedy
    texts = set()
    for seed in ("1", "1", "2"):
        assert main([*arguments, "--temperature", "2", "--seed", seed]) == 0
        texts.add(capsys.readouterr().out.splitlines()[0])
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "the " * 64], "more than the model's context of 64"),
        (["--prompt", "the", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--prompt", "the", "--top-p", "2"], "top_p must be above 0"),
        (["--prompt", "the", "--chat"], "no chat template"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt", "the", "--model", "nowhere"], "no such directory: nowhere"),
    ],
)
def test_generate_refuses(
    checkpoint: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(checkpoint), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_demo_finds_its_pass_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tokens", "2048", "--questions", "4"]) == 0
    out = capsys.readouterr().out
    assert "hides 4 pass keys" in out
    assert "right    4 of 4" in out


def test_demo_answers_about_a_document_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "story.txt"
    document.write_text("The miller crossed the bridge. The pass key of lemon is 48213. The old road was quiet.")
    question = "What is the pass key of lemon?"
    assert main(["demo", "--document", str(document), "--question", question]) == 0
    assert f"{question} 48213\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--question", "What?"], "--document and --question go together"),
        (["--document", "nowhere.txt", "--question", "What?"], "nowhere.txt"),
        (["--tokens", "10"], "do not fit into num_bytes=10"),
        (["--questions", "999"], "num_facts must be between 0"),
        (["--questions", "0"], "--questions must be at least 1, got 0"),
        (["--tokens", "1000000"], "model's context"),
        (["--chunk-size", "0", "--tokens", "512"], "chunk_size must be positive"),
    ],
)
def test_demo_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err
