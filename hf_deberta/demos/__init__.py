"""Data and a tiny untrained model for the `--demo` flag of each fine-tuning script."""
