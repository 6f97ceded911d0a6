"""One configuration for the whole DeBERTa family (v1, v2, v3 and multilingual).

Papers: P1 = DeBERTa (arXiv 2006.03654), P3 = DeBERTaV3 (arXiv 2111.09543).

    >>> from hf_deberta import HfDebertaConfig
    >>> HfDebertaConfig().position_buckets                     # the defaults are DeBERTaV3 base
    256
    >>> HfDebertaConfig.from_preset("v2-xxlarge").num_hidden_layers
    48
    >>> HfDebertaConfig(pos_att_type=["c2p"], emd_steps=0).attention_terms   # an ablation
    2
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

POSITION_TERMS = ("c2p", "p2c", "p2p")

# What the official code assumes for a key that a configuration file leaves out.
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

# Plain Transformers differs from the official code only where a key of its own class is absent.
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

V1 = {
    "vocab_size": 50265,
    "position_buckets": -1,
    "share_att_key": False,
    "norm_rel_ebd": "none",
    "attention_key_bias": False,
}
V2 = {"conv_kernel_size": 3, "conv_act": "gelu"}


def _size(layers: int, width: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "v1-base": {**V1, **_size(12, 768, 12)},
    "v1-large": {**V1, **_size(24, 1024, 16)},
    "v1-xlarge": {**V1, **_size(48, 1024, 16)},
    "v2-xlarge": {**V2, **_size(24, 1536, 24)},
    "v2-xxlarge": {**V2, **_size(48, 1536, 24)},
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
    r"""Configuration of every `HfDeberta` model.

    Size (P1 table 8):
        vocab_size (`int`): entries of the word embedding.
        hidden_size (`int`): width of a layer.
        embedding_size (`int`, *optional*): width of the embeddings if it differs; they are then projected.
        num_hidden_layers (`int`): encoder layers; the enhanced mask decoder reuses the last one.
        num_attention_heads (`int`): heads; must divide `hidden_size`.
        intermediate_size (`int`): inner width of the feed-forward part.
        hidden_act (`str`): its activation.
        layer_norm_eps, initializer_range (`float`): as usual.
        hidden_dropout_prob, attention_probs_dropout_prob (`float`): dropout; the first also falls on the
            relative-position table.

    Relative position (P1 sections 3.1 and 3.2, eq. 4; log buckets: P1 section 5.1.2):
        relative_attention (`bool`): disentangled attention on or off.
        pos_att_type (`list[str]` or `str`): position terms of the score, from "c2p" (content to position),
            "p2c" (position to content), "p2p" (an ablation, eq. 2's last term); "c2p|p2c" is read too, "none" is none.
            Each counts in the scale 1/sqrt((1 + terms) d), with `relative_attention` off as well.
        max_relative_positions (`int`): largest distance k; below 1 it is `max_position_embeddings`.
        position_buckets (`int`): logarithmic buckets per side (256 in v2 and v3); below 1 every distance has its row.
        share_att_key (`bool`): project positions with the content's query and key matrices (v2, v3), or with
            their own `pos_key_proj`, `pos_query_proj` (v1).
        norm_rel_ebd (`str`): "layer_norm" normalises the table before use (v2, v3), "none" does not.
        attention_key_bias (`bool`): biases on the key projections; v1 has none.
        clamp_relative_distance (`bool`): clamp distances before bucketing, as the official code does. `False` gives
            what plain Transformers computes past `max_relative_positions`, where it reads an untrained row.

    Absolute position and the enhanced mask decoder (P1 section 3.3):
        max_position_embeddings (`int`): absolute positions known.
        position_biased_input (`bool`): add absolute positions to the input (BERT) instead of in the decoder.
        type_vocab_size (`int`): token types at the input; released models have none.
        emd_steps (`int`): times the last layer is applied to the decoder's queries; 0 is the ablation "-EMD".
        sparse_prediction (`bool`): in training, decode and score labelled positions only, some at a time. The loss is
            the same; `logits` are then None, the output has `losses` and `predictions` of labelled positions.

    Padding:
        unpad_inputs (`bool`): run the layers on real tokens only where a batch has padding worth the trouble. Results
            at real tokens are the same; states of padding are zeros. Hooks on layers then see one row
            [1, total, hidden].

    Convolution (nGiE, v2; P1 section 5.1.2):
        conv_kernel_size (`int`): 0 is none. conv_groups (`int`), conv_act (`str`).

    Heads:
        pooler_dropout (`float`), pooler_hidden_act (`str`), pooler_hidden_size (`int`, must be `hidden_size`).
        cls_dropout (`float`, *optional*): dropout before the classifier; `hidden_dropout_prob` if not given.
        token_classifier (`str`): "linear", or "projection" for the official NER head (dense, gelu, linear).
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
    layer_norm_eps: float = 1e-7
    initializer_range: float = 0.02
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
        super().__post_init__(**kwargs)

    # ---- what the fields imply -------------------------------------------------------------------

    @property
    def attention_terms(self) -> int:
        """m of the scale 1/sqrt(m d): content to content, and every position term named."""
        return 1 + len(self.pos_att_type)

    @property
    def max_distance(self) -> int:
        """k, the largest relative distance that has a meaning of its own."""
        k = self.max_relative_positions
        return k if k > 0 else self.max_position_embeddings

    @property
    def relative_span(self) -> int:
        """Rows of the relative table per side; the table has twice as many."""
        return self.position_buckets if self.position_buckets > 0 else self.max_distance

    @property
    def uses_mask_decoder(self) -> bool:
        """Whether masked-language modelling goes through the enhanced mask decoder."""
        return self.emd_steps > 0 and not self.position_biased_input

    # ---- making ----------------------------------------------------------------------------------

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "HfDebertaConfig":
        """A published size by name; a name without a version means v3.

        >>> HfDebertaConfig.from_preset("base", vocab_size=32000)
        """
        known = {*cls.__dataclass_fields__, "num_labels", "attn_implementation", "output_attentions"}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(f"unknown field {', '.join(unknown)}: HfDebertaConfig documents those there are")
        for candidate in (name, f"v3-{name}"):
            if candidate in PRESETS:
                return cls(**{**PRESETS[candidate], **overrides})
        raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return _translate(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Fields of ours, of in-tree DeBERTa, or, without a model type, of an official configuration file.

        Keyword arguments override fields; they are read and checked like fields, so `pos_att_type="c2p"` works.
        """
        overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in cls.__dataclass_fields__ and key != "dtype"}
        return super().from_dict({**_translate(config_dict), **overrides}, **kwargs)

    # Any backend may be asked for attentions: one that has none leaves that to "eager", and says so.

    @property
    def output_attentions(self) -> bool | None:
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        pass

    # ---- checks ----------------------------------------------------------------------------------

    def validate_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            _require(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        heads, width = self.num_attention_heads, self.hidden_size
        _require(
            width % heads == 0,
            f"num_attention_heads must divide hidden_size, but {heads} does not divide {width}",
        )
        for name, needed in (("attention_head_size", width // heads), ("pooler_hidden_size", width)):
            given = getattr(self, name)
            _require(
                given in (None, needed), f"{name} must be {needed} for hidden_size {width}, not {given}; leave it out"
            )

    def validate_positions(self) -> None:
        unknown = [term for term in self.pos_att_type if term not in POSITION_TERMS]
        _require(not unknown, f"pos_att_type takes {', '.join(POSITION_TERMS)}, not {', '.join(map(repr, unknown))}")
        _require(
            len(set(self.pos_att_type)) == len(self.pos_att_type),
            f"pos_att_type names a term twice: {list(self.pos_att_type)}",
        )
        _require(
            self.norm_rel_ebd in ("none", "layer_norm"),
            f"norm_rel_ebd is 'none' or 'layer_norm', not {self.norm_rel_ebd!r}",
        )
        _require(
            self.max_position_embeddings > 0,
            f"max_position_embeddings must be positive, not {self.max_position_embeddings}",
        )
        buckets = self.position_buckets
        _require(
            buckets < 1 or (buckets > 1 and buckets // 2 < self.max_distance - 1),
            f"position_buckets must be 0 (off), or at least 2 with half of it below the largest distance "
            f"{self.max_distance} - 1, not {buckets}; "
            "raise max_relative_positions (or max_position_embeddings) or use fewer buckets",
        )

    def validate_decoder(self) -> None:
        _require(self.emd_steps >= 0, f"emd_steps must be 0 or more, not {self.emd_steps}")
        if not self.uses_mask_decoder:
            return
        _require(
            self.num_hidden_layers > 1,
            f"the enhanced mask decoder reads the layer before the last, and num_hidden_layers is "
            f"{self.num_hidden_layers}; "
            "set emd_steps=0 or use two layers or more",
        )
        _require(
            self.embedding_size == self.hidden_size,
            f"the enhanced mask decoder adds position embeddings to hidden states, so embedding_size "
            f"({self.embedding_size}) must equal hidden_size ({self.hidden_size}); set emd_steps=0 otherwise",
        )

    def validate_convolution_and_heads(self) -> None:
        kernel, groups = self.conv_kernel_size, self.conv_groups
        _require(kernel <= 0 or kernel % 2 == 1, f"conv_kernel_size must be odd, or 0 for none, not {kernel}")
        _require(
            groups > 0 and self.hidden_size % groups == 0,
            f"conv_groups must divide hidden_size, but {groups} does not divide {self.hidden_size}",
        )
        _require(
            self.token_classifier in ("linear", "projection"),
            f"token_classifier is 'linear' or 'projection', not {self.token_classifier!r}",
        )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout", "cls_dropout"):
            rate = getattr(self, name)
            _require(rate is None or 0 <= rate < 1, f"{name} must lie in [0, 1), not {rate}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _translate(config_dict: dict[str, Any]) -> dict[str, Any]:
    """An official or in-tree configuration, in our fields; one of ours comes back as it is."""
    model_type = config_dict.get("model_type")
    if model_type == HfDebertaConfig.model_type or not config_dict:
        return config_dict
    if model_type not in (None, *IN_TREE_DEFAULTS):
        raise ValueError(
            f"HfDebertaConfig reads model types hf_deberta, deberta and deberta-v2, not {model_type!r}: "
            "this checkpoint is of another architecture"
        )
    given = dict(config_dict)
    translated = {**IN_TREE_DEFAULTS.get(model_type, OFFICIAL_DEFAULTS), **given}
    translated["model_type"] = HfDebertaConfig.model_type
    translated.pop("legacy", None)
    if "torch_dtype" not in translated:
        translated.setdefault("dtype", "float32")  # some released files are float16, which trains badly
    if "padding_idx" in translated:
        padding_idx = translated.pop("padding_idx")
        translated.setdefault("pad_token_id", padding_idx)
    if model_type == "deberta":
        translated.update({key: V1[key] for key in ("position_buckets", "share_att_key", "norm_rel_ebd")})
        translated["conv_kernel_size"] = 0
        translated.setdefault("attention_key_bias", False)
    if "emd_steps" not in given:
        translated["emd_steps"] = infer_emd_steps(translated)
    if model_type is None:
        pooling = translated.pop("pooling", {})
        translated.setdefault("pooler_dropout", pooling.get("dropout", 0))
        translated.setdefault("pooler_hidden_act", pooling.get("hidden_act", translated.get("hidden_act", "gelu")))
    return translated


def infer_emd_steps(config_dict: dict[str, Any]) -> int:
    """Released checkpoints were trained with the decoder; one saved by the in-tree MLM class was not."""
    trained_in_tree = any(name.endswith("ForMaskedLM") for name in config_dict.get("architectures") or [])
    width = config_dict["hidden_size"]
    impossible = config_dict["num_hidden_layers"] < 2 or config_dict.get("embedding_size", width) != width
    return 0 if trained_in_tree or impossible else 2
