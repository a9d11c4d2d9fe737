"""Write `corpus.jsonl`, the small generated text that `config/test.yaml` runs on. Run it only to change the text.

Each document has a small cast of invented words and follows a word-pair table of its own, so that what was read
earlier helps to predict what comes: enough structure for the pipeline to have something to learn.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SYLLABLES = "ba ce di fo gu la me ni po ru sa te vi wo zu ka lo mi na pe".split()


def word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3)))


def document(rng: random.Random, common: list[str]) -> str:
    cast = [word(rng).capitalize() for _ in range(6)]
    following = {first: rng.sample(common, 4) for first in common}
    sentences = []
    for _ in range(rng.randint(70, 110)):
        current = rng.choice(common)
        words = [rng.choice(cast)]
        for _ in range(rng.randint(3, 8)):
            words.append(current)
            current = rng.choice(following[current])
        sentences.append(" ".join(words) + ".")
    return " ".join(sentences)


def main() -> None:
    rng = random.Random(20250702)
    common = sorted({word(rng) for _ in range(60)})
    lines = [json.dumps({"text": document(rng, common), "meta": {"pile_set_name": f"generated-{n % 2}"}}) for n in range(72)]
    Path(__file__).with_name("corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
