"""Find entities of any type with GLiNER, computed by this package under `enable()`.

    pip install gliner
    python examples/gliner_entities.py --texts texts.txt --types person company date

It prints the entities with line and offsets, and the time without and with this package:

    1:0:12  person  ...  Ada Lovelace
    200 texts: ... s, with enable() ... s

notebooks/faster.ipynb shows the same with `hf_deberta.optimize`. GLiNER 0.2.29 requires Transformers below 5.17.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from gliner import GLiNER

import hf_deberta


def main(flags: list[str] | None = None) -> tuple[list[Any], list[Any]]:
    """Return the entities of each text, without and with this package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="urchade/gliner_medium-v2.1", help="folder or Hub id")
    parser.add_argument("--texts", type=Path, required=True, help="file with a text per line")
    parser.add_argument("--types", nargs="+", default=["person", "organization", "location"])
    parser.add_argument("--threshold", type=float, default=0.5)
    arguments = parser.parse_args(flags)
    texts = arguments.texts.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    # GLiNER has no trust_remote_code: with encoders other than DeBERTa it runs code of their repositories
    model = GLiNER.from_pretrained(arguments.model).eval()

    def find() -> tuple[list[Any], float]:
        start = time.perf_counter()
        with torch.inference_mode():
            entities = model.inference(texts, arguments.types, threshold=arguments.threshold, batch_size=8)
        return entities, time.perf_counter() - start

    find()  # the first call is slower
    plain, seconds = find()
    with hf_deberta.enable():  # applies to models that are loaded already
        entities, enabled_seconds = find()
    for number, row in enumerate(entities, 1):
        for entity in row:
            place = f"{number}:{entity['start']}:{entity['end']}"
            print(f"{place}  {entity['label']}  {entity['score']:.2f}  {entity['text']}")
    print(f"{len(texts)} texts: {seconds:.1f} s, with enable() {enabled_seconds:.1f} s")
    return plain, entities


if __name__ == "__main__":
    main()
