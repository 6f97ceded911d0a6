"""Pretraining by replaced token detection (RTD, section 3.1 of the DeBERTaV3 paper): generator and discriminator.

    L = L_MLM(generator) + rtd_weight * L_RTD(discriminator)

The generator, as wide and half as deep, guesses masked words (`HfDebertaForMaskedLM`). At each masked position one
word is drawn from its guesses, and the discriminator (`HfDebertaForPreTraining`) tells for every real token whether it
is the original one. The draw has no gradient. Afterwards the discriminator is the model that people want.

    >>> config = HfDebertaRtdConfig.from_discriminator(HfDebertaConfig.from_preset("v3-small", vocab_size=32000))
    >>> pair = HfDebertaForRtdPretraining(config)
    >>> RtdTrainer(pair, arguments, collator, rows).train()
    >>> pair.save_pair("my-deberta")  # two ordinary checkpoints: my-deberta/generator, my-deberta/discriminator

What the released script does differently from the paper: rtd_weight 10, and `RtdTrainer(decoupled=True)`.
"""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers import initialization as init
from transformers.utils.generic import ModelOutput, can_return_tuple

from hf_deberta import HfDebertaConfig, HfDebertaForMaskedLM, HfDebertaForPreTraining, replaced_token_labels
from hf_deberta.model.attention_context import real_tokens
from hf_deberta.model.batch_loss import IGNORED, loss_divisor
from hf_deberta.model.linear_cross_entropy import MAX_CHUNK_LOGITS, MIN_CHUNK_TOKENS
from hf_deberta.pretraining.gradient_disentangled_embedding import (
    SHARINGS,
    GradientDisentangledEmbedding,
    folded,
    share_embeddings,
    unfold,
)
from hf_deberta.pretraining.released_generator import load_released_generator
from hf_deberta.pretraining.throughput import training_operations
from hf_deberta.pretraining.trainer import PretrainingTrainer
from hf_deberta.runs.checkpoints import UNFINISHED, replace_folder
from hf_deberta.runs.model_card import write_training_card

MODELS = ("generator", "discriminator")


@strict
class HfDebertaRtdConfig(PreTrainedConfig):
    """Configuration of a generator, a discriminator and how they are trained together.

    >>> HfDebertaRtdConfig(discriminator=HfDebertaConfig.from_preset("v3-base")).generator.num_hidden_layers
    6

    Args:
        discriminator (`HfDebertaConfig`): the model that is wanted.
        generator (`HfDebertaConfig`): by default the same with half the layers, as published.
        embedding_sharing (`str`): "gdes", "es" or "nes", see `gradient_disentangled_embedding`.
        rtd_weight (`float`): of the discriminator's loss; 50 in the paper, 10 in the released script.
        sampling_temperature (`float`): words are drawn from softmax(logits / temperature); 0 takes the best.
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
            if isinstance(given := getattr(self, name), dict):
                setattr(self, name, HfDebertaConfig.from_dict(given))
        if self.discriminator is None:
            self.discriminator = HfDebertaConfig()
        if self.generator is None:
            self.generator = shallower(self.discriminator)
        kwargs.setdefault("attn_implementation", {"": None})  # leaves those of the two as they are
        super().__post_init__(**kwargs)

    @classmethod
    def from_discriminator(
        cls, discriminator: HfDebertaConfig, generator_layers: int | None = None, **fields: Any
    ) -> "HfDebertaRtdConfig":
        """A pair whose generator has so many layers, by default half of the discriminator's, and its width.

        >>> HfDebertaRtdConfig.from_discriminator(HfDebertaConfig.from_preset("v3-small"), rtd_weight=10)
        """
        return cls(generator=shallower(discriminator, generator_layers), discriminator=discriminator, **fields)

    @property
    def pad_token_id(self) -> int | None:
        return self.discriminator.pad_token_id

    def validate_pair(self) -> None:
        if self.embedding_sharing not in SHARINGS:
            raise ValueError(f"embedding_sharing is one of {', '.join(SHARINGS)}, not {self.embedding_sharing!r}")
        for name in ("rtd_weight", "sampling_temperature"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, and finite, not {getattr(self, name)}")
        self._require_equal("vocab_size", "generator and discriminator read the same words")
        if self.embedding_sharing == "nes":
            return
        reason = f"embedding_sharing {self.embedding_sharing!r} gives the discriminator the generator's tables"
        self._require_equal("embedding_size", reason)
        self._require_equal("position_biased_input", reason)
        if self.discriminator.position_biased_input:
            self._require_equal("max_position_embeddings", reason)

    def _require_equal(self, field: str, reason: str) -> None:
        ours, theirs = (getattr(getattr(self, name), field) for name in MODELS)
        if ours != theirs:
            way_out = "" if field == "vocab_size" else ", or use embedding_sharing='nes'"
            raise ValueError(
                f"{reason}, so {field} must be the same: it is {ours} in the generator and {theirs} in the "
                f"discriminator; make them equal{way_out}"
            )


def shallower(config: HfDebertaConfig, layers: int | None = None) -> HfDebertaConfig:
    """The same model with so many layers, by default half; a decoder needs two at least."""
    least = 2 if config.uses_mask_decoder else 1
    shallow = deepcopy(config)
    shallow.num_hidden_layers = max(config.num_hidden_layers // 2, least) if layers is None else layers
    shallow.validate()
    return shallow


@dataclass
class RtdOutput(ModelOutput):
    """What a pair returns. Of a pass with one model alone, the other's are None.

    `loss` is the sum to be minimised, `logits` [B, N] are the discriminator's and `replaced_ids` [B, N] what it read.
    `statistics` are sums over the tokens at hand, without gradient: see `means`.
    """

    loss: torch.Tensor | None = None
    lm_loss: torch.Tensor | None = None
    rtd_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    replaced_ids: torch.Tensor | None = None
    statistics: dict[str, torch.Tensor] | None = None


class HfDebertaForRtdPretraining(PreTrainedModel):
    """Generator and discriminator, with shared embeddings, and their loss.

    >>> output = pair(input_ids=masked_ids, labels=labels, attention_mask=attention_mask)
    >>> output.loss.backward()

    `save_pretrained` and `from_pretrained` keep the state of training (deltas apart from tables), `save_pair` and
    `from_pair` write and read two ordinary checkpoints.
    """

    config: HfDebertaRtdConfig
    config_class = HfDebertaRtdConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    accepts_loss_kwargs = True
    _no_split_modules = ["HfDebertaLayer"]

    def __init__(self, config: HfDebertaRtdConfig):
        super().__init__(config)
        self.generator = HfDebertaForMaskedLM(config.generator)
        self.discriminator = HfDebertaForPreTraining(config.discriminator)
        share_embeddings(self.generator, self.discriminator, config.embedding_sharing)
        self.post_init()
        self._keys_to_ignore_on_load_unexpected = set()  # what one model alone may ignore, the pair needs

    @torch.no_grad()
    def initialize_weights(self) -> None:
        super().initialize_weights()
        for module in self.modules():  # which the models that hold them do not know
            if isinstance(module, GradientDisentangledEmbedding):
                init.zeros_(module.delta)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def get_input_embeddings(self) -> nn.Module:
        return self.generator.get_input_embeddings()

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        raise ValueError(
            "a pair is not resized, since its tables belong together: save_pair, resize generator and discriminator, "
            "and put them together with from_pair"
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
        **kwargs,
    ) -> RtdOutput:
        """Both losses. Rows may be padded or packed as in `HfDebertaModel`.

        Args:
            replaced_ids: what the discriminator reads; drawn from the generator's guesses if not given.
            only: "generator" or "discriminator" runs that model alone; the latter needs `replaced_ids`.
            num_items_in_batch: masked tokens and real tokens of the whole optimisation batch, as `RtdTrainer` counts.
        """
        self._check_inputs(input_ids, labels, replaced_ids, only)
        masked_items, real_items = items_of(num_items_in_batch)
        masked, real = counted_tokens(input_ids, labels, attention_mask, self.config.pad_token_id)
        layout = {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "cu_seq_lens_q": cu_seq_lens_q,
        }
        lm_loss = rtd_loss = logits = None
        losses, statistics = [], {}
        if only != "discriminator":
            known = labels.masked_fill(~masked, IGNORED)
            lm_loss, best, words = self._guess(input_ids, known, masked_items, layout, draws=replaced_ids is None)
            if words is not None:
                replaced_ids = input_ids.masked_scatter(masked, words.to(input_ids.dtype))
            losses.append(lm_loss)
            statistics |= {
                "lm_loss": lm_loss.detach() * loss_divisor(masked, masked_items),
                "masked": masked.sum(),
                "masked_right": (masked & (labels == labels.masked_scatter(masked, best.to(labels.dtype)))).sum(),
            }
        if only != "generator":
            originals = torch.where(masked, labels, input_ids)
            targets = replaced_token_labels(replaced_ids, originals).masked_fill(~real, IGNORED)
            detected = self.discriminator(replaced_ids, labels=targets, num_items_in_batch=real_items, **layout)
            rtd_loss, logits = detected.loss, detected.logits.detach()
            losses.append(self.config.rtd_weight * rtd_loss)
            replaced, original, positive = targets == 1, targets == 0, logits > 0
            statistics |= {
                "rtd_loss": rtd_loss.detach() * loss_divisor(real, real_items),
                "replaced": replaced.sum(),
                "replaced_found": (replaced & positive).sum(),
                "original": original.sum(),
                "original_kept": (original & ~positive).sum(),
            }
        return RtdOutput(sum(losses), lm_loss, rtd_loss, logits, replaced_ids, statistics)

    def _guess(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        items: torch.Tensor | None,
        layout: dict[str, torch.Tensor | None],
        draws: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The generator's loss, and of labelled tokens best words [M] and, if wanted, words drawn [M]."""
        guessed = self.generator(input_ids, labels=labels, num_items_in_batch=items, sparse_prediction=True, **layout)
        states, best, head = guessed.states, guessed.predictions, self.generator.lm_predictions.lm_head
        if best is None:  # a graph is compiled, which predicts all tokens
            states, head = guessed.logits.detach()[labels != IGNORED], nn.Identity()
            best = states.argmax(-1)
        config = self.config
        words = sample_words(states, head, config.sampling_temperature, config.generator.vocab_size) if draws else None
        return guessed.loss, best, words

    def _check_inputs(self, input_ids, labels, replaced_ids, only) -> None:
        if only not in (None, *MODELS):
            raise ValueError(f"only is None, {' or '.join(map(repr, MODELS))}, not {only!r}")
        if labels is None:
            raise ValueError("labels are needed: the original ids of masked tokens, and -100 elsewhere")
        if only == "discriminator" and replaced_ids is None:
            raise ValueError(
                "the discriminator alone draws no words: give replaced_ids, which the generator's pass returns"
            )
        for name, ids in (("labels", labels), ("replaced_ids", replaced_ids)):
            if ids is not None and ids.shape != input_ids.shape:
                raise ValueError(f"{name} must be [B, N] = {tuple(input_ids.shape)}, not {tuple(ids.shape)}")

    # ---- two ordinary checkpoints, and back ----------------------------------------------------------------------

    def folded_discriminator(self) -> HfDebertaForPreTraining:
        """The discriminator as an ordinary model, with tables of its own.

        >>> export_to_transformers(pair.folded_discriminator(), "for-plain-transformers")
        """
        with init.no_init_weights():  # training goes on with the random numbers it would have had
            discriminator = HfDebertaForPreTraining(deepcopy(self.config.discriminator))
        discriminator.to(self.device, self.dtype).load_state_dict(folded(self.discriminator))
        return discriminator.eval()

    def save_pair(self, folder: str | Path) -> None:
        """Write folder/generator (`HfDebertaForMaskedLM`) and folder/discriminator (`HfDebertaForPreTraining`).

        Of a sharded model, load a checkpoint of Trainer with `from_pretrained` and save that.
        """
        self.generator.save_pretrained(Path(folder) / "generator")
        self.folded_discriminator().save_pretrained(Path(folder) / "discriminator")

    @classmethod
    def from_pair(
        cls,
        generator: str | Path | None,
        discriminator: str | Path,
        loading: dict[str, Any] | None = None,
        **fields: Any,
    ) -> "HfDebertaForRtdPretraining":
        """Go on from two checkpoints, official, of Transformers, or ours. `fields` are those of the configuration.

        The generator is None where it lies beside the discriminator, as Microsoft's do: `released_generator`.

        With "gdes" the delta is what the discriminator's table differs by; with "es" its table is dropped.

        >>> pair = HfDebertaForRtdPretraining.from_pair("my-deberta/generator", "my-deberta/discriminator")
        >>> pair = HfDebertaForRtdPretraining.from_pair(None, "microsoft/deberta-v3-base")
        >>> pair = HfDebertaForRtdPretraining.from_pair("me/g", "me/d", {"revision": "v2"}, embedding_sharing="es")
        """
        loading = {"dtype": torch.float32, **(loading or {})}
        if generator is None:
            guessing = load_released_generator(discriminator, **loading)
        else:
            guessing = HfDebertaForMaskedLM.from_pretrained(generator, **loading)
        detecting = HfDebertaForPreTraining.from_pretrained(discriminator, **loading)
        pair = cls(cls.config_class(generator=guessing.config, discriminator=detecting.config, **fields))
        pair.generator.load_state_dict(guessing.state_dict())
        unfold(pair.discriminator, detecting.state_dict())
        return pair

    def save_pretrained(self, *args, save_original_format: bool = False, **kwargs) -> None:
        """As in Transformers; names are always ours."""
        super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)


def items_of(num_items_in_batch: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Masked tokens and real tokens."""
    if num_items_in_batch is None:
        return None, None
    if not torch.is_tensor(num_items_in_batch) or num_items_in_batch.numel() != 2:
        raise ValueError(
            f"num_items_in_batch must hold two numbers, masked tokens and real tokens, not {num_items_in_batch}; "
            "RtdTrainer counts both, Trainer does not; or leave it out"
        )
    masked_items, real_items = num_items_in_batch.flatten()
    return masked_items, real_items


def counted_tokens(
    input_ids: torch.Tensor,  # [B, N]
    labels: torch.Tensor,  # [B, N]
    attention_mask: torch.Tensor | None,
    pad_token_id: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens the generator's loss is over, and the discriminator's: masked ones, and real ones, bool [B, N]."""
    if attention_mask is None:
        real = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        real = real_tokens(attention_mask, *input_ids.shape)
    masked = (labels >= 0) & real
    if pad_token_id is not None:  # rows of packed documents have no mask; a masked token may read as padding
        real = real & (masked | (input_ids != pad_token_id))
    return masked, real


@torch.no_grad()
def sample_words(
    states: torch.Tensor,  # [M, hidden]
    head: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
    words: int,
) -> torch.Tensor:
    """One word [M] for each state, from softmax(head(state) / temperature); logits [M, words] never exist for all.

    >>> sample_words(states, model.lm_predictions.lm_head, temperature=1.0, words=model.config.vocab_size)
    """
    size = max(MIN_CHUNK_TOKENS, MAX_CHUNK_LOGITS // words)
    drawn = [draw(head(chunk), temperature) for chunk in states.split(size)]
    return torch.cat(drawn)


def draw(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """One word [M] for each row of logits [M, words]."""
    if temperature == 0:
        return logits.argmax(-1)
    # Gumbel-max; unlike torch.multinomial it does not wait for the device
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_()
    return (logits.float() / temperature).sub_(noise).argmax(-1)


def means(sums: dict[str, float]) -> dict[str, float]:
    """Of summed `RtdOutput.statistics`: losses per token, and shares of tokens that were dealt with rightly.

    >>> means({"lm_loss": 6.0, "masked": 3, "masked_right": 1})
    {'lm_loss': 2.0, 'masked_accuracy': 0.3333333333333333}
    """
    tokens = {**sums, "real": sums.get("replaced", 0) + sums.get("original", 0)}
    shares = {
        "lm_loss": ("lm_loss", "masked"),
        "masked_accuracy": ("masked_right", "masked"),
        "rtd_loss": ("rtd_loss", "real"),
        "replaced_found": ("replaced_found", "replaced"),
        "original_kept": ("original_kept", "original"),
    }
    return {name: tokens[part] / tokens[whole] for name, (part, whole) in shares.items() if tokens.get(whole)}


class RtdTrainer(PretrainingTrainer):
    """`PretrainingTrainer` for a `HfDebertaForRtdPretraining`; in the end `save_model` writes two ordinary checkpoints.

    Both losses are divided by their own tokens of the whole optimisation batch. Besides `loss` it logs lm_loss,
    rtd_loss, masked_accuracy (of the generator's best words), replaced_found and original_kept (shares of replaced and
    of original tokens that the discriminator took for that), over the tokens since the last log; and the same as
    eval_... in evaluation.

    Args:
        decoupled: step the generator first, then train the discriminator on the updated table with the words that were
            drawn before, as the released script does. One optimizer steps twice, once for each model; a table shared
            by "es" is stepped twice, with one set of Adam moments. The logged grad_norm is the discriminator's. With
            DDP it needs find_unused_parameters, which is switched on unless the arguments say otherwise.
    """

    def __init__(
        self,
        model: HfDebertaForRtdPretraining | None = None,
        args: TrainingArguments | None = None,
        *arguments,
        decoupled: bool = False,
        **kwargs,
    ):
        if decoupled and args is not None and args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True
        super().__init__(model, args, *arguments, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process cannot train a pair on {self.args.n_gpu} GPUs; start one for each with accelerate launch "
                "or torchrun, or show it one with CUDA_VISIBLE_DEVICES"
            )
        if decoupled and self.is_deepspeed_enabled:
            raise ValueError(
                "decoupled=True steps the optimizer twice, which DeepSpeed's engine does not; leave it out"
            )
        self.decoupled = decoupled
        self.drawn: list[dict[str, Any]] = []  # inputs of the discriminator in this step
        self.sums: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}  # of training and of evaluation

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """Masked tokens and real tokens [2] of all micro-batches and processes."""
        self.drawn = []  # a step that ran out of memory may have left some
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        padding = self.model.config.pad_token_id
        counted = [
            counted_tokens(batch["input_ids"], batch["labels"], batch.get("attention_mask"), padding)
            for batch in batch_samples
        ]
        items = []
        for tokens in zip(*counted, strict=True):
            # as labels, which Trainer knows how to count
            labels = [
                {"labels": torch.zeros_like(token, dtype=torch.long).masked_fill(~token, IGNORED)} for token in tokens
            ]
            items.append(super()._get_num_items_in_batch(labels, device))
        return torch.stack(items)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        sums = self.sums[model.training]
        for name, value in outputs.statistics.items():
            sums[name] = sums.get(name, 0) + value
        if inputs.get("only") == "generator":
            self.drawn.append({**inputs, "only": "discriminator", "replaced_ids": outputs.replaced_ids})
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self.decoupled:
            return super().training_step(model, inputs, num_items_in_batch)
        loss = super().training_step(model, {**inputs, "only": "generator"}, num_items_in_batch)
        if not self.accelerator.sync_gradients:
            return loss
        if self.args.max_grad_norm > 0:
            self._clip_grad_norm(model)
        self.optimizer.step()
        # None, so that optimizers pass the generator by when the discriminator is stepped
        self.optimizer.zero_grad(set_to_none=True)
        drawn, self.drawn = self.drawn, []
        for number, kept in enumerate(drawn, 1):
            with nullcontext() if number == len(drawn) else self.accelerator.no_sync(model):
                loss = loss + super().training_step(model, kept, num_items_in_batch)
        return loss

    def operations(self, tokens: float, predicted: float) -> float:
        generator, discriminator = self.model.config.generator, self.model.config.discriminator
        head = 3 * 2 * tokens * discriminator.hidden_size**2
        guessing = training_operations(generator, tokens, self.context, predicted)
        return guessing + training_operations(discriminator, tokens, self.context, 0, vocabulary=0) + head

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write generator and discriminator, each with the tokenizer; of a checkpoint, the state of training."""
        if _internal_call:
            return super().save_model(output_dir, _internal_call=True)
        folder = Path(output_dir or self.args.output_dir)
        state, pair = folder / UNFINISHED / "state", folder / UNFINISHED / "pair"
        super().save_model(str(state), _internal_call=True)  # whole, however the model is sharded
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            HfDebertaForRtdPretraining.from_pretrained(state).save_pair(pair)
            for name in MODELS:
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(pair / name)
                replace_folder(pair / name, folder / name)
            shutil.rmtree(folder / UNFINISHED)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(self, **_) -> None:
        for name in MODELS:
            folder = Path(self.args.output_dir) / name
            if folder.exists():
                write_training_card(self, **self.about, folder=folder)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        losses = [name for name in logs if name.endswith("loss") and name != "train_loss"]
        for prefix in (name.removesuffix("loss") for name in losses):
            logs |= {prefix + name: value for name, value in self._close_window(training=prefix == "").items()}
        super().log(logs, start_time)

    def _close_window(self, training: bool) -> dict[str, float]:
        """Means over all tokens, of all processes, since the last call."""
        sums, self.sums[training] = self.sums[training], {}
        if not sums:
            return {}
        found = torch.stack([value.float() for value in sums.values()])
        return means(dict(zip(sums, self.accelerator.reduce(found, "sum").tolist(), strict=True)))
