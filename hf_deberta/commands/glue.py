"""`accelerate launch -m hf_deberta.commands.glue`; the code is in hf_deberta/fine_tuning/tasks/glue.py."""

from hf_deberta.fine_tuning.tasks.glue import main

if __name__ == "__main__":
    main()
