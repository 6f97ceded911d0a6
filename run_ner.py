"""Fine-tune on named entities, or other labels of words: `python run_ner.py --help`.

The code is in hf_deberta/fine_tuning/tasks/ner.py. Where the package is installed, use `hf-deberta ner`.
"""

from hf_deberta_command import import_command

if __name__ == "__main__":
    import_command("ner").main()
