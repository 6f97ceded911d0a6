"""The parts of the scores sum to what the model computes; plots, the page's data, the command."""

import base64
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from numerics import V1_ATTENTION

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForCausalLM,
    HfDebertaForMaskedLM,
    HfDebertaForPreTraining,
    HfDebertaForSequenceClassification,
    HfDebertaModel,
)
from hf_deberta.model.attention_reference import visible_softmax
from hf_deberta.pretraining.tokenizer_training import train_tokenizer
from hf_deberta.visualize import (
    attention_page,
    attention_parts,
    plot_position_table,
    position_norms,
)
from hf_deberta.visualize.page import HIDDEN, page_data

TEXT = "A new [MASK] opened </script> beside the new [MASK]."
VARIANTS = {
    "v1": V1_ATTENTION,
    "v3": {},
    "v2": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "p2p": {"pos_att_type": "c2p|p2c|p2p"},
    "content": {"relative_attention": False},
}
TERMS = {"p2p": ["c2c", "c2p", "p2c", "p2p"], "content": ["c2c"]}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT, "the paper says words have positions"] * 20, 300, "bpe")


def make_model(model_class=HfDebertaModel, **fields):
    torch.manual_seed(0)
    config = HfDebertaConfig.from_preset("tiny", initializer_range=0.3, **fields)
    model = model_class(config).eval()
    torch.nn.init.normal_(model.base_model.embeddings.word_embeddings.weight)
    return model


def make_masked_lm(tokenizer, **fields):
    return make_model(HfDebertaForMaskedLM, vocab_size=len(tokenizer), **fields)


@pytest.fixture
def inputs():
    return {"input_ids": torch.arange(1, 13)[None]}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_class", [HfDebertaModel, HfDebertaForMaskedLM, HfDebertaForSequenceClassification])
def test_parts_sum_to_the_scores_of_the_model(model_class, variant, inputs):
    model = make_model(model_class, **VARIANTS[variant])
    model.set_attn_implementation("eager")
    attentions = model(**inputs, output_attentions=True).attentions
    for layer, attention in enumerate(attentions):
        parts = attention_parts(model, inputs, layer)
        total = parts.pop("sum")
        assert list(parts) == TERMS.get(variant, ["c2c", "c2p", "p2c"])
        assert all(part.shape == (4, 12, 12) and part.std() > 0.01 for part in parts.values())
        torch.testing.assert_close(sum(parts.values()), total)
        torch.testing.assert_close(total.softmax(-1), attention[0])


@pytest.mark.parametrize("term", ["c2p", "p2c"])
def test_position_part_alone_vanishes_with_its_projection(term, inputs):
    model = make_model(**V1_ATTENTION)
    before = attention_parts(model, inputs, 1)
    attention = model.encoder.layer[1].attention.self
    for parameter in (attention.pos_key_proj if term == "c2p" else attention.pos_query_proj).parameters():
        torch.nn.init.zeros_(parameter)
    parts = attention_parts(model, inputs, 1)
    assert before[term].any() and not parts[term].any()
    unchanged = {"c2c", "c2p", "p2c"} - {term}
    torch.testing.assert_close({name: parts[name] for name in unchanged}, {name: before[name] for name in unchanged})


def test_half_precision_is_scored_in_float32(inputs):
    model = make_model().to(torch.bfloat16)
    total = attention_parts(model, inputs, 1)["sum"]
    assert total.dtype == torch.float32
    attention = model(**inputs, output_attentions=True).attentions[1][0]
    torch.testing.assert_close(total.softmax(-1).bfloat16(), attention)


def test_hidden_pairs_of_a_causal_model(tokenizer):
    model = make_model(HfDebertaForCausalLM, vocab_size=len(tokenizer))
    inputs = tokenizer("the paper says", return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    visible = torch.ones(length, length).tril().bool()
    total = attention_parts(model, inputs, 1)["sum"]
    attention = model(**inputs, output_attentions=True).attentions[1][0]
    torch.testing.assert_close(visible_softmax(total, visible), attention)
    data = page_data(model, tokenizer, "the paper says")
    hidden = decode(data["values"][1]["c2p"], 4, length, missing=np.nan)
    assert (np.isnan(hidden) == ~visible.numpy()).all()
    assert data["masks"] == []


def test_errors_name_value_and_way_out(inputs):
    model = make_model()
    with pytest.raises(ValueError, match=r"input_ids must lie in \[0, 128\)"):
        attention_parts(model, {"input_ids": torch.tensor([[1, 999]])}, 0)
    assert not [module for module in model.modules() if module._forward_pre_hooks]  # ours are removed
    with pytest.raises(ValueError, match="one text.* batch of 2"):
        attention_parts(model, {"input_ids": torch.ones(2, 3, dtype=torch.long)}, 0)
    with pytest.raises(TypeError, match="Linear has 0; load"):
        attention_parts(torch.nn.Linear(2, 2).eval(), inputs, 0)
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        attention_parts(make_model().train(), inputs, 0)
    with pytest.raises(ValueError, match="no relative positions"):
        plot_position_table(make_model(relative_attention=False), 0)


@pytest.mark.parametrize("variant", ["v1", "v3"])
def test_position_norms_bound_the_change_over_distance(variant, inputs):
    """|q . (Kr[r] - mean)| / |q| <= norm, reached by the query that is parallel to the row."""
    model = make_model(**VARIANTS[variant])
    attention, table = model.encoder.layer[0].attention.self, model.encoder.rel_embeddings.weight
    table = table if variant == "v1" else model.encoder.LayerNorm(table)
    projection = attention.pos_key_proj if variant == "v1" else attention.key_proj
    rows = projection(table).view(len(table), 4, 8)
    distances, norms = position_norms(model, 0)
    assert set(norms) == {"c2p", "p2c"} and norms["c2p"].shape == (4, len(distances))
    expected = (rows - rows.mean(0))[model.encoder.config.relative_span].norm(dim=-1)
    torch.testing.assert_close(norms["c2p"][:, distances == 0][:, 0], expected)
    figure = plot_position_table(model, 0)
    assert [axes.get_title()[:3] for axes in figure.axes[:2]] == ["c2p", "p2c"]


PAGE_DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', flags=re.DOTALL)


def decode(encoded, heads, length, missing=0.0):
    integers = np.frombuffer(base64.b64decode(encoded["base64"]), "<i2").reshape(heads, length, length)
    return np.where(integers == HIDDEN, missing, integers * encoded["step"])


def test_page_holds_the_parts(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "double", None)  # unknown to Apple's GPUs
    model, file = make_masked_lm(tokenizer), tmp_path / "page.html"
    attention_page(model, tokenizer, TEXT, file)
    html = file.read_text(encoding="utf-8")
    data = json.loads(PAGE_DATA.search(html)[1])
    assert data["text"] == TEXT and data["tokens"][0] == "[CLS]" and data["tokens"][3] == "[MASK]"
    assert html.count("</script>") == 2 and not re.search(r"(src|href)=.http|url\(", html)
    assert list(data["parts"]) == ["c2c", "c2p", "p2c", "sum"]
    for layer, values in enumerate(data["values"]):
        parts = attention_parts(model, tokenizer(TEXT, return_tensors="pt"), layer)
        for name, encoded in values.items():
            read = decode(encoded, 4, len(data["tokens"]))
            np.testing.assert_allclose(read, parts[name], atol=encoded["step"] * 0.51)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    attention_page(model, tokenizer, "words have <b>[MASK]</b>", file, "the paper")
    html = file.read_text(encoding="utf-8")
    assert json.loads(PAGE_DATA.search(html)[1])["tokens"].count("[SEP]") == 2 and "<b>" not in html


def test_a_page_of_too_many_tokens_is_refused(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_deberta.visualize.page.MAX_PAGE_MB", 0.001)
    with pytest.raises(ValueError, match="shorten the text to [0-9]+ tokens"):
        attention_page(make_masked_lm(tokenizer), tokenizer, TEXT, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_candidates_with_and_without_the_mask_decoder(tokenizer):
    model = make_masked_lm(tokenizer)
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        expected = {"with the mask decoder": model(**inputs).logits[0].softmax(-1)}
        model.config.emd_steps = 0  # what the ablation computes
        expected["without (last layer only)"] = model(**inputs).logits[0].softmax(-1)
        model.config.emd_steps = 2
    data = page_data(model, tokenizer, TEXT)
    masks = data["masks"]
    assert data["note"] == ""
    positions = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
    assert [mask["position"] for mask in masks] == positions.tolist()
    for mask in masks:
        assert set(mask["candidates"]) == set(expected)
        for name, candidates in mask["candidates"].items():
            best = expected[name][mask["position"]].topk(8).values
            torch.testing.assert_close(torch.tensor([score for _, score in candidates]), best, atol=1e-4, rtol=0)
    assert masks[0]["candidates"]["with the mask decoder"] != masks[0]["candidates"]["without (last layer only)"]
    masks = page_data(make_masked_lm(tokenizer, emd_steps=0), tokenizer, TEXT)["masks"]
    assert [list(mask["candidates"]) for mask in masks] == [["masked-language model"]] * 2


@pytest.mark.parametrize(
    ("model_class", "text", "expected"),
    [
        (HfDebertaForPreTraining, TEXT, "no masked-language head.*--generator"),
        (HfDebertaForCausalLM, TEXT, "no masked-language head.*microsoft/deberta-base"),
        (HfDebertaForPreTraining, "the paper", "^$"),
    ],
)
def test_missing_candidates_are_explained(model_class, text, expected, tokenizer):
    data = page_data(make_model(model_class, vocab_size=len(tokenizer)), tokenizer, text)
    assert data["masks"] == [] and re.search(expected, data["note"])


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_page_in_chromium(tokenizer, tmp_path):
    """Its script draws the head that the address names, and candidates with and without the decoder."""
    attention_page(make_masked_lm(tokenizer), tokenizer, TEXT, tmp_path / "page.html")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    address = f"{(tmp_path / 'page.html').as_uri()}#layer=1&head=2&part=p2c"
    html = subprocess.run([*command, address], capture_output=True, text=True, check=True, timeout=300).stdout
    assert '<h1 id="title">Layer 1, head 2 | position to content</h1>' in html and html.count("<caption") == 4
