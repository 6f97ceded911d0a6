"""The model: exactly the files that a saved folder may carry to the Hub."""
