"""The object that carries what a model remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farstate.errors import FarstateError
from farstate.state import LayerState, State


def make(batch: int = 3, requires_grad: bool = False) -> State:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, requires_grad=requires_grad)

    return State(tuple(LayerState(draw(batch, 2, 3, 4), {"conv": draw(batch, 5, 3)}) for _ in range(2)))


def tensors(state: State) -> list[torch.Tensor]:
    return [tensor for layer in state.layers for tensor in layer.tensors()]


def same(left: State, right: State) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(left), tensors(right), strict=True))


def test_properties() -> None:
    state = make()
    assert (len(state), state.batch_size, state.device.type) == (2, 3, "cpu")
    assert state.nbytes == 2 * 4 * 3 * (2 * 3 * 4 + 5 * 3)
    assert state.to(torch.float64).layers[0].auxiliary["conv"].dtype == torch.float64
    assert not any(tensor.any() for tensor in tensors(state.zeros_like()))
    assert not any(tensor.requires_grad for tensor in tensors(make(requires_grad=True).detach()))


@pytest.mark.parametrize("auxiliary", [True, False])
def test_reset_clears_the_marked_rows_even_of_nan(auxiliary: bool) -> None:
    state = make(requires_grad=True)
    poisoned = state.map(lambda t: torch.where(torch.tensor([False, True, False]).view(-1, *(1,) * (t.dim() - 1)), torch.nan, t))
    reset = poisoned.reset(torch.tensor([False, True, False]), auxiliary=auxiliary)
    for before, after in zip(state.layers, reset.layers, strict=True):
        assert not after.recurrent[1].any()
        assert torch.equal(after.recurrent[::2], before.recurrent[::2])
        if auxiliary:
            assert not after.auxiliary["conv"][1].any()
        else:
            assert after.auxiliary["conv"][1].isnan().all()
        after.recurrent.sum().backward()
        assert before.recurrent.grad is not None
        assert torch.equal(before.recurrent.grad[:, 0, 0, 0], torch.tensor([1.0, 0.0, 1.0]))


def test_reset_refuses_anything_but_a_boolean_vector() -> None:
    for mask in (torch.tensor([0, 1, 0]), torch.zeros(2, dtype=torch.bool)):
        with pytest.raises(ValueError, match="mask must be boolean"):
            make().reset(mask)


def test_rows_are_picked_ordered_and_joined() -> None:
    state = make()
    assert same(state.select([2, 0, 0]), State.cat([state.select([2]), state.select([0]), state.select([0])]))
    assert same(state.select(torch.tensor([True, False, True])), state.select(torch.tensor([0, 2])))
    assert state.select([]).batch_size == 0
    assert same(state.permute([2, 0, 1]).permute([1, 2, 0]), state)
    for wrong in ([0, 1], [0, 1, 1], [0, 1, 3]):
        with pytest.raises(ValueError, match="not a permutation"):
            state.permute(wrong)
    with pytest.raises(IndexError):
        state.select([3])
    with pytest.raises(ValueError, match="different models"):
        State.cat([state, State(state.layers[:1])])


def test_entries_are_a_view_and_can_be_replaced() -> None:
    state = make()
    entries = state.entries(1)
    assert entries.shape == (3, 2, 12)
    assert entries.data_ptr() == state.layers[1].recurrent.data_ptr()
    changed = state.with_entries(1, entries.double() * 2)
    assert torch.equal(changed.layers[1].recurrent, state.layers[1].recurrent * 2)
    assert changed.layers[0] is state.layers[0]
    assert torch.equal(state.with_entries(-1, entries * 2).entries(1), entries * 2)
    with pytest.raises(ValueError, match="entries of shape"):
        state.with_entries(0, torch.zeros(3, 2, 11))


def test_without_auxiliary() -> None:
    state = make().without_auxiliary()
    assert not state.layers[0].auxiliary["conv"].any()
    assert torch.equal(state.layers[0].recurrent, make().layers[0].recurrent)


def test_inconsistent_states_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        State(())
    with pytest.raises(ValueError, match="batch size"):
        State((LayerState(torch.zeros(2, 1, 1), {"conv": torch.zeros(3, 1, 1)}),))
    with pytest.raises(ValueError, match="must be"):
        State((LayerState(torch.zeros(2, 1)),))


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    state = make(requires_grad=True)
    path = tmp_path / "state.safetensors"
    state.save(path)
    assert same(State.load(path), state.detach())
    shared = torch.randn(3, 2, 3, 4)
    State((LayerState(shared), LayerState(shared))).save(path)
    assert torch.equal(State.load(path).layers[1].recurrent, shared)
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(FarstateError, match="no such file"):
        State.load(path)
    make().save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FarstateError, match="damaged or truncated"):
        State.load(path)
