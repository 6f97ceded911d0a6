"""The commands of `hf-deberta` but for the fine-tuning tasks, which are in hf_deberta/fine_tuning/tasks."""
