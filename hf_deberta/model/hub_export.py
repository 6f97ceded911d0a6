"""Make a saved folder loadable where this package is not installed.

`save_pretrained` and `push_to_hub` write next to the weights: the source files of the model (flat, so that
`trust_remote_code=True` finds them), an `auto_map` in config.json with every head, and a model card.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, ModelCard
from transformers.dynamic_module_utils import get_relative_import_files

if TYPE_CHECKING:
    # Transformers finds the files that a model needs by searching the text for relative imports. These lines make the
    # file of every head part of every saved folder, and cause no import circle because they never run.
    from .causal_language_model import HfDebertaForCausalLM  # noqa: F401
    from .configuration_hf_deberta import HfDebertaConfig
    from .enhanced_mask_decoder import HfDebertaForMaskedLM  # noqa: F401
    from .modeling_heads import HfDebertaForSequenceClassification  # noqa: F401
    from .modeling_hf_deberta import HfDebertaModel  # noqa: F401
    from .replaced_token_detection import HfDebertaForPreTraining  # noqa: F401

# Auto class -> "file.Class": the `auto_map` of config.json. Entity choice has no Auto class and uses its own name.
AUTO_MAP = {
    "AutoConfig": "configuration_hf_deberta.HfDebertaConfig",
    "AutoModel": "modeling_hf_deberta.HfDebertaModel",
    "AutoModelForTextEncoding": "modeling_hf_deberta.HfDebertaModel",
    "AutoModelForMaskedLM": "enhanced_mask_decoder.HfDebertaForMaskedLM",
    "AutoModelForCausalLM": "causal_language_model.HfDebertaForCausalLM",
    "AutoModelForPreTraining": "replaced_token_detection.HfDebertaForPreTraining",
    "AutoModelForSequenceClassification": "modeling_heads.HfDebertaForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_heads.HfDebertaForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_heads.HfDebertaForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_heads.HfDebertaForMultipleChoice",
    "HfDebertaForEntityChoice": "modeling_heads.HfDebertaForEntityChoice",
}

PIPELINE_TAGS = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}

MODEL_CARD = """---
library_name: transformers
tags:
- deberta
- hf_deberta
pipeline_tag: {pipeline_tag}
---

# {name}

A DeBERTa model: `{architecture}` with {layers} layers, hidden size {hidden_size} and a
vocabulary of {vocab_size} tokens.

```python
{load}
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=False)  # the tokenizer needs no custom code
```

This needs Transformers 5.12 or later. With the `hf_deberta` package installed, `import hf_deberta` replaces
`trust_remote_code=True`. The package can also export this model to the format of Transformers' own classes:
`export_to_transformers(model, folder)`.
"""


def write_code(folder: str | Path) -> None:
    """Copy this file, and every sibling that it imports directly or indirectly, into `folder`."""
    for source in {__file__, *get_relative_import_files(__file__)}:
        target = Path(folder) / Path(source).name
        if not target.exists() or target.read_bytes() != Path(source).read_bytes():
            shutil.copyfile(source, target)


def loading_code(auto_class: str, name: str) -> str:
    """Return the Python lines of the model card that load the model."""
    if not auto_class.startswith("Auto"):
        return f'''from hf_deberta import {auto_class}
from transformers import AutoTokenizer

model = {auto_class}.from_pretrained("{name}")'''
    return f'''from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{name}", trust_remote_code=True)'''


def write_model_card(folder: str | Path, architecture: str, config: "HfDebertaConfig", name: str | None = None) -> None:
    """Write a README.md that shows how to load the model, unless `folder` has one."""
    path = Path(folder) / "README.md"
    if path.exists():
        return
    auto_class = next((auto for auto, cls in AUTO_MAP.items() if cls.endswith(f".{architecture}")), "AutoModel")
    name = name or Path(folder).resolve().name
    path.write_text(
        MODEL_CARD.format(
            name=name,
            architecture=architecture,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            load=loading_code(auto_class, name),
            pipeline_tag=PIPELINE_TAGS.get(auto_class, "feature-extraction"),
        ),
        encoding="utf-8",
    )


def upload(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
    **commit: Any,
) -> str:
    """Upload the files of a saved folder, without its subfolders, to a Hub repository; create it if it is missing.

    If the repository already has a model card, that card is kept, and `tags` are added to it. `commit` may have
    `commit_message` and `commit_description`.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    has_card = api.file_exists(repo_id, "README.md", revision=revision)
    if tags:
        path = api.hf_hub_download(repo_id, "README.md", revision=revision) if has_card else Path(folder) / "README.md"
        card = ModelCard.load(path)
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
        card.save(Path(folder) / "README.md")
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        ignore_patterns=["*/*", *(["README.md"] if has_card and not tags else [])],
        revision=revision,
        create_pr=create_pr,
        **{"commit_message": "Upload model", **commit},
    )
