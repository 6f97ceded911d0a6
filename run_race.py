"""Fine-tune on multiple choice: `python run_race.py --help`.

The code is in hf_deberta/fine_tuning/tasks/race.py. Where the package is installed, use `hf-deberta race`.
"""

from hf_deberta_command import import_command

if __name__ == "__main__":
    import_command("race").main()
