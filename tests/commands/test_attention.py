"""`hf-deberta attention`: the page of a masked-language model and of a classifier, and mistakes."""

import re

import pytest
import torch

from hf_deberta import (
    HfDebertaConfig,
    HfDebertaForMaskedLM,
    HfDebertaForPreTraining,
    HfDebertaForSequenceClassification,
)
from hf_deberta.__main__ import main
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

TEXT = "the new [MASK] opened"


def save(model_class, folder) -> HfDebertaConfig:
    tokenizer = train_tokenizer([TEXT] * 20, 280, "bpe")
    torch.manual_seed(0)
    config = HfDebertaConfig.from_preset("tiny", vocab_size=len(tokenizer))
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config


@pytest.mark.parametrize("model_class", [HfDebertaForMaskedLM, HfDebertaForSequenceClassification])
def test_page(model_class, tmp_path, capsys):
    save(model_class, tmp_path)
    file = tmp_path / "page.html"
    assert main(["attention", str(tmp_path), TEXT, "--output", str(file)]) == 0
    output, fills_masks = capsys.readouterr().out, model_class is HfDebertaForMaskedLM
    assert output.endswith(f"wrote {file}\n")
    assert ("no masked-language head" in output) != fills_masks
    assert ('"with the mask decoder"' in file.read_text(encoding="utf-8")) == fills_masks
    main(["attention", str(tmp_path), "the new", "opened", "--output", str(file)])
    assert capsys.readouterr().out == f"wrote {file}\n" and '"the new / opened"' in file.read_text(encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["attention", str(tmp_path), TEXT, "--output", str(tmp_path / "none" / "page.html")])
    assert stopped.value.code.startswith("hf-deberta attention: ") and "none" in stopped.value.code


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "are required: text"),
        (
            [TEXT, "--generator", "--architecture", "HfDebertaForMaskedLM"],
            "not allowed with argument --generator",
        ),
        ([TEXT, "--generator"], "no generator beside the discriminator .pytorch_model.generator.bin"),
    ],
)
def test_mistakes(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["attention", str(tmp_path), *flags])
    assert re.search(message, f"{stopped.value.code} {capsys.readouterr().err}")


def test_generator_beside_a_discriminator(tmp_path, capsys):
    config = save(HfDebertaForPreTraining, tmp_path)
    torch.save(HfDebertaForMaskedLM(config).state_dict(), tmp_path / "pytorch_model.generator.bin")
    command = ["attention", str(tmp_path), TEXT, "--output", str(tmp_path / "page.html")]
    main(command)
    assert "--generator" in capsys.readouterr().out
    main([*command, "--generator"])
    assert "discriminator" not in capsys.readouterr().out
    assert '"with the mask decoder"' in (tmp_path / "page.html").read_text(encoding="utf-8")
