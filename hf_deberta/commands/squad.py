"""`accelerate launch -m hf_deberta.commands.squad`; the code is in hf_deberta/fine_tuning/tasks/squad.py."""

from hf_deberta.fine_tuning.tasks.squad import main

if __name__ == "__main__":
    main()
