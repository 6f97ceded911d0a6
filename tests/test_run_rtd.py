"""`run_rtd.py` from the command line: two ordinary checkpoints, continuing from them, finished runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from example_rows import write_corpus
from fine_tuning_models import results, run_script
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from hf_deberta import HfDebertaConfig
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
    """From two folders, or from one with the generator's weights beside the discriminator's."""
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
    card = (first / "discriminator" / "README.md").read_text()
    assert "HfDebertaForPreTraining" in card and "- rtd_loss: " in card and "training_steps: " in card

    pair = ["--generator_name_or_path", first / "generator", "--discriminator_name_or_path", first / "discriminator"]
    if sharing == "nes":  # as in Microsoft's release
        with pytest.raises(SystemExit, match="no generator beside the discriminator .*--generator_name_or_path"):
            run_rtd(*pair[2:], *RUN, *common, "--output_dir", second)
        generator = load_file(first / "generator" / "model.safetensors")
        torch.save(generator, first / "discriminator" / "pytorch_model.generator.bin")
        pair = pair[2:]
    changed = ["--config_overrides", "hidden_dropout_prob=0.2", "--emd_steps", 1]
    run_rtd(*pair, *RUN, *common, *changed, "--output_dir", second, "--max_steps", 1, "--learning_rate", "1e-7")
    for name in MODELS:
        config = HfDebertaConfig.from_pretrained(second / name)
        assert (config.hidden_dropout_prob, config.emd_steps) == (0.2, 1)
    for name in ("generator", "discriminator"):
        before, after = (load_file(folder / name / "model.safetensors") for folder in (first, second))
        assert all(torch.allclose(value, after[key], atol=1e-5) for key, value in before.items())


def test_a_finished_run_is_not_trained_again(text, tmp_path, caplog):
    """The two checkpoints are loaded; one that is damaged is written again from the last checkpoint."""
    arguments = [*TINY, "--decoupled", "--max_steps", 3, "--lr_scheduler_type", "constant", "--train_file", text]
    run_rtd(*arguments, "--output_dir", tmp_path)
    names = [f"{name}/{file}" for name in MODELS for file in ("model.safetensors", "README.md")]
    names += ["train_results.json", "trainer_state.json"]
    before = {name: (tmp_path / name).read_bytes() for name in names}
    run_rtd(*arguments, "--output_dir", tmp_path)
    assert "it is finished: nothing is trained" in caplog.text
    assert f"Try: hf-deberta classify --model_name_or_path {tmp_path}/discriminator" in caplog.records[-1].message
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
