"""Pretrain a DeBERTa on text: `python run_mlm.py --help`.

The code is in hf_deberta/commands/mlm.py; where the package is installed, `hf-deberta mlm` is the same.
"""

from hf_deberta_command import import_command

if __name__ == "__main__":
    import_command("mlm").main()
