"""What a saved folder needs to load where this package is not installed.

`save_pretrained` and `push_to_hub` put beside the weights: every source file a model needs (all are flat siblings,
so `trust_remote_code=True` finds them), an `auto_map` that names every head, and a model card.
"""

import shutil
from pathlib import Path

from huggingface_hub import HfApi, ModelCard
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
{load}
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=False)  # it is plain files
```

With the `hf_deberta` package installed, `import hf_deberta` replaces `trust_remote_code=True`. `hf_deberta` can
also export this model to the format of Transformers' own classes: `export_to_transformers(model, folder)`.
"""

PIPELINE_TAGS = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}


def auto_classes() -> dict[str, type]:
    """Our class for each Auto class; the ReCoRD head has none in Transformers and goes under its own name.

    Imports are made here, late, because the models import this file to save themselves; they also make every head's
    file travel, whichever head is saved.
    """
    from .causal_language_model import HfDebertaForCausalLM
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
        "AutoModelForCausalLM": HfDebertaForCausalLM,
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


def how_to_load(auto: str, name: str) -> str:
    if not auto.startswith("Auto"):
        return f'''from hf_deberta import {auto}
from transformers import AutoTokenizer

model = {auto}.from_pretrained("{name}")'''
    return f'''from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{name}", trust_remote_code=True)'''


def write_model_card(folder: str | Path, architecture: str, config, name: str | None = None) -> None:
    """A README.md that says how to load the model; one that is already there is left alone."""
    path = Path(folder) / "README.md"
    if path.exists():
        return
    auto = next((auto for auto, cls in auto_classes().items() if cls.__name__ == architecture), "AutoModel")
    path.write_text(
        MODEL_CARD.format(
            name=name or Path(folder).resolve().name,
            architecture=architecture,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            vocabulary=config.vocab_size,
            load=how_to_load(auto, name or Path(folder).resolve().name),
            pipeline_tag=PIPELINE_TAGS.get(auto, "feature-extraction"),
        ),
        encoding="utf-8",
    )


def upload(
    folder: str | Path,
    repo_id: str,
    *,
    commit_message: str = "Upload model",
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
) -> str:
    """Upload the files of a saved folder (not its subfolders) to a Hub repository, which is made if need be.

    The repository's own model card, if it has one, is kept and gets the tags.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    has_card = api.file_exists(repo_id, "README.md", revision=revision)
    if tags:
        card = ModelCard.load(repo_id, token=token) if has_card else ModelCard.load(Path(folder) / "README.md")
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
        card.save(Path(folder) / "README.md")
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        ignore_patterns=["*/*", *(["README.md"] if has_card and not tags else [])],
        commit_message=commit_message,
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )
