"""`enable()`: Transformers' own DeBERTa classes compute with `hf_deberta.model`."""
