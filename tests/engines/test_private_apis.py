"""Private APIs of PyTorch and Transformers are listed here, with what they are for."""

import ast
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, TokenizersBackend

import hf_deberta

PACKAGE = Path(hf_deberta.__file__).parent
FOLDERS = ("model", "engines", "in_tree", "serving", "export")
FILES = sorted(
    [*(path for name in FOLDERS for path in PACKAGE.glob(f"{name}/*.py")), PACKAGE / "tokenization_hf_deberta.py"]
)

# purpose -> private names of PyTorch and Transformers; tests of these purposes fail where a name is missing
ALLOWED = {
    "detect transforms of torch.func and forward-mode differentiation": "_C _functorch _current_level",
    "reuse the memory of gradients in the masked-LM loss": "_C _autograd _get_current_graph_task_keep_graph",
    "detect torch.export, not torch.compile": "_is_exporting_flag",
    "launch kernels on the current stream": "_C _cuda_getCurrentRawStream",
    "detect tensors without values": "_subclasses _python_dispatch _get_current_dispatch_mode_stack",
    "detect hooks on all modules": "_global_forward_hooks _global_forward_pre_hooks "
    "_global_backward_hooks _global_backward_pre_hooks",
    "detect hooked and replaced modules": "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks "
    "_parameters",
    "tell torch.export the range of a length that depends on values": "_check",
    "detect writes to weights": "_version",
    "compute the rows of distances inside FakeTensorMode": "_disable_current_modes",
    "detect FLOP counters and other dispatch modes": "_get_current_dispatch_mode",
    "products of oneDNN": "_is_mkldnn_bf16_supported _linear_pointwise _reorder_linear_weight",
    "attention to far keys, with its log sums": "_scaled_dot_product_flash_attention_for_cpu",
    "initialize weights": "_init_weights",
    "move constants; refuse other types and devices after optimize()": "_apply",
    "choose the attention backend": "_attn_implementation _can_set_attn_implementation _supports_sdpa",
    "device_map='auto'": "_no_split_modules",
    "name the word embeddings": "_input_embed_layer",
    "load checkpoints of other heads silently": "_keys_to_ignore_on_load_unexpected",
    "tie the masked-LM head to the word embeddings": "_tied_weights_keys",
    "refuse a masked-LM head with two biases": "_adjust_missing_and_unexpected_keys",
    "save an adapter without the model's code": "_hf_peft_config_loaded",
    "name a config.json that holds no JSON object": "_dict_from_json_file",
    "generate not past the last position": "_validate_generated_length",
    "build the tokenizer from spm.model or vocab.json": "_tokenizer",
    "refuse lists of words without add_prefix_space in v1": "_encode_plus",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_replace"  # a method of named tuples


def private_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the private names that a file uses as attributes or imports, and those that it defines."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            used |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.FunctionDef):
            defined.add(node.name)
    return set(filter(is_private, used)), set(filter(is_private, defined))


def test_private_apis_are_listed():
    names = {path.name: private_names(ast.parse(path.read_text())) for path in FILES}
    own = set().union(*(defined for _, defined in names.values()))
    models = (PreTrainedModel, PreTrainedConfig, GenerationMixin, nn.Linear(1, 1), torch.Tensor)
    for name, (used, defined) in names.items():
        bases = (TokenizersBackend,) if name.startswith("tokenization") else models
        foreign = {x for x in used | defined if x not in own or any(hasattr(base, x) for base in bases)}
        allowed = {private for names_of_purpose in ALLOWED.values() for private in names_of_purpose.split()}
        assert not foreign - allowed, f"{name} uses private APIs that are not listed: {foreign - allowed}"
