"""`accelerate launch -m hf_deberta.commands.superglue`; the code is in hf_deberta/fine_tuning/tasks/superglue.py."""

from hf_deberta.fine_tuning.tasks.superglue import main

if __name__ == "__main__":
    main()
