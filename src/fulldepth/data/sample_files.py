"""Small files of every kind of data that the documentation uses: made here, or from novels in the public domain.

`write_samples` makes the same files on every machine. They show formats and let every example run; they are too few to
judge a model by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import atomic_folder, write_text
from fulldepth.data.corpus import builtin_texts

TEXT_BYTES = 40_000
"""Size of `text.txt`."""
ROWS = 60
"""Rows of `text.jsonl` and of `pairs.jsonl`; a third as many in `test.jsonl`."""
SIZE = 32
IMAGES = 8
"""Pixels of an edge, and images of a class."""
LEAST = 40
MOST = 90
"""Words of a paragraph."""
WORDS = re.compile(r"[A-Za-z']+")

GOOD = ("delightful", "charming", "a joy", "well made", "moving", "clever")
BAD = ("tedious", "clumsy", "a waste of time", "badly made", "dull", "confused")
THINGS = ("The first chapter", "The music", "The ending", "The acting", "The story", "The voyage")
QUESTIONS = (
    ("Which of these can fly?", ("a sparrow", "a dog", "a snake", "a stone"), 0),
    ("What does a plant need to grow?", ("darkness", "water", "paper", "noise"), 1),
    ("Which of these is hottest?", ("ice", "snow", "fire", "rain"), 2),
    ("What do bees make?", ("milk", "wool", "silk", "honey"), 3),
    ("Which of these is a liquid at room temperature?", ("water", "iron", "wood", "glass"), 0),
    ("What gives the Earth its light by day?", ("the Moon", "the Sun", "a comet", "Mars"), 1),
    ("Which animal lives in the sea?", ("a horse", "a hen", "a whale", "a goat"), 2),
    ("What falls from clouds?", ("sand", "smoke", "leaves", "rain"), 3),
    ("Which part of a plant is under the ground?", ("the root", "the flower", "the leaf", "the fruit"), 0),
    ("What do we use to hear?", ("our eyes", "our ears", "our hands", "our feet"), 1),
    ("Which season is the coldest?", ("summer", "spring", "winter", "autumn"), 2),
    ("What pulls a falling apple to the ground?", ("the wind", "light", "sound", "gravity"), 3),
)
GOALS = (
    ("To keep milk fresh,", ("put it in the refrigerator.", "put it in the sun."), 0),
    ("To cut a piece of paper,", ("use a spoon.", "use a pair of scissors."), 1),
    ("To see in a dark room,", ("switch on the lamp.", "close your eyes."), 0),
    ("To dry wet clothes,", ("put them into a bucket of water.", "hang them on a line."), 1),
    ("To boil an egg,", ("put it into hot water.", "put it into the freezer."), 0),
    ("To cross a river,", ("walk away from it.", "use the bridge."), 1),
)
SCENES = (
    ("Baking: A woman mixes flour, eggs and sugar in a bowl. She", ("puts the dough into the oven.", "flies away."), 0),
    ("Tennis: A man throws a ball into the air. He", ("reads a book about it.", "hits it with his racket."), 1),
    ("Gardening: A boy digs a small hole in the earth. He", ("puts a seed into it.", "paints the ceiling."), 0),
    ("Washing: A girl pours water over a muddy dog. She", ("sells the water.", "rubs the dog with soap."), 1),
)


def write_samples(folder: str | Path) -> list[Path]:
    """Write the sample files into a new folder.

    Args:
        folder: to create. It gets `text.txt` and `text.jsonl` (plain text), `pairs.jsonl` and `test.jsonl` (prompt and
            response), `labelled.jsonl` and `validation.jsonl` (text and label), `chats.jsonl` (messages),
            `images/CLASS/N.png` and `captions.jsonl` (image and text), and the files of all `*_local` tasks of
            `fulldepth evaluate`.

    Returns:
        The files.

    Raises:
        FulldepthError: if the folder exists, or cannot be written.
    """
    target = Path(folder)
    if target.exists():
        raise FulldepthError(f"{target} exists already; the sample files are written into a new folder.")
    with atomic_folder(target) as part:
        for name, rows in _tables().items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(part / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        write_text(part / "text.txt", "\n\n".join(_cut(_paragraphs("heldout"), TEXT_BYTES)) + "\n")
        captions = [*_images(part / "images")]
        rows = [{"image": str(target / "images" / name), "text": caption} for name, caption in captions]
        write_text(part / "captions.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return sorted(path for path in target.rglob("*") if path.is_file())


def _tables() -> dict[str, list[dict[str, Any]]]:
    """Name of each file of rows -> its rows."""
    train = list(_paragraphs("train"))
    heldout = list(_paragraphs("heldout"))
    pairs = [_pair(text) for text in train[: 2 * ROWS : 2]]
    choices = [{"question": q, "choices": list(options), "gold": gold} for q, options, gold in QUESTIONS]
    return {
        "text.jsonl": [{"text": text} for text in train[1 : 2 * ROWS : 2]],
        "pairs.jsonl": pairs,
        "test.jsonl": [_pair(text) for text in heldout[: ROWS // 3]],
        "labelled.jsonl": _reviews(0),
        "validation.jsonl": _reviews(1),
        "chats.jsonl": [
            {
                "messages": [
                    {"role": "user", "content": f"Continue this story: {pair['prompt']}"},
                    {"role": "assistant", "content": pair["response"].strip()},
                ]
            }
            for pair in pairs
        ],
        "lambada_test.jsonl": [*_last_words([*heldout, *train])],
        "arc_easy_test.jsonl": choices,
        "arc_challenge_test.jsonl": choices[::-1],
        "piqa_valid.jsonl": [{"goal": goal, "choices": list(ways), "gold": gold} for goal, ways, gold in GOALS],
        "hellaswag_val.jsonl": [{"context": text, "choices": list(ends), "gold": gold} for text, ends, gold in SCENES],
        "gsm8k/train.jsonl": [_sum(number) for number in range(8)],
        "gsm8k/test.jsonl": [_sum(number) for number in range(8, 16)],
    }


def _paragraphs(part: str) -> Iterator[str]:
    """Paragraphs of medium length of the built-in novels, the novels in turn.

    A novel's paragraphs end at empty lines or at every line; a novel with neither is left out.
    """
    paragraphs = list[list[str]]()
    for novel in builtin_texts(part):
        for end in (r"\n\s*\n", r"\n"):
            blocks = [" ".join(block.split()) for block in re.split(end, novel)]
            medium = [text for text in blocks if LEAST <= text.count(" ") + 1 <= MOST]
            if len(medium) >= ROWS:
                paragraphs.append(medium)
                break
    for number in range(min(map(len, paragraphs))):
        for texts in paragraphs:
            yield texts[number]


def _cut(texts: Iterable[str], left: int) -> Iterator[str]:
    """The first texts, up to a number of bytes."""
    for text in texts:
        left -= len(text.encode())
        if left < 0:
            return
        yield text


def _pair(text: str) -> dict[str, str]:
    """The first half of a paragraph, and its second half as the response."""
    words = text.split(" ")
    middle = len(words) // 2
    return {"prompt": " ".join(words[:middle]), "response": " " + " ".join(words[middle:])}


def _reviews(part: int) -> list[dict[str, str]]:
    """Sentences that praise or blame; every other one is in each part."""
    rows = [
        {"text": f"{thing} is {word}.", "label": label}
        for thing in THINGS
        for words in zip(GOOD, BAD, strict=True)
        for label, word in zip(("positive", "negative"), words, strict=True)
    ]
    return [row for number, row in enumerate(rows) if (number // 2) % 2 == part]


def _last_words(texts: Iterable[str], left: int = 40) -> Iterator[dict[str, str]]:
    """Passages whose last word stands in them before, as in LAMBADA; the `target` begins with the space before it."""
    for text in texts:
        sentences = re.split(r"(?<=[.!?]) ", text)
        for count in range(len(sentences), 1, -1):
            passage = " ".join(sentences[:count]).rstrip(".!?")
            context, _, word = passage.rpartition(" ")
            if len(word) > 3 and WORDS.fullmatch(word) and word in WORDS.findall(context):
                yield {"context": context, "target": f" {word}"}
                left -= 1
                break
        if not left:
            return


def _sum(number: int) -> dict[str, str]:
    """A word problem with the answer in the form of GSM8K."""
    apples = 3 + number
    baskets = 2 + number % 4
    eaten = 1 + number % 5
    total = apples * baskets
    left = total - eaten
    return {
        "question": f"{baskets} baskets hold {apples} apples each. {eaten} of the apples are eaten. How many are left?",
        "answer": f"There are {baskets} * {apples} = {total} apples. {total} - {eaten} = {left} are left.\n#### {left}",
    }


def _images(folder: Path) -> Iterator[tuple[str, str]]:
    """Draw images of two classes; yields each file's path below the folder, and a caption."""
    for name in ("circle", "square"):
        (folder / name).mkdir(parents=True)
        for number in range(IMAGES):
            image = Image.new("RGB", (SIZE, SIZE), "white")
            left = 2 + number
            top = 10 - number
            edge = 12 + number
            color = ("red", "green", "blue", "black")[number % 4]
            draw = ImageDraw.Draw(image)
            shape = draw.ellipse if name == "circle" else draw.rectangle
            shape((left, top, left + edge, top + edge), fill=color)
            image.save(folder / name / f"{number}.png")
            yield f"{name}/{number}.png", f"a {color} {name}"
