"""Show what the enhanced mask decoder (EMD) is for: `python demo.py --help`.

The code is in hf_deberta/commands/demo.py; where the package is installed, `hf-deberta demo` is the same.
"""

from hf_deberta_command import import_command

if __name__ == "__main__":
    import_command("demo").main()
