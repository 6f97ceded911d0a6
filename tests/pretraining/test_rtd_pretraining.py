"""Replaced token detection: official losses and gradients, what is drawn and counted, both ways to train, and files."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import golden_cases
import pytest
import torch
from golden_cases import part
from huggingface_hub.errors import StrictDataclassError
from numerics import assert_same_by_name, tiny_config
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    DebertaV2Model,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForMaskedLM,
    HfDebertaForPreTraining,
    export_to_transformers,
)
from hf_deberta.model import enhanced_mask_decoder
from hf_deberta.pretraining import rtd_pretraining
from hf_deberta.pretraining.gradient_disentangled_embedding import SHARINGS
from hf_deberta.pretraining.rtd_pretraining import (
    MODELS,
    HfDebertaForRtdPretraining,
    HfDebertaRtdConfig,
    RtdTrainer,
    sample_words,
)

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
STATES = {"atol": 2e-5, "rtol": 1e-4}  # of tests/golden, as the official tensors' README derives them
MASK = 4


def tiny_pair(sharing="gdes", seed=0, temperature=0.0, dtype=torch.float32, **fields):
    """Three and two layers. Temperature 0, so that the same words are drawn however a batch is cut."""
    torch.manual_seed(seed)
    discriminator = tiny_config(**{"num_hidden_layers": 3, **fields})
    config = HfDebertaRtdConfig.from_discriminator(
        discriminator, embedding_sharing=sharing, sampling_temperature=temperature
    )
    model = HfDebertaForRtdPretraining(config).to(dtype)
    if sharing == "gdes":
        torch.nn.init.normal_(model.discriminator.get_input_embeddings().delta, std=0.05)
    return model.train()


def tiny_rows(lengths=(12, 5, 9, 3, 11, 8, 4, 12), width=12):
    """Masked rows, padded to one width, that have 0 to 5 labels."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, length in enumerate(lengths):
        mask = (torch.arange(width) < length).long()
        original = torch.randint(5, 128, (width,), generator=generator) * mask
        chosen = torch.randperm(length, generator=generator)[: number % 6]
        labels = torch.full((width,), -100).scatter(0, chosen, original[chosen])
        ids = original.scatter(0, chosen, MASK)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def batch_of(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trained(model, **inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, gradients_of(model)


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
    found, wanted = output.statistics, expected["rtd_labels"]
    positive = expected["rtd_logits"][real] > 0
    assert found["masked"] == len(expected["lm_labels"])
    assert found["masked_right"] == (expected["lm_logits"].argmax(-1) == expected["lm_labels"]).sum()
    assert (found["replaced"], found["original"]) == ((wanted == 1).sum(), (wanted == 0).sum())
    assert found["replaced_found"] == ((wanted == 1) & positive).sum()
    assert found["original_kept"] == ((wanted == 0) & ~positive).sum()
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


def test_configuration_file_round_trip(tmp_path):
    config = HfDebertaRtdConfig.from_discriminator(
        tiny_config(pos_att_type=["c2p"]), embedding_sharing="es", rtd_weight=10, sampling_temperature=0.5
    )
    config.save_pretrained(tmp_path)
    found = HfDebertaRtdConfig.from_pretrained(tmp_path)
    assert {**found.to_dict(), "transformers_version": None} == {**config.to_dict(), "transformers_version": None}
    assert isinstance(found.generator, HfDebertaConfig) and found.generator.pos_att_type == ["c2p"]


def test_attention_backends_are_kept():
    discriminator = tiny_config(attn_implementation="eager")
    config = HfDebertaRtdConfig(discriminator=discriminator, generator=tiny_config(attn_implementation="sdpa"))
    model = HfDebertaForRtdPretraining(config)
    assert [getattr(model, name).config._attn_implementation for name in MODELS] == ["sdpa", "eager"]
    model.set_attn_implementation("eager")
    assert model.generator.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"embedding_sharing": "half"}, "one of gdes, es, nes, not 'half'"),
        ({"rtd_weight": -1}, "rtd_weight must be 0 or more, and finite, not -1"),
        ({"sampling_temperature": float("inf")}, "sampling_temperature must be 0 or more, and finite, not inf"),
        ({"sampling_temperature": float("nan")}, "not nan"),
        ({"generator": tiny_config(vocab_size=130)}, "vocab_size must be the same: it is 130 in the gen.* 128 in the"),
        ({"generator": tiny_config(vocab_size=130), "embedding_sharing": "nes"}, "read the same words"),
        ({"generator": tiny_config(hidden_size=64)}, "embedding_size must be the same.*or use embedding_sharing='nes'"),
        ({"generator": tiny_config(position_biased_input=True)}, "position_biased_input must be the same"),
        ({"generator_layers": 1}, "the enhanced mask decoder reads the layer before the last"),
    ],
)
def test_configurations_that_make_no_pair(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        if "generator_layers" in fields:
            HfDebertaRtdConfig.from_discriminator(tiny_config(), **fields)
        else:
            HfDebertaRtdConfig(discriminator=tiny_config(), **fields)


def test_unequal_widths_need_no_sharing():
    config = HfDebertaRtdConfig(
        generator=tiny_config(hidden_size=64), discriminator=tiny_config(), embedding_sharing="nes"
    )
    assert HfDebertaForRtdPretraining(config)(**batch_of(tiny_rows())).loss > 0


# ---- what is drawn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2**25], ids=["chunks", "at once"])
def test_words_are_drawn_from_the_guesses(at_once, monkeypatch):
    monkeypatch.setattr(rtd_pretraining, "MAX_CHUNK_LOGITS", at_once)
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    many = logits.repeat(20000 if at_once > 1 else 2000, 1)
    torch.manual_seed(0)
    for temperature in (0.5, 1.0, 3.0):
        found = sample_words(many, torch.nn.Identity(), temperature, 5).bincount(minlength=5) / len(many)
        expected = (logits / temperature).softmax(-1)
        deviation = (expected * (1 - expected) / len(many)).sqrt()
        assert ((found - expected).abs() < 5 * deviation).all(), temperature
    assert (sample_words(many, torch.nn.Identity(), 0, 5) == 3).all()
    assert (sample_words(many, torch.nn.Identity(), 1e-4, 5) == 3).all()
    uniform = sample_words(many, torch.nn.Identity(), 1e6, 5).bincount(minlength=5) / len(many)
    assert (uniform - 0.2).abs().max() < 0.05
    assert sample_words(many[:0], torch.nn.Identity(), 1.0, 5).shape == (0,)


def test_only_masked_tokens_are_replaced_and_by_the_generators_guesses():
    model, batch = tiny_pair(), batch_of(tiny_rows())
    output = model(**batch)
    masked = batch["labels"] >= 0
    with torch.no_grad():
        guesses = model.eval().generator(batch["input_ids"], batch["attention_mask"]).logits
    assert torch.equal(output.replaced_ids[masked], guesses.argmax(-1)[masked])
    assert torch.equal(output.replaced_ids[~masked], batch["input_ids"][~masked])
    assert not output.replaced_ids.requires_grad


@pytest.mark.parametrize("variant", ["a hook at the head", "int32", "as if compiled", "config"])
def test_words_come_the_same_other_ways(variant, monkeypatch):
    """The head's logits are asked for, or those of all positions; ids may be short."""
    batch = batch_of(tiny_rows())
    expected, gradients = trained(tiny_pair(), **batch)
    model = tiny_pair(sparse_prediction=variant != "config")
    if variant == "a hook at the head":
        model.generator.get_output_embeddings().register_forward_hook(lambda *_: None)
    elif variant == "int32":
        batch = {name: tensor.int() for name, tensor in batch.items()}
    elif variant == "as if compiled":
        monkeypatch.setattr(enhanced_mask_decoder, "is_tracing_or_compiling", lambda: True)
    found, same = trained(model, **batch)
    torch.testing.assert_close(found.loss, expected.loss)
    assert torch.equal(found.replaced_ids, expected.replaced_ids)
    assert found.statistics["masked_right"] == expected.statistics["masked_right"]
    assert_same_by_name(same, gradients)


def test_outputs_as_a_tuple():
    loss, lm_loss, rtd_loss, logits, *_ = tiny_pair()(**batch_of(tiny_rows()), return_dict=False)
    torch.testing.assert_close(loss, lm_loss + 50 * rtd_loss)
    assert logits.shape == (8, 12)


def test_draws_come_from_the_global_generator_of_random_numbers():
    model, batch = tiny_pair(temperature=1.0).eval(), batch_of(tiny_rows())
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(model(**batch).replaced_ids)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


# ---- what is counted ---------------------------------------------------------------------------------------------


def test_losses_by_hand():
    """MLM over masked tokens; RTD over real ones, where a word that was guessed right is an original."""
    model, batch = tiny_pair(dtype=torch.float64).eval(), batch_of(tiny_rows())
    real, masked = batch["attention_mask"].bool(), batch["labels"] >= 0
    originals = torch.where(masked, batch["labels"], batch["input_ids"])
    right = masked & (torch.arange(12) % 2 == 0)
    replaced = torch.where(masked & ~right, originals % 100 + 6, originals)
    output = model(**batch, replaced_ids=replaced)
    logits = model.generator(batch["input_ids"], batch["attention_mask"]).logits
    lm_loss = -logits.log_softmax(-1)[masked].gather(1, batch["labels"][masked][:, None]).mean()
    targets = (masked & ~right).double()
    scores = model.discriminator(replaced, batch["attention_mask"]).logits
    losses = torch.nn.functional.softplus(torch.where(targets == 1, -scores, scores))
    torch.testing.assert_close(output.lm_loss.double(), lm_loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(output.rtd_loss.double(), losses[real].mean(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(output.loss, output.lm_loss + 50 * output.rtd_loss)
    assert output.statistics["replaced"] == targets.sum() and output.statistics["original"] == (
        real.sum() - targets.sum()
    )


def test_padding_is_found_by_mask_or_by_id():
    model, batch = tiny_pair(), batch_of(tiny_rows())
    with_mask, gradients = trained(model, **batch)
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, 7)  # nobody's
    again, same = trained(model, **batch)
    torch.testing.assert_close(again.loss, with_mask.loss)
    assert_same_by_name(same, gradients)
    counts = {name: value for name, value in with_mask.statistics.items() if "loss" not in name}
    assert {name: again.statistics[name] for name in counts} == counts
    masked, real = rtd_pretraining.counted_tokens(
        batch["input_ids"], tiny_labels := batch_of(tiny_rows())["labels"], None, 0
    )
    assert torch.equal(real, batch["attention_mask"].bool()) and torch.equal(masked, tiny_labels >= 0)


def test_a_masked_token_may_read_as_padding():
    """The official generator puts in any word at random, padding too."""
    ids, labels = torch.tensor([[1, 0, 5, 0]]), torch.tensor([[-100, 9, -100, -100]])
    masked, real = rtd_pretraining.counted_tokens(ids, labels, None, 0)
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


def test_items_of_the_whole_batch_divide():
    model, batch = tiny_pair(), batch_of(tiny_rows())
    output = model(**batch)
    items = torch.tensor([100, 1000])
    scaled = model(**batch, num_items_in_batch=items)
    torch.testing.assert_close(scaled.lm_loss * 100, output.lm_loss * output.statistics["masked"])
    torch.testing.assert_close(scaled.rtd_loss * 1000, output.rtd_loss * batch["attention_mask"].sum())
    for name, value in output.statistics.items():
        torch.testing.assert_close(scaled.statistics[name], value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"labels": None}, "labels are needed"),
        ({"labels": torch.zeros(2, 3)}, r"labels must be \[B, N\] = \(8, 12\), not \(2, 3\)"),
        ({"replaced_ids": torch.zeros(2, 3)}, r"replaced_ids must be \[B, N\] = \(8, 12\)"),
        ({"attention_mask": torch.ones(8, 3)}, "attention_mask must be"),
        ({"only": "both"}, "only is None, 'generator' or 'discriminator', not 'both'"),
        ({"only": "discriminator"}, "give replaced_ids"),
        (
            {"num_items_in_batch": torch.tensor(5)},
            "two numbers, masked tokens and real tokens, not 5; RtdTrainer counts",
        ),
        ({"num_items_in_batch": 5}, "two numbers"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        tiny_pair()(**{**batch_of(tiny_rows()), **change})


# ---- which loss trains what --------------------------------------------------------------------------------------

WORDS = "generator.deberta.embeddings.word_embeddings.weight"


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_tables_learn_from_their_losses(sharing):
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
def test_the_state_of_training_round_trips(sharing, tmp_path):
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
def test_two_ordinary_checkpoints_and_back(sharing, tmp_path):
    model, batch = tiny_pair(sharing).eval(), batch_of(tiny_rows())
    output = model(**batch)
    numbers = torch.get_rng_state()
    model.save_pair(tmp_path)
    assert torch.equal(torch.get_rng_state(), numbers), "training goes on as if nothing had been saved"
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
    assert found.config.rtd_weight == 50 and found.config.generator.num_hidden_layers == 2
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, msg=name)
    torch.testing.assert_close(found.eval()(**batch).loss, output.loss)


@pytest.mark.parametrize("together", [False, True], ids=["two folders", "one folder"])
def test_going_on_from_released_checkpoints(together, tmp_path):
    """The official release holds the discriminator's whole table, and may hold its delta beside."""
    case = "case03c_v3_rtd_gdes"
    tensors, official = golden_cases.tensors(case), golden_cases.official_config(case)
    given, expected = part(tensors, "in/A/"), part(tensors, "out/A/")
    words = "deberta.embeddings.word_embeddings."
    weights = {name: part(tensors, f"w/{name}.") for name in MODELS}
    weights["discriminator"][words + "weight"] = expected["disc_effective_word_embeddings"]
    folders = [golden_cases.write_checkpoint(tmp_path / name, official[name], weights[name]) for name in MODELS]
    if together:
        (folders[0] / "config.json").rename(folders[1] / "generator_config.json")
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


def test_going_on_with_other_sharing(tmp_path):
    model, batch = tiny_pair("nes").eval(), batch_of(tiny_rows())
    model.save_pair(tmp_path)
    folders = tmp_path / "generator", tmp_path / "discriminator"
    expected = model(**batch).rtd_loss
    gdes = HfDebertaForRtdPretraining.from_pair(*folders, sampling_temperature=0).eval()
    assert gdes.discriminator.get_input_embeddings().delta.abs().max() > 0
    torch.testing.assert_close(gdes(**batch).rtd_loss, expected)
    es = HfDebertaForRtdPretraining.from_pair(*folders, embedding_sharing="es", sampling_temperature=0).eval()
    torch.testing.assert_close(
        es.discriminator.get_input_embeddings().table(), es.generator.get_input_embeddings().weight
    )
    assert not torch.allclose(es(**batch).rtd_loss, expected)


def test_the_discriminator_goes_to_plain_transformers(tmp_path):
    model, batch = tiny_pair(conv_kernel_size=0).eval(), batch_of(tiny_rows())
    export_to_transformers(model.folded_discriminator(), tmp_path)
    plain = DebertaV2Model.from_pretrained(tmp_path)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        found, expected = plain(**inputs).last_hidden_state, model.discriminator.deberta(**inputs).last_hidden_state
    torch.testing.assert_close(found[real], expected[real], **STATES)


def test_a_pair_is_not_resized():
    model = tiny_pair()
    with pytest.raises(ValueError, match="save_pair, resize generator and discriminator"):
        model.resize_token_embeddings(130)
    assert model.get_input_embeddings() is model.generator.deberta.embeddings.word_embeddings


def test_gradient_checkpointing_changes_nothing():
    model, batch = tiny_pair(dtype=torch.float64), batch_of(tiny_rows())
    _, expected = trained(model, **batch)
    model.gradient_checkpointing_enable()
    _, found = trained(model, **batch)
    assert_same_by_name(found, expected)


# ---- the trainer -------------------------------------------------------------------------------------------------


NUMBERS = ("loss", "lm_loss", "rtd_loss", "masked_accuracy", "replaced_found", "original_kept")


class ThroughEpochs(list):
    """Rows whose numbers go on counting in the next epoch, as those of `packing.Rows`."""

    def __getitem__(self, index):
        return super().__getitem__(index % len(self))


class Gradients(TrainerCallback):
    """Those that the optimizer gets in each step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(gradients_of(model))


def trainer_of(model, folder, decoupled=False, kind=RtdTrainer, callbacks=None, eval_dataset=None, **arguments):
    """Two steps over all rows, by plain gradient descent, if nothing else is said."""
    given = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return kind(
        model,
        TrainingArguments(str(folder), **{**given, **arguments}),
        train_dataset=ThroughEpochs(tiny_rows()),
        eval_dataset=eval_dataset,
        callbacks=callbacks,
        **({"decoupled": decoupled} if kind is RtdTrainer else {}),
    )


def run(trainer):
    trainer.train()
    logs = [{name: entry[name] for name in NUMBERS} for entry in trainer.state.log_history if "loss" in entry]
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, logs


def assert_same_runs(found, expected):
    (parameters, logs), (others, other_logs) = found, expected
    assert_same_by_name(parameters, others)
    for ours, theirs in zip(logs, other_logs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("decoupled", [False, True], ids=["joint", "decoupled"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_accumulation_changes_nothing(sharing, decoupled, tmp_path):
    """Rows have 0 to 5 labels and 3 to 12 tokens."""
    found = []
    for size, pieces in ((8, 1), (2, 4), (1, 8)):
        gradients = Gradients()
        trainer = trainer_of(
            tiny_pair(sharing),
            tmp_path,
            decoupled,
            callbacks=[gradients],
            per_device_train_batch_size=size,
            gradient_accumulation_steps=pieces,
        )
        found.append((*run(trainer), gradients.steps))
    for parameters, logs, steps in found[1:]:
        assert_same_runs((parameters, logs), found[0][:2])
        for ours, theirs in zip(steps, found[0][2], strict=True):
            assert_same_by_name(ours, theirs)


def test_the_step_is_that_of_one_batch(tmp_path):
    model, batch = tiny_pair(), batch_of(tiny_rows())
    output, expected = trained(model, **batch)
    gradients = Gradients()
    _, logs = run(trainer_of(tiny_pair(), tmp_path, callbacks=[gradients], max_steps=1))
    assert_same_by_name(gradients.steps[0], expected)
    assert logs[0]["loss"] == pytest.approx(output.loss.item())
    assert logs[0]["loss"] == pytest.approx(logs[0]["lm_loss"] + 50 * logs[0]["rtd_loss"])
    assert logs[0]["masked_accuracy"] == output.statistics["masked_right"] / output.statistics["masked"]
    assert logs[0]["original_kept"] == pytest.approx(
        (output.statistics["original_kept"] / output.statistics["original"]).item()
    )


def test_trainer_counts_both_kinds_of_items(tmp_path):
    trainer = trainer_of(tiny_pair(), tmp_path)
    rows = tiny_rows()
    batches = [batch_of(rows[:4]), batch_of(rows[4:])]
    items = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    labels, real = (batch_of(rows)[name] for name in ("labels", "attention_mask"))
    assert items.tolist() == [(labels >= 0).sum(), real.sum()]
    packed = [{name: batch[name] for name in ("input_ids", "labels")} for batch in batches]
    assert trainer._get_num_items_in_batch(packed, torch.device("cpu")).tolist() == items.tolist()
    assert trainer._get_num_items_in_batch([], torch.device("cpu")) is None


def test_another_trainer_is_told_so(tmp_path):
    with pytest.raises(ValueError, match="RtdTrainer counts both, Trainer does not"):
        trainer_of(tiny_pair(), tmp_path, kind=Trainer).train()


def test_logs_are_means_over_the_window_and_evaluation_has_its_own(tmp_path):
    rows = tiny_rows()
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "eval_dataset": rows[:7]}
    each = trainer_of(tiny_pair(), tmp_path, **arguments)
    _, logs = run(each)
    both = run(trainer_of(tiny_pair(), tmp_path, logging_steps=2, **arguments))[1]
    assert len(logs) == 2 and len(both) == 1
    for name in ("lm_loss", "rtd_loss", "masked_accuracy", "original_kept"):  # the same rows, so as many tokens
        if name != "original_kept":
            assert both[0][name] == pytest.approx((logs[0][name] + logs[1][name]) / 2, rel=1e-5)
    evaluated = [entry for entry in each.state.log_history if "eval_loss" in entry]
    with torch.no_grad():
        whole = each.model.eval()(**batch_of(rows[:7]))
    assert evaluated[-1]["eval_lm_loss"] == pytest.approx(whole.lm_loss.item(), rel=1e-5)
    assert evaluated[-1]["eval_rtd_loss"] == pytest.approx(whole.rtd_loss.item(), rel=1e-5)
    assert each.evaluate()["eval_rtd_loss"] == pytest.approx(whole.rtd_loss.item(), rel=1e-5)


def test_without_coupling_decoupled_is_joint(tmp_path):
    """With tables of their own, and plain gradient descent, the order of the two steps does not matter."""
    runs = [run(trainer_of(tiny_pair("nes"), tmp_path, decoupled)) for decoupled in (True, False)]
    assert_same_runs(*runs)


@pytest.mark.parametrize("sharing", ["gdes", "es"])
def test_decoupled_by_hand(sharing, tmp_path):
    """The generator steps; the discriminator reads the new table, but the words drawn before."""
    model, batch = tiny_pair(sharing), batch_of(tiny_rows())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    drawn = model(**batch, only="generator")
    drawn.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model(**batch, only="discriminator", replaced_ids=drawn.replaced_ids).loss.backward()
    optimizer.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert_same_by_name(run(trainer_of(tiny_pair(sharing), tmp_path, True, max_steps=1))[0], expected)
    joint = run(trainer_of(tiny_pair(sharing), tmp_path, max_steps=1))[0]
    assert not torch.allclose(
        joint[WORDS] if sharing == "es" else joint[DELTA], expected[WORDS if sharing == "es" else DELTA]
    )


DELTA = "discriminator.deberta.embeddings.word_embeddings.delta"


@pytest.mark.parametrize("sharing", SHARINGS)
def test_each_step_moves_one_model(sharing, tmp_path):
    """Adam with weight decay and moments from the step before; gradients are clipped for each model."""
    trainer = trainer_of(
        tiny_pair(sharing), tmp_path, True, optim="adamw_torch", weight_decay=0.1, max_grad_norm=0.1, max_steps=3
    )
    moved, norms = [], []
    create = trainer.create_optimizer

    def create_and_watch(*args):
        optimizer = create(*args)
        step = optimizer.step

        def has_global_hooks_or_modes(*args, **kwargs):
            before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            norms.append(torch.cat([g.flatten() for g in gradients_of(trainer.model).values()]).norm().item())
            step(*args, **kwargs)
            moved.append({n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])})

        optimizer.step = has_global_hooks_or_modes
        return optimizer

    trainer.create_optimizer = create_and_watch
    trainer.train()
    assert len(moved) == 6
    for first, second in zip(moved[::2], moved[1::2], strict=True):
        assert {name.partition(".")[0] for name in first} == {"generator"}
        assert {n for n in second if n.startswith("generator.")} == ({WORDS} if sharing == "es" else set())
        assert WORDS in first and "discriminator.mask_predictions.dense.weight" in second
    assert norms == pytest.approx([0.1] * 6, rel=1e-3)
    steps = {name: trainer.optimizer.state[p]["step"].item() for name, p in trainer.model.named_parameters()}
    assert {name for name, number in steps.items() if number != 3} == ({WORDS} if sharing == "es" else set())
    assert trainer.lr_scheduler.last_epoch == 3


@pytest.mark.parametrize("decoupled", [False, True], ids=["joint", "decoupled"])
@pytest.mark.parametrize("sharing", ["gdes", "es"])
def test_resumes_to_the_bit(sharing, decoupled, tmp_path):
    """Dropout is on, words are drawn, and the checkpoint stands in the middle of an epoch."""
    arguments = {"max_steps": 5, "optim": "adamw_torch", "lr_scheduler_type": "linear", "max_grad_norm": 1.0}
    arguments |= {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}

    def fresh():
        return trainer_of(tiny_pair(sharing, temperature=1.0, **DROPOUT), tmp_path, decoupled, **arguments)

    whole, logs = run(fresh())
    resumed = fresh()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole[name]), name
    last = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert [entry["lm_loss"] for entry in last] == [entry["lm_loss"] for entry in logs]
    loaded = HfDebertaForRtdPretraining.from_pretrained(tmp_path / "checkpoint-5")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_arguments_that_decoupled_training_needs(tmp_path):
    trainer = trainer_of(tiny_pair(), tmp_path, decoupled=True)
    assert trainer.args.ddp_find_unused_parameters is True
    trainer = trainer_of(tiny_pair(), tmp_path, decoupled=True, ddp_find_unused_parameters=False)
    assert trainer.args.ddp_find_unused_parameters is False
    assert trainer_of(tiny_pair(), tmp_path).args.ddp_find_unused_parameters is None


def runs_of_both_kinds(folder, processes):
    """What a run over all rows makes of a pair, with so many processes at work."""
    size = 4 // processes
    return {
        (sharing, decoupled): run(trainer_of(tiny_pair(sharing), folder, decoupled, per_device_train_batch_size=size))
        for sharing, decoupled in (("gdes", False), ("es", True))
    }


def sharded_gradients(rank):
    """Of half the rows, by FSDP2: the discriminator looks into the generator's table inside the pair's forward."""
    model, rows = tiny_pair(), tiny_rows()
    for layer in (*model.generator.deberta.encoder.layer, *model.discriminator.deberta.encoder.layer):
        fully_shard(layer)
    fully_shard(model)
    whole = batch_of(rows)
    items = torch.stack([(whole["labels"] >= 0).sum(), whole["attention_mask"].sum()])
    output = model(**batch_of(rows[4 * rank : 4 * rank + 4]), num_items_in_batch=items)
    (2 * output.loss).backward()  # gradients are averaged
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def test_two_processes_train_as_one(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found, sharded = torch.load(tmp_path / "found.pt", weights_only=False)
    assert_same_by_name(sharded, trained(tiny_pair(), **batch_of(tiny_rows()))[1])
    for kind, expected in runs_of_both_kinds(tmp_path, 1).items():
        assert_same_runs(found[kind], expected)


def one_of_two(rank, folder, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    results = runs_of_both_kinds(folder, 2), sharded_gradients(rank)
    if rank == 0:
        torch.save(results, Path(folder) / "found.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(one_of_two, (sys.argv[1], port), nprocs=2, start_method="fork")
