"""Pretraining and fine-tuning around the models. Nothing in here travels to the Hub."""
