"""How far our numbers are from the official ones and from Transformers' own classes.

    python benchmarks/exactness.py            # prints a table, writes benchmarks/results/exactness.csv

Official: tests/golden, tensors computed with the official implementation. In-tree: random weights of base width,
saved by Transformers' class and loaded by ours. All float32 on CPU; figures are the largest absolute difference
over hidden states of all layers at real tokens, and over masked-LM logits at labelled positions.
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from timing import RESULTS, circumstances, write_rows

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
BASE = {
    "num_hidden_layers": 4,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 1000,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
BUCKETS = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
IN_TREE = {
    "v1": (transformers.DebertaModel, {}),
    "v2 with convolution": (transformers.DebertaV2Model, {**BUCKETS, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "v3": (transformers.DebertaV2Model, BUCKETS),
}


def against_official(case: str, folder: Path) -> float:
    tensors = golden_cases.tensors(case)
    model = golden_cases.load(HfDebertaForMaskedLM, case, folder)
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    worst = 0.0
    for name in sorted({key.split("/")[1] for key in tensors if key.startswith("in/")}):
        given, expected = golden_cases.part(tensors, f"in/{name}/"), golden_cases.part(tensors, f"out/{name}/")
        with torch.no_grad():
            output = model(**{key: given[key] for key in names if key in given}, output_hidden_states=True)
        real = given["attention_mask"].bool()
        pairs = [
            (output.hidden_states[int(key.partition(".")[2]) + 1][real], value[real])
            for key, value in expected.items()
            if key.startswith("hidden_states.")
        ]
        if "lm_logits" in expected:
            pairs.append((output.logits[given["labels"] > 0], expected["lm_logits"]))
        worst = max([worst, *(float((found - wanted).abs().max()) for found, wanted in pairs)])
    return worst


def against_in_tree(shape: str, length: int, folder: Path, official_rows: bool = False, **ours) -> float:
    """`official_rows`: give in-tree's table, past its end, the row that the official code reads there."""
    model_class, fields = IN_TREE[shape]
    torch.manual_seed(0)
    theirs = model_class(model_class.config_class(**BASE, **fields)).eval()
    theirs.save_pretrained(folder)
    mine = HfDebertaModel.from_pretrained(folder, **ours).eval()
    if official_rows:
        with torch.no_grad():
            theirs.encoder.rel_embeddings.weight[0] = theirs.encoder.rel_embeddings.weight[1]
    mask = (torch.arange(length) < torch.tensor([length, (length + 1) // 2])[:, None]).long()
    ids = torch.randint(1, BASE["vocab_size"], mask.shape) * mask
    with torch.no_grad():
        found, wanted = (
            model(ids, attention_mask=mask, output_hidden_states=True).hidden_states for model in (mine, theirs)
        )
    real = mask.bool()
    return max(float((a[real] - b[real]).abs().max()) for a, b in zip(found, wanted, strict=True))


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, case in OFFICIAL.items():
            rows.append(("official", name, "", against_official(case, folder)))
        for shape in IN_TREE:
            for length in (1, 32, 128, 512):
                rows.append(("in-tree", shape, length, against_in_tree(shape, length, folder)))
        rows.append(("in-tree", "v3, past the table", 1152, against_in_tree("v3", 1152, folder)))
        official = against_in_tree("v3", 1152, folder, official_rows=True)
        rows.append(("in-tree", "v3, past the table, with the official row there", 1152, official))
        compatible = against_in_tree("v3", 1152, folder, clamp_relative_distance=False)
        rows.append(("in-tree", "v3, past the table, clamp_relative_distance=False", 1152, compatible))
    found = []
    for against, shape, tokens, difference in rows:
        print(f"{against:9} {shape:52} {tokens!s:>5}  {difference:.1e}")
        row = {"against": against, "shape": shape, "tokens": tokens or "", "max_abs_difference": f"{difference:.2e}"}
        found.append({**row, **circumstances()})
    write_rows(RESULTS / "exactness.csv", found, ("against", "shape", "tokens"))


if __name__ == "__main__":
    main()
