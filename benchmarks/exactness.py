"""Measure how far our numbers are from those of the official code and of Transformers' own classes.

    python benchmarks/exactness.py            # prints a table, writes benchmarks/results/exactness.csv

Official: the tensors in tests/golden, computed with the official implementation. In-tree: Transformers' classes with
random weights of base width, saved by them and loaded by ours. All in float32 on the CPU. Each number is the largest
absolute difference over the hidden states of all layers at real tokens and the masked-LM logits at labelled positions.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import record

from hf_deberta import HfDebertaForMaskedLM, HfDebertaModel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import golden_cases  # noqa: E402

OFFICIAL = {
    "v1": "case01_v1_mlm",
    "v1, short table": "case01b_v1_maxrel",
    "v2 with convolution": "case02_v2_mlm",
    "v2, own projections": "case02c_v2_unshared",
    "v3": "case03a_v3_mlm",
    "absolute positions, types": "case04_abs_pos_types_embproj",
    "c2p only": "case05a_c2p_only",
    "p2c only": "case05b_p2c_only",
}
SIZES = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
SIZES["vocab_size"] = 1000
RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"]}
BUCKETS = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
IN_TREE: dict[str, tuple[Any, dict]] = {
    "v1": (transformers.DebertaModel, {}),
    "v2 with convolution": (transformers.DebertaV2Model, {**BUCKETS, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "v3": (transformers.DebertaV2Model, BUCKETS),
}


def difference_from_official(case: str, folder: Path) -> float:
    """Return the largest difference from the official tensors of a case."""
    tensors = golden_cases.tensors(case)
    model = golden_cases.load(HfDebertaForMaskedLM, case, folder)
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    largest = 0.0
    for name in sorted({key.split("/")[1] for key in tensors if key.startswith("in/")}):
        inputs, expected = golden_cases.part(tensors, f"in/{name}/"), golden_cases.part(tensors, f"out/{name}/")
        with torch.no_grad():
            output = model(**{key: inputs[key] for key in names if key in inputs}, output_hidden_states=True)
        real = inputs["attention_mask"].bool()
        pairs = [
            (output.hidden_states[int(key.partition(".")[2]) + 1][real], value[real])
            for key, value in expected.items()
            if key.startswith("hidden_states.")
        ]
        if "lm_logits" in expected:
            pairs.append((output.logits[inputs["labels"] > 0], expected["lm_logits"]))
        largest = max([largest, *(float((ours - official).abs().max()) for ours, official in pairs)])
    return largest


def difference_from_in_tree(shape: str, length: int, folder: Path, official_rows: bool, **config_fields: Any) -> float:
    """Return the largest difference from Transformers' hidden states.

    Args:
        official_rows: past the end of the position table, give Transformers the row that the official code reads.
        config_fields: of our model.
    """
    model_class, fields = IN_TREE[shape]
    torch.manual_seed(0)
    theirs = model_class(model_class.config_class(**SIZES, **RELATIVE, **fields)).eval()
    theirs.save_pretrained(folder)
    ours = HfDebertaModel.from_pretrained(folder, **config_fields).eval()
    if official_rows:
        with torch.no_grad():
            theirs.encoder.rel_embeddings.weight[0] = theirs.encoder.rel_embeddings.weight[1]
    mask = (torch.arange(length) < torch.tensor([length, (length + 1) // 2])[:, None]).long()
    ids = torch.randint(1, SIZES["vocab_size"], mask.shape) * mask
    with torch.no_grad():
        states = [model(ids, attention_mask=mask, output_hidden_states=True).hidden_states for model in (ours, theirs)]
    real = mask.bool()
    return max(float((a[real] - b[real]).abs().max()) for a, b in zip(*states, strict=True))


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    past = ("v3, past the table", "v3", 1152)
    compared: list[tuple] = [(shape, shape, length, False) for shape in IN_TREE for length in (1, 32, 128, 512)]
    compared += [(*past, False), ("v3, past the table, with the official row there", *past[1:], True)]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, case in OFFICIAL.items():
            rows.append(("official", name, "", difference_from_official(case, folder)))
        for name, shape, length, official_rows in compared:
            rows.append(("in-tree", name, length, difference_from_in_tree(shape, length, folder, official_rows)))
        compatible = difference_from_in_tree("v3", 1152, folder, False, clamp_relative_distance=False)
        rows.append(("in-tree", "v3, past the table, clamp_relative_distance=False", 1152, compatible))
    for against, shape, tokens, difference in rows:
        print(f"{against:9} {shape:52} {tokens!s:>5}  {difference:.1e}")
        row = {"against": against, "shape": shape, "tokens": tokens, "max_abs_difference": f"{difference:.2e}"}
        record("exactness.csv", [row], ("against", "shape", "tokens"))


if __name__ == "__main__":
    main()
