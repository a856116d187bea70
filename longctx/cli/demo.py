"""`longctx demo`: a long document goes in, the built-in model answers questions about it."""

import argparse
from pathlib import Path

from longctx.cli import answer
from longctx.models import load_checkpoint, load_tokenizer, passkey
from longctx.models.builtin import TINY
from longctx.models.generate import Context
from longctx.models.sampling import GREEDY

SUMMARY = "Hide pass keys in a long document and ask the built-in model for them."
MAX_ANSWER = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=32768, metavar="N", help="length of the document in bytes")
    parser.add_argument("--questions", type=int, default=8, metavar="N", help="pass keys to hide and ask for")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the document")
    parser.add_argument("--document", type=Path, metavar="FILE", help="ask about this text instead (with --question)")
    parser.add_argument("--question", metavar="TEXT", help='such as "What is the pass key of lemon?"')
    parser.add_argument("--chunk-size", type=int, default=1024, metavar="N", help="tokens read at a time")


def run(options: argparse.Namespace) -> int:
    if (options.document is None) != (options.question is None):
        raise ValueError("--document and --question go together")
    if options.questions < 1:
        raise ValueError(f"--questions must be at least 1, got {options.questions}")
    if options.document is None:
        document = passkey.make_document(options.tokens, options.questions, options.seed)
        expected: dict[str, str | None]
        text, expected = document.text, {passkey.question(name): key for name, key in document.facts.items()}
        print(f"A document of {len(text):,} bytes hides {len(expected)} pass keys.")
    else:
        text, expected = options.document.read_text(encoding="utf-8"), {options.question: None}

    tokenizer = load_tokenizer(TINY)
    tokens = tokenizer.encode(text)
    endings = {question: tokenizer.encode(passkey.prompt("", question), False) for question in expected}
    longest = max(map(len, endings.values()))
    model, params = load_checkpoint(TINY)

    figures = answer.Figures()
    context = Context(model, params, len(tokens) + longest + MAX_ANSWER, options.chunk_size)
    answer.read(context, tokens, figures)
    num_right = 0
    for question, ending in endings.items():
        # Every question is asked of the same document, which is read once.
        context.rewind(len(tokens))
        answer.read(context, ending, figures, show=False)
        print(f"{question} ", end="")
        given = answer.write(context, tokenizer, MAX_ANSWER, GREEDY, tokenizer.eos_ids, figures)
        num_right += given == expected[question]
    print(f"\n{figures.report()}")
    if options.document is None:
        print(f"right    {num_right} of {len(expected)}")
    return 0
