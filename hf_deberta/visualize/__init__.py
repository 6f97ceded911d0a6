"""Pictures of disentangled attention: the parts of the scores, the position tables, and an HTML page.

hf-deberta attention microsoft/deberta-base "The new [MASK] opened." --output page.html
"""

from .page import attention_page
from .plots import plot_attention, plot_position_table, position_norms
from .scores import attention_parts

__all__ = [
    "attention_page",
    "attention_parts",
    "plot_attention",
    "plot_position_table",
    "position_norms",
]
