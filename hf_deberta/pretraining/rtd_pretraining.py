"""Replaced token detection (RTD, section 3.1 of the DeBERTaV3 paper): a generator and a discriminator as one model.

    L = L_MLM(generator) + rtd_weight * L_RTD(discriminator)

The generator (`HfDebertaForMaskedLM`, same width, half the layers) predicts masked tokens. At each masked position one
token is sampled from its predictions, without gradient. The discriminator (`HfDebertaForPreTraining`) classifies every
real token as original or replaced. It is the model to fine-tune afterwards.

    >>> config = HfDebertaRtdConfig.from_discriminator(HfDebertaConfig.from_preset("v3-small", vocab_size=32000))
    >>> pair = HfDebertaForRtdPretraining(config)
    >>> RtdTrainer(pair, arguments, collator, rows).train()
    >>> pair.save_pair("my-deberta")  # two ordinary checkpoints: my-deberta/generator, my-deberta/discriminator

The released script differs from the paper: rtd_weight is 10, and training is decoupled, `RtdTrainer(decoupled=True)`.
"""

import os
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils.generic import ModelOutput, can_return_tuple

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaForPreTraining, replaced_token_labels
from hf_deberta.model.batch_layout import real_tokens
from hf_deberta.model.enhanced_mask_decoder import sample_tokens
from hf_deberta.model.input_checks import check_tensors
from hf_deberta.model.losses import IGNORED, loss_divisor
from hf_deberta.model.pretrained_model import HfDebertaPreTrainedModel
from hf_deberta.pretraining.gradient_disentangled_embedding import (
    SHARINGS,
    GradientDisentangledEmbedding,
    fold,
    share_embeddings,
    unfold,
)
from hf_deberta.pretraining.released_generator import load_released_generator

MODELS = ("generator", "discriminator")


@strict
class HfDebertaRtdConfig(PreTrainedConfig):
    """Configuration of a generator, a discriminator, and their joint training.

    >>> HfDebertaRtdConfig(discriminator=HfDebertaConfig.from_preset("v3-base")).generator.num_hidden_layers
    6

    Args:
        discriminator (`HfDebertaConfig`): the discriminator.
        generator (`HfDebertaConfig`): the generator; by default the same with half the layers, as published.
        embedding_sharing (`str`): "gdes", "es" or "nes", see `gradient_disentangled_embedding`.
        rtd_weight (`float`): weight of the discriminator's loss; 50 in the paper, 10 in the released script.
        sampling_temperature (`float`): tokens are sampled from softmax(logits / temperature); 0 takes the most likely.
    """

    model_type = "hf_deberta_rtd"
    sub_configs = dict.fromkeys(MODELS, HfDebertaConfig)
    keys_to_ignore_at_inference = ["lm_loss", "rtd_loss", "replaced_ids", "statistics"]

    generator: HfDebertaConfig | dict | None = None
    discriminator: HfDebertaConfig | dict | None = None
    embedding_sharing: str = "gdes"
    rtd_weight: float | int = 50.0
    sampling_temperature: float | int = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        for name in MODELS:
            if isinstance(fields := getattr(self, name), dict):
                setattr(self, name, HfDebertaConfig.from_dict(fields))
        if self.discriminator is None:
            self.discriminator = HfDebertaConfig()
        if self.generator is None:
            self.generator = with_fewer_layers(self.models()[1])
        kwargs.setdefault("attn_implementation", {"": None})  # keeps the implementations of the two models
        super().__post_init__(**kwargs)

    @classmethod
    def from_discriminator(
        cls, discriminator: HfDebertaConfig, generator_layers: int | None = None, **fields: Any
    ) -> "HfDebertaRtdConfig":
        """Make a pair whose generator has `generator_layers` layers, by default half of the discriminator's.

        >>> HfDebertaRtdConfig.from_discriminator(HfDebertaConfig.from_preset("v3-small"), rtd_weight=10)
        """
        return cls(generator=with_fewer_layers(discriminator, generator_layers), discriminator=discriminator, **fields)

    def models(self) -> tuple[HfDebertaConfig, HfDebertaConfig]:
        """Return the configurations of generator and discriminator."""
        return cast(HfDebertaConfig, self.generator), cast(HfDebertaConfig, self.discriminator)

    @property
    def pad_token_id(self) -> int | None:
        return self.models()[1].pad_token_id

    def validate_pair(self) -> None:
        if self.embedding_sharing not in SHARINGS:
            raise ValueError(f"embedding_sharing must be one of {', '.join(SHARINGS)}, not {self.embedding_sharing!r}")
        for name in ("rtd_weight", "sampling_temperature"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more and finite, not {getattr(self, name)}")
        models = self.models()
        reasons = {"vocab_size": "both have the same vocabulary"}
        if self.embedding_sharing != "nes":  # the discriminator uses the generator's tables
            names = ["embedding_size", "position_biased_input"]
            names += ["max_position_embeddings"] if models[1].position_biased_input else []
            reasons |= dict.fromkeys(names, "or use embedding_sharing='nes'")
        for name, reason in reasons.items():
            generator, discriminator = (getattr(model, name) for model in models)
            if generator != discriminator:
                raise ValueError(
                    f"{name} must be equal: it is {generator} in the generator and {discriminator} in the "
                    f"discriminator; {reason}"
                )


def with_fewer_layers(config: HfDebertaConfig, layers: int | None = None) -> HfDebertaConfig:
    """Return a copy with so many layers, by default half; at least two if it has an enhanced mask decoder."""
    minimum = 2 if config.uses_mask_decoder else 1
    config = deepcopy(config)
    config.num_hidden_layers = max(config.num_hidden_layers // 2, minimum) if layers is None else layers
    config.validate()
    return config


@dataclass
class RtdOutput(ModelOutput):
    """Output of a pair. If only one model runs, the fields of the other are None.

    `loss` is the weighted sum of both losses. `logits` [B, N] are the discriminator's, `replaced_ids` [B, N] its input.
    `statistics` are sums over the tokens of the batch, without gradient: see `mean_statistics`.
    """

    loss: torch.Tensor | None = None
    lm_loss: torch.Tensor | None = None
    rtd_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    replaced_ids: torch.Tensor | None = None
    statistics: dict[str, torch.Tensor] | None = None


class HfDebertaForRtdPretraining(PreTrainedModel):
    """Generator and discriminator with shared embeddings, and their loss.

    >>> output = pair(input_ids=masked_ids, labels=labels, attention_mask=attention_mask)
    >>> output.loss.backward()

    `save_pretrained` and `from_pretrained` keep the training state, with deltas and tables apart. `save_pair` and
    `from_pair` write and read two ordinary checkpoints.
    """

    config: HfDebertaRtdConfig
    config_class = HfDebertaRtdConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    accepts_loss_kwargs = True
    _no_split_modules = ["HfDebertaLayer"]
    # the names of this package, as for each of the two models
    _can_set_attn_implementation = HfDebertaPreTrainedModel._can_set_attn_implementation
    get_correct_attn_implementation = HfDebertaPreTrainedModel.get_correct_attn_implementation

    def __init__(self, config: HfDebertaRtdConfig):
        super().__init__(config)
        generator, discriminator = config.models()
        self.generator = HfDebertaForMaskedLM(generator)
        self.discriminator = HfDebertaForPreTraining(discriminator)
        share_embeddings(self.generator, self.discriminator, config.embedding_sharing)
        self.post_init()
        self._keys_to_ignore_on_load_unexpected = set()  # the pair needs the keys that one model ignores

    @torch.no_grad()
    def initialize_weights(self) -> None:
        super().initialize_weights()
        for module in self.modules():  # the two models do not initialize these
            if isinstance(module, GradientDisentangledEmbedding):
                init.zeros_(module.delta)

    def get_input_embeddings(self) -> nn.Module:
        return self.generator.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Return the generator's, which share their weight with its input embeddings: FSDP2 keeps both in one group."""
        return self.generator.get_output_embeddings()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise ValueError(
            "a pair cannot be resized, since its tables belong together: save_pair, resize generator and "
            "discriminator, and join them with from_pair"
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,  # [B, N], masked
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,  # [B, N]: original ids of masked tokens, -100 elsewhere
        cu_seq_lens_q: torch.Tensor | None = None,
        replaced_ids: torch.Tensor | None = None,  # [B, N]
        only: str | None = None,
        num_items_in_batch: torch.Tensor | None = None,  # [2]
        num_real_tokens: int | None = None,
        max_predictions_per_row: int | None = None,
        **kwargs: Any,
    ) -> RtdOutput:
        """Compute both losses. Rows may be padded or packed as in `HfDebertaModel`.

        Args:
            replaced_ids: the discriminator's input; by default sampled from the generator's predictions.
            only: "generator" or "discriminator" runs that model alone; the latter needs `replaced_ids`.
            num_items_in_batch: masked tokens and real tokens of the whole optimization batch, counted by `RtdTrainer`.
            max_predictions_per_row: the generator's, see `HfDebertaForMaskedLM`.
        """
        if labels is None:
            raise ValueError("labels are missing: the original ids of masked tokens, and -100 elsewhere")
        if only not in (None, *MODELS) or (only == "discriminator" and replaced_ids is None):
            raise ValueError(f"only must be None, 'generator', or 'discriminator' with replaced_ids, not {only!r}")
        check_tensors(input_ids=input_ids, labels=labels, replaced_ids=replaced_ids)
        for name, ids in (("labels", labels), ("replaced_ids", replaced_ids)):
            if ids is not None and ids.shape != input_ids.shape:
                raise ValueError(f"{name} must be [B, N] = {tuple(input_ids.shape)}, not {tuple(ids.shape)}")
        masked_items, real_items = (None, None) if num_items_in_batch is None else num_items_in_batch.flatten()
        masked, real = masked_and_real_tokens(input_ids, labels, attention_mask, self.config.pad_token_id)
        layout: dict[str, Any] = {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "cu_seq_lens_q": cu_seq_lens_q,
            "num_real_tokens": num_real_tokens,
        }
        lm_loss = rtd_loss = logits = None
        losses: list[torch.Tensor] = []
        statistics: dict[str, torch.Tensor] = {}
        if only != "discriminator":
            temperature = self.config.sampling_temperature if replaced_ids is None else None
            inputs = {"labels": labels.masked_fill(~masked, IGNORED), "num_items_in_batch": masked_items}
            inputs |= {**layout, "input_ids": input_ids, "max_predictions_per_row": max_predictions_per_row}
            lm_loss, best, sampled = self._run_generator(inputs, temperature)
            if sampled is not None:
                replaced_ids = input_ids.masked_scatter(masked, sampled.to(input_ids.dtype))
            losses.append(lm_loss)
            statistics["lm_loss"] = lm_loss.detach() * loss_divisor(masked, masked_items)
            statistics |= count_predictions(masked, labels, best)
        if only != "generator":
            originals = torch.where(masked, labels, input_ids)
            targets = replaced_token_labels(cast(torch.Tensor, replaced_ids), originals).masked_fill(~real, IGNORED)
            outputs = self.discriminator(replaced_ids, labels=targets, num_items_in_batch=real_items, **layout)
            rtd_loss, logits = outputs.loss, outputs.logits.detach()
            losses.append(self.config.rtd_weight * rtd_loss)
            statistics["rtd_loss"] = rtd_loss.detach() * loss_divisor(real, real_items)
            statistics |= count_detections(targets, logits)
        return RtdOutput(cast(torch.Tensor, sum(losses)), lm_loss, rtd_loss, logits, replaced_ids, statistics)

    def _run_generator(
        self, inputs: dict[str, Any], temperature: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the loss, the most likely tokens [M] at masked positions, and, with a temperature, sampled tokens [M].

        With `max_predictions_per_row` these may be followed by tokens of other positions.
        """
        outputs = self.generator(**inputs, sparse_prediction=True, sampling_temperature=temperature)
        best, samples = outputs.predictions, outputs.samples
        if best is None:  # a compiled graph returns logits at all positions
            logits = outputs.logits[inputs["labels"] != IGNORED]
            best, samples = logits.argmax(-1), sample_tokens(logits, temperature)
        elif inputs["max_predictions_per_row"] is not None:
            labelled_first = (outputs.labels == IGNORED).int().argsort(stable=True)
            best, samples = best[labelled_first], None if samples is None else samples[labelled_first]
        return outputs.loss, best, samples

    # ---- two ordinary checkpoints --------------------------------------------------------------------------------

    def folded_discriminator(self) -> HfDebertaForPreTraining:
        """Return the discriminator as an ordinary model, with its own embedding tables.

        >>> export_to_transformers(pair.folded_discriminator(), "for-plain-transformers")
        """
        with init.no_init_weights():  # draw no random numbers: training must continue as if nothing had been saved
            discriminator = HfDebertaForPreTraining(deepcopy(self.config.models()[1]))
        cast(nn.Module, discriminator).to(self.device, self.dtype)
        discriminator.load_state_dict(fold(self.discriminator))
        return discriminator.eval()

    def save_pair(self, folder: str | Path) -> None:
        """Write folder/generator (`HfDebertaForMaskedLM`) and folder/discriminator (`HfDebertaForPreTraining`).

        For a sharded model, load a checkpoint of Trainer with `from_pretrained`, and save that.
        """
        self.generator.save_pretrained(Path(folder) / "generator")
        self.folded_discriminator().save_pretrained(Path(folder) / "discriminator")

    @classmethod
    def from_pair(
        cls,
        generator: str | Path | None,
        discriminator: str | Path,
        options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> "HfDebertaForRtdPretraining":
        """Load a pair from two checkpoints: official ones, Transformers', or ours.

        With embedding sharing "gdes" the delta becomes the difference of the two tables; with "es" the discriminator's
        table is dropped.

        Args:
            generator: None if it lies beside the discriminator, as in microsoft/deberta-v3-large.
            options: keyword arguments of `from_pretrained` for both models.
            fields: fields of the pair's configuration.

        >>> pair = HfDebertaForRtdPretraining.from_pair("my-deberta/generator", "my-deberta/discriminator")
        >>> pair = HfDebertaForRtdPretraining.from_pair(None, "microsoft/deberta-v3-large")
        >>> pair = HfDebertaForRtdPretraining.from_pair("me/g", "me/d", {"revision": "v2"}, embedding_sharing="es")
        """
        options = {"dtype": torch.float32, **(options or {})}
        if generator is None:
            masked_lm = load_released_generator(discriminator, **options)
        else:
            masked_lm = _load_with_encoder(HfDebertaForMaskedLM, generator, options)
        detector = _load_with_encoder(HfDebertaForPreTraining, discriminator, options)
        pair = cls(HfDebertaRtdConfig(generator=masked_lm.config, discriminator=detector.config, **fields))
        pair.generator.load_state_dict(masked_lm.state_dict())
        unfold(pair.discriminator, detector.state_dict())
        return pair

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as Transformers does, always with our parameter names."""
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, **kwargs)


def _load_with_encoder(model_class: Any, name: str | Path, options: dict[str, Any]) -> Any:
    """Load a model; raise ValueError if the checkpoint lacks tensors of the encoder."""
    options = {**options, "trust_remote_code": False}
    model, info = model_class.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(key for key in info["missing_keys"] if key.startswith(f"{model.base_model_prefix}."))
    if missing:
        raise ValueError(
            f"{name} has no weights for {shorten(', '.join(missing), 300)}: a part of the encoder would be random"
        )
    return model


def masked_and_real_tokens(
    input_ids: torch.Tensor,  # [B, N]
    labels: torch.Tensor,  # [B, N]
    attention_mask: torch.Tensor | None,
    pad_token_id: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens in the generator's loss (masked) and in the discriminator's loss (real), bool [B, N]."""
    if attention_mask is None:
        real = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        real = real_tokens(attention_mask, *input_ids.shape)
    masked = (labels >= 0) & real
    if pad_token_id is not None:  # packed rows have no mask; a masked token may be replaced by [PAD]
        real = real & (masked | (input_ids != pad_token_id))
    return masked, real


def count_predictions(masked: torch.Tensor, labels: torch.Tensor, best: torch.Tensor) -> dict[str, torch.Tensor]:
    """Count the masked tokens [B, N], and those that the generator's most likely tokens [M] restore."""
    correct = masked & (labels == labels.masked_scatter(masked, best.to(labels.dtype)))
    return {"masked": masked.sum(), "masked_correct": correct.sum()}


def count_detections(targets: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Count replaced and original tokens, and those of both that the discriminator's logits [B, N] classify right."""
    replaced, original, positive = targets == 1, targets == 0, logits > 0
    return {
        "replaced": replaced.sum(),
        "replaced_found": (replaced & positive).sum(),
        "original": original.sum(),
        "original_kept": (original & ~positive).sum(),
    }


def mean_statistics(sums: dict[str, float]) -> dict[str, float]:
    """Return losses per token and accuracies from sums of `RtdOutput.statistics`.

    >>> mean_statistics({"lm_loss": 6.0, "masked": 3, "masked_correct": 1})
    {'lm_loss': 2.0, 'masked_accuracy': 0.3333333333333333}
    """
    tokens = {**sums, "real": sums.get("replaced", 0) + sums.get("original", 0)}
    ratios = {
        "lm_loss": ("lm_loss", "masked"),
        "masked_accuracy": ("masked_correct", "masked"),
        "rtd_loss": ("rtd_loss", "real"),
        "replaced_found": ("replaced_found", "replaced"),
        "original_kept": ("original_kept", "original"),
    }
    return {name: tokens[part] / tokens[whole] for name, (part, whole) in ratios.items() if tokens.get(whole)}
