"""Fine-tune on multiple choice: `python run_race.py --help`.

The code is in hf_deberta/commands/race.py; where the package is installed, `hf-deberta race` is the same.
"""

from hf_deberta.commands.race import main

if __name__ == "__main__":
    main()
