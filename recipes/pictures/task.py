"""The task of this recipe: a picture of squares of one colour, and the question how many there are or which colour.

    python -m recipes.pictures.task runs/pictures

makes a tiny Qwen3-VL with random weights (DIRECTORY/model) and rows with their pictures (DIRECTORY/data).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from rltool.quickstart.tiny_model import make_tiny_vision_model

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230)}
CELL, MOST = 16, 4
"""Pixels of a square with its border, which is what the model has as one token; squares of a picture, at most."""
QUESTIONS = {"how many?": lambda colour, count: "abcd"[count - 1], "which?": lambda colour, count: colour}
"""Answers are short: one letter for each number."""


def draw(path: Path, colour: str, count: int, generator: random.Random) -> None:
    """A PNG of 2 to 4 x 2 to 4 cells, `count` of which have a square."""
    columns, rows = generator.randint(2, 4), generator.randint(2, 4)
    image = Image.new("RGB", (columns * CELL, rows * CELL), (16, 16, 16))
    pen = ImageDraw.Draw(image)
    for cell in generator.sample(range(rows * columns), count):
        left, top = cell % columns * CELL, cell // columns * CELL
        pen.rectangle((left + 2, top + 2, left + CELL - 3, top + CELL - 3), fill=COLOURS[colour])
    image.save(path)


def write_rows(directory: Path, name: str, count: int, generator: random.Random) -> None:
    """directory/NAME.jsonl, and its pictures in directory/NAME."""
    (directory / name).mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.jsonl").open("w") as file:
        for number in range(count):
            colour, squares = generator.choice(list(COLOURS)), generator.randint(1, MOST)
            question = generator.choice(list(QUESTIONS))
            path = directory / name / f"{number:05}.png"
            draw(path, colour, squares, generator)
            content = [{"type": "image", "path": f"{name}/{path.name}"}, {"type": "text", "text": question}]
            row = {"messages": [{"role": "user", "content": content}], "label": QUESTIONS[question](colour, squares)}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    generator = random.Random(chosen.seed)
    for name, count in (("held_out", 128), ("train", 2048)):
        write_rows(chosen.directory / "data", name, count, generator)
    make_tiny_vision_model(chosen.directory / "model", seed=chosen.seed)


if __name__ == "__main__":
    main()
