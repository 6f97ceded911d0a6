"""Made-up data and a tiny model for the `--demo` flag of the scripts."""
