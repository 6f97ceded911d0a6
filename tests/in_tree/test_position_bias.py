"""The small form of disentangled attention for upstream computes what Transformers' eager attention does."""

import inspect

import pytest
import torch
from position_bias import with_position_bias
from transformers import DebertaV2Config, DebertaV2Model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

pytestmark = pytest.mark.skipif(
    "position_bias" not in inspect.signature(sdpa_attention_forward).parameters,
    reason="this Transformers has no position_bias",
)
SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
V3 = {
    "relative_attention": True,
    "position_buckets": 8,
    "max_position_embeddings": 32,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
CONFIGS = {
    "v3": V3,
    "own projections": {**V3, "share_att_key": False, "position_buckets": -1},
    "c2p": {**V3, "pos_att_type": ["c2p"]},
    "no positions": {**V3, "relative_attention": False, "pos_att_type": []},
}


@pytest.mark.parametrize("shape", [(2, 9), (3, 1), (1, 40)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_are_those_of_eager_attention(name, shape):
    ids, mask = torch.randint(5, 60, shape), torch.ones(shape, dtype=torch.long)
    mask[0, shape[1] // 2 + 1 :] = 0
    results = []
    for backend in ("eager", "sdpa"):
        torch.manual_seed(0)
        with with_position_bias():
            config = DebertaV2Config(**SIZES, **CONFIGS[name], attn_implementation=backend)
            model = DebertaV2Model(config).double().eval()
            states = model(ids, mask).last_hidden_state
        (states * mask[..., None]).square().sum().backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        results.append([states[mask.bool()].detach(), *gradients])
    assert len(results[0]) == len(results[1])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_the_kernel_is_called(monkeypatch):
    calls = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **b: calls.append(b) or kernel(*a, **b)
    )
    with with_position_bias():
        model = DebertaV2Model(DebertaV2Config(**SIZES, **V3, attn_implementation="sdpa")).train()
        model(torch.ones(1, 5, dtype=torch.long))
    assert [call["dropout_p"] for call in calls] == [0.1, 0.1]
    assert all(call["attn_mask"].shape == (1, 4, 5, 5) for call in calls)
