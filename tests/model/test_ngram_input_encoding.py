"""nGiE: the convolution against its formula; nothing crosses document boundaries or padding."""

import pytest
import torch
from numerics import gradients, tiny_config

from hf_deberta.model.ngram_input_encoding import NgramInputEncoding


@pytest.fixture(params=[(3, 1), (5, 1), (3, 4), (5, 2), (1, 1)], ids=str)
def encoding(request):
    torch.manual_seed(0)
    kernel, groups = request.param
    module = NgramInputEncoding(tiny_config(conv_kernel_size=kernel, conv_groups=groups)).double()
    torch.nn.init.normal_(module.LayerNorm.weight)
    torch.nn.init.normal_(module.LayerNorm.bias)
    return module


def random_inputs(batch=2, length=9):
    torch.manual_seed(1)
    return (torch.randn(batch, length, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))


def formula(encoding, embeddings, layer_output):
    """Return LayerNorm(layer_1(x) + act(conv(x))), with the convolution as a sum over neighbours, group by group."""
    weight, bias, (kernel,) = encoding.conv.weight, encoding.conv.bias, encoding.conv.kernel_size
    per_group = 32 // encoding.conv.groups
    batch, length, _ = embeddings.shape
    mixed = bias.expand(batch, length, -1).clone()
    for token in range(length):
        for tap in range(kernel):
            neighbour = token + tap - kernel // 2
            if not 0 <= neighbour < length:
                continue
            for start in range(0, 32, per_group):
                group = slice(start, start + per_group)
                mixed[:, token, group] += embeddings[:, neighbour, group] @ weight[group, :, tap].T
    return encoding.LayerNorm(layer_output + encoding.activation(mixed))


def tensors_by_name(encoding, embeddings, layer_output):
    return {"embeddings": embeddings, "layer_output": layer_output, **dict(encoding.named_parameters())}


def assert_same(encoding, inputs, output, expected):
    """Compare two outputs and their gradients."""
    torch.testing.assert_close(output, expected)
    weight = torch.linspace(-1, 2, 32, dtype=torch.float64)
    actual, expected = (gradients(each * weight, tensors_by_name(encoding, *inputs)) for each in (output, expected))
    torch.testing.assert_close(actual, expected)


def test_single_documents_equal_the_formula(encoding):
    inputs = tuple(random_inputs())
    assert_same(encoding, inputs, encoding(*inputs, None, None), formula(encoding, *inputs))


@pytest.mark.parametrize("lengths", [(1, 2, 1, 5), (9,), (4, 5), (1,) * 9], ids=str)
def test_documents_equal_separate_sequences(encoding, lengths):
    inputs = embeddings, layer_output = tuple(random_inputs())
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    pieces = zip(embeddings.split(lengths, 1), layer_output.split(lengths, 1), strict=True)
    separate = torch.cat([encoding(*piece, None, None) for piece in pieces], 1)
    assert_same(encoding, inputs, encoding(*inputs, None, documents[None]), separate)


def test_each_row_has_its_own_documents(encoding):
    embeddings, layer_output = random_inputs()
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1, 2]])
    both = encoding(embeddings, layer_output, None, documents)
    for b in range(2):
        row = slice(b, b + 1)
        torch.testing.assert_close(both[row], encoding(embeddings[row], layer_output[row], None, documents[row]))


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_padding_stays_zero_and_does_not_leak(encoding, packed):
    """The embeddings are zero at padding; the output of the layer may have any value there."""
    embeddings, layer_output = random_inputs()
    token_mask = torch.arange(9) < torch.tensor([9, 6])[:, None]
    documents = torch.tensor([[0] * 4 + [1] * 5]) if packed else None
    inputs = embeddings * token_mask[..., None], layer_output
    output = encoding(*inputs, token_mask, documents)
    assert not output[1, 6:].any() and output[1, :6].all()
    noisy = layer_output.detach().clone()
    noisy[1, 6:] = 1e4
    assert torch.equal(output, encoding(inputs[0], noisy, token_mask, documents))
    short = encoding(embeddings[1:, :6], layer_output[1:, :6], None, None if documents is None else documents[:, :6])
    torch.testing.assert_close(output[1:, :6], short)
    torch.testing.assert_close(output[:1], encoding(embeddings[:1], layer_output[:1], None, documents))
    for name, gradient in gradients(output[1], tensors_by_name(encoding, embeddings, layer_output)).items():
        assert gradient.isfinite().all(), name
        if name in ("embeddings", "layer_output"):
            assert not gradient[1, 6:].any() and not gradient[0].any(), name


def test_dropout_applies_to_the_convolution_only():
    torch.manual_seed(0)
    module = NgramInputEncoding(tiny_config(hidden_dropout_prob=0.5, conv_act="gelu")).double()
    embeddings, layer_output = random_inputs()
    dropped = module(embeddings, layer_output, None, None)
    assert not torch.equal(dropped, module(embeddings, layer_output, None, None))
    module.dropout.p = 1.0  # gelu(0) = 0
    torch.testing.assert_close(module(embeddings, layer_output, None, None), module.LayerNorm(layer_output))


def test_packed_rows_call_the_convolution_as_a_module(encoding):
    """An adapter that changes its output counts there too."""
    encoding.conv.register_forward_hook(lambda module, arguments, output: 2 * output)
    inputs = tuple(random_inputs())
    documents = torch.zeros(2, 9, dtype=torch.long)
    torch.testing.assert_close(encoding(*inputs, None, documents), encoding(*inputs, None, None))
