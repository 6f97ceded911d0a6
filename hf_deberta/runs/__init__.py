"""What pretraining and fine-tuning runs share: checkpoints, row order, model cards, command line."""
