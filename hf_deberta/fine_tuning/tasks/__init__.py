"""One file a benchmark: columns, features, metrics, submission files."""
