"""DeBERTa for Hugging Face Transformers: importing this package registers it with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from .attention import disentangled_attention
from .configuration_hf_deberta import PRESETS, HfDebertaConfig
from .enhanced_mask_decoder import HfDebertaForMaskedLM
from .modeling_heads import (
    HfDebertaForEntityChoice,
    HfDebertaForMultipleChoice,
    HfDebertaForQuestionAnswering,
    HfDebertaForSequenceClassification,
    HfDebertaForTokenClassification,
)
from .modeling_hf_deberta import HfDebertaModel, HfDebertaPreTrainedModel
from .replaced_token_detection import HfDebertaForPreTraining, replaced_token_labels
try:
    from .tokenization_hf_deberta import HfDebertaTokenizer
except ImportError:
    HfDebertaTokenizer = None

__version__ = "0.1.0"

AutoConfig.register(HfDebertaConfig.model_type, HfDebertaConfig, exist_ok=True)
for _auto, _model in (
    (AutoModel, HfDebertaModel),
    (AutoModelForTextEncoding, HfDebertaModel),
    (AutoModelForMaskedLM, HfDebertaForMaskedLM),
    (AutoModelForPreTraining, HfDebertaForPreTraining),
    (AutoModelForSequenceClassification, HfDebertaForSequenceClassification),
    (AutoModelForTokenClassification, HfDebertaForTokenClassification),
    (AutoModelForQuestionAnswering, HfDebertaForQuestionAnswering),
    (AutoModelForMultipleChoice, HfDebertaForMultipleChoice),
):
    _auto.register(HfDebertaConfig, _model, exist_ok=True)
HfDebertaTokenizer and AutoTokenizer.register(HfDebertaConfig, fast_tokenizer_class=HfDebertaTokenizer, exist_ok=True)

__all__ = [
    "PRESETS",
    "HfDebertaConfig",
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
    "disentangled_attention",
    "replaced_token_labels",
]
