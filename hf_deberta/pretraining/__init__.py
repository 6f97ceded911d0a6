"""From text to a pretrained checkpoint."""
