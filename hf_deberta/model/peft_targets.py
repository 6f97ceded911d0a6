"""Default `target_modules` of PEFT's adapters for `HfDeberta` models: those of Transformers' `deberta-v2`.

PEFT looks them up by model type in tables of its own and offers no way to register one. A row for ours is added, and no
other row is changed. PEFT is not imported for that: the row is added when a model is created after `import peft`.
"""

import sys

TABLES = "peft.utils.constants"
SAME_MODULE_NAMES, MODEL_TYPE = "deberta-v2", "hf_deberta"


def register_default_targets() -> None:
    """Add a row to each of PEFT's tables that has one for `deberta-v2`, if PEFT was imported."""
    for name, table in list(vars(sys.modules.get(TABLES, sys)).items()):
        if name.startswith("TRANSFORMERS_MODELS_TO_") and SAME_MODULE_NAMES in table:
            table.setdefault(MODEL_TYPE, table[SAME_MODULE_NAMES])
