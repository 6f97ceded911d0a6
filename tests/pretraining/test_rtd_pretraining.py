"""The pair of generator and discriminator: official losses and gradients, sampling, counting, and files."""

from contextlib import nullcontext

import golden_cases
import pytest
import torch
from golden_cases import part
from huggingface_hub.errors import StrictDataclassError
from numerics import assert_same_by_name, tiny_config
from safetensors.torch import load_file, save_file
from tiny_pairs import DROPOUT, WORDS, batch_of, tiny_pair, tiny_rows, trained
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaForPreTraining, reference_mode
from hf_deberta.engines import linear_cross_entropy
from hf_deberta.model import enhanced_mask_decoder
from hf_deberta.model.enhanced_mask_decoder import HfDebertaLMHead, vocabulary_loss
from hf_deberta.pretraining import rtd_pretraining
from hf_deberta.pretraining.gradient_disentangled_embedding import SHARINGS
from hf_deberta.pretraining.rtd_pretraining import MODELS, HfDebertaForRtdPretraining, HfDebertaRtdConfig

pytestmark = pytest.mark.usefixtures("unpad_tiny_models")

STATES = {"atol": 2e-5, "rtol": 1e-4}  # of tests/golden, as the official tensors' README derives them

# ---- the official implementation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("sharing", ["es", "gdes"])
def test_official_losses_and_gradients(sharing, training):
    case = f"case03c_v3_rtd_{sharing}"
    tensors, official = golden_cases.tensors(case), golden_cases.official_config(case)
    rates = dict.fromkeys(DROPOUT, 0.0)
    configs = {name: HfDebertaConfig.from_dict({**official[name], **rates}) for name in MODELS}
    model = HfDebertaForRtdPretraining(HfDebertaRtdConfig(**configs, embedding_sharing=official["embedding_sharing"]))
    ours = {name: name.replace("._weight", ".delta") for name in part(tensors, "w/")}
    unused = {"discriminator.deberta.embeddings.position_embeddings.weight"}
    unused |= {"discriminator.deberta.embeddings.position_embeddings.delta"}
    unused |= {"discriminator.deberta.embeddings.word_embeddings.weight"} if sharing == "es" else set()
    state = {ours[name]: value for name, value in part(tensors, "w/").items() if ours[name] not in unused}
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["generator.lm_predictions.lm_head.decoder.weight"]  # tied
    assert not missing.unexpected_keys
    given, expected = part(tensors, "in/A/"), part(tensors, "out/A/")
    if sharing == "gdes":
        table = model.discriminator.get_input_embeddings().table()
        torch.testing.assert_close(table, expected["disc_effective_word_embeddings"])
    labels = given["labels"].masked_fill(given["labels"] == 0, -100)
    output, gradients = trained(
        model.train(training),
        input_ids=given["input_ids"],
        attention_mask=given["input_mask"],
        labels=labels,
        replaced_ids=expected["replaced_input_ids"],
    )
    torch.testing.assert_close(output.lm_loss, expected["lm_loss"].mean(), **STATES)
    torch.testing.assert_close(output.rtd_loss, expected["rtd_loss"].mean(), **STATES)
    torch.testing.assert_close(output.loss, expected["total_loss"], **STATES)
    real = given["input_mask"].bool()
    torch.testing.assert_close(output.logits[real], expected["rtd_logits"][real], **STATES)
    statistics, rtd_labels = output.statistics, expected["rtd_labels"]
    positive = expected["rtd_logits"][real] > 0
    assert statistics["masked"] == len(expected["lm_labels"])
    assert statistics["masked_correct"] == (expected["lm_logits"].argmax(-1) == expected["lm_labels"]).sum()
    assert (statistics["replaced"], statistics["original"]) == ((rtd_labels == 1).sum(), (rtd_labels == 0).sum())
    assert statistics["replaced_found"] == ((rtd_labels == 1) & positive).sum()
    assert statistics["original_kept"] == ((rtd_labels == 0) & ~positive).sum()
    for name, gradient in part(expected, "grad/").items():
        difference = (gradients[ours[name]] - gradient).abs().max()
        assert difference < 1e-4 * gradient.abs().max(), name


# ---- the configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset, layers", [("v3-base", 6), ("v3-small", 3), ("v3-large", 12), ("v3-xsmall", 6)])
def test_the_generator_is_as_wide_and_half_as_deep(preset, layers):
    discriminator = HfDebertaConfig.from_preset(preset, vocab_size=1000)
    config = HfDebertaRtdConfig(discriminator=discriminator)
    assert config.generator.num_hidden_layers == layers
    assert config.generator.to_dict() == {**discriminator.to_dict(), "num_hidden_layers": layers}
    assert (config.embedding_sharing, config.rtd_weight, config.sampling_temperature) == ("gdes", 50, 1)
    assert HfDebertaRtdConfig.from_discriminator(discriminator).to_dict() == config.to_dict()
    assert HfDebertaRtdConfig.from_discriminator(discriminator, 2).generator.num_hidden_layers == 2
    assert HfDebertaRtdConfig.from_discriminator(tiny_config()).generator.num_hidden_layers == 2  # its decoder's least
    assert HfDebertaRtdConfig.from_discriminator(tiny_config(emd_steps=0)).generator.num_hidden_layers == 1


def test_attention_backends_are_kept():
    discriminator = tiny_config(attn_implementation="eager")
    config = HfDebertaRtdConfig(discriminator=discriminator, generator=tiny_config(attn_implementation="sdpa"))
    model = HfDebertaForRtdPretraining(config)
    assert [getattr(model, name).config._attn_implementation for name in MODELS] == ["sdpa", "eager"]
    for backend in ("eager", "triton", "auto"):
        model.set_attn_implementation(backend)
        assert {getattr(model, name).config._attn_implementation for name in MODELS} == {backend}
    with pytest.raises(ValueError, match='"flash_attention_2"` is not supported: choose one of auto'):
        model.set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"embedding_sharing": "half"}, "one of gdes, es, nes, not 'half'"),
        ({"rtd_weight": -1}, "rtd_weight must be 0 or more and finite, not -1"),
        ({"sampling_temperature": float("inf")}, "sampling_temperature must be 0 or more and finite, not inf"),
        ({"sampling_temperature": float("nan")}, "not nan"),
        ({"generator": tiny_config(vocab_size=130)}, "vocab_size must be equal: it is 130 in the gen.* 128 in the"),
        ({"generator": tiny_config(vocab_size=130), "embedding_sharing": "nes"}, "both have the same vocabulary"),
        ({"generator": tiny_config(hidden_size=64)}, "embedding_size must be equal.*or use embedding_sharing='nes'"),
        ({"generator": tiny_config(position_biased_input=True)}, "position_biased_input must be equal"),
        ({"generator_layers": 1}, "num_hidden_layers"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        if "generator_layers" in fields:
            HfDebertaRtdConfig.from_discriminator(tiny_config(), **fields)
        else:
            HfDebertaRtdConfig(discriminator=tiny_config(), **fields)


def test_unequal_widths_need_no_sharing():
    fields = {"generator": tiny_config(hidden_size=64), "embedding_sharing": "nes"}
    config = HfDebertaRtdConfig(discriminator=tiny_config(), **fields)
    assert HfDebertaForRtdPretraining(config)(**batch_of(tiny_rows())).loss > 0


# ---- sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**25, None], ids=["chunks", "at once", "with logits"])
def test_tokens_are_sampled_from_the_softmax(at_once, trained, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "MAX_CHUNK_LOGITS", at_once)
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    many = 2000 if at_once == 1 else 20000
    head = HfDebertaLMHead(tiny_config(vocab_size=5)).requires_grad_(trained)
    torch.nn.init.zeros_(head.decoder.weight)
    head.bias.data.copy_(logits)

    def shares(temperature):
        arguments = head, torch.zeros(many, head.dense.in_features), torch.zeros(many, dtype=torch.long), None
        with reference_mode() if at_once is None else nullcontext():
            return vocabulary_loss(*arguments, temperature)["samples"].bincount(minlength=5) / many

    torch.manual_seed(0)
    for temperature in (0.5, 1.0, 3.0):
        expected = (logits / temperature).softmax(-1)
        deviation = (expected * (1 - expected) / many).sqrt()
        assert ((shares(temperature) - expected).abs() < 5 * deviation).all(), temperature
    assert shares(0)[3] == shares(1e-4)[3] == 1
    assert (shares(1e6) - 0.2).abs().max() < 0.05


def test_only_masked_tokens_are_replaced_by_the_generators_predictions():
    model, batch = tiny_pair(), batch_of(tiny_rows())
    output = model(**batch)
    masked = batch["labels"] >= 0
    with torch.no_grad():
        guesses = model.eval().generator(batch["input_ids"], batch["attention_mask"]).logits
    assert torch.equal(output.replaced_ids[masked], guesses.argmax(-1)[masked])
    assert torch.equal(output.replaced_ids[~masked], batch["input_ids"][~masked])
    torch.testing.assert_close(output.loss, output.lm_loss + 50 * output.rtd_loss)


@pytest.mark.parametrize("variant", ["a hook at the head", "int32", "as if compiled", "config", "a bound of labels"])
def test_other_paths_sample_the_same_tokens(variant, monkeypatch, request):
    """Logits from the head with a hook, or at all positions; int32 ids; as many predictions in each row."""
    batch = batch_of(tiny_rows())
    expected, gradients = trained(tiny_pair(), **batch)
    model = tiny_pair(sparse_prediction=variant != "config")
    if variant == "a hook at the head":
        model.generator.get_output_embeddings().register_forward_hook(lambda *_: None)
    elif variant == "int32":
        batch = {name: tensor.int() for name, tensor in batch.items()}
    elif variant == "as if compiled":
        monkeypatch.setattr(enhanced_mask_decoder, "in_captured_graph", lambda: True)
    elif variant == "a bound of labels":
        request.getfixturevalue("values_are_not_read")
        batch["max_predictions_per_row"] = 7
    found, same = trained(model, **batch)
    torch.testing.assert_close(found.loss, expected.loss)
    assert torch.equal(found.replaced_ids, expected.replaced_ids)
    assert found.statistics["masked_correct"] == expected.statistics["masked_correct"]
    assert_same_by_name(same, gradients)


# ---- losses and counts -------------------------------------------------------------------------------------------


def test_padding_by_mask_or_by_id():
    model, batch = tiny_pair(), batch_of(tiny_rows())
    with_mask, gradients = trained(model, **batch)
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, 7)  # labels at padding
    again, same = trained(model, **batch)
    torch.testing.assert_close(again.loss, with_mask.loss)
    assert_same_by_name(same, gradients)
    counts = {name: value for name, value in with_mask.statistics.items() if "loss" not in name}
    assert {name: again.statistics[name] for name in counts} == counts
    labels = batch_of(tiny_rows())["labels"]
    masked, real = rtd_pretraining.masked_and_real_tokens(batch["input_ids"], labels, None, 0)
    assert torch.equal(real, batch["attention_mask"].bool()) and torch.equal(masked, labels >= 0)


def test_a_masked_token_may_be_replaced_by_padding():
    """The official generator replaces by any token, [PAD] too."""
    ids, labels = torch.tensor([[1, 0, 5, 0]]), torch.tensor([[-100, 9, -100, -100]])
    masked, real = rtd_pretraining.masked_and_real_tokens(ids, labels, None, 0)
    assert masked.tolist() == [[False, True, False, False]] and real.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("sharing", SHARINGS)
def test_packed_rows_equal_rows_of_their_own(sharing):
    model = tiny_pair(sharing, dtype=torch.float64)
    rows = tiny_rows((5, 7, 3))
    expected, gradients = trained(model, **batch_of(rows))
    pieces = [{name: row[name][: row["attention_mask"].sum()] for name in ("input_ids", "labels")} for row in rows]
    packed = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    positions = torch.cat([torch.arange(len(piece["labels"])) for piece in pieces])
    by_lengths = {**packed, "cu_seq_lens_q": torch.tensor([0, 5, 12, 15])}
    by_positions = {
        "input_ids": torch.cat([packed["input_ids"], torch.zeros(2, dtype=torch.long)]),
        "labels": torch.cat([packed["labels"], torch.full((2,), -100)]),
        "position_ids": torch.cat([positions, torch.zeros(2, dtype=torch.long)]),
    }
    for inputs in (by_lengths, by_positions):
        inputs = {name: value if name == "cu_seq_lens_q" else value[None] for name, value in inputs.items()}
        found, same = trained(model, **inputs)
        torch.testing.assert_close(found.loss, expected.loss)
        assert_same_by_name(same, gradients)
        assert found.statistics.keys() == expected.statistics.keys()
        for name, value in expected.statistics.items():
            torch.testing.assert_close(found.statistics[name], value)


def test_no_masked_token_at_all():
    model, batch = tiny_pair(temperature=1.0), batch_of(tiny_rows())
    batch["labels"] = torch.full_like(batch["labels"], -100)
    output, gradients = trained(model, **batch)
    assert output.lm_loss == 0 and output.rtd_loss > 0 and output.statistics["masked"] == 0
    assert torch.equal(output.replaced_ids, batch["input_ids"])
    assert gradients.keys() == dict(model.named_parameters()).keys(), "all take part, which DDP needs"
    assert all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"labels": None}, "labels are missing"),
        ({"labels": torch.zeros(2, 3)}, r"labels must be \[B, N\] = \(8, 12\), not \(2, 3\)"),
        ({"replaced_ids": torch.zeros(2, 3)}, r"replaced_ids must be \[B, N\] = \(8, 12\)"),
        ({"attention_mask": torch.ones(8, 3)}, "attention_mask must be"),
        ({"only": "both"}, "only must be None, 'generator', or 'discriminator' with replaced_ids, not 'both'"),
        ({"only": "discriminator"}, "only must be"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        tiny_pair()(**{**batch_of(tiny_rows()), **change})


# ---- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARINGS)
def test_each_table_is_trained_by_its_losses(sharing):
    model, batch = tiny_pair(sharing), batch_of(tiny_rows())
    _, joint = trained(model, **batch)
    generated, of_generator = trained(model, **batch, only="generator")
    detected, of_discriminator = trained(model, **batch, only="discriminator", replaced_ids=generated.replaced_ids)
    assert generated.rtd_loss is None and detected.lm_loss is None
    assert all(name.startswith("generator.") for name in of_generator)
    assert {name for name in of_discriminator if name.startswith("generator.")} == (
        {WORDS} if sharing == "es" else set()
    )
    both = {
        name: sum(g[name] for g in (of_generator, of_discriminator) if name in g)
        for name in {**of_generator, **of_discriminator}
    }
    assert_same_by_name(joint, both)
    if sharing == "gdes":
        assert_same_by_name({WORDS: joint[WORDS]}, {WORDS: of_generator[WORDS]})


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARINGS)
def test_training_state_round_trip(sharing, tmp_path):
    model, batch = tiny_pair(sharing, position_biased_input=sharing != "gdes"), batch_of(tiny_rows())
    model.save_pretrained(tmp_path)
    found, report = HfDebertaForRtdPretraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert found.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert found.generator.get_output_embeddings().weight is found.generator.get_input_embeddings().weight
    torch.testing.assert_close(found(**batch).loss, model.eval()(**batch).loss)


def test_a_checkpoint_without_deltas_starts_them_at_zero(tmp_path):
    tiny_pair("nes").save_pretrained(tmp_path)
    found, report = HfDebertaForRtdPretraining.from_pretrained(
        tmp_path, embedding_sharing="gdes", output_loading_info=True
    )
    delta = "discriminator.deberta.embeddings.word_embeddings.delta"
    assert report["missing_keys"] == {delta}
    assert found.state_dict()[delta].abs().sum() == 0


@pytest.mark.parametrize("sharing", SHARINGS)
def test_two_ordinary_checkpoints_round_trip(sharing, tmp_path):
    model, batch = tiny_pair(sharing, position_biased_input=True).eval(), batch_of(tiny_rows())
    output = model(**batch)
    numbers = torch.get_rng_state()
    model.save_pair(tmp_path)
    assert torch.equal(torch.get_rng_state(), numbers), "training must continue as if nothing had been saved"
    inputs = {"attention_mask": batch["attention_mask"]}
    generator = AutoModelForMaskedLM.from_pretrained(tmp_path / "generator")
    discriminator = AutoModelForPreTraining.from_pretrained(tmp_path / "discriminator")
    assert (type(generator), type(discriminator)) == (HfDebertaForMaskedLM, HfDebertaForPreTraining)
    torch.testing.assert_close(discriminator(output.replaced_ids, **inputs).logits, output.logits)
    labels = generator(batch["input_ids"], **inputs, labels=batch["labels"])
    torch.testing.assert_close(labels.loss, output.lm_loss)
    states = AutoModel.from_pretrained(tmp_path / "discriminator")(output.replaced_ids, **inputs).last_hidden_state
    torch.testing.assert_close(discriminator.deberta(output.replaced_ids, **inputs).last_hidden_state, states)

    found = HfDebertaForRtdPretraining.from_pair(
        tmp_path / "generator", tmp_path / "discriminator", embedding_sharing=sharing, sampling_temperature=0
    )
    assert found.config.rtd_weight == 50 and found.config.generator.num_hidden_layers == 1
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, msg=name)
    torch.testing.assert_close(found.eval()(**batch).loss, output.loss)


def test_a_pair_needs_the_whole_encoder_of_both(tmp_path):
    tiny_pair().save_pair(tmp_path)
    file = tmp_path / "discriminator" / "model.safetensors"
    weights = load_file(file)
    del weights["deberta.encoder.rel_embeddings.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"discriminator has no weights for deberta\.encoder\.rel_embeddings\.weight"):
        HfDebertaForRtdPretraining.from_pair(tmp_path / "generator", tmp_path / "discriminator")


@pytest.mark.parametrize("variant", ["two folders", "one folder", "one configuration"])
def test_from_released_checkpoints(variant, tmp_path):
    """The official release has the discriminator's whole table, and may have its delta too."""
    case = "case03c_v3_rtd_gdes"
    tensors, official = golden_cases.tensors(case), golden_cases.official_config(case)
    given, expected = part(tensors, "in/A/"), part(tensors, "out/A/")
    words = "deberta.embeddings.word_embeddings."
    weights = {name: part(tensors, f"w/{name}.") for name in MODELS}
    weights["discriminator"][words + "weight"] = expected["disc_effective_word_embeddings"]
    folders = [golden_cases.write_checkpoint(tmp_path / name, official[name], weights[name]) for name in MODELS]
    if variant == "one folder":
        (folders[0] / "config.json").rename(folders[1] / "generator_config.json")
    if variant != "two folders":
        torch.save(weights["generator"], folders[1] / "pytorch_model.generator.bin")
        folders[0] = None
    model = HfDebertaForRtdPretraining.from_pair(*folders, {"hidden_dropout_prob": 0.2}, rtd_weight=10).eval()
    assert [getattr(model, name).config.hidden_dropout_prob for name in MODELS] == [0.2, 0.2]
    delta = model.discriminator.get_input_embeddings().delta
    torch.testing.assert_close(delta, weights["discriminator"][words + "_weight"], atol=1e-7, rtol=0)
    output = model(
        input_ids=given["input_ids"],
        attention_mask=given["input_mask"],
        labels=given["labels"].masked_fill(given["labels"] == 0, -100),
        replaced_ids=expected["replaced_input_ids"],
    )
    torch.testing.assert_close(output.lm_loss, expected["lm_loss"].mean(), **STATES)
    torch.testing.assert_close(output.rtd_loss, expected["rtd_loss"].mean(), **STATES)


def test_from_checkpoints_of_two_tables_to_one(tmp_path):
    model, batch = tiny_pair("nes").eval(), batch_of(tiny_rows())
    model.save_pair(tmp_path)
    folders, expected = (tmp_path / "generator", tmp_path / "discriminator"), model(**batch).rtd_loss
    for sharing in ("gdes", "es"):
        fields = {"embedding_sharing": sharing, "sampling_temperature": 0}
        found = HfDebertaForRtdPretraining.from_pair(*folders, **fields).eval()
        assert torch.allclose(found(**batch).rtd_loss, expected) == (sharing == "gdes")  # "es" drops the second table


def test_the_tables_of_a_pair_belong_together():
    """accelerate puts input and output embeddings into one group of FSDP2 if they share their weight."""
    model = tiny_pair()
    with pytest.raises(ValueError, match="save_pair, resize generator and discriminator"):
        model.resize_token_embeddings(130)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
