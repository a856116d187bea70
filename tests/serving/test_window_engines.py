"""Models with sliding windows under every plan: the tokens of the dense model, with window pages that stay few."""

import pytest
from mesh_workload import check_tokens

MIXED = (11, (True, True, False, True))  # as Gemma 3 has them
SLIDING = (5, (True,) * 4)  # as Mistral has them
MODELS = {"mixed": MIXED, "sliding": SLIDING}
SINGLE, GROWN, DEALT = ("grow", "auto"), ("grow", "kvp"), ("interleave", "pass_q")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ((1, 1, 1), SINGLE),
        ((1, 2, 1), GROWN),
        ((2, 1, 1), SINGLE),
        ((1, 1, 2), SINGLE),
        ((1, 3, 1), DEALT),
        *(
            pytest.param(sizes, strategy, marks=pytest.mark.slow)
            for sizes, strategy in [
                ((1, 2, 1), ("grow", "auto")),
                ((1, 2, 1), ("interleave", "pass_kv")),
                ((1, 3, 1), ("interleave", "pass_kv")),
                ((1, 2, 1), ("interleave", "algorithm_5")),
                ((1, 4, 1), ("grow", "all_gather")),
                ((3, 1, 1), SINGLE),
                ((2, 2, 2), ("interleave", "auto")),
            ]
        ),
    ],
    ids=str,
)
def test_tokens_equal_those_of_the_dense_model(
    name: str, sizes: tuple[int, int, int], strategy: tuple[str, str]
) -> None:
    """Prompts in chunks and decodes mixed, sessions, shared prefixes, several completions, cancels."""
    check_tokens(sizes, strategy, events=60, layers=4, windows=MODELS[name])
