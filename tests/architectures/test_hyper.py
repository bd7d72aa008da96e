"""Hyper-Connections: the static limit, derivatives, and what backward keeps."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from architectures import oracle
from architectures.combinations import build, tokens
from architectures.test_memory import saved_bytes
from fulldepth.architectures.depth_llama.hyper_depth_llama import HyperConnection
from tiny_models import seeded

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def test_dynamic_connections_of_scale_zero_are_static():
    dynamic, static, ids = build("hyper", num_streams=3), build("hyper-static"), tokens()
    with torch.no_grad():
        for connection in (module for module in dynamic.modules() if isinstance(module, HyperConnection)):
            for name, parameter in connection.named_parameters():
                parameter.mul_(0.0 if "scale" in name else 1.0)
        static.load_state_dict(dynamic.state_dict(), strict=False)
        assert_close(dynamic(ids).logits, static(ids).logits, **CLOSE)


def connect(streams, width=5, dynamic=True):
    """A connection with random weights, and the call with the branch f(x) = sin x as a function of tensors."""
    connection = HyperConnection(width, streams, start=1, dynamic=dynamic).double()
    source = seeded(streams)
    for parameter in connection.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=source, dtype=torch.float64))
    names, parameters = zip(*connection.named_parameters(), strict=True)

    def run(x, *tensors):
        read, carried, beta = torch.func.functional_call(connection, dict(zip(names, tensors, strict=True)), (x,))
        return connection.add(carried, read.sin(), beta)

    x = torch.randn(2, 3, streams, width, generator=source, dtype=torch.float64, requires_grad=True)
    return run, (x, *parameters), dict(zip(names, parameters, strict=True))


@pytest.mark.parametrize("dynamic", [True, False])
def test_first_and_second_derivatives_are_those_of_the_plain_form(dynamic):
    """What backward computes again changes no gradient of the formula written out."""
    run, tensors, parameters = connect(2, dynamic=dynamic)
    plain = oracle.through_connection(oracle.Weights(parameters), tensors[0], torch.sin)
    found = run(*tensors)
    assert_close(found, plain, **CLOSE)
    top = torch.randn(found.shape, generator=seeded(1), dtype=torch.float64)
    pairs = [torch.autograd.grad(output, tensors, top, create_graph=True) for output in (found, plain)]
    assert_close(*pairs, **CLOSE)
    squares = [sum(gradient.square().sum() for gradient in gradients) for gradients in pairs]
    assert_close(*(torch.autograd.grad(square, tensors) for square in squares), **CLOSE)


@pytest.mark.parametrize(("dynamic", "weights"), [(True, 2 * 4**2 + 6 * 4), (False, 0)])
def test_backward_keeps_the_streams_the_branchs_output_and_its_input(dynamic, weights):
    """Per token and connection n D + D + D numbers and the weights; nothing as large as the streams twice."""
    connections = [HyperConnection(64, 4, start=index, dynamic=dynamic) for index in range(5)]
    streams = torch.randn(2, 50, 4, 64, requires_grad=True)

    def run():
        state = streams
        for connection in connections:
            read, carried, beta = connection(state)
            state = connection.add(carried, read.sin(), beta)
        return [state]

    numbers = saved_bytes(run, [p for connection in connections for p in connection.parameters()]) / 4
    small = 5 * 4 * 6  # the weights themselves, which do not grow with the tokens
    assert numbers - small <= 5 * 100 * (4 * 64 + 64 + 64 + weights)
