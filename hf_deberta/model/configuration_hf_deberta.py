"""Configuration of all DeBERTa models: v1, v2, v3 and multilingual.

Papers: P1 = DeBERTa (arXiv 2006.03654), P3 = DeBERTaV3 (arXiv 2111.09543).
"""

from decimal import Decimal
from math import isfinite
from numbers import Integral
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

# Upper bounds, so that a damaged or hostile configuration is an error and not hours of work or all of the memory.
# The largest released model has 48 layers and 1.5 billion parameters.
MAX_PARAMETERS = 10**11
MAX_LABELS = 10**6
LARGEST = {"num_hidden_layers": 10_000, "max_distance": 10**7, "emd_steps": 1000}

SIZES = ("vocab_size", "hidden_size", "embedding_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SMALLEST = {
    **dict.fromkeys((*SIZES, "max_position_embeddings", "conv_groups"), 1),
    **dict.fromkeys(("type_vocab_size", "emd_steps", "conv_kernel_size"), 0),
}
POSITIVE = ("layer_norm_eps", "initializer_range")
DROPOUT_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout", "cls_dropout")
BACKEND_FIELDS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
POSITION_TERMS = ("c2p", "p2c", "p2p")
CHOICES = {
    "norm_rel_ebd": ("none", "layer_norm"),
    "token_classifier": ("linear", "projection"),
    "problem_type": (None, "regression", "single_label_classification", "multi_label_classification"),
    **dict.fromkeys(("hidden_act", "pooler_hidden_act", "conv_act"), sorted(ACT2FN)),
}

# The official code's defaults for keys that are absent from its configuration file.
OFFICIAL_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "type_vocab_size": 0,
    "position_biased_input": True,
    "relative_attention": False,
    "max_relative_positions": -1,
    "position_buckets": -1,
    "pos_att_type": "c2p",
    "share_att_key": False,
    "norm_rel_ebd": "none",
    "conv_kernel_size": 0,
}

# Defaults of Transformers' own classes, by model type, for keys that are absent from config.json.
IN_TREE_DEFAULTS: dict[str, dict[str, Any]] = {
    "deberta": {**OFFICIAL_DEFAULTS, "vocab_size": 50265, "pos_att_type": None},
    "deberta-v2": {
        **OFFICIAL_DEFAULTS,
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "pos_att_type": None,
    },
}

V1_FIELDS: dict[str, Any] = {
    "vocab_size": 50265,
    "position_buckets": -1,
    "share_att_key": False,
    "norm_rel_ebd": "none",
    "attention_key_bias": False,
}
V2_FIELDS: dict[str, Any] = {"conv_kernel_size": 3, "conv_act": "gelu"}


def _size(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "v1-base": {**V1_FIELDS, **_size(12, 768, 12)},
    "v1-large": {**V1_FIELDS, **_size(24, 1024, 16)},
    "v1-xlarge": {**V1_FIELDS, **_size(48, 1024, 16)},
    "v2-xlarge": {**V2_FIELDS, **_size(24, 1536, 24)},
    "v2-xxlarge": {**V2_FIELDS, **_size(48, 1536, 24)},
    "v3-xsmall": _size(12, 384, 6),
    "v3-small": _size(6, 768, 12),
    "v3-base": _size(12, 768, 12),
    "v3-large": _size(24, 1024, 16),
    "mdeberta-v3-base": {**_size(12, 768, 12), "vocab_size": 251000},
    "tiny": {
        **_size(2, 32, 4),
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "position_buckets": 16,
    },
}


@strict
class HfDebertaConfig(PreTrainedConfig):
    r"""Configuration of every `HfDeberta` model. The defaults are DeBERTaV3 base; `from_preset` has the other sizes.

    A saved config.json contains all of these fields, and the usual ones of Transformers such as `id2label`.

    Sizes (P1 table 8):
        vocab_size (`int`, 128100): number of tokens in the vocabulary.
        hidden_size (`int`, 768): width of a layer.
        embedding_size (`int`, None): width of the embeddings, None for `hidden_size`; others are projected to it.
        num_hidden_layers (`int`, 12): encoder layers. The enhanced mask decoder has none of its own, it uses the last.
        num_attention_heads (`int`, 12): attention heads; must divide `hidden_size`.
        attention_head_size (`int`, None): None or `hidden_size / num_attention_heads`; other values are an error.
        intermediate_size (`int`, 3072): inner width of the feed-forward part.

    Activation, initialization and dropout:
        hidden_act (`str`, "gelu"): activation of the feed-forward part and of the pretraining heads.
        layer_norm_eps (`float`, 1e-07): epsilon of every LayerNorm, above 0.
        initializer_range (`float`, 0.02): standard deviation of initial weights, above 0.
        hidden_dropout_prob (`float`, 0.1): dropout of hidden states and of the relative-position table, in [0, 1).
        attention_probs_dropout_prob (`float`, 0.1): dropout of attention probabilities, in [0, 1).

    Relative positions (P1 section 3.1):
        relative_attention (`bool`, True): use disentangled attention (P1 eq. 4).
        pos_att_type (`list[str]` or `str`, ["c2p", "p2c"]): position terms of the attention score: "c2p"
            (content to position), "p2c" (position to content), "p2p" (P1 eq. 2, an ablation). "c2p|p2c" and "none" are
            accepted. Each term counts in the scale 1/sqrt((1 + terms) d), even without `relative_attention`.
        max_relative_positions (`int`, -1): largest distance k; below 1 it is `max_position_embeddings`.
        position_buckets (`int`, 256): logarithmic buckets per side (v2 and v3); below 1, one row per distance.
        share_att_key (`bool`, True): project positions with the query and key matrices of the content (v2, v3), or with
            matrices of their own, `pos_key_proj` and `pos_query_proj` (False, v1).
        norm_rel_ebd (`str`, "layer_norm"): "layer_norm" normalizes the relative-position table (v2, v3); "none" (v1).
        attention_key_bias (`bool`, True): biases of the key projections; False in v1.
        clamp_relative_distance (`bool`, True): clamp distances before bucketing, as the official code does. False gives
            the outputs of Transformers' classes for distances past k, for which they use an untrained row.

    Absolute positions and the enhanced mask decoder (P1 section 3.2):
        max_position_embeddings (`int`, 512): number of absolute positions.
        position_biased_input (`bool`, False): add absolute positions to the input (BERT) instead of in the decoder.
        type_vocab_size (`int`, 0): number of token types at the input; 0 in released models.
        emd_steps (`int`, 2): how many times the decoder applies the last layer; 0 for no decoder (P1's "-EMD"). Masked
            and causal language models use it, including the generator of v3, but not its discriminator.
        sparse_prediction (`bool`, True): in training, predict labelled positions only. The loss is the same; the output
            then has `losses` and `predictions` instead of `logits`, see `HfDebertaMaskedLMOutput`.

    Speed:
        unpad_inputs (`bool`, True): leave out padding in the layers if a batch has enough of it, and masks without
            any. Outputs at real tokens are the same and those at padding are zeros. Hooks on layers then see one row
            [1, total, hidden].

    Convolution beside the first layer (nGiE of v2, P1 section 5.3):
        conv_kernel_size (`int`, 0): width of the convolution, an odd number (3 in v2); 0 for none.
        conv_groups (`int`, 1): groups of the convolution; must divide `hidden_size`.
        conv_act (`str`, "tanh"): activation of the convolution ("gelu" in v2).

    Heads:
        pooler_hidden_size (`int`, None): None or `hidden_size`; other values are an error.
        pooler_dropout (`float`, 0.0): dropout before the dense layer of the pooler, in [0, 1).
        pooler_hidden_act (`str`, "gelu"): activation of the pooler.
        cls_dropout (`float`, None): dropout before a classifier, in [0, 1); None for `hidden_dropout_prob`.
        token_classifier (`str`, "linear"): "linear", or "projection" for the official NER head (dense, gelu, linear).
        id2label (`dict[int, str]`, None): names of the labels; None for as many numbered ones as `num_labels`, or 2.
        label2id (`dict[str, int]`, None): numbers of the labels; None for those of numbered names.
        problem_type (`str`, None): "regression", "single_label_classification" or "multi_label_classification", the
            loss of a classifier; None to infer it from the number of labels and the type of the targets.

    Tokens:
        pad_token_id (`int`, 0): id of the padding token, whose embedding gets no gradient; None for no such token.
        bos_token_id (`int`, None): id of the first token, for generation.
        eos_token_id (`int` or `list[int]`, None): id of the token that ends generation.
        tie_word_embeddings (`bool`, True): use the word embedding as the output matrix of language models.

    >>> from hf_deberta import HfDebertaConfig
    >>> HfDebertaConfig().position_buckets
    256
    >>> HfDebertaConfig.from_preset("v2-xxlarge").num_hidden_layers
    48
    >>> HfDebertaConfig(pos_att_type="c2p", emd_steps=0).pos_att_type
    ['c2p']
    """

    model_type = "hf_deberta"

    vocab_size: int = 128100
    hidden_size: int = 768
    embedding_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    attention_head_size: int | None = None
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    layer_norm_eps: float | int = 1e-7
    initializer_range: float | int = 0.02
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1

    relative_attention: bool = True
    pos_att_type: str | list[str] | tuple[str, ...] | None = ("c2p", "p2c")
    max_relative_positions: int = -1
    position_buckets: int = 256
    share_att_key: bool = True
    norm_rel_ebd: str = "layer_norm"
    attention_key_bias: bool = True
    clamp_relative_distance: bool = True

    max_position_embeddings: int = 512
    position_biased_input: bool = False
    type_vocab_size: int = 0
    emd_steps: int = 2
    sparse_prediction: bool = True
    unpad_inputs: bool = True

    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"

    pooler_hidden_size: int | None = None
    pooler_dropout: float | int = 0.0
    pooler_hidden_act: str = "gelu"
    cls_dropout: float | int | None = None
    token_classifier: str = "linear"

    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    # of the base class, whose types some releases check before __post_init__
    id2label: Any = None
    label2id: Any = None
    problem_type: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.pos_att_type is None:
            self.pos_att_type = []
        elif isinstance(self.pos_att_type, str):
            self.pos_att_type = [term.strip() for term in self.pos_att_type.lower().split("|")]
        self.pos_att_type = [term for term in self.pos_att_type if term not in ("", "none")]
        self.norm_rel_ebd = self.norm_rel_ebd.strip().lower()
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        if self.pooler_hidden_size is None:
            self.pooler_hidden_size = self.hidden_size
        for name in BACKEND_FIELDS:  # with a slash, it would be downloaded from the Hub and run
            backend = kwargs.get(name)
            is_name = backend is None or (isinstance(backend, str) and "/" not in backend)
            _require(is_name, f"{name} must be the name of a backend, such as 'sdpa', not {backend!r:.100}")
        super().__post_init__(**kwargs)

    # ---- derived values --------------------------------------------------------------------------

    @property
    def attention_terms(self) -> int:
        """Number m of terms in the attention score, content to content included, for the scale 1/sqrt(m d)."""
        return 1 + len(self.pos_att_type or ())

    @property
    def max_distance(self) -> int:
        """Largest relative distance k; larger ones are treated as k."""
        k = self.max_relative_positions
        return k if k > 0 else self.max_position_embeddings

    @property
    def relative_span(self) -> int:
        """Rows of the relative-position table per side; the table has twice as many."""
        return self.position_buckets if self.position_buckets > 0 else self.max_distance

    @property
    def uses_mask_decoder(self) -> bool:
        """Whether the language models have the enhanced mask decoder."""
        return self.emd_steps > 0 and not self.position_biased_input

    @property
    def num_labels(self) -> int | None:
        return None if self.id2label is None else len(self.id2label)

    @num_labels.setter
    def num_labels(self, num_labels: int | None) -> None:
        is_number = isinstance(num_labels, int | Integral) and not isinstance(num_labels, bool)  # NumPy's too
        if num_labels is None or not is_number or not 1 <= num_labels <= MAX_LABELS:
            raise ValueError(f"num_labels must be an integer in [1, {MAX_LABELS}], not {num_labels!r}")
        if self.num_labels != num_labels:
            self.id2label = {label: f"LABEL_{label}" for label in range(num_labels)}
            self.label2id = {name: label for label, name in self.id2label.items()}

    # ---- constructors ----------------------------------------------------------------------------

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "HfDebertaConfig":
        """Return the configuration of a published model by name (a name without version is v3), with fields overridden.

        >>> HfDebertaConfig.from_preset("base", vocab_size=32000).vocab_size
        32000
        """
        fields = {*cls.__dataclass_fields__, "num_labels", "attn_implementation", "output_attentions"}
        if unknown := sorted(set(overrides) - fields):
            raise ValueError(f"unknown field {', '.join(unknown)}: help(HfDebertaConfig) lists all fields")
        for candidate in (name, f"v3-{name}"):
            if candidate in PRESETS:
                return cls(**{**PRESETS[candidate], **overrides})
        raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Return the fields read from a folder or the Hub, and the unused keyword arguments, as Transformers does."""
        name = pretrained_model_name_or_path
        check_path(name)
        config_dict, kwargs = super().get_config_dict(name, **kwargs)
        if not set(config_dict or ()) - {"_commit_hash"}:  # which Transformers adds before 5.17
            raise OSError(f"{name} has no config.json, or an empty one: it is not the folder of a saved model")
        return _translate_config(config_dict, cls.model_type), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Return the configuration from fields of `HfDebertaConfig`, of Transformers' DeBERTa or of an official file.

        `model_type` tells them apart; official files have none. Keyword arguments override fields and are parsed and
        checked as fields are.
        """
        overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in cls.__dataclass_fields__ and key != "dtype"}
        return super().from_dict({**_translate_config(config_dict, cls.model_type), **overrides}, **kwargs)

    # Transformers forbids `output_attentions` with "sdpa". Here every backend accepts it: one that does not compute
    # probabilities falls back to "eager" and logs that.

    @property
    def output_attentions(self) -> bool | None:
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        pass

    # ---- checks ----------------------------------------------------------------------------------

    def validate_fields(self) -> None:
        self._check_values()
        self._check_sizes()
        self._check_positions()

    def _check_values(self) -> None:
        for name, low in SMALLEST.items():
            value = getattr(self, name)
            _require(value >= low, f"{name} must be {low} or more, not {value}")
        for name in POSITIVE:
            value = getattr(self, name)
            _require(isfinite(value) and value > 0, f"{name} must be positive and finite, not {value}")
        for name in DROPOUT_RATES:
            rate = getattr(self, name)
            _require(rate is None or 0 <= rate < 1, f"{name} must be in [0, 1), not {rate}")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
        for name, largest in LARGEST.items():
            _require(getattr(self, name) <= largest, f"{name} must be at most {largest}, not {getattr(self, name)}")

    def _check_sizes(self) -> None:
        heads, width, padding = self.num_attention_heads, self.hidden_size, self.pad_token_id
        for name, divisor in (("num_attention_heads", heads), ("conv_groups", self.conv_groups)):
            _require(width % divisor == 0, f"{name} must divide hidden_size, but {divisor} does not divide {width}")
        for name, required in (("attention_head_size", width // heads), ("pooler_hidden_size", width)):
            value = getattr(self, name)
            _require(
                value in (None, required),
                f"{name} must be {required} for hidden_size {width}, not {value}; leave it out",
            )
        _require(
            padding is None or 0 <= padding < self.vocab_size,
            f"pad_token_id must be an id of the vocabulary, in [0, {self.vocab_size}), or None, not {padding}",
        )
        kernel = self.conv_kernel_size
        _require(kernel == 0 or kernel % 2 == 1, f"conv_kernel_size must be odd, or 0 for none, not {kernel}")
        _require(bool(self.id2label), "num_labels must be at least 1, and id2label is empty")
        parameters = self.approximate_parameters()
        sizes = (*SIZES, "max_position_embeddings", "relative_span", "conv_kernel_size", "num_labels")
        _require(
            parameters <= MAX_PARAMETERS,
            f"these sizes give a model of {Decimal(parameters):.1e} parameters, and the largest that is accepted has "
            f"{MAX_PARAMETERS:.0e}: " + ", ".join(f"{name} {getattr(self, name)}" for name in sizes),
        )

    def approximate_parameters(self) -> int:
        """Number of parameters of a model with these sizes, without biases and norms."""
        width, embedding = self.hidden_size, self.embedding_size or self.hidden_size
        rows = self.vocab_size + self.max_position_embeddings + self.type_vocab_size
        layer = (4 if self.share_att_key else 6) * width**2 + 2 * width * self.intermediate_size
        convolution = self.conv_kernel_size * width**2 // self.conv_groups
        table = 2 * self.relative_span * width
        heads = (embedding + len(self.id2label or ())) * width
        return rows * embedding + self.num_hidden_layers * layer + convolution + table + heads

    def _check_positions(self) -> None:
        terms = list(self.pos_att_type or ())
        unknown = [term for term in terms if term not in POSITION_TERMS]
        _require(
            not unknown,
            f"pos_att_type must contain only {', '.join(POSITION_TERMS)}, not {', '.join(map(repr, unknown))}",
        )
        _require(len(set(terms)) == len(terms), f"pos_att_type must not contain a term twice: {terms}")
        buckets, distance = self.position_buckets, self.max_distance
        _require(
            buckets < 1 or (buckets > 1 and buckets // 2 < distance - 1),
            f"position_buckets must be 0 (off), or at least 2 and half of it below {distance - 1}, the largest "
            f"distance minus 1, not {buckets}; raise max_relative_positions (or max_position_embeddings) or use fewer "
            "buckets",
        )
        if not self.uses_mask_decoder:
            return
        _require(
            self.num_hidden_layers > 1,
            f"the enhanced mask decoder reads the layer before the last, but num_hidden_layers is "
            f"{self.num_hidden_layers}; set emd_steps=0 or use at least two layers",
        )
        _require(
            self.embedding_size == self.hidden_size,
            f"the enhanced mask decoder adds position embeddings to hidden states, so embedding_size "
            f"({self.embedding_size}) must equal hidden_size ({self.hidden_size}); set emd_steps=0 otherwise",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_path(folder_or_name: Any) -> None:
    """Raise OSError for the path of a folder that does not exist; names of the Hub pass."""
    name = str(folder_or_name)
    is_path = name.startswith((".", "~")) or Path(name).is_absolute() or len(Path(name).parts) > 2
    if is_path and not Path(name).exists():
        raise OSError(f"there is no folder {name}")


def _translate_config(config_dict: dict[str, Any], own_type: str) -> dict[str, Any]:
    """Return an official or in-tree configuration in the fields of `HfDebertaConfig`; ours and `own_type` unchanged."""
    model_type = config_dict.get("model_type")
    if not config_dict or model_type in {HfDebertaConfig.model_type, own_type} - IN_TREE_DEFAULTS.keys():
        return config_dict
    if model_type not in (None, *IN_TREE_DEFAULTS):
        raise ValueError(
            f"HfDebertaConfig reads the model types hf_deberta, deberta and deberta-v2, not {model_type!r}: "
            "this checkpoint has another architecture"
        )
    if config_dict.get("talking_head"):
        raise ValueError("this checkpoint mixes attention heads (talking_head): load it with Transformers' own class")
    defaults = OFFICIAL_DEFAULTS if model_type is None else IN_TREE_DEFAULTS[model_type]
    translated = {**defaults, **config_dict, "model_type": HfDebertaConfig.model_type}
    translated.pop("legacy", None)
    if "torch_dtype" not in translated:
        translated.setdefault("dtype", "float32")  # some released files are float16, in which training is unstable
    if "padding_idx" in translated:
        translated.setdefault("pad_token_id", translated.pop("padding_idx"))
    if model_type == "deberta":
        translated.update({key: V1_FIELDS[key] for key in ("position_buckets", "share_att_key", "norm_rel_ebd")})
        translated["conv_kernel_size"] = 0
        translated.setdefault("attention_key_bias", False)
    if "emd_steps" not in config_dict:
        translated["emd_steps"] = infer_emd_steps(translated)
    if model_type is None:
        pooling = translated.pop("pooling", {})
        translated.setdefault("pooler_dropout", pooling.get("dropout", 0))
        translated.setdefault("pooler_hidden_act", pooling.get("hidden_act", translated.get("hidden_act", "gelu")))
    return translated


def infer_emd_steps(config_dict: dict[str, Any]) -> int:
    """Return the `emd_steps` of an official or in-tree checkpoint.

    2 for released checkpoints, which were trained with the decoder. 0 for those saved by the in-tree masked-LM class
    and for shapes that the decoder does not support.
    """
    architectures = config_dict.get("architectures")
    trained_in_tree = isinstance(architectures, list) and any(
        str(name).endswith("ForMaskedLM") for name in architectures
    )
    width = config_dict["hidden_size"]
    impossible = config_dict["num_hidden_layers"] in (0, 1) or config_dict.get("embedding_size", width) != width
    return 0 if trained_in_tree or impossible else 2
