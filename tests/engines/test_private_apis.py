"""Private APIs of PyTorch and Transformers: each exists, and is listed here."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, TokenizersBackend

import hf_deberta

PACKAGE = Path(hf_deberta.__file__).parent
FOLDERS = ("model", "engines", "in_tree", "serving", "export")
FILES = sorted(
    [*(path for name in FOLDERS for path in PACKAGE.glob(f"{name}/*.py")), PACKAGE / "tokenization_hf_deberta.py"]
)

# private API -> purpose
TORCH = {
    "torch:_C._functorch.peek_interpreter_stack": "detect transforms of torch.func",
    "torch:_C._autograd._get_current_graph_task_keep_graph": "reuse the memory of gradients in the masked-LM loss",
    "torch:_subclasses.fake_tensor.FakeTensor": "detect tensors without values",
    "torch:autograd.forward_ad._current_level": "detect forward-mode differentiation",
    "torch:nn.modules.module._global_forward_hooks": "detect hooks on all modules",
    "torch:nn.modules.module._global_forward_pre_hooks": "detect hooks on all modules",
    "torch:nn.modules.module._global_backward_hooks": "detect hooks on all modules",
    "torch:nn.modules.module._global_backward_pre_hooks": "detect hooks on all modules",
    "torch:nn.Module._forward_hooks": "detect hooked modules",
    "torch:nn.Module._forward_pre_hooks": "detect hooked modules",
    "torch:nn.Module._backward_hooks": "detect hooked modules",
    "torch:nn.Module._backward_pre_hooks": "detect hooked modules",
    "torch:nn.Module._parameters": "detect replicas, whose weights are not parameters",
    "torch:nn.Module._modules": "detect replaced modules in models that hf_deberta.optimize prepared",
    "torch:_check": "tell torch.export the range of a length that depends on values",
    "torch:Tensor._version": "detect writes to weights, which invalidate a cache",
    "torch:utils._python_dispatch._disable_current_modes": "compute the rows of distances inside FakeTensorMode",
    "torch:utils._python_dispatch._get_current_dispatch_mode": "detect FLOP counters and other dispatch modes",
    "torch:utils._python_dispatch._get_current_dispatch_mode_stack": "detect modes whose tensors have no values",
    "torch:utils._python_dispatch.TorchDispatchMode.is_infra_mode": "detect modes whose tensors have no values",
    "torch:ops.mkldnn._is_mkldnn_bf16_supported": "whether hf_deberta.optimize can take bfloat16",
    "torch:ops.mkldnn._linear_pointwise": "linear layers on AMD processors, and those of hf_deberta.optimize",
    "torch:ops.mkldnn._reorder_linear_weight": "pack weights in hf_deberta.optimize",
    "torch:ops.onednn.qlinear_prepack": "pack int8 weights in hf_deberta.optimize",
    "torch:ops.onednn.qlinear_pointwise": "linear layers with int8 weights",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu": "attention to far keys, with its log sums",
}
# private API -> purpose; our classes set, override or call it
TRANSFORMERS = {
    "transformers:PreTrainedModel._init_weights": "initialize weights and buffers",
    "transformers:PreTrainedModel._can_set_attn_implementation": "model.set_attn_implementation",
    "transformers:PreTrainedModel._supports_sdpa": "attn_implementation='sdpa'",
    "transformers:PreTrainedModel._no_split_modules": "device_map='auto'",
    "transformers:PreTrainedModel._keys_to_ignore_on_load_unexpected": "load checkpoints of other heads silently",
    "transformers:PreTrainedModel._tied_weights_keys": "tie the masked-LM head to the word embeddings",
    "transformers:PreTrainedModel._adjust_missing_and_unexpected_keys": "refuse a masked-LM head with two biases",
    "transformers:PreTrainedModel._hf_peft_config_loaded": "save an adapter without the model's code",
    "transformers:PreTrainedConfig._attn_implementation": "choose the attention backend",
    "transformers:PreTrainedConfig._dict_from_json_file": "name a config.json that holds no JSON object",
    "transformers:GenerationMixin._prepare_cache_for_generation": "generate without a cache",
    "transformers:GenerationMixin._validate_generated_length": "refuse to generate past the last position",
    "transformers:TokenizersBackend._tokenizer": "build the tokenizer from spm.model or vocab.json",
    "transformers:TokenizersBackend._encode_plus": "refuse lists of words without add_prefix_space in v1",
}


@pytest.mark.parametrize("path", {**TORCH, **TRANSFORMERS})
def test_private_api_exists(path):
    purpose = {**TORCH, **TRANSFORMERS}[path]
    owner, name = re.fullmatch(r"(.*)[.:](\w+)", path).groups()
    missing = f"this release has no {path.replace(':', '.')}, which is used to {purpose}"
    try:
        owner = pkgutil.resolve_name(owner)
    except AttributeError:
        pytest.fail(missing)
    set_by_init = getattr(getattr(owner, "__init__", None), "__code__", None)
    assert (
        hasattr(owner, name)
        or name in getattr(owner, "__annotations__", {})
        or (set_by_init is not None and name in set_by_init.co_names)
    ), missing


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


def listed_names(table: dict[str, str]) -> set[str]:
    return {part for path in table for part in path.replace(":", ".").split(".") if is_private(part)}


def test_private_apis_are_listed():
    names = {path.name: private_names(ast.parse(path.read_text())) for path in FILES}
    own = set().union(*(defined for _, defined in names.values()))
    models = (PreTrainedModel, PreTrainedConfig, GenerationMixin, nn.Linear(1, 1), torch.Tensor)
    for name, (used, defined) in names.items():
        bases = (TokenizersBackend,) if name.startswith("tokenization") else models
        foreign = {x for x in used | defined if x not in own or any(hasattr(base, x) for base in bases)}
        allowed = listed_names({**TORCH, **TRANSFORMERS})
        assert not foreign - allowed, f"{name} uses private APIs that are not listed: {foreign - allowed}"
