"""nGiE, the n-gram induced input encoding of DeBERTa v2: a convolution beside the first layer.

    output = LayerNorm( layer_1(x) + act(dropout(conv(x))) )

It sees what the embedding layer gave, mixes n neighbouring tokens, and is added to the first layer's
output. Neighbours of another document are not neighbours: with packed rows the convolution stops where
attention stops (the official code mixes across).
"""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration_hf_deberta import HfDebertaConfig


class NgramInputEncoding(nn.Module):
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
        token_mask: torch.Tensor | None,  # [B, N] of bool
        documents: torch.Tensor | None,  # [B, N], equal within a document
    ) -> torch.Tensor:
        mixed = self.conv(embeddings.mT).mT if documents is None else self._within_documents(embeddings, documents)
        if token_mask is not None:
            mixed = mixed * token_mask[..., None]
        mixed = self.activation(self.dropout(mixed))
        output = self.LayerNorm(layer_output + mixed)
        return output if token_mask is None else output * token_mask[..., None]

    def _within_documents(self, embeddings: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """The same convolution, one window per token, with other documents' tokens set to zero."""
        kernel = self.conv.kernel_size[0]
        margin = (kernel // 2, kernel // 2)
        windows = nn.functional.pad(embeddings.mT, margin).unfold(-1, kernel, 1)  # [B, hidden, N, kernel]
        neighbour = nn.functional.pad(documents, margin, value=-1).unfold(-1, kernel, 1)  # [B, N, kernel]
        windows = windows * (neighbour == documents[..., None])[:, None]
        batch, width, length, _ = windows.shape
        columns = windows.transpose(1, 2).reshape(batch * length, width, kernel)
        mixed = nn.functional.conv1d(columns, self.conv.weight, self.conv.bias, groups=self.conv.groups)
        return mixed.view(batch, length, width)
