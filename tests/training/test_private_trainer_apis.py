"""The private methods of Trainer that our trainers override or call exist, and are listed here.

Transformers may change them in any release. Where a callback or a public method does the job, it is used instead.
So are the private names of PyTorch in graphed_steps.py and cuda_graphs.py.
"""

import ast
from pathlib import Path

from test_private_apis import private_names
from transformers import Trainer

PRIVATE_TRAINER_METHODS = {
    "_get_output_dir": "AtomicCheckpointsMixin writes a checkpoint to another folder until it is complete",
    "_save_checkpoint": "AtomicCheckpointsMixin renames the folder when the checkpoint is complete",
    "_push_from_checkpoint": "AtomicCheckpointsMixin pushes complete checkpoints only, with the model's source files",
    "_save": "AtomicCheckpointsMixin saves tied weights once, also if FSDP2 or DeepSpeed has gathered each of them",
    "_load_from_checkpoint": "AtomicCheckpointsMixin says in one sentence that a checkpoint of FSDP needs FSDP",
    "_get_train_sampler": "both trainers shuffle rows by seed and epoch alone, so that a run resumes exactly",
    "_get_eval_sampler": "RunTrainer predicts in the order of the rows, also if training groups by length",
    "_init_training_state": "AtomicCheckpointsMixin finds the best checkpoint in a folder that was moved or copied",
    "_run_epoch": "AtomicCheckpointsMixin makes no further step when it resumes a run that ended or stopped early",
    "_get_num_items_in_batch": "our trainers count the items of two losses, or answers to questions",
    "_clip_grad_norm": "RtdTrainer clips the gradients of generator and discriminator separately",
    "_get_grad_norm": "FiniteValuesMixin notes gradient norms that are not finite, also without clipping",
    "_issue_warnings_after_load": "RunTrainer does not name tied weights, which a checkpoint holds once, as missing",
    "_prepare_inputs": "two trainers move inputs to the device in their own prediction_step",
}

# purpose -> private names of PyTorch in graphed_steps.py and cuda_graphs.py
PRIVATE_TORCH_NAMES = {
    "tensors in nested outputs": "_pytree",
    "set many gradients to zero in one call": "_foreach_zero_",
    "settings, weights and hooks that a graph would not follow": "_modules _parameters _buffers _backward_hooks "
    "_post_accumulate_grad_hooks",
    "free the memory of a failed capture, if they exist": "_C _cuda_endAllocateToPool "
    "_cuda_endAllocateCurrentStreamToPool _cuda_releasePool",
}

PACKAGE = Path(__file__).parents[2] / "hf_deberta"
FILES = [path for folder in ("training", "pretraining", "fine_tuning") for path in (PACKAGE / folder).rglob("*.py")]


def test_every_private_method_in_use_is_listed():
    used = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                used.add(node.name)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
    private = {name for name in vars(Trainer) if name.startswith("_") and not name.startswith("__")}
    assert used & private == set(PRIVATE_TRAINER_METHODS)


def test_every_private_name_of_pytorch_in_graphed_steps_is_listed():
    files = (PACKAGE / "training" / name for name in ("graphed_steps.py", "cuda_graphs.py"))
    used, defined = private_names(ast.parse("".join(file.read_text(encoding="utf-8") for file in files)))
    assert used - defined == {name for names in PRIVATE_TORCH_NAMES.values() for name in names.split()}
