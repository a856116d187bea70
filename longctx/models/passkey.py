r"""Retrieval documents: pass keys hidden in filler text.

A document is plain ASCII prose without digits, except for a few statements

    The pass key of lemon is 48213.

The prompt of a model is a beginning-of-sequence token and the bytes of the string

    {document}\nQ: What is the pass key of lemon?\nA:␣

where ␣ is one space. The correct continuation is the five digits and then the end-of-sequence token. The built-in model
is trained on exactly these prompts (examples/train_tiny.py), and the demo and the tests use them: a lost, doubled or
misplaced page of keys and values shows as a wrong digit.
"""

from dataclasses import dataclass

import numpy as np


def _split(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(separator))


NAMES = _split(
    """
    acorn amber anchor apple apron arrow autumn badge bagel bamboo banana barrel basil basket beacon
    bean beetle berry bicycle biscuit blanket blossom bottle boulder bracelet branch bread breeze brick
    bridge bronze brush bucket butter button cabin cactus camel camera candle canoe carpet carrot castle
    cedar cello chalk cherry chestnut chimney cinnamon circle clay cliff cloud clover cobalt coconut
    comet compass copper coral cotton cradle crane crayon cricket crown crystal cushion cymbal daisy
    diamond dolphin dragon drum eagle echo elbow ember emerald engine falcon feather fern fiddle flame
    flute forest fossil fountain galaxy garden garlic garnet ginger glacier glove goblet granite grape
    guitar hammer harbor harp hazel helmet heron hickory honey horizon island ivory jacket jasmine
    jungle kettle kite ladder lagoon lantern laurel lava lemon lentil library lilac linen lizard lobster
    locket magnet mango maple marble meadow melon meteor mint mirror mitten mountain mushroom needle
    nutmeg oak oasis oat ocean olive onion orange orchid otter oyster paddle palm panther paper parrot
    peach pearl pebble pepper piano pigeon pillow planet plum pocket pony poppy potato prairie puzzle
    quartz quilt rabbit raven ribbon river rocket rose saddle saffron salmon sandal satin shadow shell
    silver sparrow spider spoon spruce squirrel stable statue stone storm sugar summit sunset swan table
    teapot temple thimble thunder ticket tiger timber tomato tower trumpet tulip tunnel turtle valley
    vanilla velvet violin volcano wagon walnut whale wheat whistle willow window winter wolf yarrow
    zebra
    """
)
KEY_DIGITS = 5

_DETERMINERS = ("the", "a", "this", "every", "that", "our")
_ADJECTIVES = _split(
    """
    old quiet green narrow bright heavy gentle distant broken golden patient hollow early late curious
    wooden empty crowded warm cold silent clever tired young small great pale dark steep lonely careful
    famous rusty simple strange wide muddy honest busy lucky
    """
)
_NOUNS = _split(
    """
    road farmer market teacher letter ship baker village doctor train winter evening lake painter house
    bird wind sailor clock captain morning child neighbour dog kitchen field queen soldier story bell
    mill harvest boat library song hill gate street stranger carpenter traveller roof barn shore tailor
    miller shepherd bench page key number pass word
    """
)
_VERBS = _split(
    """
    crossed watched followed painted carried remembered found opened left passed visited repaired forgot
    heard reached counted bought sold hid admired described measured cleaned lost moved kept answered
    climbed warmed drew
    """
)
_PHRASES = _split(
    """
    before the rain; after supper; in the spring; without a word; near the river; by the old wall; every
    day; at dawn; for many years; with great care; on the way home; under the trees; as the sun went
    down; during the storm; in the end; because of the snow; beside the church; along the coast; when
    nobody looked; for the first time; of the north; as it is; of course
    """,
    separator=";",
)


@dataclass(frozen=True)
class Document:
    """A text, and the key of each name that the text states one for, in order of appearance."""

    text: str
    facts: dict[str, str]


def statement(name: str, key: str) -> str:
    return f"The pass key of {name} is {key}."


def question(name: str) -> str:
    return f"What is the pass key of {name}?"


def prompt(text: str, question: str) -> str:
    """The prompt that a model continues with its answer; `question` may be any text."""
    return f"{text}\nQ: {question}\nA: "


def random_key(rng: np.random.Generator) -> str:
    return f"{rng.integers(10**KEY_DIGITS):0{KEY_DIGITS}d}"


def filler_sentence(rng: np.random.Generator) -> str:
    """A sentence without a key. Names occur in it as ordinary nouns, so that matching a name alone finds no key."""

    def choose(words: tuple[str, ...]) -> str:
        return words[rng.integers(len(words))]

    def thing() -> str:
        determiner = choose(_DETERMINERS)
        adjective = choose(_ADJECTIVES) + " " if rng.random() < 0.6 else ""
        noun = choose(NAMES if rng.random() < 0.15 else _NOUNS)
        return f"{determiner} {adjective}{noun}"

    match rng.integers(4):
        case 0:
            text = f"{thing()} {choose(_VERBS)} {thing()} {choose(_PHRASES)}."
        case 1:
            text = f"{choose(_PHRASES)}, {thing()} {choose(_VERBS)} {thing()}."
        case 2:
            text = (
                f"{thing()} is {choose(_ADJECTIVES)} and {choose(_ADJECTIVES)}, "
                f"and {thing()} {choose(_VERBS)} {thing()}."
            )
        case _:
            text = f"{thing()} of {thing()} {choose(_VERBS)} {thing()}."
    return text[0].upper() + text[1:]


def make_document(num_bytes: int, num_facts: int = 8, seed: int = 0) -> Document:
    """A document of exactly `num_bytes` bytes that states `num_facts` pass keys at random places.

    It is deterministic.

    Raises:
      ValueError: there are not that many names, or the statements alone are longer than `num_bytes`.
    """
    if not 0 <= num_facts <= len(NAMES):
        raise ValueError(f"num_facts must be between 0 and {len(NAMES)}, got {num_facts}")
    rng = np.random.default_rng(seed)
    names = [NAMES[i] for i in rng.permutation(len(NAMES))[:num_facts]]
    facts = {name: random_key(rng) for name in names}
    statements = [statement(name, key) for name, key in facts.items()]

    room = num_bytes - sum(len(sentence) + 1 for sentence in statements)
    if room < 1:
        least = num_bytes - room + 1  # the statements and a byte of filler
        raise ValueError(f"num_bytes must be at least {least} for num_facts={num_facts}, got {num_bytes}")
    filler: list[str] = []
    while room > 0:
        filler.append(filler_sentence(rng))
        room -= len(filler[-1]) + 1

    # Every statement comes before some filler sentence, so that the truncation below never hits one.
    before = sorted(rng.integers(len(filler), size=num_facts))
    sentences = np.insert(np.array(filler, dtype=object), before, statements).tolist()
    return Document(" ".join(sentences)[: num_bytes - 1] + ".", facts)
