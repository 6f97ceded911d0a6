"""Fine-tune on questions with answers in a text: `python run_squad.py --help`.

The code is in hf_deberta/commands/squad.py; where the package is installed, `hf-deberta squad` is the same.
"""

from hf_deberta.commands.squad import main

if __name__ == "__main__":
    main()
