"""`accelerate launch -m hf_deberta.commands.ner`; the code is in hf_deberta/fine_tuning/tasks/ner.py."""

from hf_deberta.fine_tuning.tasks.ner import main

if __name__ == "__main__":
    main()
