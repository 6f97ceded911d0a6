"""Fine-tune on questions with answers in a text: `python run_squad.py --help`.

The code is in hf_deberta/fine_tuning/tasks/squad.py. Where the package is installed, use `hf-deberta squad`.
"""

from hf_deberta_command import import_command

if __name__ == "__main__":
    import_command("squad").main()
