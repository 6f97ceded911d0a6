"""DeBERTa for Hugging Face Transformers. Importing this package registers its classes with the Auto classes."""

import transformers

from . import engines, metrics  # noqa: F401  # engines replaces functions of the model
from .in_tree.enable import disable, enable
from .model.attention import disentangled_attention
from .model.causal_language_model import HfDebertaForCausalLM
from .model.configuration_hf_deberta import PRESETS, HfDebertaConfig
from .model.enhanced_mask_decoder import HfDebertaForMaskedLM
from .model.modeling_heads import (
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
)
from .model.modeling_hf_deberta import HfDebertaModel
from .model.pretrained_model import AUTO_MAP, HfDebertaPreTrainedModel
from .model.replaced_token_detection import HfDebertaForPreTraining, replaced_token_labels
from .model.slots import reference_mode
from .serving.optimize import optimize
from .tokenization_hf_deberta import HfDebertaTokenizer
from .transformers_format import export_to_transformers

__version__ = "0.3.0"

transformers.AutoConfig.register(HfDebertaConfig.model_type, HfDebertaConfig, exist_ok=True)
for _auto_class, _reference in AUTO_MAP.items():
    if _auto_class.startswith("AutoModel"):
        _model_class = globals()[_reference.partition(".")[2]]
        getattr(transformers, _auto_class).register(HfDebertaConfig, _model_class, exist_ok=True)
transformers.AutoTokenizer.register(HfDebertaConfig, fast_tokenizer_class=HfDebertaTokenizer, exist_ok=True)


def __getattr__(name: str) -> type:
    """Import `QuestionAnswerer` at its first use: it needs the extra train, whose packages are slow to import."""
    if name == "QuestionAnswerer":
        from .question_answering import QuestionAnswerer

        return QuestionAnswerer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PRESETS",
    "HfDebertaConfig",
    "HfDebertaForCausalLM",
    "HfDebertaForEntityChoice",
    "HfDebertaForMaskedLM",
    "HfDebertaForMultipleChoice",
    "HfDebertaForPreTraining",
    "HfDebertaForQuestionAnswering",
    "HfDebertaForSequenceClassification",
    "HfDebertaForTokenClassification",
    "HfDebertaModel",
    "HfDebertaPreTrainedModel",
    "HfDebertaTokenizer",
    "disable",
    "disentangled_attention",
    "enable",
    "export_to_transformers",
    "metrics",
    "optimize",
    "reference_mode",
    "replaced_token_labels",
]
