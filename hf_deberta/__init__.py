"""DeBERTa for Hugging Face Transformers: importing this package registers it with the Auto classes."""

import transformers

from .attention import disentangled_attention
from .causal_language_model import HfDebertaForCausalLM
from .checkpoint_conversion import export_to_transformers
from .configuration_hf_deberta import PRESETS, HfDebertaConfig
from .enable import disable, enable
from .enhanced_mask_decoder import HfDebertaForMaskedLM
from .hub_export import auto_classes
from .modeling_heads import (
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
)
from .modeling_hf_deberta import HfDebertaModel, HfDebertaPreTrainedModel
from .replaced_token_detection import HfDebertaForPreTraining, replaced_token_labels
from .tokenization_hf_deberta import HfDebertaTokenizer

__version__ = "0.1.0"

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
