"""Fine-tune on GLUE, or on your own texts or text pairs: `python run_glue.py --help`.

The code is in hf_deberta/fine_tuning/tasks/glue.py. Where the package is installed, use `hf-deberta glue`.
"""

from hf_deberta_command import import_command

if __name__ == "__main__":
    import_command("glue").main()
