"""`Trainer` for replaced token detection."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from hf_deberta.model.losses import IGNORED
from hf_deberta.pretraining.rtd_pretraining import (
    MODELS,
    HfDebertaForRtdPretraining,
    masked_and_real_tokens,
    mean_statistics,
)
from hf_deberta.pretraining.throughput import rtd_training_operations
from hf_deberta.pretraining.trainer import PretrainingTrainer
from hf_deberta.training.checkpoints import replace_folder
from hf_deberta.training.errors import InputError
from hf_deberta.training.uneven_batches import IS_FILLER

MIN_REPLACED_FOUND = 0.01  # by a discriminator that learns
STEPS_BEFORE_WARNING = 1000  # after the warmup

logger = logging.get_logger(__name__)


class RtdTrainer(PretrainingTrainer):
    """`PretrainingTrainer` for a `HfDebertaForRtdPretraining`; `save_model` writes two ordinary checkpoints.

    Each loss is divided by the number of its tokens in the whole optimization batch. Logs, in addition to `loss`:
    lm_loss, rtd_loss, masked_accuracy (of the generator's most likely tokens), and replaced_found and original_kept,
    the shares of replaced and of original tokens that the discriminator classifies correctly. These are means over the
    tokens since the last log. Evaluation logs the same as eval_... A discriminator that finds nothing long after the
    warmup is warned of once.

    Args:
        decoupled: as in the released script, step the generator first, then train the discriminator on the updated
            table with the tokens sampled before. One optimizer steps twice, once per model; a table shared by "es" is
            stepped twice, with one set of Adam moments. The logged grad_norm is the discriminator's. DDP needs
            find_unused_parameters, which is switched on unless the arguments set it.
    """

    final_models = MODELS

    def __init__(
        self,
        model: HfDebertaForRtdPretraining | None = None,
        args: TrainingArguments | None = None,
        *arguments: Any,
        decoupled: bool = False,
        **kwargs: Any,
    ):
        if decoupled and args is not None and args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True
        self.decoupled = decoupled
        super().__init__(model, args, *arguments, **kwargs)
        self.require_one_gpu_per_process("a pair")
        if decoupled and self.is_deepspeed_enabled:
            raise InputError("--decoupled steps the optimizer twice, which DeepSpeed's engine cannot: leave it out")
        self.warned = False  # that the discriminator finds nothing
        self.discriminator_inputs: list[dict[str, Any]] = []  # of this step, if decoupled
        # statistics of training and of evaluation
        self.sums: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """Count masked tokens and real tokens [2] of all micro-batches and processes."""
        self.discriminator_inputs = []  # a step that ran out of memory may have left some
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        pad_token_id = self.model.config.pad_token_id
        masks = [
            masked_and_real_tokens(batch["input_ids"], batch["labels"], batch.get("attention_mask"), pad_token_id)
            for batch in batch_samples
        ]
        items: list[Any] = []
        for masks_of_loss in zip(*masks, strict=True):
            # Trainer counts labels
            labels = [torch.zeros_like(mask, dtype=torch.long).masked_fill(~mask, IGNORED) for mask in masks_of_loss]
            items.append(super()._get_num_items_in_batch([{"labels": label} for label in labels], device))
        return torch.stack(items)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        sums = self.sums[model.training]
        for name, value in outputs.statistics.items():
            if name not in sums:
                sums[name] = torch.zeros_like(value)
            sums[name] += 0 * value if IS_FILLER in inputs else value
        if inputs.get("only") == "generator":
            generated = {"only": "discriminator", "replaced_ids": outputs.replaced_ids}
            self.discriminator_inputs.append({**inputs, **generated})
        return (loss, outputs) if return_outputs else loss

    def step_statistics(self) -> Iterable[torch.Tensor]:
        return [*self.sums[True].values(), *self.sums[False].values()]

    def reason_against_graphs(self) -> str | None:
        return "--decoupled" if self.decoupled else super().reason_against_graphs()

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if not self.decoupled:
            return super().training_step(model, inputs, num_items_in_batch)
        loss = super().training_step(model, {**inputs, "only": "generator"}, num_items_in_batch)
        if not self.accelerator.sync_gradients:
            return loss
        if self.args.max_grad_norm > 0:
            self._clip_grad_norm(model)
        optimizer: Any = self.optimizer
        optimizer.step()
        # None instead of zeros: the optimizer skips the generator when it steps the discriminator.
        optimizer.zero_grad(set_to_none=True)
        micro_batches, self.discriminator_inputs = self.discriminator_inputs, []
        for number, micro_batch in enumerate(micro_batches, 1):
            with nullcontext() if number == len(micro_batches) else self.accelerator.no_sync(model):
                loss = loss + super().training_step(model, micro_batch, num_items_in_batch)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Sample the same tokens in each evaluation, and leave the random numbers of training as they are."""
        device = self.args.device
        # fork_rng cannot save the states of the other kinds, such as mps
        devices, kind = ([device], device.type) if device.type in ("cuda", "xpu") else ([], "cuda")
        with torch.random.fork_rng(devices, device_type=kind):
            torch.manual_seed(self.args.seed + self.args.process_index)
            return super().evaluation_loop(*args, **kwargs)

    def operations(self, tokens: float, predictions: float) -> float:
        generator, discriminator = self.model.config.models()
        return rtd_training_operations(generator, discriminator, tokens, self.context_length, predictions)

    def publish_model(self, unfinished: Path, folder: Path) -> None:
        """Write generator and discriminator, each with the tokenizer. Checkpoints hold the training state instead."""
        pair = unfinished.with_name("pair")
        HfDebertaForRtdPretraining.from_pretrained(unfinished).save_pair(pair)
        for name in MODELS:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(pair / name)
        for name in MODELS:
            replace_folder(pair / name, folder / name)

    def read_final_model(self) -> HfDebertaForRtdPretraining:
        generator, discriminator = (Path(str(self.args.output_dir)) / name for name in MODELS)
        names = ("embedding_sharing", "rtd_weight", "sampling_temperature")
        fields = {name: getattr(self.model.config, name) for name in names}
        return HfDebertaForRtdPretraining.from_pair(generator, discriminator, {"dtype": self.model.dtype}, **fields)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        losses = [name for name in logs if name.endswith("loss") and name != "train_loss"]
        for prefix in (name.removesuffix("loss") for name in losses):
            means = self._mean_statistics(training=prefix == "")
            logs |= {prefix + name: value for name, value in means.items()}
            if prefix and "rtd_loss" in means:  # Trainer takes the mean of batches, which have more or fewer tokens
                logs[f"{prefix}loss"] = means["lm_loss"] + self.model.config.rtd_weight * means["rtd_loss"]
        super().log(logs, start_time)
        if logs.get("replaced_found", 1.0) < MIN_REPLACED_FOUND and not self.warned:
            warmup = self.args.get_warmup_steps(self.state.max_steps)
            self.warned = self.state.global_step >= warmup + STEPS_BEFORE_WARNING
            if self.warned and self.is_world_process_zero():
                config = self.model.config
                logger.warning(
                    f"At step {self.state.global_step:,} the discriminator finds {logs['replaced_found']:.1%} of the "
                    "replaced tokens: it calls nearly every token original, which is right for most. If that stays so, "
                    f"change one of these: --embedding_sharing gdes (now {config.embedding_sharing}), another "
                    f"--learning_rate (now {self.args.learning_rate:g}; small models need about 1e-3), a higher "
                    f"--rtd_weight (now {config.rtd_weight:g}), fewer --generator_layers, or for little text a smaller "
                    "vocabulary"
                )

    def _mean_statistics(self, training: bool) -> dict[str, float]:
        """Return means over the tokens of all processes since the last call."""
        sums = self.sums[training]
        if not sums:
            return {}
        values = torch.stack([value.float() for value in sums.values()])
        for value in sums.values():
            value.zero_()
        return mean_statistics(dict(zip(sums, self.accelerator.reduce(values, "sum").tolist(), strict=True)))
