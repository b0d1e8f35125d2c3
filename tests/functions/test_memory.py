"""Memory as torch has it: `.data`, `.grad`, storages, strides of results, and `out=`."""

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.errors import DeviceError, GradientError


def trained(fused: bool) -> tuple[nn.Linear, genesis.optim.SGD]:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.copy_(genesis.tensor([[1.0, 2.0]]))
    return layer, genesis.optim.SGD(layer.parameters(), lr=0.5, fused=fused)


def step(layer: nn.Linear, optimizer: genesis.optim.SGD) -> list[float]:
    optimizer.zero_grad()
    layer(genesis.ones(1, 2)).sum().backward()  # a gradient of ones
    optimizer.step()
    return layer.weight.tolist()[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fused", [False, True])
def test_data_is_updated_exchanged_and_put_back_under_an_optimizer(fused: bool) -> None:
    layer, optimizer = trained(fused)
    weight = layer.weight
    assert step(layer, optimizer) == [0.5, 1.5]
    weight.data -= 0.25 * weight.grad
    assert step(layer, optimizer) == [-0.25, 0.75]
    kept, other = weight.data, genesis.tensor([[8.0, 9.0]])
    weight.data = other
    assert layer(genesis.ones(1, 2)).item() == 17 and weight.untyped_storage() == other.untyped_storage()
    weight.data = kept
    assert step(layer, optimizer) == [-0.75, 0.25]
    weight.data = other  # stays: a fused optimizer copies its values into the flat buffer
    assert step(layer, optimizer) == [7.5, 8.5] and other.tolist() == [[8, 9] if fused else [7.5, 8.5]]
    weight.data = weight.data.double()
    if fused:
        with pytest.raises(genesis.errors.GenesisError, match="left its flat buffer"):
            optimizer.step()


def test_data_of_two_parameters_is_exchanged() -> None:
    p, q = (nn.Parameter(genesis.full((2,), float(v))) for v in (1, 2))
    optimizer = genesis.optim.SGD([p, q], lr=1.0, fused=True)
    (p.sum() + q.sum()).backward()
    p.data, q.data = q.data, p.data
    optimizer.step()
    assert (p.tolist(), q.tolist()) == ([1, 1], [0, 0])


def test_data_of_a_result_keeps_its_shape() -> None:
    x = genesis.ones(3, requires_grad=True)
    y = x * 2
    y.data = genesis.full((3,), 7.0)
    y.sum().backward()
    assert y.tolist() == [7, 7, 7] and x.grad.tolist() == [2, 2, 2]
    with pytest.raises(GradientError, match="cannot change"):
        (x * 2).data = genesis.ones(2)
    with pytest.raises(TypeError):
        x.data = 3


@pytest.mark.parametrize("grad", [genesis.ones(2), genesis.ones(3).double(), 1.0, "self"])
def test_a_gradient_is_like_its_tensor(grad: object) -> None:
    x = genesis.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"\.grad"):
        x.grad = x if grad == "self" else grad
    x.grad = genesis.ones(3)
    assert x.grad.tolist() == [1, 1, 1]
    x.grad = None


def test_storages_and_windows() -> None:
    x = genesis.arange(6.0)
    storage = x[2:].untyped_storage()
    assert storage.nbytes() == 24 and storage == x.untyped_storage() != genesis.ones(6).untyped_storage()
    assert storage.clone().tolist() == storage.tolist() and x.is_set_to(x.view(6)) and not x.is_set_to(x[1:])
    y = genesis.empty(0).set_(storage, 1, (2, 2), (2, 1))
    y[0, 0] = 9
    assert x.tolist() == [0, 9, 2, 3, 4, 5] and y.tolist() == [[9, 2], [3, 4]] and y.set_().shape == (0,)
    for wrong in ((storage, 3, (2, 2)), (storage, -1, (2,)), (storage, 0, (2, 2), (1,))):
        with pytest.raises(RuntimeError, match="set_"):
            y.set_(*wrong)
    with pytest.raises(DeviceError):
        x.share_memory_()


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_results_store_dimensions_in_the_order_of_their_operands(order: tuple[int, ...]) -> None:
    x = genesis.arange(24.0).view(2, 3, 4).permute(*order)
    like = [
        x.clone(),
        x + 1,
        x.exp(),
        2 * x,
        genesis.zeros_like(x),
        genesis.empty_like(x),
        x > 3,
        x.double(),
        x + x[:1],
    ]
    assert {t.stride() for t in like} == {x.stride()}
    assert x.contiguous().stride() == genesis.ones(x.shape).stride()
    np.testing.assert_array_equal((x.clone() * 2).numpy(), x.numpy() * 2)
    part = x[:, 1:]  # with gaps: the order remains
    assert np.argsort(part.clone().stride()).tolist() == np.argsort(part.stride()).tolist()


def test_out_takes_the_shape_of_the_result_if_it_is_empty_and_shares_no_part() -> None:
    out, x = genesis.empty(0), genesis.ones(4)
    assert genesis.add(x, 1, out=out) is out and out.tolist() == [2, 2, 2, 2]
    assert genesis.matmul(genesis.ones(2, 3), genesis.ones(3), out=genesis.empty(0)).tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="part"):
        genesis.add(x[1:], 1, out=x[:-1])
    assert genesis.add(x, 1, out=x).tolist() == [2, 2, 2, 2]
