"""DeBERTa for Hugging Face Transformers: importing this package registers it with the Auto classes."""

import transformers

from .in_tree.enable import disable, enable
from .model.attention import disentangled_attention
from .model.causal_language_model import HfDebertaForCausalLM
from .model.checkpoint_conversion import export_to_transformers
from .model.configuration_hf_deberta import PRESETS, HfDebertaConfig
from .model.enhanced_mask_decoder import HfDebertaForMaskedLM
from .model.hub_export import auto_classes
from .model.modeling_heads import (
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
)
from .model.modeling_hf_deberta import HfDebertaModel, HfDebertaPreTrainedModel
from .model.replaced_token_detection import HfDebertaForPreTraining, replaced_token_labels
from .tokenization_hf_deberta import HfDebertaTokenizer

__version__ = "0.2.0"

transformers.AutoConfig.register(HfDebertaConfig.model_type, HfDebertaConfig, exist_ok=True)
for _auto, _class in auto_classes().items():
    if _auto.startswith("AutoModel"):
        getattr(transformers, _auto).register(HfDebertaConfig, _class, exist_ok=True)
transformers.AutoTokenizer.register(HfDebertaConfig, fast_tokenizer_class=HfDebertaTokenizer, exist_ok=True)

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
    "replaced_token_labels",
]
