"""PeepholeLSTM: its equations, scans in parts, first parameters, states."""

from __future__ import annotations

import pytest
import torch
from module_kinds import D, N, made
from torch import Tensor

from orthokern.errors import InputError
from orthokern.nn import PeepholeLSTM
from orthokern.nn import lstm as lstm_module

F64 = torch.float64


def plain(p: dict[str, Tensor], x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One layer, step by step: (output, h_n, c_n)."""
    p_i, p_f, p_o = p["weight_peephole_l0"]
    hs = []
    for x_t in x:
        a = x_t @ p["weight_ih_l0"].T + p["bias_ih_l0"] + h @ p["weight_hh_l0"].T + p["bias_hh_l0"]
        a_i, a_f, a_g, a_o = a.chunk(4, 1)
        c = torch.sigmoid(a_f + p_f * c) * c + torch.sigmoid(a_i + p_i * c) * torch.tanh(a_g)
        h = torch.sigmoid(a_o + p_o * c) * torch.tanh(c)
        hs.append(h)
    return torch.stack(hs), h, c


@pytest.mark.parametrize("part", [[0], [1], [2], [0, 1, 2]])
def test_equations(part: list[int]) -> None:
    """The peepholes, written out step by step, and every gradient by torch's autograd, of one result or all."""
    module = made("peephole", dtype=F64)
    leaves = [torch.randn(*shape, dtype=F64, requires_grad=True) for shape in ((7, 2, D), (1, 2, N), (1, 2, N))]
    x, h0, c0 = leaves
    output, (h, c) = module(x, (h0, c0))
    outcomes = []
    for results in ((output, h[0], c[0]), plain(dict(module.named_parameters()), x, h0[0], c0[0])):
        loss = torch.stack([results[index].sin().sum() for index in part]).sum()
        outcomes.append([*results, *torch.autograd.grad(loss, [*leaves, *module.parameters()])])
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-12, atol=1e-12)


def test_inference_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, input terms exist for a few steps at a time."""
    module = made("peephole", num_layers=2, bidirectional=True, dtype=F64)
    x, lengths = torch.randn(11, 3, D, dtype=F64), torch.tensor([11, 4, 1])
    expected = [module(x), module(x, lengths=lengths)]
    monkeypatch.setattr("orthokern.nn.lstm._INPUT_BYTES", 4 * 3 * (4 * N) * 8)  # of four steps
    with torch.no_grad():
        torch.testing.assert_close([module(x), module(x, lengths=lengths)], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("trained", ["bias_ih_l0", "weight_peephole_l0"])
def test_training_in_one_part(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls, scan = made("peephole").requires_grad_(False), [], lstm_module.peephole_scan
    module.get_parameter(trained).requires_grad_()

    def counted(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        return scan(x, *rest)

    monkeypatch.setattr(lstm_module, "_INPUT_BYTES", 1)
    monkeypatch.setattr(lstm_module, "peephole_scan", counted)
    module(torch.randn(7, 2, D))
    assert calls == [7]


def test_first_parameters() -> None:
    module = PeepholeLSTM(3, 8, 2, dtype=F64)
    for layer in (0, 1):
        blocks = getattr(module, f"weight_hh_l{layer}").detach().chunk(4)
        for w in blocks:
            torch.testing.assert_close(w.T @ w, torch.eye(8, dtype=F64))
        assert not torch.equal(blocks[0], blocks[1])
        bias = getattr(module, f"bias_ih_l{layer}") + getattr(module, f"bias_hh_l{layer}")
        assert bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
        assert not getattr(module, f"weight_peephole_l{layer}").any()
    other = PeepholeLSTM(3, 8, 2, dtype=F64, forget_bias=3.0)
    assert other.bias_ih_l0[8] == 3.0 and repr(other) == "PeepholeLSTM(3, 8, num_layers=2, forget_bias=3.0)"


def test_the_state_may_be_a_list() -> None:
    module, x, h, c = PeepholeLSTM(3, 4), torch.randn(5, 2, 3), torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    expected = module(x, (h, c))[0]
    assert torch.equal(module(x, [h, c])[0], expected)
    with pytest.raises(InputError, match="hx must be a pair of tensors"):
        module(x, [h])
    with pytest.raises(InputError, match="hx must be a pair of tensors .* got Tensor and NoneType"):
        module(x, (h, None))


def test_a_program_that_was_exported_without_gradients() -> None:
    with torch.no_grad():
        program = torch.export.export(PeepholeLSTM(3, 4), (torch.randn(5, 2, 3),)).module()
    output, _ = program(torch.randn(5, 2, 3))
    with pytest.raises(RuntimeError, match="called with need_gates=False"):
        output.sum().backward()


def test_the_last_states_can_be_changed_in_place() -> None:
    """Also those of one sequence, whose two halves have no gap in memory."""
    _, (h, c) = PeepholeLSTM(3, 4)(torch.randn(5, 1, 3))
    h *= 0.5
    c.detach_()
