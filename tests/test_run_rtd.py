"""`run_rtd.py` from the command line: two ordinary checkpoints, continuing from them, finished runs, bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from example_rows import write_corpus
from fine_tuning_models import results, run_script
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, DebertaV2Model

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForSequenceClassification,
    export_to_transformers,
)
from hf_deberta.pretraining.rtd_pretraining import MODELS

RUN = ["--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", "4", "--learning_rate", "1e-3"]
RUN += ["--max_seq_length", "32"]
TINY = ["--config_preset", "tiny", "--train_tokenizer", "300", "--tokenizer_type", "bpe", *RUN]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt")


def run_rtd(*arguments: object) -> None:
    run_script("run_rtd.py", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["gdes", "es", "nes"])
def test_from_text_to_two_checkpoints_and_continue(text, tmp_path, sharing):
    first, second = tmp_path / "first", tmp_path / "second"
    common = ["--train_file", text, "--embedding_sharing", sharing, "--logging_steps", 2]
    run_rtd(*TINY, *common, "--output_dir", first, "--max_steps", 4)
    for name in ("lm_loss", "rtd_loss", "masked_accuracy", "replaced_found", "original_kept"):
        assert results(first)[f"eval_{name}"] >= 0
    logged = [x for x in json.loads((first / "trainer_state.json").read_text())["log_history"] if "loss" in x]
    assert len(logged) == 2 and all(x["tokens_per_second"] > 0 and x["rtd_loss"] > 0 for x in logged)

    generator = AutoModelForMaskedLM.from_pretrained(first / "generator")
    discriminator = AutoModelForPreTraining.from_pretrained(first / "discriminator")
    assert AutoTokenizer.from_pretrained(first / "discriminator").mask_token == "[MASK]"
    assert generator.config.num_hidden_layers == discriminator.config.num_hidden_layers == 2  # a decoder needs two
    tables = [model.get_input_embeddings().weight for model in (generator, discriminator)]
    assert torch.equal(*tables) == (sharing == "es")
    assert torch.allclose(*tables, atol=0.1) == (sharing != "nes")
    HfDebertaForSequenceClassification.from_pretrained(first / "discriminator", num_labels=2)
    export_to_transformers(discriminator, tmp_path / "exported")
    DebertaV2Model.from_pretrained(tmp_path / "exported")
    card = (first / "discriminator" / "README.md").read_text()
    assert "HfDebertaForPreTraining" in card and "- rtd_loss: " in card and "training_steps: " in card

    pair = ["--generator_name_or_path", first / "generator", "--discriminator_name_or_path", first / "discriminator"]
    changed = ["--config_overrides", "hidden_dropout_prob=0.2", "--emd_steps", 1]
    run_rtd(*pair, *RUN, *common, *changed, "--output_dir", second, "--max_steps", 1, "--learning_rate", "1e-7")
    for name in MODELS:
        config = HfDebertaConfig.from_pretrained(second / name)
        assert (config.hidden_dropout_prob, config.emd_steps) == (0.2, 1)
    for name in ("generator", "discriminator"):
        before, after = (load_file(folder / name / "model.safetensors") for folder in (first, second))
        assert all(torch.allclose(value, after[key], atol=1e-5) for key, value in before.items())


@pytest.mark.slow
def test_continue_from_a_pair_in_one_folder(text, tmp_path):
    """As Microsoft's release: weights saved by `torch.save`, the generator's beside the discriminator's."""
    first, released, second = tmp_path / "first", tmp_path / "released", tmp_path / "second"
    run_rtd(*TINY, "--train_file", text, "--output_dir", first, "--max_steps", 1)
    AutoTokenizer.from_pretrained(first / "discriminator").save_pretrained(released)
    for name, file in {"discriminator": "pytorch_model.bin", "generator": "pytorch_model.generator.bin"}.items():
        torch.save(load_file(first / name / "model.safetensors"), released / file)
    shutil.copy(first / "discriminator" / "config.json", released)
    on = ["--discriminator_name_or_path", released, "--train_file", text, *RUN, "--max_steps", 1]
    run_rtd(*on, "--output_dir", second, "--learning_rate", "1e-7", "--emd_steps", 1)
    for name in MODELS:
        before, after = (load_file(folder / name / "model.safetensors") for folder in (first, second))
        assert all(torch.allclose(value, after[key], atol=1e-5) for key, value in before.items())
        assert HfDebertaConfig.from_pretrained(second / name).emd_steps == 1
    (released / "pytorch_model.generator.bin").unlink()
    with pytest.raises(SystemExit, match="released has no generator beside the discriminator .pytorch_model.generator"):
        run_rtd(*on, "--output_dir", tmp_path / "third")


def test_a_finished_run_is_not_trained_again(text, tmp_path, caplog):
    """The two checkpoints are loaded; one that is damaged is written again from the last checkpoint."""
    arguments = [*TINY, "--decoupled", "--max_steps", 3, "--lr_scheduler_type", "constant", "--train_file", text]
    run_rtd(*arguments, "--output_dir", tmp_path)
    names = [f"{name}/{file}" for name in MODELS for file in ("model.safetensors", "README.md")]
    names += ["train_results.json", "trainer_state.json"]
    before = {name: (tmp_path / name).read_bytes() for name in names}
    run_rtd(*arguments, "--output_dir", tmp_path)
    assert "it is finished: nothing is trained" in caplog.text
    assert before == {name: (tmp_path / name).read_bytes() for name in names}
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    for name in names[:1] + names[2:3]:
        (tmp_path / name).write_bytes(before[name][:-1] + b"x")
    run_rtd(*arguments, "--output_dir", tmp_path)
    assert "is damaged (discriminator/model.safetensors has another checksum" in caplog.text
    assert all((tmp_path / name).read_bytes() == before[name] for name in names if name.endswith(".safetensors"))
    losses, metrics = ("eval_lm_loss", "eval_rtd_loss"), json.loads((tmp_path / "eval_results.json").read_text())
    shutil.rmtree(tmp_path / "checkpoint-3")
    run_rtd(*arguments, "--output_dir", tmp_path)
    again = json.loads((tmp_path / "eval_results.json").read_text())
    assert [again[name] for name in losses] == pytest.approx([metrics[name] for name in losses], rel=1e-3)
    (tmp_path / "generator" / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match=r"damaged \(generator/model.safetensors is missing\), and no checkpoint"):
        run_rtd(*arguments, "--output_dir", tmp_path)
    with pytest.raises(SystemExit, match=r"run_rtd.py: .* other settings: rtd_weight 50.0, now 10.0; .*--output_dir"):
        run_rtd(*arguments, "--output_dir", tmp_path, "--rtd_weight", 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --config_preset, --config_name (a new pair)"),
        (["--generator_name_or_path", "x"], "--generator_name_or_path needs --discriminator_name_or_path"),
        ([*TINY, "--push_to_hub"], "--push_to_hub uploads one model, but this script writes two"),
        ([*TINY, "--rtd_weight", -1], "rtd_weight must be 0 or more and finite, not -1"),
        ([*TINY, "--config_overrides", "max_position_embeddings=20"], "more than the 20 absolute positions of"),
        ([*TINY, "--do_train", "false"], "random weights: give --discriminator_name_or_path"),
        (
            ["--generator_name_or_path", "g", "--discriminator_name_or_path", "d", "--generator_layers", 2],
            "--generator_layers is for a new generator, but g has its layers",
        ),
    ],
)
def test_bad_input_is_reported_in_one_line(text, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        run_rtd(*arguments, "--train_file", text, "--output_dir", tmp_path / "out", "--use_cpu")
    assert message in stopped.value.code and stopped.value.code.startswith("run_rtd.py: ")
    assert not (tmp_path / "out" / "_tokens").exists()  # reported before the corpus is tokenized
