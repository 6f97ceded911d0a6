"""Pictures of disentangled attention: the parts of the scores, the position tables, and an HTML page.

hf-deberta attention microsoft/deberta-base "The new [MASK] opened." --output page.html
hf-deberta attention microsoft/deberta-base --serve
"""

from .page import attention_page
from .plots import plot_attention, plot_position_table, position_norms
from .scores import attention_parts
from .server import attention_app

__all__ = [
    "attention_app",
    "attention_page",
    "attention_parts",
    "plot_attention",
    "plot_position_table",
    "position_norms",
]
