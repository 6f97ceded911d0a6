"""`accelerate launch -m hf_deberta.commands.race`; the code is in hf_deberta/fine_tuning/tasks/race.py."""

from hf_deberta.fine_tuning.tasks.race import main

if __name__ == "__main__":
    main()
