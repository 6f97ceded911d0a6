"""Shared by pretraining and fine-tuning runs: checkpoints, row order, run identity, model cards, command line."""
