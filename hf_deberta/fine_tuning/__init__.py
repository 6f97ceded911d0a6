"""From a checkpoint to a fine-tuned task."""
