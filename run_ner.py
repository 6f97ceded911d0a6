"""Fine-tune on named entities, or other labels of words: `python run_ner.py --help`.

The code is in hf_deberta/commands/ner.py; where the package is installed, `hf-deberta ner` is the same.
"""

from hf_deberta.commands.ner import main

if __name__ == "__main__":
    main()
