"""The command `hf-deberta` as python -m hf_deberta."""

from hf_deberta_command import main

if __name__ == "__main__":
    raise SystemExit(main())
