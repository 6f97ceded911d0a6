"""What a saved folder needs to load where this package is not installed.

`save_pretrained` and `push_to_hub` put beside the weights: every source file a model needs (all are flat siblings,
so `trust_remote_code=True` finds them), an `auto_map` that names every head, and a model card.
"""

import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

MODEL_CARD = """---
library_name: transformers
tags:
- deberta
- hf_deberta
pipeline_tag: {pipeline_tag}
---

# {name}

A DeBERTa model (`{architecture}`: {layers} layers, {width} wide, vocabulary {vocabulary}).

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

With the `hf_deberta` package installed, `import hf_deberta` replaces `trust_remote_code=True`. `hf_deberta` can
also export this model to the format of Transformers' own classes: `export_to_transformers(model, folder)`.
"""

PIPELINE_TAGS = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}


def auto_classes() -> dict[str, type]:
    """Our class for each Auto class; the ReCoRD head has none in Transformers and goes under its own name."""
    from .configuration_hf_deberta import HfDebertaConfig
    from .enhanced_mask_decoder import HfDebertaForMaskedLM
    from .modeling_heads import (
        HfDebertaForEntityChoice,
        HfDebertaForMultipleChoice,
        HfDebertaForQuestionAnswering,
        HfDebertaForSequenceClassification,
        HfDebertaForTokenClassification,
    )
    from .modeling_hf_deberta import HfDebertaModel
    from .replaced_token_detection import HfDebertaForPreTraining

    return {
        "AutoConfig": HfDebertaConfig,
        "AutoModel": HfDebertaModel,
        "AutoModelForTextEncoding": HfDebertaModel,
        "AutoModelForMaskedLM": HfDebertaForMaskedLM,
        "AutoModelForPreTraining": HfDebertaForPreTraining,
        "AutoModelForSequenceClassification": HfDebertaForSequenceClassification,
        "AutoModelForTokenClassification": HfDebertaForTokenClassification,
        "AutoModelForQuestionAnswering": HfDebertaForQuestionAnswering,
        "AutoModelForMultipleChoice": HfDebertaForMultipleChoice,
        "HfDebertaForEntityChoice": HfDebertaForEntityChoice,
    }


def auto_map() -> dict[str, str]:
    """The `auto_map` of config.json: Auto class to "file.Class"."""
    return {auto: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for auto, cls in auto_classes().items()}


def write_code(folder: str | Path) -> None:
    """Copy this file and every sibling it reaches."""
    for source in {__file__, *get_relative_import_files(__file__)}:
        target = Path(folder) / Path(source).name
        if not target.exists() or target.read_bytes() != Path(source).read_bytes():
            shutil.copyfile(source, target)


def write_model_card(folder: str | Path, model, name: str | None = None) -> None:
    """A README.md that says how to load the model; one that is already there is left alone."""
    path = Path(folder) / "README.md"
    if path.exists():
        return
    architecture = type(model).__name__
    auto = next((auto for auto, cls in auto_classes().items() if cls.__name__ == architecture), "AutoModel")
    path.write_text(
        MODEL_CARD.format(
            name=name or Path(folder).resolve().name,
            architecture=architecture,
            layers=model.config.num_hidden_layers,
            width=model.config.hidden_size,
            vocabulary=model.config.vocab_size,
            auto_class=auto if auto.startswith("Auto") else "AutoModel",
            pipeline_tag=PIPELINE_TAGS.get(auto, "feature-extraction"),
        ),
        encoding="utf-8",
    )
