"""Stop a diverging run, and keep its last finite checkpoint.

    >>> class MyTrainer(FiniteValuesMixin, AtomicCheckpointsMixin): ...
    >>> MyTrainer(model, arguments, ...).train()
    InputError: the loss is not finite at step 3 (learning rate 1e+30), so the run stops: lower --learning_rate, ...

Every step notes on the device whether its loss and its gradient norm are finite. The note is read where `Trainer`
waits for the device anyway: when it logs, evaluates or saves. All processes stop together.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from hf_deberta.training.checkpoints import checkpoints_by_step
from hf_deberta.training.errors import InputError

VALUES = ("loss", "gradient norm")
MIN_GRADIENT_SCALE = 1e-4  # under fp16 GradScaler starts at 2**16, and halves its scale at each step that overflows


class FiniteValuesMixin(Trainer):
    """Mixin for a `Trainer` that stops with an InputError when a loss, a gradient norm or a weight is not finite.

    A model with such weights is not saved. With fp16, steps that overflow are skipped by the gradient scaler, and only
    many of them in a row stop the run. Evaluation and prediction stop if a loss or a prediction is not finite.

    Put it before the other `Trainer` classes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_own_optimizer = self.optimizer is not None
        self.scales_gradients = self.args.fp16
        if self.scales_gradients:  # the loss of a skipped step would make the logged mean NaN
            self.args.logging_nan_inf_filter = True
        self.add_callback(_StartOfTraining(self))
        self.reset_failures()

    def reset_failures(self) -> None:
        self.failure = torch.zeros(3, device=self.args.device)  # step, learning rate, index in VALUES; 0 if none
        self.learning_rate = 0.0  # of the last step

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._note_failure("loss", loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._note_failure("gradient norm", grad_norm)
        return grad_norm

    @torch.no_grad()
    def _note_failure(self, name: str, value: Any) -> None:
        """Note step and learning rate of the first value that is not finite, without waiting for the device."""
        if self.optimizer is not None:
            self.learning_rate = self.optimizer.param_groups[0]["lr"]
        if self.scales_gradients or not torch.is_tensor(value):  # DeepSpeed's norm is a number or None
            return
        value = value.full_tensor() if isinstance(value, DTensor) else value
        first = ~value.to(self.failure.device).isfinite() & (self.failure[0] == 0)
        for field, noted in enumerate((self.state.global_step + 1, self.learning_rate, VALUES.index(name))):
            self.failure[field].masked_fill_(first, noted)

    def check_training(self, weights: bool = True) -> None:
        """Stop if a step since the start of training had a value that is not finite, or if a weight is not finite."""
        step, scaler = self.state.global_step, self.accelerator.scaler if self.scales_gradients else None
        if scaler is not None and scaler.get_scale() < MIN_GRADIENT_SCALE:
            raise self._stop("gradients overflow in fp16, however small their scale,", step, ", or train with --bf16")
        failures = self.accelerator.gather(self.failure[None])
        if failures.any().item():
            step, self.learning_rate, value = min(failure for failure in failures.tolist() if failure[0])
            raise self._stop(f"the {VALUES[int(value)]} is not finite", step)
        if weights:
            finite = has_finite_weights(cast(nn.Module, self.model)).to(self.args.device)
            if not self.accelerator.gather(finite[None]).all().item():
                raise self._stop("a weight is not finite", step)

    def _stop(self, problem: str, step: float, more_advice: str = "") -> InputError:
        clipping = "" if 0 < (self.args.max_grad_norm or 0) <= 1 else "set --max_grad_norm 1, "
        advice = f"lower --learning_rate, {clipping}or look for damaged rows in the data{more_advice}"
        checkpoints = [*checkpoints_by_step(Path(str(self.args.output_dir))).values()]
        way_out = "no checkpoint was written, so start over with --resume_from_checkpoint false"
        if checkpoints:
            way_out = (
                "start over in another --output_dir, or continue there from an earlier checkpoint with "
                f"--resume_from_checkpoint PATH: {checkpoints[-1]} is finite, but may have begun to diverge"
            )
        where = f"at step {int(step)} (learning rate {self.learning_rate:g})"
        return InputError(f"{problem} {where}, so the run stops: {advice}; {way_out}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs or "train_loss" in logs:
            self.check_training(weights=False)
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.check_training()
        super().save_model(output_dir, _internal_call)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        if self.is_in_train:
            self.check_training()
        log_filter, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, False  # it would hide NaN
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = log_filter
        self._check_predictions(output.predictions)
        for name, value in (output.metrics or {}).items():
            if name.endswith("_loss") and not np.isfinite(value):
                raise self._no_result(f"{name} is {value}")
        return output

    def _check_predictions(self, predictions: Any) -> None:
        """Stop if predictions, an array or nested arrays, are not finite."""
        if isinstance(predictions, list | tuple):
            for part in predictions:
                self._check_predictions(part)
        elif predictions is not None and np.issubdtype(np.asarray(predictions).dtype, np.floating):
            number = np.size(predictions) - np.isfinite(predictions).sum()
            if number:
                raise self._no_result(f"{number:,} of {np.size(predictions):,} predictions are not finite")

    def _no_result(self, problem: str) -> InputError:
        if self.is_in_train:  # large but finite weights overflow in the forward pass
            return self._stop(problem, self.state.global_step)
        return InputError(
            f"{problem}: weights of the model or numbers in the rows are not finite, so there is no result to report"
        )


@torch.no_grad()
def has_finite_weights(model: nn.Module) -> torch.Tensor:
    """Return whether all weights of this process are finite, a bool tensor: one reduction over all of them."""
    weights = [weight.detach() for weight in model.parameters() if weight.is_floating_point()]
    weights = [weight for weight in weights if weight.element_size() > 1]  # frozen float8 has no norm
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    # the largest absolute value; unlike a sum of squares it does not overflow
    return nn.utils.get_total_norm([weight for weight in local if weight.numel()], float("inf")).isfinite()


class _StartOfTraining(TrainerCallback):
    """Forgets earlier failures, and follows the schedule of this run with its learning rate.

    A checkpoint that is resumed contains the rate of its own run, which may be shorter.
    """

    def __init__(self, trainer: FiniteValuesMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, *_: Any, optimizer: Any = None, lr_scheduler: Any = None, **kw: Any) -> None:
        self.trainer.reset_failures()
        rate = args.learning_rate
        is_ours = isinstance(lr_scheduler, LambdaLR) and not self.trainer.has_own_optimizer
        if not is_ours or len(set(lr_scheduler.base_lrs)) > 1:
            return
        current = [rate * factor(lr_scheduler.last_epoch) for factor in lr_scheduler.lr_lambdas]
        for group, value in zip(optimizer.param_groups, current, strict=True):
            group["initial_lr"], group["lr"] = rate, value
        lr_scheduler.load_state_dict(
            {**lr_scheduler.state_dict(), "base_lrs": [rate] * len(current), "_last_lr": current}
        )
