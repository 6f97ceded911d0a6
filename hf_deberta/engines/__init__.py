"""The speed: faster functions for those of `hf_deberta.model`, which they replace when the package is imported."""

from ..model import attention, batch_layout, enhanced_mask_decoder, slots
from .attention_auto import checked_backend
from .attention_sdpa import sdpa_attention
from .linear_cross_entropy import loss_without_logits
from .onednn import linear_by_onednn
from .unpadding import unpadded_where_faster
from .weight_cache import from_weight_cache


def _triton_attention(*call) -> attention.Result:
    from .attention_triton import triton_attention  # imported late: it reads what is installed

    return triton_attention(*call)


def _triton_unsupported_reason(*call) -> str | None:
    from .attention_triton import unsupported_reason

    return unsupported_reason(*call)


slots.linear_on_cpu.use(linear_by_onednn)
slots.from_cache.use(from_weight_cache)
batch_layout.unpadded.use(unpadded_where_faster)
attention.choose_backend.use(checked_backend)
enhanced_mask_decoder.vocabulary_loss.use(loss_without_logits)
attention.BACKENDS["sdpa"] = attention.Backend(sdpa_attention)
attention.BACKENDS["triton"] = attention.Backend(
    _triton_attention, _triton_unsupported_reason, supports_query_positions=False
)
