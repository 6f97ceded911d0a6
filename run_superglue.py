"""Fine-tune on SuperGLUE: `python run_superglue.py --help`.

The code is in hf_deberta/commands/superglue.py; where the package is installed, `hf-deberta superglue` is the same.
"""

from hf_deberta.commands.superglue import main

if __name__ == "__main__":
    main()
