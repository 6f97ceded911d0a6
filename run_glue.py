"""Fine-tune on GLUE, or on your own texts or text pairs: `python run_glue.py --help`.

The code is in hf_deberta/commands/glue.py; where the package is installed, `hf-deberta glue` is the same.
"""

from hf_deberta.commands.glue import main

if __name__ == "__main__":
    main()
