"""`hf-deberta attention`: the page of a masked-language model and of a classifier, and mistakes."""

import pytest
import torch

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaForSequenceClassification
from hf_deberta.__main__ import main
from hf_deberta.pretraining.tokenizer_training import train_tokenizer

TEXT = "the new [MASK] opened"


@pytest.mark.parametrize("model_class", [HfDebertaForMaskedLM, HfDebertaForSequenceClassification])
def test_page(model_class, tmp_path, capsys):
    tokenizer = train_tokenizer([TEXT] * 20, 280, "bpe")
    torch.manual_seed(0)
    model_class(HfDebertaConfig.from_preset("tiny", vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "page.html"
    assert main(["attention", str(tmp_path), TEXT, "--output", str(file)]) == 0
    output, fills_masks = capsys.readouterr().out, model_class is HfDebertaForMaskedLM
    assert output.endswith(f"wrote {file}\n")
    assert ("is no masked-language model" in output) != fills_masks
    assert ('"with the mask decoder"' in file.read_text(encoding="utf-8")) == fills_masks
    with pytest.raises(SystemExit) as stopped:
        main(["attention", str(tmp_path), TEXT, "--output", str(tmp_path / "none" / "page.html")])
    assert stopped.value.code.startswith("hf-deberta attention: ") and "none" in stopped.value.code
