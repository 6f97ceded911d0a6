"""Methods of Transformers' `Trainer` that start with an underscore and that our trainers override or call.

Transformers may change them in any release. `tests/training/test_private_trainer_apis.py` names those that are missing
from the installed version, and finds uses that are not listed here. Where a callback or a public method does the job,
it is used instead.
"""

PRIVATE_TRAINER_METHODS = {
    "_get_output_dir": "AtomicCheckpointsMixin writes a checkpoint to another folder until it is complete",
    "_save_checkpoint": "AtomicCheckpointsMixin renames the folder when the checkpoint is complete",
    "_push_from_checkpoint": "AtomicCheckpointsMixin pushes complete checkpoints only, with the model's source files",
    "_get_train_sampler": "both trainers shuffle rows by seed and epoch alone, so that a run resumes exactly",
    "_get_eval_sampler": "FineTuningTrainer predicts in the order of the rows, also if training groups by length",
    "_run_epoch": "AtomicCheckpointsMixin makes no further step when it resumes a finished run",
    "_get_num_items_in_batch": "our trainers count the items of two losses, or answers to questions",
    "_clip_grad_norm": "RtdTrainer clips the gradients of generator and discriminator separately",
    "_get_grad_norm": "FiniteValuesMixin notes gradient norms that are not finite, also without clipping",
    "_issue_warnings_after_load": "RunTrainer does not name tied weights, which a checkpoint holds once, as missing",
    "_prepare_inputs": "two trainers move inputs to the device in their own prediction_step",
}
