"""One module per benchmark: columns, model inputs, metrics, prediction files."""
