"""nGiE, the n-gram induced input encoding of DeBERTa v2 (paper section 5.3): a convolution beside the first layer.

    output = LayerNorm( layer_1(x) + act(dropout(conv(x))) )

x is the output of the embedding layer; the convolution mixes n neighbouring tokens. In a packed row it mixes only
tokens of the same document, as attention does. (The official code mixes across documents.)
"""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration_hf_deberta import HfDebertaConfig


class NgramInputEncoding(nn.Module):
    """Adds a convolution of the embeddings to the output of the first layer."""

    def __init__(self, config: HfDebertaConfig):
        super().__init__()
        kernel = config.conv_kernel_size
        self.conv = nn.Conv1d(
            config.hidden_size, config.hidden_size, kernel, padding=kernel // 2, groups=config.conv_groups
        )
        self.activation = ACT2FN[config.conv_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        embeddings: torch.Tensor,  # [B, N, hidden], zero at padding
        layer_output: torch.Tensor,  # [B, N, hidden]
        token_mask: torch.Tensor | None,  # [B, N] of bool, True for real tokens
        documents: torch.Tensor | None,  # [B, N], equal within a document
    ) -> torch.Tensor:
        """Return the new output of the first layer [B, N, hidden], zero at padding."""
        if documents is None:
            convolved = self.conv(embeddings.mT).mT
        else:
            convolved = self._convolve_documents(embeddings, documents)
        if token_mask is not None:
            convolved = convolved * token_mask[..., None]
        convolved = self.activation(self.dropout(convolved))
        output = self.LayerNorm(layer_output + convolved)
        return output if token_mask is None else output * token_mask[..., None]

    def _convolve_documents(self, embeddings: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """Return the convolution within documents: one window per token, zero at tokens of other documents."""
        kernel = self.conv.kernel_size[0]
        margin = (kernel // 2, kernel // 2)
        windows = nn.functional.pad(embeddings.mT, margin).unfold(-1, kernel, 1)  # [B, hidden, N, kernel]
        neighbours = nn.functional.pad(documents, margin, value=-1).unfold(-1, kernel, 1)  # [B, N, kernel]
        windows = windows * (neighbours == documents[..., None])[:, None]
        batch, width, length, _ = windows.shape
        columns = windows.transpose(1, 2).reshape(batch * length, width, kernel)
        convolved = self.conv(columns)[..., kernel // 2]  # called as a module: an adapter may have replaced it
        return convolved.view(batch, length, width)
