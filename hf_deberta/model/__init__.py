"""The model. Saved folders contain copies of these files, which import only torch, Transformers and one another."""
