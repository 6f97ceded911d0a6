"""What is particular to a benchmark: its columns, features, answers, files and scores."""
