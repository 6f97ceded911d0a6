"""The commands of `hf-deberta`. Those that train also start with `accelerate launch -m hf_deberta.commands.glue`."""
