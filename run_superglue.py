"""Fine-tune on SuperGLUE: `python run_superglue.py --help`.

The code is in hf_deberta/fine_tuning/tasks/superglue.py. Where the package is installed, use `hf-deberta superglue`.
"""

from hf_deberta_command import import_command

if __name__ == "__main__":
    import_command("superglue").main()
