"""Pretrain a DeBERTaV3: `python run_rtd.py --help`.

The code is in hf_deberta/commands/rtd.py; where the package is installed, `hf-deberta rtd` is the same.
"""

from hf_deberta_command import import_command

if __name__ == "__main__":
    import_command("rtd").main()
